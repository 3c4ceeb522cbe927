"""System calls for compiled code: libc entry points that Numba calls directly, without the GIL and without Python."""

import platform
from typing import Any, Final

import numpy as np
from numba import types

from strataflux.cache_policy.base import wide
from strataflux.proto.atomics import load_u32, load_u64, store_u64
from strataflux.proto.compiled import borrowing

__all__ = [
    "PREADV2",
    "PWRITEV2",
    "call",
    "eventfd_drain",
    "eventfd_signal",
    "futex_wake",
    "monotonic_us",
    "poll2",
    "punch_hole",
]

_libc_syscall: Any = types.ExternalFunction(
    "syscall", types.int64(types.int64, types.int64, types.int64, types.int64, types.int64, types.int64, types.int64)
)
_libc_errno: Any = types.ExternalFunction("__errno_location", types.int64())
_libc_clock: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))

_X86 = platform.machine() == "x86_64"
_READ: Final = 0 if _X86 else 63
_WRITE: Final = 1 if _X86 else 64
PREADV2: Final = 327 if _X86 else 286
PWRITEV2: Final = 328 if _X86 else 287
_PPOLL: Final = 271 if _X86 else 73
_FALLOCATE: Final = 285 if _X86 else 47
_PUNCH_HOLE_KEEP_SIZE: Final = 3
_FUTEX: Final = 202 if _X86 else 98
_FUTEX_WAKE: Final = 1
_CLOCK_MONOTONIC: Final = 1
_POLLIN: Final = 1


@borrowing
def call(number: int, a: int, b: int, c: int, d: int, e: int, f: int) -> int:
    """A raw system call: its result, or -errno."""
    result = _libc_syscall(number, a, b, c, d, e, f)
    if result < 0:
        return -wide(load_u32(_libc_errno()))
    return wide(result)


@borrowing
def monotonic_us(scratch: int) -> int:
    """CLOCK_MONOTONIC in microseconds; ``scratch`` is the address of 16 bytes of ours."""
    _libc_clock(_CLOCK_MONOTONIC, scratch)
    return wide(load_u64(scratch)) * 1_000_000 + wide(load_u64(scratch + 8)) // 1000


@borrowing
def eventfd_signal(descriptor: int, scratch: int, count: int) -> int:
    """Add ``count`` to an eventfd."""
    store_u64(scratch, count)
    return call(_WRITE, descriptor, scratch, 8, 0, 0, 0)


@borrowing
def eventfd_drain(descriptor: int, scratch: int) -> int:
    """Read a non-blocking eventfd back to zero (or take one token of a semaphore)."""
    return call(_READ, descriptor, scratch, 8, 0, 0, 0)


@borrowing
def punch_hole(descriptor: int, offset: int, length: int) -> int:
    """Give the blocks of a part of a file back; 0, or -errno where the file system cannot."""
    return call(_FALLOCATE, descriptor, _PUNCH_HOLE_KEEP_SIZE, offset, length, 0, 0)


@borrowing
def futex_wake(address: int) -> int:
    """Wake every process that sleeps on the u32 at ``address`` (shared mappings)."""
    return call(_FUTEX, address, _FUTEX_WAKE, 0x7FFFFFFF, 0, 0, 0)


@borrowing
def poll2(first: int, second: int, timeout_us: int, scratch: int) -> int:
    """Wait until one of two descriptors (-1 = none) is readable or the time is over. ``scratch``: 32 bytes of ours."""
    store_u64(scratch, np.uint64(np.uint32(first)) | np.uint64(_POLLIN << 32))
    store_u64(scratch + 8, np.uint64(np.uint32(second)) | np.uint64(_POLLIN << 32))
    store_u64(scratch + 16, timeout_us // 1_000_000)
    store_u64(scratch + 24, timeout_us % 1_000_000 * 1000)
    return call(_PPOLL, scratch, 2, scratch + 16, 0, 8, 0)
