"""A worker for the job board that breaks the disk on demand.

It takes jobs off the board like a compiled worker and completes them by a script: right, short, with an error, with
a flipped bit, late, or out of order. The file's right bytes come from a plain read. Every fault it gives is counted.
"""

import ctypes
import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from strataflux.daemon.engines.board import Board, claim, finish
from strataflux.daemon.engines.layout import JOB

RIGHT: Final = "right"
FLIPPED: Final = "flipped"
SHORT: Final = "short"
TORN: Final = "torn"
ERRORS: Final = {
    "eio": errno.EIO,
    "einval": errno.EINVAL,
    "eintr": errno.EINTR,
    "eagain": errno.EAGAIN,
    "enospc": errno.ENOSPC,
}


@dataclass(frozen=True)
class Job:
    """One read, or write, as it stands on the board."""

    window: int
    descriptor: int
    address: int
    length: int
    offset: int
    write: bool = False


@dataclass(frozen=True)
class Fault:
    """What becomes of a job: ``kind`` is RIGHT, FLIPPED, SHORT, TORN or a key of ERRORS; ``at`` the file offset of the
    bit that is flipped, or how many bytes a short one moves, or after how many bytes a write that claims to be whole
    is torn.
    """

    kind: str = RIGHT
    at: int = 0


Script = Callable[[Job], Fault]


def always(fault: Fault) -> Script:
    """The same for every read."""
    return lambda job: fault


def in_turn(*faults: Fault) -> Script:
    """One fault a read in the order they come, then right reads."""
    left = list(faults)
    return lambda job: left.pop(0) if left else Fault()


def covering(offset: int, *faults: Fault) -> Script:
    """One fault for each read that covers ``offset`` in the file, then right reads."""
    left = list(faults)

    def script(job: Job) -> Fault:
        covers = job.offset <= offset < job.offset + job.length
        return left.pop(0) if left and covers else Fault()

    return script


@dataclass
class BoardWorker:
    """Takes and completes jobs. ``take`` and ``complete`` are for tests that sweep by hand; ``start`` runs a thread.

    The thread is one of the board's workers: the board's ``close`` lets it leave.
    """

    board: Board
    script: Script = field(default_factory=lambda: always(Fault()))
    given: Counter[str] = field(default_factory=Counter)
    bytes_given: int = 0
    jobs: list[Job] = field(default_factory=list)
    _taken: int = 0

    def take(self) -> list[Job]:
        """Claim every job that was flushed; they stay in flight until :meth:`complete`."""
        claimed = []
        while self._taken < int(self.board.state[0]["flushed"]):
            claimed.append(self._claim())
        return claimed

    def complete(self, jobs: Iterable[Job]) -> None:
        """Complete claimed jobs in the order given, by the script."""
        for job in jobs:
            finish(self.board.state, job.window, self._result(job, self.script(job)))

    def work(self) -> int:
        """Take and complete all there is now, in order; how many."""
        jobs = self.take()
        self.complete(jobs)
        return len(jobs)

    def start(self) -> None:
        """Work in a thread until the board is closed."""
        thread = threading.Thread(target=self._live, name="board-worker")
        self.board.workers.append(thread)
        thread.start()

    def _live(self) -> None:
        tokens, stop = int(self.board.state[0]["tokens"]), self.board._keep[2]
        while True:
            os.eventfd_read(tokens)
            if stop[1]:
                return
            self.complete([self._read(claim(self.board.state))])

    def _claim(self) -> Job:
        os.eventfd_read(int(self.board.state[0]["tokens"]))
        self._taken += 1
        return self._read(claim(self.board.state))

    def _read(self, window: int) -> Job:
        row: Any = np.ctypeslib.as_array(
            (ctypes.c_uint8 * JOB.itemsize).from_address(int(self.board.state[0]["jobs"]) + window * JOB.itemsize)
        ).view(JOB)[0]
        numbers = (int(row[name]) for name in ("descriptor", "address", "length", "offset"))
        descriptor, address, length, offset = numbers
        job = Job(window, descriptor, address, length, offset, bool(row["write"]))
        self.jobs.append(job)
        return job

    def _result(self, job: Job, fault: Fault) -> int:
        self.given[fault.kind] += 1
        if fault.kind in ERRORS:
            return -ERRORS[fault.kind]
        if job.write:
            length = fault.at if fault.kind in (SHORT, TORN) else job.length
            with open(f"/proc/self/fd/{job.descriptor}", "r+b") as file:  # buffered, so that any address will do
                written = os.pwrite(file.fileno(), ctypes.string_at(job.address, length), job.offset)
            return job.length if fault.kind == TORN else written
        data = bytearray(self._file_bytes(job))
        if fault.kind == SHORT:
            del data[fault.at :]
        if fault.kind == FLIPPED and job.offset <= fault.at < job.offset + len(data):
            data[fault.at - job.offset] ^= 0x10
        ctypes.memmove(job.address, bytes(data), len(data))
        self.bytes_given += len(data)
        return len(data)

    def _file_bytes(self, job: Job) -> bytes:
        """A buffered read of the same file, whatever the job's descriptor asks for."""
        with open(f"/proc/self/fd/{job.descriptor}", "rb") as file:
            return os.pread(file.fileno(), job.length, job.offset)
