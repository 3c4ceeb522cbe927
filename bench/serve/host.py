"""A process a rival, in a memory group of its own: it starts what sessions share and forks them for each cell.

Sessions and their parent meet at one barrier: opened (the limit is set), go, begun (CPU is read), ended (CPU and memory
are read), and once more to be let go.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Barrier
from typing import Any

from serve.cells import Session, measure
from serve.confine import Group, make_group
from serve.plan import Cell, Stage
from serve.rival import Rival
from serve.usage import cpu_seconds, drop_page_cache, memory_of

__all__ = ["Host", "build"]

_FORK = multiprocessing.get_context("fork")
_WATCHDOG_SECONDS = 300.0
_PR_SET_PDEATHSIG = 1
_ALLOWANCE = 2 << 20
"""Beside the budget, for stacks and page tables: a limit counts them, and without room for them the kernel kills."""


def build(rivals: Sequence[Rival]) -> None:
    """Write the records of all at once, in processes that take what that needs with them.

    Raises:
        RuntimeError: one of them failed, naming it.
    """
    writers = [_FORK.Process(target=rival.build, name=rival.name) for rival in rivals]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    if failed := [f"{process.name} ended with {process.exitcode}" for process in writers if process.exitcode != 0]:
        raise RuntimeError(f"writing the records: {', '.join(failed)}")


class Host:
    """Pairs: :func:`Host.open` as a context. :meth:`run` measures one cell."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection

    @classmethod
    @contextmanager
    def open(cls, rival: Rival, stage: Stage, seconds: float) -> "Iterator[Host]":
        """Start it.

        Raises:
            RuntimeError: it did not start.
        """
        ours, theirs = _FORK.Pipe()
        with make_group(rival.name.replace(", ", "-")) as group:
            process = _FORK.Process(target=_host, args=(theirs, rival, stage, seconds, group))
            process.start()
            theirs.close()
            try:
                host = cls(ours)
                host._answer()
                yield host
            finally:
                with contextlib.suppress(BrokenPipeError):
                    ours.send(None)
                process.join(_WATCHDOG_SECONDS)
                process.kill()
                process.join()

    def run(self, cell: Cell) -> dict[str, Any]:
        """A row: what was measured.

        Raises:
            RuntimeError: a session failed.
        """
        self._connection.send(cell)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._connection.recv()
        except EOFError as error:
            raise RuntimeError("the rival's process ended") from error
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


def _host(connection: "Connection[Any, Any]", rival: Rival, stage: Stage, seconds: float, group: Group | None) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if group is not None:
        group.enter()
    try:
        rival.start()
        drop_page_cache(rival.files())  # whoever wrote it was no member of the group
        connection.send({})
        while (cell := connection.recv()) is not None:
            try:
                connection.send(_run(rival, stage, cell, seconds, group))
            except Exception as error:
                connection.send({"error": f"{rival.name}, {cell.label}: {error!r}"})
    finally:
        rival.stop()


def _run(rival: Rival, stage: Stage, cell: Cell, seconds: float, group: Group | None) -> dict[str, Any]:
    barrier = _FORK.Barrier(cell.sessions + 1)
    pipes = [_FORK.Pipe(duplex=False) for _ in range(cell.sessions)]
    sessions = [
        _FORK.Process(target=_session, args=(theirs, barrier, rival, stage, cell, index, seconds))
        for index, (_, theirs) in enumerate(pipes)
    ]
    for process in sessions:
        process.start()
    limited = rival.in_page_cache and group is not None
    watch = threading.Thread(target=_abort_at_a_death, args=(barrier, sessions))
    watch.start()
    try:
        found = _watch(barrier, rival, cell, [p.pid or 0 for p in sessions], group if limited else None)
        parts = [ours.recv() for ours, _ in pipes if ours.poll(_WATCHDOG_SECONDS)]
    except threading.BrokenBarrierError:
        said = [ours.recv() for ours, _ in pipes if ours.poll(1.0)]
        words = "; ".join(part.get("error", "") for part in said) or "a session ended without a word"
        raise RuntimeError(words) from None
    finally:
        barrier.abort()  # whoever still waits is let go
        if group is not None and limited:
            group.lift()
        for process in sessions:
            process.join(30.0)
            process.kill()
            process.join()
        watch.join()
    row = {"rival": rival.name, "kind": cell.kind, "skew": cell.skew, "sessions": cell.sessions, "limited": limited}
    return row | _joined(parts) | _per_lookup(found, parts)


def _abort_at_a_death(barrier: Barrier, sessions: list[Any]) -> None:
    """A session that the kernel ended for want of memory meets nobody any more."""
    waiting = {process.sentinel: process for process in sessions}
    while waiting:
        for sentinel in wait(list(waiting)):
            process = waiting.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                barrier.abort()


def _watch(barrier: Barrier, rival: Rival, cell: Cell, pids: list[int], group: Group | None) -> dict[str, float]:
    """The parent's part: the limit, CPU and memory."""
    meet = partial(barrier.wait, _WATCHDOG_SECONDS)
    everybody = [*pids, *rival.pids()]
    meet()
    if cell.kind in ("cold", "miss"):  # else what the cell before left is as good a start as a daemon's own cache
        drop_page_cache(rival.files())
    if group is not None:
        group.allow(rival.share_bytes + _ALLOWANCE, memory_of((), rival.files()).page_cache)
    meet()
    meet()
    before = cpu_seconds(everybody)
    meet()
    cpu = cpu_seconds(everybody) - before
    memory = memory_of(everybody, rival.files())
    meet()
    return {"cpu_seconds": cpu, "own_bytes": memory.own, "page_cache_bytes": memory.page_cache}


def _session(
    connection: "Connection[Any, Any]",
    barrier: Barrier,
    rival: Rival,
    stage: Stage,
    cell: Cell,
    index: int,
    seconds: float,
) -> None:
    meet = partial(barrier.wait, _WATCHDOG_SECONDS)
    before = memory_of([os.getpid()], ()).own

    def meet_twice() -> None:
        meet()
        meet()

    try:
        found = measure(Session(rival, stage, cell, index, seconds, meet_twice, meet, meet_twice))
        connection.send(found | {"before_bytes": before})
    except Exception as error:
        connection.send({"error": repr(error)})
        barrier.abort()


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Rates add up, percentiles are the middle and the worst session's."""
    lookups = sum(part["lookups"] for part in parts)
    row: dict[str, Any] = {"lookups": lookups}
    row["served"] = sum(part["served"] * part["lookups"] for part in parts) / max(lookups, 1)
    if "rate" in parts[0]:
        row["rate"] = sum(part["rate"] for part in parts)
    if "p50_us" in parts[0]:
        row["p50_us"] = statistics.median(part["p50_us"] for part in parts)
        row["p99_us"] = max(part["p99_us"] for part in parts)
        row["samples"] = sum(part["samples"] for part in parts)
    return row


def _per_lookup(found: dict[str, float], parts: list[dict[str, Any]]) -> dict[str, float]:
    lookups = max(sum(part["lookups"] for part in parts), 1)
    return {
        "cpu_us": found["cpu_seconds"] / lookups * 1e6,
        # Beyond what the sessions' processes were before they opened anything.
        "own_bytes": found["own_bytes"] - sum(part["before_bytes"] for part in parts),
        "page_cache_bytes": found["page_cache_bytes"],
    }
