"""The job board: reads posted in memory for worker threads. The ``threads`` engine is its compiled workers.

Whoever takes jobs off the board completes them: compiled threads calling preadv2 in production; in tests, a worker that
gives short reads, errors and completions out of order. States of a job and who moves it::

    FREE ── flush (reader) ──► READY ── claim, finish (one worker) ──► DONE ── reap (reader) ──► FREE
"""

import os
import threading
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy.base import wide
from strataflux.daemon.engines.layout import BOARD, ENGINE, JOB, JOB_DONE, JOB_FREE, JOB_READY
from strataflux.daemon.system import PREADV2, PWRITEV2, call, eventfd_drain, eventfd_signal, poll2
from strataflux.proto.atomics import (
    add_u64,
    load_acquire_u32,
    load_u32,
    load_u64,
    store_release_u32,
    store_u32,
    store_u64,
)
from strataflux.proto.compiled import borrowing, compiled

__all__ = ["Board", "claim", "finish", "flush", "open_board", "reap", "submit", "wait", "work"]

_JOB: Final = JOB.itemsize
_INTERRUPTED: Final = -4
_TIMED_OUT: Final = 62


@dataclass
class Board:
    """A job board and its worker threads. ``state`` is what the compiled functions take."""

    state: NDArray[np.void]
    _keep: list[NDArray[Any]]
    _descriptors: list[int]
    name: str = "threads"
    workers: list[threading.Thread] = field(default_factory=list)

    @property
    def stopping(self) -> bool:
        """Workers are to leave."""
        return bool(self._keep[2][1])

    def start_threads(self, count: int) -> None:
        """Start ``count`` compiled workers."""
        for number in range(count):
            worker = threading.Thread(target=work, args=(self.state,), name=f"strataflux-read-{number}", daemon=True)
            worker.start()
            self.workers.append(worker)

    def close(self) -> None:
        """Let the workers leave, join them, close the eventfds. Every read must have been reaped."""
        self._keep[2][1] = 1  # the word at e[0].stop
        os.eventfd_write(int(self.state[0]["tokens"]), max(len(self.workers), 1))
        for worker in self.workers:
            worker.join()
        for descriptor in self._descriptors:
            os.close(descriptor)


def open_board(depth: int, doorbell: int, name: str = "threads") -> Board:
    """A board for ``depth`` reads without workers yet, whose ``name`` it bears; ``doorbell`` is an eventfd that ends a
    wait.
    """
    order = np.zeros(1 << max(depth - 1, 1).bit_length(), np.uint32)
    jobs = np.zeros(depth, JOB)
    words = np.zeros(2, np.uint64)
    tokens = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
    done = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    state: Any = np.zeros(1, ENGINE)
    state[0]["kind"] = BOARD
    state[0]["depth"] = depth
    state[0]["jobs"] = jobs.ctypes.data
    state[0]["order"] = order.ctypes.data
    state[0]["order_mask"] = order.size - 1
    state[0]["claimed"] = words.ctypes.data
    state[0]["stop"] = words.ctypes.data + 8
    state[0]["tokens"] = tokens
    state[0]["done"] = done
    state[0]["doorbell"] = doorbell
    return Board(state, [order, jobs, words], [tokens, done], name)


@borrowing
def submit(e: Any, window: int, descriptor: int, address: int, length: int, offset: int, write: bool) -> None:
    """As :func:`strataflux.daemon.engines.submit`."""
    job = e[0].jobs + window * _JOB
    store_u32(job + 4, descriptor)
    store_u64(job + 8, address)
    store_u64(job + 16, length)
    store_u64(job + 24, offset)
    store_u64(job + 40, write)
    position = (e[0].flushed + e[0].unflushed) & e[0].order_mask
    store_u32(e[0].order + 4 * position, window)
    # SYNC: job-ready (publish). Release: the job is whole before a worker may see it.
    store_release_u32(job, JOB_READY)
    e[0].unflushed += 1


@compiled
def flush(e: Any) -> int:
    """As :func:`strataflux.daemon.engines.flush`: one token a job, so that as many workers wake as have work."""
    if e[0].unflushed == 0:
        return 0
    scratch = np.zeros(1, np.uint64)
    count = e[0].unflushed
    e[0].flushed += count
    e[0].running += count
    e[0].unflushed = 0
    e[0].system_calls += 1
    return min(eventfd_signal(e[0].tokens, scratch.ctypes.data, count), 0)


@borrowing
def wait(e: Any, timeout_us: int, scratch: int) -> int:
    """As :func:`strataflux.daemon.engines.wait`."""
    flush(e)
    woken = poll2(e[0].doorbell, e[0].done, timeout_us, scratch)
    if woken > 0:
        eventfd_drain(e[0].doorbell, scratch)
        eventfd_drain(e[0].done, scratch)
    return 0 if woken > 0 else -_TIMED_OUT


@borrowing
def claim(e: Any) -> int:
    """A worker's next job (its window), after it took one token."""
    position = wide(add_u64(e[0].claimed, 1)) & e[0].order_mask
    window = wide(load_u32(e[0].order + 4 * position))
    # SYNC: job-ready (read). Acquire: the job's fields are read after its state.
    load_acquire_u32(e[0].jobs + window * _JOB)
    return window


@compiled
def finish(e: Any, window: int, result: int) -> None:
    """A worker is done with a job: ``result`` bytes, or -errno."""
    job = e[0].jobs + window * _JOB
    store_u64(job + 32, result)
    # SYNC: job-done (publish). Release: the bytes and the result are in place before the state.
    store_release_u32(job, JOB_DONE)
    scratch = np.zeros(1, np.uint64)
    eventfd_signal(e[0].done, scratch.ctypes.data, 1)


@compiled
def work(e: Any) -> None:
    """Life of one compiled worker: take a token, claim a job, read, finish; leave when told to."""
    scratch = np.zeros(2, np.uint64)
    while True:
        taken = eventfd_drain(e[0].tokens, scratch.ctypes.data)
        if load_u64(e[0].stop) != 0:
            return
        if taken == 8:
            window = claim(e)
            job = e[0].jobs + window * _JOB
            scratch[0] = load_u64(job + 8)
            scratch[1] = load_u64(job + 16)
            result = _INTERRUPTED
            while result == _INTERRUPTED:
                descriptor = wide(np.int32(load_u32(job + 4)))
                offset = wide(load_u64(job + 24))
                number = PWRITEV2 if load_u64(job + 40) else PREADV2
                result = call(number, descriptor, scratch.ctypes.data, 1, offset, 0, 0)
            finish(e, window, result)


@borrowing
def reap(e: Any, finished: Any) -> int:
    """As :func:`strataflux.daemon.engines.reap`: look at every job that may be done."""
    count = 0
    if e[0].running == 0:
        return 0
    for window in range(e[0].depth):
        job = e[0].jobs + window * _JOB
        # SYNC: job-done (read). Acquire: the bytes are read after the state.
        if load_acquire_u32(job) == JOB_DONE:
            finished[0, count] = window
            finished[1, count] = wide(load_u64(job + 32))
            store_u32(job, JOB_FREE)
            count += 1
    e[0].running -= count
    return count
