"""The io_uring engine: raw rings, driven from compiled code.

:func:`open_uring` creates the ring in the thread that uses it (SINGLE_ISSUER), drops optional setup flags one by one on
kernels that lack them, registers the bounce pool as fixed buffer 0 if memlock allows, and reports all of it.
The kernel publishes a completion by storing the CQ tail (release), we publish submissions by storing the SQ tail; the
counterparts of both lie in the kernel.
"""

import ctypes
import errno
import mmap
import os
import platform
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy.base import wide
from strataflux.daemon.engines.layout import CQE, ENGINE, SQE, URING
from strataflux.daemon.errors import EngineUnavailable
from strataflux.daemon.system import call
from strataflux.proto.atomics import (
    load_acquire_u32,
    load_u32,
    load_u64,
    store_release_u32,
    store_u16,
    store_u32,
    store_u64,
)
from strataflux.proto.compiled import borrowing

__all__ = ["UringEngine", "flush", "open_uring", "reap", "submit", "wait"]

_SETUP, _ENTER, _REGISTER = 425, 426, 427
_OP_READ: Final = 22
_OP_WRITE: Final = 23
_OP_READ_FIXED: Final = 4
_OP_POLL_ADD: Final = 6
_POLL_MULTI: Final = 1
_POLLIN: Final = 1
_CQE_MORE: Final = 2
_ENTER_GETEVENTS: Final = 1
_ENTER_EXT_ARG: Final = 8
_REGISTER_BUFFERS: Final = 0
_DOORBELL: Final = 1 << 62
_EXTRA_ENTRIES: Final = 8
_OFF_SQ_RING: Final = 0
_OFF_SQES: Final = 0x10000000
_FEATURES: Final = 1 | 1 << 8  # SINGLE_MMAP, EXT_ARG: a wait with a time-out
_FLAGS: Final = {"DEFER_TASKRUN": 1 << 13, "SINGLE_ISSUER": 1 << 12, "CLAMP": 1 << 4}
_MAP_POPULATE: Final = 0x8000


class _Params(ctypes.Structure):
    _fields_ = [
        ("sq_entries", ctypes.c_uint32),
        ("cq_entries", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("sq_thread", ctypes.c_uint32 * 2),
        ("features", ctypes.c_uint32),
        ("wq_fd", ctypes.c_uint32),
        ("resv", ctypes.c_uint32 * 3),
        # head, tail, ring_mask, ring_entries, flags, dropped, array, resv1, user_addr (2 words)
        ("sq_off", ctypes.c_uint32 * 10),
        # head, tail, ring_mask, ring_entries, overflow, cqes, flags, resv1, user_addr (2 words)
        ("cq_off", ctypes.c_uint32 * 10),
    ]


assert ctypes.sizeof(_Params) == 120


@dataclass
class UringEngine:
    """An open ring. ``state`` is what the compiled functions take; the maps live as long as this object."""

    state: NDArray[np.void]
    flags: list[str]
    registered: bool
    _descriptor: int
    _maps: list[mmap.mmap]

    def close(self) -> None:
        """Close the ring. Every read must have been reaped."""
        os.close(self._descriptor)
        for mapping in self._maps:
            mapping.close()


def open_uring(depth: int, pool_address: int, pool_bytes: int, doorbell: int) -> UringEngine:
    """Create a ring for ``depth`` reads in this thread and register the bounce pool where memlock allows.

    ``doorbell`` is an eventfd that ends a wait.

    Raises:
        EngineUnavailable: io_uring is forbidden (seccomp, io_uring_disabled) or missing here.
    """
    if platform.machine() not in ("x86_64", "aarch64"):
        raise EngineUnavailable("uring", platform.machine(), "x86_64 or aarch64", 'set reader.engine = "threads"')
    descriptor, params, flags = _setup(depth + _EXTRA_ENTRIES)
    ring_bytes = max(params.sq_off[6] + params.sq_entries * 4, params.cq_off[5] + params.cq_entries * CQE.itemsize)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    shared = mmap.MAP_SHARED | _MAP_POPULATE
    if params.features & _FEATURES != _FEATURES:
        os.close(descriptor)
        raise EngineUnavailable("uring", "a kernel before 5.11", "5.11 or newer", 'set reader.engine = "threads"')
    rings = mmap.mmap(descriptor, ring_bytes, shared, protection, offset=_OFF_SQ_RING)
    sqes = mmap.mmap(descriptor, params.sq_entries * SQE.itemsize, shared, protection, offset=_OFF_SQES)
    base = _address(rings)
    # The kernel's indirection from ring position to entry is not needed: position i always is entry i.
    start = params.sq_off[6]
    np.frombuffer(rings, np.uint32, params.sq_entries, start)[:] = np.arange(params.sq_entries)
    state: Any = np.zeros(1, ENGINE)
    state[0]["kind"] = URING
    state[0]["ring"] = descriptor
    state[0]["doorbell"] = doorbell
    state[0]["depth"] = depth
    state[0]["deferred"] = "DEFER_TASKRUN" in flags
    state[0]["sq_tail"] = base + params.sq_off[1]
    state[0]["sq_mask"] = params.sq_entries - 1
    state[0]["sqes"] = _address(sqes)
    state[0]["cq_head"] = base + params.cq_off[0]
    state[0]["cq_tail"] = base + params.cq_off[1]
    state[0]["cq_mask"] = params.cq_entries - 1
    state[0]["cqes"] = base + params.cq_off[5]
    registered = _register_pool(descriptor, pool_address, pool_bytes)
    state[0]["fixed"] = registered
    return UringEngine(state, flags, registered, descriptor, [rings, sqes])


def _address(mapping: mmap.mmap) -> int:
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def _setup(depth: int) -> tuple[int, _Params, list[str]]:
    """Try with every optional flag, then without one after the other: older kernels refuse what they do not know."""
    wanted = list(_FLAGS)
    while True:
        params = _Params()
        params.flags = sum(_FLAGS[name] for name in wanted)
        result = call(_SETUP, depth, ctypes.addressof(params), 0, 0, 0, 0)
        if result >= 0:
            os.set_inheritable(result, False)
            return result, params, wanted
        if result != -errno.EINVAL or not wanted:
            raise EngineUnavailable(
                "uring",
                f"io_uring_setup: {os.strerror(-result)}",
                "a kernel and sandbox that allow io_uring",
                'set reader.engine = "threads", or allow io_uring (sysctl kernel.io_uring_disabled, seccomp)',
            )
        wanted.pop(0)


def _register_pool(descriptor: int, address: int, size: int) -> bool:
    """Register the bounce pool; False where RLIMIT_MEMLOCK is too low for it (reads then pin pages one by one)."""
    vector = np.array([address, size], np.uint64)
    return call(_REGISTER, descriptor, _REGISTER_BUFFERS, vector.ctypes.data, 1, 0, 0) == 0


@borrowing
def submit(e: Any, window: int, descriptor: int, address: int, length: int, offset: int, write: bool) -> None:
    """As :func:`strataflux.daemon.engines.submit`. The ring has an entry for every window, so there is always room."""
    tail = load_u32(e[0].sq_tail)
    sqe = e[0].sqes + (wide(tail) & e[0].sq_mask) * 64
    opcode = _OP_WRITE if write else _OP_READ_FIXED if e[0].fixed else _OP_READ
    store_u32(sqe, opcode)  # opcode:8, flags:8 = 0, ioprio:16 = 0
    store_u32(sqe + 4, descriptor)
    store_u64(sqe + 8, offset)
    store_u64(sqe + 16, address)
    store_u32(sqe + 24, length)
    store_u32(sqe + 28, 0)
    store_u64(sqe + 32, window)
    store_u16(sqe + 40, 0)
    # The kernel reads the tail in enter. Release: the entry is whole before the tail moves.
    store_release_u32(e[0].sq_tail, np.uint32(tail) + np.uint32(1))
    e[0].unflushed += 1


@borrowing
def _arm_doorbell(e: Any) -> None:
    """Ask for a completion each time the doorbell rings (multishot poll), so that one system call waits for both."""
    tail = load_u32(e[0].sq_tail)
    sqe = e[0].sqes + (wide(tail) & e[0].sq_mask) * 64
    for word in range(0, 64, 8):
        store_u64(sqe + word, 0)
    store_u32(sqe, _OP_POLL_ADD)
    store_u32(sqe + 4, e[0].doorbell)
    store_u32(sqe + 24, _POLL_MULTI)
    store_u32(sqe + 28, _POLLIN)
    store_u64(sqe + 32, _DOORBELL)
    store_release_u32(e[0].sq_tail, np.uint32(tail) + np.uint32(1))
    e[0].unflushed += 1
    e[0].armed = 1


@borrowing
def _enter(e: Any, wanted: int, flags: int, argument: int, size: int) -> int:
    taken = call(_ENTER, e[0].ring, e[0].unflushed, wanted, flags, argument, size)
    e[0].system_calls += 1
    if taken > 0:
        e[0].unflushed -= taken
    return min(taken, 0)


@borrowing
def flush(e: Any) -> int:
    """As :func:`strataflux.daemon.engines.flush`; with deferred task work it also lets completions appear."""
    return _enter(e, 0, _ENTER_GETEVENTS if e[0].deferred else 0, 0, 0)


@borrowing
def wait(e: Any, timeout_us: int, scratch: int) -> int:
    """As :func:`strataflux.daemon.engines.wait`: submit, let completions appear and wait, in one system call."""
    if not e[0].armed:
        _arm_doorbell(e)
    store_u64(scratch, 0)  # no signal mask
    store_u64(scratch + 8, 0)
    store_u64(scratch + 16, scratch + 24)
    store_u64(scratch + 24, timeout_us // 1_000_000)
    store_u64(scratch + 32, timeout_us % 1_000_000 * 1000)
    return _enter(e, 1, _ENTER_GETEVENTS | _ENTER_EXT_ARG, scratch, 24)


@borrowing
def reap(e: Any, finished: Any) -> int:
    """As :func:`strataflux.daemon.engines.reap`; a doorbell's completion is only taken note of."""
    head = wide(load_u32(e[0].cq_head))
    # The kernel published the tail. Acquire: entries are read after the tail that covers them.
    tail = wide(load_acquire_u32(e[0].cq_tail))
    ready = (tail - head) & 0xFFFFFFFF
    count = 0
    for i in range(ready):
        cqe = e[0].cqes + ((head + i) & e[0].cq_mask) * 16
        window = wide(load_u64(cqe))
        if window == _DOORBELL:
            e[0].armed = wide(load_u32(cqe + 12)) & _CQE_MORE
            continue
        finished[0, count] = window
        finished[1, count] = wide(np.int32(load_u32(cqe + 8)))
        count += 1
    if ready:
        store_release_u32(e[0].cq_head, np.uint32(tail))
    return count
