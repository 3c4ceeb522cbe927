"""Shared memory: anonymous, sealed, handed over by descriptor and never by name.

Life of a segment: *create* (daemon: memfd, reserved, mapped, sealed) → *send* (a read-only descriptor, or the writable
one for a session's own segment) → *map* (client: size and seals checked before the map) → *close* (either side; the
kernel frees the pages when the last map and descriptor go, whoever died how).

A segment is never shrunk, grown or punched once it was handed out (FORMAT.md, "Segments"): a GPU registration would
keep reading the punched-out pages without a word.
"""

import contextlib
import errno
import fcntl
import mmap
import os

import numpy as np

from strataflux.proto.errors import SegmentError

__all__ = ["Segment", "create", "map_descriptor"]

_MFD_NOEXEC_SEAL = 0x0008
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Segment:
    """A mapped segment. ``address`` is valid until :meth:`close`; whoever keeps it must be done before."""

    def __init__(self, descriptor: int, mapping: mmap.mmap, size: int) -> None:
        # fixed after construction
        self.descriptor = descriptor
        self.size = size
        self.address = int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
        # guarded by the owner's thread
        self._mapping = mapping
        self._open = True

    def view(self, dtype: np.dtype[np.void], offset: int = 0) -> np.ndarray:
        """A one-element array over a page at ``offset``; dead after :meth:`close`, so do not keep it."""
        return np.frombuffer(self._mapping, dtype=dtype, count=1, offset=offset)

    def read_only_descriptor(self) -> int:
        """A new descriptor that can only ever be mapped for reading; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Unmap and close. Idempotent. A view that is still alive keeps the map until it goes."""
        if not self._open:
            return
        self._open = False
        os.close(self.descriptor)
        with contextlib.suppress(BufferError):
            self._mapping.close()


def create(name: str, size: int, *, reserve: bool) -> Segment:
    """Make a segment of ``size`` bytes, zeroed, mode 0600, sealed against resizing.

    ``name`` shows up in /proc/PID/maps only. With ``reserve`` its pages are allocated now, so that nothing is a SIGBUS
    later; whoever reserves much has compared it with the memory there is, because Linux answers a lack of it with its
    out-of-memory killer before an error. Without, the segment is sparse.

    Raises:
        SegmentError: no memory, or a kernel without memfd.
    """
    descriptor = _memfd(name, size)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, size)
        if reserve:
            os.posix_fallocate(descriptor, 0, size)
        mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        mapping.madvise(mmap.MADV_DONTFORK)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        raise SegmentError(
            f"segment {name}",
            f"{error.strerror} for {size} bytes",
            "memory for all of it",
            "lower the cache budgets, or raise MemoryMax of the service",
        ) from error
    return Segment(descriptor, mapping, size)


def _memfd(name: str, size: int) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise SegmentError(
                f"segment {name}", str(error.strerror), f"a memfd of {size} bytes", "check the kernel (≥ 5.1)"
            ) from error
    return os.memfd_create(name, flags)  # a kernel older than 6.3 knows no NOEXEC_SEAL


def map_descriptor(descriptor: int, size: int, *, writable: bool) -> Segment:
    """Map a received descriptor, of which nothing is believed; takes it over (closed on error, too).

    Raises:
        SegmentError: it is smaller than announced, could still be resized under us (missing seals: a later access
            could be a SIGBUS), or cannot be mapped.
    """
    try:
        actual = os.fstat(descriptor).st_size
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if actual != size or seals & _SIZE_SEALS != _SIZE_SEALS:
            raise SegmentError(
                f"descriptor {descriptor}",
                f"{actual} bytes, seals {seals:#x}",
                f"{size} bytes, sealed against resizing",
                "is the other side a stratafluxd of the same version?",
            )
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED, protection)
        mapping.madvise(mmap.MADV_DONTFORK)
    except OSError as error:
        os.close(descriptor)
        raise SegmentError(
            f"descriptor {descriptor}", str(error.strerror), "a sealed memfd", "restart the client"
        ) from error
    except SegmentError:
        os.close(descriptor)
        raise
    return Segment(descriptor, mapping, size)
