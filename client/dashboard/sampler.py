"""Looks at a daemon again and again, and keeps what a page shows: now, the last minute, and some history."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from strataflux.client.control import Control
from strataflux.client.errors import FailureError
from strataflux.client.watch import Asked, Moment, Rates, SetMisses, look, rates

__all__ = ["Sampler", "describe"]

_MINUTE_SECONDS: Final = 60.0
_NOW_SECONDS: Final = 5.0
"""Of what is called now: a slow decoder's tokens come too seldom for less."""
_HISTORY: Final = 180

_Json = dict[str, Any]


@dataclass(frozen=True)
class _Point:
    """One interval in the history. Hit rates are None without look-ups."""

    at: float
    weight: float | None
    kv: float | None
    steps: float


def describe(moment: Moment, now: Rates, minute: Rates) -> _Json:
    """A moment as the page takes it, but for the history.

    Args:
        moment: what the daemon said.
        now: of the last seconds.
        minute: of the last minute, for what happens too seldom to be seen in one interval.
    """
    info = moment.info
    caches = [
        {name: getattr(row, name) for name in ("kind", "capacity_bytes", "valid_bytes", "filling_bytes",
                                               "retired_bytes", "free_bytes")}
        for row in moment.stats.caches
    ]  # fmt: skip
    classes = [
        {name: getattr(row, name) for name in ("kind", "slot_bytes", "slots", "free", "filling", "retired")}
        for row in moment.stats.classes
    ]
    return {
        "daemon": {
            "version": info.version,
            "state": info.state,
            "degraded": dict(info.degraded),
            "uptime_seconds": info.uptime_seconds,
            "engine": info.engine,
            "direct_io": info.direct_io,
            "policy": info.policy,
            "pid": info.pid,
        },
        "now": now.to_json(),
        "warmed": moment.stats.warmed,
        "minute_seconds": minute.seconds,
        "stores": [_store(moment, index, minute) for index in range(len(moment.stores))],
        "caches": caches,
        "classes": classes,
    }


def _store(moment: Moment, index: int, minute: Rates) -> _Json:
    """Misses a second of one store as rows of layers and columns of sets."""
    store = moment.stores[index]
    mine = [row for row in minute.misses if row.store == store.digest]
    sets = list(dict.fromkeys(row.set for row in mine))
    return {
        "digest": store.digest,
        "records": store.records,
        "resident_records": store.stats.resident_records,
        "quarantined": store.stats.quarantined,
        "bytes": store.bytes,
        "sets": sets,
        "layers": _grid(mine, sets),
    }


def _grid(rows: Sequence[SetMisses], sets: Sequence[str]) -> list[list[float | None]]:
    """[layers, sets]; None where a layer has no such set."""
    if not rows:
        return []
    grid: list[list[float | None]] = [[None] * len(sets) for _ in range(max(row.layer for row in rows) + 1)]
    for row in rows:
        at = sets.index(row.set)
        grid[row.layer][at] = (grid[row.layer][at] or 0.0) + row.per_second
    return grid


class Sampler:
    """Pairs: :meth:`start` / :meth:`stop`. :attr:`text` may be read from any thread."""

    def __init__(self, runtime_dir: Path, interval_seconds: float, connect: Callable[[Path], Asked] = Control) -> None:
        """``connect`` makes what is asked (tests)."""
        # fixed after construction
        self._daemon = connect(runtime_dir)
        self._interval = interval_seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="strataflux-sampler", daemon=True)
        # the sampler's thread
        self._moments: deque[Moment] = deque(maxlen=max(2, round(_MINUTE_SECONDS / interval_seconds)))
        self._history: deque[_Point] = deque(maxlen=_HISTORY)
        # replaced as a whole
        self.text = b"{}"
        """The newest state as JSON."""

    def start(self) -> None:
        """Look once, then at every interval from now on."""
        self.sample()
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        if isinstance(self._daemon, Control):
            self._daemon.close()

    def sample(self) -> None:
        """Look at the daemon; that nobody answers, or with a refusal, is a state, too."""
        try:
            state = self._look()
        except FailureError as error:
            state = {"error": {"subject": error.subject, "found": error.found, "remedy": error.remedy}}
        state["interval_seconds"] = self._interval
        state["history"] = [asdict(point) for point in self._history]
        self.text = json.dumps(state).encode()

    def _look(self) -> _Json:
        moment = look(self._daemon)
        if self._moments and self._moments[-1].info.generation != moment.info.generation:
            self._moments.clear()
        if not self._moments:
            self._moments.append(moment)
            since_start = rates(moment)
            return describe(moment, since_start, since_start)
        point = rates(moment, self._moments[-1])
        hit_rate = {kind: found.hit_rate for kind, found in point.lookups.items()}
        self._history.append(_Point(time.time(), hit_rate["weight"], hit_rate["kv"], point.steps_per_second))
        recent = self._moments[-min(len(self._moments), max(1, round(_NOW_SECONDS / self._interval)))]
        minute = rates(moment, self._moments[0])
        self._moments.append(moment)
        return describe(moment, rates(moment, recent), minute)

    def _run(self) -> None:
        while not self._stopping.wait(self._interval):
            self.sample()
