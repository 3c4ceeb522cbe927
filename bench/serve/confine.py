"""A memory cgroup a rival, so that the page cache it lives on is as small as the others' RAM.

Version 1 or 2, below this process' own group, where one can be made. Where none can, the page cache is not limited, and
the rows say so: what was really used is measured in both cases.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Group", "make_group"]

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Group:
    """One memory group: ``limit`` and ``usage`` are its files."""

    folder: Path
    limit: Path
    usage: Path
    unlimited: str

    def enter(self) -> None:
        """Move this process in; children follow."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def allow(self, more_bytes: int, cached_bytes: int) -> None:
        """No more than ``more_bytes`` beside what is charged now, ``cached_bytes`` of which are of those."""
        self.limit.write_text(str(int(self.usage.read_text()) - cached_bytes + more_bytes))

    def lift(self) -> None:
        """No limit."""
        self.limit.write_text(self.unlimited)


def _place() -> tuple[Path, str, str, str]:
    own = Path("/proc/self/cgroup").read_text()
    if old := re.search(r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:/(.*)$", own, re.MULTILINE):
        return _ROOT / "memory" / old[1], "memory.limit_in_bytes", "memory.usage_in_bytes", "-1"
    new = re.search(r"^0::/(.*)$", own, re.MULTILINE)
    return _ROOT / (new[1] if new else ""), "memory.max", "memory.current", "max"


@contextmanager
def make_group(name: str) -> Iterator[Group | None]:
    """A group that is gone after; None where none can be made. Its processes must have ended by then."""
    parent, limit, usage, unlimited = _place()
    folder = parent / f"strataflux-race-{os.getpid()}-{name}"
    try:
        folder.mkdir()
    except OSError:
        yield None
        return
    try:
        usable = os.access(folder / limit, os.W_OK)
        yield Group(folder, folder / limit, folder / usage, unlimited) if usable else None
    finally:
        folder.rmdir()
