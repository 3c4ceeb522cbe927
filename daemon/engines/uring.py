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
from strataflux.proto.compiled import compiled

__all__ = ["UringEngine", "flush", "open_uring", "reap", "submit"]

_SETUP, _ENTER, _REGISTER = 425, 426, 427
_OP_READ: Final = 22
_OP_READ_FIXED: Final = 4
_ENTER_GETEVENTS: Final = 1
_REGISTER_BUFFERS: Final = 0
_REGISTER_EVENTFD: Final = 4
_OFF_SQ_RING: Final = 0
_OFF_SQES: Final = 0x10000000
_FEAT_SINGLE_MMAP: Final = 1
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
    _descriptors: list[int]
    _maps: list[mmap.mmap]

    def close(self) -> None:
        """Close the ring. Every read must have been reaped."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        for mapping in self._maps:
            mapping.close()


def open_uring(depth: int, pool_address: int, pool_bytes: int) -> UringEngine:
    """Create a ring of ``depth`` entries in this thread and register the bounce pool where memlock allows.

    Raises:
        EngineUnavailable: io_uring is forbidden (seccomp, io_uring_disabled) or missing here.
    """
    if platform.machine() not in ("x86_64", "aarch64"):
        raise EngineUnavailable("uring", platform.machine(), "x86_64 or aarch64", 'set reader.engine = "threads"')
    descriptor, params, flags = _setup(depth)
    ring_bytes = max(params.sq_off[6] + params.sq_entries * 4, params.cq_off[5] + params.cq_entries * CQE.itemsize)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    shared = mmap.MAP_SHARED | _MAP_POPULATE
    if not params.features & _FEAT_SINGLE_MMAP:
        os.close(descriptor)
        raise EngineUnavailable("uring", "a kernel before 5.4", "5.4 or newer", 'set reader.engine = "threads"')
    rings = mmap.mmap(descriptor, ring_bytes, shared, protection, offset=_OFF_SQ_RING)
    sqes = mmap.mmap(descriptor, params.sq_entries * SQE.itemsize, shared, protection, offset=_OFF_SQES)
    base = _address(rings)
    # The kernel's indirection from ring position to entry is not needed: position i always is entry i.
    start = params.sq_off[6]
    np.frombuffer(rings, np.uint32, params.sq_entries, start)[:] = np.arange(params.sq_entries)
    state: Any = np.zeros(1, ENGINE)
    state[0]["kind"] = URING
    state[0]["ring"] = descriptor
    state[0]["wait_descriptor"] = done = _register_eventfd(descriptor)
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
    return UringEngine(state, flags, registered, [descriptor, done], [rings, sqes])


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


def _register_eventfd(descriptor: int) -> int:
    """An eventfd that the kernel signals when there may be completions. The ring's own descriptor does not become
    readable with deferred task work, so it cannot be waited on.
    """
    done = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    word = np.array([done], np.int32)
    result = call(_REGISTER, descriptor, _REGISTER_EVENTFD, word.ctypes.data, 1, 0, 0)
    if result < 0:
        os.close(done)
        os.close(descriptor)
        raise EngineUnavailable(
            "uring", f"register eventfd: {os.strerror(-result)}", "a kernel ≥ 5.4", 'set reader.engine = "threads"'
        )
    return done


def _register_pool(descriptor: int, address: int, size: int) -> bool:
    """Register the bounce pool; False where RLIMIT_MEMLOCK is too low for it (reads then pin pages one by one)."""
    vector = np.array([address, size], np.uint64)
    return call(_REGISTER, descriptor, _REGISTER_BUFFERS, vector.ctypes.data, 1, 0, 0) == 0


@compiled
def submit(e: Any, window: int, descriptor: int, address: int, length: int, offset: int) -> None:
    """As :func:`strataflux.daemon.engines.submit`. The ring has an entry for every window, so there is always room."""
    tail = load_u32(e[0].sq_tail)
    sqe = e[0].sqes + (wide(tail) & e[0].sq_mask) * 64
    opcode = _OP_READ_FIXED if e[0].fixed else _OP_READ
    store_u32(sqe, opcode)  # opcode:8, flags:8 = 0, ioprio:16 = 0
    store_u32(sqe + 4, descriptor)
    store_u64(sqe + 8, offset)
    store_u64(sqe + 16, address)
    store_u32(sqe + 24, length)
    store_u32(sqe + 28, 0)
    store_u64(sqe + 32, window)
    store_u16(sqe + 40, 0)
    # SYNC: kernel-sq (publish; read by the kernel in enter). Release: the entry is whole before the tail moves.
    store_release_u32(e[0].sq_tail, np.uint32(tail) + np.uint32(1))
    e[0].unflushed += 1


@compiled
def flush(e: Any) -> int:
    """As :func:`strataflux.daemon.engines.flush`; with deferred task work it also lets completions appear."""
    if e[0].unflushed == 0 and not (e[0].deferred and e[0].running):
        return 0
    flags = _ENTER_GETEVENTS if e[0].deferred else 0
    taken = call(_ENTER, e[0].ring, e[0].unflushed, 0, flags, 0, 0)
    e[0].system_calls += 1
    if taken < 0:
        return taken
    e[0].unflushed -= taken
    e[0].running += taken
    return 0


@compiled
def reap(e: Any, finished: Any) -> int:
    """As :func:`strataflux.daemon.engines.reap`."""
    head = wide(load_u32(e[0].cq_head))
    # SYNC: kernel-cq (read; published by the kernel). Acquire: entries are read after the tail that covers them.
    tail = wide(load_acquire_u32(e[0].cq_tail))
    count = (tail - head) & 0xFFFFFFFF
    for i in range(count):
        cqe = e[0].cqes + ((head + i) & e[0].cq_mask) * 16
        finished[0, i] = wide(load_u64(cqe))
        finished[1, i] = wide(np.int32(load_u32(cqe + 8)))
    if count:
        store_release_u32(e[0].cq_head, np.uint32(tail))
        e[0].running -= count
    return count
