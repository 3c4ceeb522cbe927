"""What a rival really uses: CPU of all of its processes, memory of its own, page cache of its files."""

import ctypes
import mmap
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Memory", "cpu_seconds", "drop_page_cache", "memory_of", "page_cache_bytes"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    own: int
    """Private and shared memory, what is shared by processes counted once: without mapped files."""
    page_cache: int
    """Pages of the rival's files that are in memory, whoever brought them there."""

    @property
    def total(self) -> int:
        return self.own + self.page_cache


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time so far, threads that ended included."""
    # clock_getcpuclockid(3): the clock of a process, with CPUCLOCK_SCHED.
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def memory_of(pids: Iterable[int], files: Iterable[Path]) -> Memory:
    """Now."""
    own = 0
    for pid in pids:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        own += sum(1024 * int(kib) for kib in re.findall(r"^Pss_(?:Anon|Shmem): +(\d+)", text, re.MULTILINE))
    return Memory(own, sum(page_cache_bytes(path) for path in files))


def page_cache_bytes(path: Path) -> int:
    """By mincore(2) over a mapping of the whole file."""
    size = path.stat().st_size
    if size == 0:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | 2) as mapped:
        flags = (ctypes.c_ubyte * (-(-size // _PAGE)))()
        view = ctypes.c_char.from_buffer(mapped)
        result = _libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), flags)
        del view
        if result != 0:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
        return sum(flag & 1 for flag in bytes(flags)) * _PAGE


def drop_page_cache(files: Iterable[Path]) -> None:
    """Write back and forget what is cached of the files; what is mapped somewhere stays."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
