"""A memory cgroup below this process' own, of either version, for processes that a test starts."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryGroup:
    """One group. ``limit`` and ``usage`` are names of its files."""

    folder: Path
    limit: str
    usage: str

    def wrapper(self) -> Sequence[str]:
        """Words before a command that starts it in this group, so that all of its memory is charged here."""
        return ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"))

    def used(self) -> int:
        """Bytes that are charged now and cannot be reclaimed: without file pages that nobody used lately."""
        stat = (self.folder / "memory.stat").read_text()
        inactive = re.findall(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
        return int((self.folder / self.usage).read_text()) - int(inactive[-1])

    def cap(self, size: int) -> None:
        """Let the group have no more than ``size`` bytes."""
        (self.folder / self.limit).write_text(str(size))

    def killed(self) -> int:
        """Processes of it that the kernel ended for want of memory."""
        for name in ("memory.events", "memory.oom_control"):
            path = self.folder / name
            if path.exists():
                return int(re.findall(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)[0])
        raise FileNotFoundError(self.folder / "memory.events")


def _place() -> tuple[Path, str, str]:
    """(this process' own group, file of the limit, file of the usage)."""
    own = Path("/proc/self/cgroup").read_text()
    if old := re.search(r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:/(.*)$", own, re.MULTILINE):
        return ROOT / "memory" / old[1], "memory.limit_in_bytes", "memory.usage_in_bytes"
    new = re.search(r"^0::/(.*)$", own, re.MULTILINE)
    return ROOT / (new[1] if new else ""), "memory.max", "memory.current"


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A group that is gone after; the test is skipped, with the reason, where none can be made. Whatever was started
    in it must have ended by then.
    """
    parent, limit, usage = _place()
    folder = parent / f"strataflux-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        if not os.access(folder / limit, os.W_OK):
            pytest.skip(f"{folder} has no {limit}: the memory controller is not delegated to {parent}")
        yield MemoryGroup(folder, limit, usage)
    finally:
        folder.rmdir()
