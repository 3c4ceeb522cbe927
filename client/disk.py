"""How fast a disk gives small pieces from random places: what a decoder's misses ask of it.

Plain threads with preadv(2), past the page cache where the file system allows it. Python's own cost is in the numbers,
so they are what can be had at least; the daemon's engine gets more out of a fast device.
"""

import contextlib
import mmap
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from strataflux.client.errors import InputError

__all__ = ["DiskSpeed", "measure_reads", "scratch_file"]

_ALIGNMENT: Final = 4096
_CHUNK: Final = 4 << 20


@dataclass(frozen=True)
class DiskSpeed:
    """Random reads of one size, many at a time."""

    read_bytes: int
    reads_per_second: float
    median_seconds: float
    slow_seconds: float
    """99 of 100 reads are faster."""
    direct: bool
    """Past the page cache; without that, these may be the speed of memory."""
    file_bytes: int


@contextmanager
def scratch_file(folder: Path, size: int, seconds: float) -> Iterator[Path]:
    """A file without a name in ``folder`` that holds up to ``size`` bytes, or what ``seconds`` suffice to write.

    Yields:
        A path by which this process can open it.

    Raises:
        InputError: nothing can be written there.
    """
    block = random.Random(0).randbytes(_CHUNK)  # noqa: S311 – only so that it cannot be compressed
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            deadline = time.monotonic() + seconds
            for number in range(max(size // _CHUNK, 1)):
                file.write(number.to_bytes(8, "little") + block[8:])  # and no chunk is like another
                if time.monotonic() > deadline and number >= 1:
                    break
            file.flush()
            os.fsync(file.fileno())
            yield Path(f"/proc/self/fd/{file.fileno()}")
    except OSError as error:
        found = error.strerror or str(error)
        raise InputError(folder, found, "a folder to write a scratch file in", "name another with --at") from error


def measure_reads(path: Path, read_bytes: int, seconds: float, threads: int = 32) -> DiskSpeed:
    """Read random pieces of ``path``, ``threads`` at a time.

    Args:
        path: a file of at least one piece.
        read_bytes: rounded up to whole blocks of 4 KiB.
        seconds: how long.
        threads: how many reads at a time.

    Raises:
        InputError: it cannot be read, or is too small.
    """
    size = -(-read_bytes // _ALIGNMENT) * _ALIGNMENT
    try:
        descriptor, direct = _open(path)
    except OSError as error:
        raise InputError(path, error.strerror or str(error), "a file to read", "name another") from error
    try:
        places = os.fstat(descriptor).st_size // size
        if places < 1:
            raise InputError(path, "a smaller file", f"at least {size} bytes", "use a larger one")
        work = _Work(descriptor, size, places, time.monotonic() + seconds)
        crew = [threading.Thread(target=work.run, args=(number,)) for number in range(threads)]
        begun = time.monotonic()
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()
        took = time.monotonic() - begun
    finally:
        os.close(descriptor)
    if work.failures or not work.seconds:
        found = str(work.failures[0]) if work.failures else "no read in time"
        raise InputError(path, found, "a file that can be read", "see dmesg and the device's health")
    ordered = sorted(work.seconds)
    middle, slow = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    return DiskSpeed(size, len(ordered) / took, middle, slow, direct, places * size)


@dataclass
class _Work:
    """What the threads share; each appends to lists, which is atomic."""

    descriptor: int
    size: int
    places: int
    deadline: float
    seconds: list[float] = field(default_factory=list)
    failures: list[OSError] = field(default_factory=list)

    def run(self, number: int) -> None:
        choose = random.Random(number).randrange  # noqa: S311 – places to read
        with mmap.mmap(-1, self.size) as buffer:  # aligned, as reads past the page cache need it
            while (begun := time.monotonic()) < self.deadline:
                try:
                    os.preadv(self.descriptor, [buffer], choose(self.places) * self.size)
                except OSError as error:
                    self.failures.append(error)
                    return
                self.seconds.append(time.monotonic() - begun)


def _open(path: Path) -> tuple[int, bool]:
    """A descriptor past the page cache if that is possible, else one of a file of which nothing is cached."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        try:
            with mmap.mmap(-1, _ALIGNMENT) as buffer:
                os.preadv(descriptor, [buffer], 0)
            return descriptor, True
        except OSError:
            os.close(descriptor)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return descriptor, False
