"""The ``liburing`` engine: the job board's reads, handed to io_uring by the PyPI package of that name (optional extra).

One Python thread takes jobs off the board and keeps them in one ring. It costs more per read than the raw rings of
``uring``, and is there for whoever wants to compare, or trusts the library more than ours. Everything is imported
when the engine is opened: without the package nothing else is missing.
"""

import ctypes
import importlib
import os
import select
import threading
from typing import Any, Final

import numpy as np

from strataflux.daemon.engines.board import Board, claim, finish, open_board
from strataflux.daemon.engines.layout import JOB
from strataflux.daemon.errors import EngineUnavailable
from strataflux.proto.extras import install_command

__all__ = ["open_liburing"]

_PINNED: Final = "2024.5.3"


def open_liburing(depth: int, doorbell: int) -> Board:
    """A board whose worker is a thread with a ring for ``depth`` reads.

    Raises:
        EngineUnavailable: the package is not installed, or the kernel or sandbox forbids io_uring.
    """
    try:
        library = importlib.import_module("liburing")
    except ImportError as error:
        raise EngineUnavailable(
            "liburing", f"no such package ({error})", f"liburing {_PINNED}", install_command("liburing")
        ) from error
    ring = library.io_uring()
    try:
        library.io_uring_queue_init(depth, ring)
    except OSError as error:
        raise EngineUnavailable(
            "liburing",
            f"io_uring_queue_init: {error.strerror or error}",
            "a kernel and sandbox that allow io_uring",
            'set reader.engine = "threads", or allow io_uring (sysctl kernel.io_uring_disabled, seccomp)',
        ) from error
    board = open_board(depth, doorbell, "liburing")
    worker = _Worker(board, library, ring)
    thread = threading.Thread(target=worker.live, name="strataflux-liburing", daemon=True)
    board.workers.append(thread)
    thread.start()
    return board


class _Worker:
    """Its thread only. In flight: jobs that were claimed and not finished; their buffers are kept alive by name."""

    def __init__(self, board: Board, library: Any, ring: Any) -> None:
        # fixed after construction
        self._board = board
        self._library = library
        self._ring = ring
        self._tokens = int(board.state[0]["tokens"])
        self._completed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        library.io_uring_register_eventfd(ring, self._completed)
        # this thread only
        self._buffers: dict[int, Any] = {}

    def live(self) -> None:
        """Take, submit and finish jobs until the board is closed."""
        poll = select.poll()
        poll.register(self._tokens, select.POLLIN)
        poll.register(self._completed, select.POLLIN)
        while not self._board.stopping:
            poll.poll()
            self._submit_new()
            self._finish_done()
        self._library.io_uring_queue_exit(self._ring)
        os.close(self._completed)

    def _submit_new(self) -> None:
        """Everything there is a token for. The ring has an entry for every window."""
        count = 0
        token = select.poll()
        token.register(self._tokens, select.POLLIN)
        while token.poll(0) and not self._board.stopping:
            os.eventfd_read(self._tokens)
            if self._board.stopping:
                return
            self._prepare(claim(self._board.state))
            count += 1
        if count:
            self._library.io_uring_submit(self._ring)

    def _prepare(self, window: int) -> None:
        job = self._job(window)
        buffer = (ctypes.c_ubyte * int(job["length"])).from_address(int(job["address"]))
        self._buffers[window] = view = memoryview(buffer).cast("B")
        sqe = self._library.io_uring_get_sqe(self._ring)
        prepare = self._library.io_uring_prep_write if job["write"] else self._library.io_uring_prep_read
        prepare(sqe, int(job["descriptor"]), view, int(job["length"]), int(job["offset"]))
        self._library.io_uring_sqe_set_data64(sqe, window + 1)

    def _finish_done(self) -> None:
        try:
            os.eventfd_read(self._completed)
        except BlockingIOError:
            return
        cqe = self._library.io_uring_cqe()
        while True:
            try:
                if self._library.io_uring_peek_cqe(self._ring, cqe) != 0:
                    return
            except BlockingIOError:
                return
            window, result = int(cqe.user_data) - 1, int(cqe.res)
            self._library.io_uring_cqe_seen(self._ring, cqe)
            del self._buffers[window]
            finish(self._board.state, window, result)

    def _job(self, window: int) -> Any:
        address = int(self._board.state[0]["jobs"]) + window * JOB.itemsize
        raw = (ctypes.c_uint8 * JOB.itemsize).from_address(address)
        return np.frombuffer(memoryview(raw), JOB)[0]
