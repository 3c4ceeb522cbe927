"""Engines: how the reader gets bytes from a file without waiting. One interface, one conformance suite.

``uring`` hands reads to the kernel through raw io_uring rings; ``threads`` hands them to a pool of threads that call
preadv2, where io_uring is forbidden; ``liburing`` to a Python thread that drives the package of that name. All but
the last are compiled; the reader's loop calls the functions below:

* ``submit(e, window, descriptor, address, length, offset, write)``: one read into the bounce pool (or a write), not
  started yet
* ``flush(e)``: start what was submitted
* ``reap(e, finished)``: completed (window, bytes or -errno) pairs, in any order, without waiting
* ``wait(e, timeout_us, scratch)``: flush, then sleep until something may be reaped or the doorbell rings

A read is in flight from ``submit`` until ``reap`` returns it, exactly once; its part of the bounce pool belongs to the
kernel (or the thread) for that long.
"""

from typing import Any

from strataflux.cache_policy.base import wide
from strataflux.daemon.engines import board, uring
from strataflux.daemon.engines.layout import ENGINE, URING
from strataflux.proto.compiled import borrowing

__all__ = ["ENGINE", "flush", "reap", "submit", "wait"]


@borrowing
def submit(e: Any, window: int, descriptor: int, address: int, length: int, offset: int, write: bool) -> None:
    """Prepare one read of ``length`` bytes at ``offset`` into ``address`` (or one write from there, which need not
    lie in the bounce pool); ``window`` names it in ``reap``.
    """
    if e[0].kind == URING:
        uring.submit(e, window, descriptor, address, length, offset, write)
    else:
        board.submit(e, window, descriptor, address, length, offset, write)


@borrowing
def flush(e: Any) -> int:
    """Start every submitted read and let completions appear; 0, or -errno (what was not taken stays submitted)."""
    if e[0].kind == URING:
        return wide(uring.flush(e))
    return wide(board.flush(e))


@borrowing
def reap(e: Any, finished: Any) -> int:
    """Completions into ``finished`` (i8 [2, depth]: windows, results); returns how many."""
    if e[0].kind == URING:
        return wide(uring.reap(e, finished))
    return wide(board.reap(e, finished))


@borrowing
def wait(e: Any, timeout_us: int, scratch: int) -> int:
    """Flush and sleep; 0, or -errno (ETIME: nothing happened). ``scratch`` is the address of 40 bytes of ours."""
    if e[0].kind == URING:
        return wide(uring.wait(e, timeout_us, scratch))
    return wide(board.wait(e, timeout_us, scratch))
