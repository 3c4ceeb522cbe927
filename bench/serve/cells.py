"""The measurements, each of one session of one rival, in a process of its own."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve.plan import Cell, Stage
from serve.rival import Keys, Reader, Rival
from serve.streams import hot_batches, shuffled, zipf_steps

__all__ = ["WIDEST", "Session", "measure"]

WIDEST = 16_384
"""Look-ups of a call where all hit: a step's of an 8B model with a long context, 1.2 M a second for 14.5 ms."""
_BATCHES = 8
_STEPS = 256
_SINGLES = 4096
_COLD_CHUNK = 64
_PAUSE_SECONDS = 0.002
"""Between two steps: a decoder's other work."""


@dataclass
class Session:
    """One of ``cell.sessions`` sessions, number ``index``.

    ``ready`` is called when it is open, and returns when all are; ``begin`` when it has warmed up and its clock starts,
    ``end`` when that stops.
    """

    rival: Rival
    stage: Stage
    cell: Cell
    index: int
    seconds: float
    ready: Callable[[], object]
    begin: Callable[[], object]
    end: Callable[[], object]
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> int:
        return self.rival.records.record_bytes // 8 if self.cell.kind == "hits_whole" else 1


def measure(session: Session) -> dict[str, Any]:
    """What the cell's kind measures; counts of look-ups are what its CPU time is divided by."""
    if session.cell.kind == "cold":
        return _cold(session)
    reader = session.rival.open(session.cell.sessions, session.words)
    try:
        kinds = {"hits": _hits, "hits_whole": _hits, "latency": _latency, "miss": _miss, "steps": _steps}
        return kinds[session.cell.kind](session, reader)
    finally:
        reader.close()


def _warm(reader: Reader, hot: int, width: int) -> None:
    """Until all hot records are there."""
    for keys in np.array_split(np.arange(hot, dtype=np.int64), -(-hot // width)):
        reader.fetch(keys)


def _hits(session: Session, reader: Reader) -> dict[str, Any]:
    hot = session.stage.hot if session.rival.count > session.stage.hot else session.rival.count
    batches = hot_batches(hot, _BATCHES, WIDEST, session.index)
    session.ready()
    _warm(reader, hot, WIDEST)
    reader.get(batches[0])
    session.begin()
    rates, lookups, served, began = [], 0, 0, time.perf_counter()
    while time.perf_counter() - began < session.seconds:
        round_began, done = time.perf_counter(), 0
        for keys in batches:
            served += reader.get(keys)
            done += keys.size
            if time.perf_counter() - began > session.seconds:
                break
        rates.append(done / (time.perf_counter() - round_began))
        lookups += done
    session.end()
    return {"lookups": lookups, "rate": float(np.median(rates)), "served": served / lookups}


def _singles(read: Callable[[Keys], int], keys: Keys, seconds: float) -> tuple[NDArray[np.float64], int]:
    """Microseconds of each call for one record, and how many were there."""
    times: list[float] = []
    served = 0
    until = time.perf_counter() + seconds
    for first in range(keys.size):
        one = keys[first : first + 1]
        began = time.perf_counter_ns()
        served += read(one)
        times.append((time.perf_counter_ns() - began) / 1e3)
        if time.perf_counter() > until:
            break
    return np.array(times), served


def _latency(session: Session, reader: Reader) -> dict[str, Any]:
    hot = min(session.stage.hot, session.rival.count)
    keys = hot_batches(hot, 1, _SINGLES, session.index)[0]
    session.ready()
    _warm(reader, hot, WIDEST)
    _singles(reader.get, keys[:64], session.seconds)
    session.begin()
    times, served = _singles(reader.get, keys, session.seconds)
    session.end()
    return {"lookups": times.size, "served": served / times.size, **_percentiles(times)}


def _miss(session: Session, reader: Reader) -> dict[str, Any]:
    keys = shuffled(min(session.stage.hot, session.rival.count // 2), session.rival.count, session.index)
    session.ready()
    _singles(reader.fetch, keys[:16], session.seconds)
    absent = reader.absent(keys[16 : 16 + _SINGLES])
    if absent.size == 0:
        raise ValueError(f"all of {session.rival.count} records are cached: a smaller budget, or more records")
    session.begin()
    times, served = _singles(reader.fetch, absent, session.seconds)
    session.end()
    return {"lookups": times.size, "served": served / times.size, **_percentiles(times)}


def _steps(session: Session, reader: Reader) -> dict[str, Any]:
    cell, stage = session.cell, session.stage
    if stage.trace is None or cell.skew is not None:
        assert cell.skew is not None
        rows = zipf_steps(session.rival.count, cell.skew, _STEPS, stage.lookups_per_step, session.index)
        steps: list[Keys] = list(rows)
    else:
        steps = [row[row >= 0] for row in stage.trace]
    session.ready()
    _play(reader, steps, session.seconds)
    session.begin()
    times, lookups, served = _play(reader, steps, session.seconds)
    session.end()
    rate = lookups / (float(times.sum()) / 1e6)
    return {"lookups": lookups, "rate": rate, "served": served / lookups, **_percentiles(times)}


def _play(reader: Reader, steps: list[Keys], seconds: float) -> tuple[NDArray[np.float64], int, int]:
    """(microseconds of each step, look-ups, those that were served), again from the first step where they run out."""
    times: list[float] = []
    lookups = served = at = 0
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or not times:
        keys = steps[at % len(steps)]
        began = time.perf_counter_ns()
        served += reader.get(keys)
        times.append((time.perf_counter_ns() - began) / 1e3)
        lookups += keys.size
        at += 1
        time.sleep(_PAUSE_SECONDS)
    return np.array(times), lookups, served


def _cold(session: Session) -> dict[str, Any]:
    rival = session.rival
    order = shuffled(0, rival.count, session.index)
    readers: list[Reader] = []
    if type(rival).cold is Rival.cold:
        readers.append(rival.open(1, 1))
        readers += [readers[0].another() for _ in range(rival.threads - 1)]
    session.ready()
    session.begin()
    counted = rival.cold(order, session.seconds)
    filled, took = _read_by_threads(readers, order, session.seconds) if counted is None else counted
    session.end()
    return {"lookups": filled, "rate": filled / took, "served": 1.0, "threads": max(len(readers), 1)}


def _read_by_threads(readers: list[Reader], order: Keys, seconds: float) -> tuple[int, float]:
    done = [0] * len(readers)
    began = time.perf_counter()

    def read(number: int) -> None:
        part = np.array_split(order, len(readers))[number]
        for first in range(0, part.size, _COLD_CHUNK):
            done[number] += readers[number].fetch(part[first : first + _COLD_CHUNK])
            if time.perf_counter() - began > seconds:
                break

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(readers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done), time.perf_counter() - began


def _percentiles(times: NDArray[np.float64]) -> dict[str, float]:
    p50, p99 = np.percentile(times, [50, 99])
    return {"p50_us": float(p50), "p99_us": float(p99), "samples": int(times.size)}
