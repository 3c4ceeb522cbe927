"""What a daemon that has ended left on the machine: nothing, if all is well."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Leftovers", "find_leftovers", "shared_memory_names"]

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 – looked at, never written to
_UNIX_SOCKETS = Path("/proc/net/unix")


@dataclass(frozen=True)
class Leftovers:
    """What was found, each by name."""

    processes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()
    shared_memory: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return self.processes + self.files + self.sockets + self.shared_memory

    def __add__(self, other: "Leftovers") -> "Leftovers":
        """Both together."""
        return Leftovers(
            self.processes + other.processes,
            self.files + other.files,
            self.sockets + other.sockets,
            self.shared_memory + other.shared_memory,
        )


def shared_memory_names() -> frozenset[str]:
    """Names of this project under /dev/shm. There should be none: its memory has no names."""
    with contextlib.suppress(OSError):
        return frozenset(name for name in os.listdir(_SHARED_MEMORY) if "strataflux" in name)
    return frozenset()


def find_leftovers(runtime_dir: Path, shared_memory_before: frozenset[str], *, forced: bool = False) -> Leftovers:
    """Look for what a daemon that served in ``runtime_dir`` left.

    Args:
        runtime_dir: its folder, of a name that nothing else has.
        shared_memory_before: :func:`shared_memory_names` from before it started.
        forced: it had to be killed, which counts as a process left.
    """
    mark = str(runtime_dir)
    processes = [f"process {found}" for found in _processes(mark)]
    if forced:
        processes.append("a daemon that did not stop and was killed")
    files = [f"file {path}" for path in (runtime_dir, *runtime_dir.rglob("*")) if path.exists() or path.is_symlink()]
    sockets = [f"socket {line.split()[-1]}" for line in _lines(_UNIX_SOCKETS) if line.split()[-1].startswith(mark)]
    shared = [f"shared memory {name}" for name in sorted(shared_memory_names() - shared_memory_before)]
    return Leftovers(tuple(processes), tuple(files), tuple(sockets), tuple(shared))


def _processes(mark: str) -> list[str]:
    """Processes other than this one whose command line names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(entry.name)
    return found


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text().splitlines()
    return []
