"""StrataFlux: a real daemon process, sessions as a decoder has them."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import ClassVar

import numpy as np

from serve.loops import touch_addresses
from serve.plan import Records
from serve.rival import IN_PLACE, Keys, Reader, Rival
from strataflux.client.control import Control
from strataflux.client.launch import PrivateDaemon
from strataflux.client.session import Session
from strataflux.proto.layout import slot_bytes
from strataflux.proto.store_format import open_store

__all__ = ["Skipping", "Waiting"]

_OUTSTANDING = 1024
_NAP_SECONDS = 0.0005
_PATIENCE_SECONDS = 5.0


class _Session:
    """Look-ups in one step a call, and a touch of what was found."""

    def __init__(self, session: Session, width: int, words: int, waits: bool) -> None:
        self._session = session
        self._scores = np.full(width, 128, np.uint8)
        self._addresses = np.zeros(width, np.uint64)
        self._words = words
        self._waits = waits

    def get(self, keys: Keys) -> int:
        if self._waits:
            return self.fetch(keys)
        found = self._addresses[: keys.size]
        with self._session.step():
            hits = self._session.lookup(0, keys, self._scores[: keys.size], found)
            touch_addresses(found, self._words)
        return hits

    def fetch(self, keys: Keys) -> int:
        found = self._addresses[: keys.size]
        with self._session.step():
            hits = self._session.lookup_waiting(0, keys, self._scores[: keys.size], found, _PATIENCE_SECONDS)
            touch_addresses(found, self._words)
        return hits

    def absent(self, keys: Keys) -> Keys:
        return keys[[bool(self._session.absent(0, keys[i : i + 1])) for i in range(keys.size)]]

    def another(self) -> Reader:
        raise NotImplementedError("a session belongs to one thread")

    def close(self) -> None:
        self._session.close()


class Skipping(Rival):
    """As a decoder uses it: what is not cached is asked for and left out of the step."""

    name = "strataflux"
    interface = "look-ups of a session in compiled code, records read in place; a step goes on without what is absent"
    kinds = IN_PLACE
    waits: ClassVar[bool] = False
    """A step waits for what is absent."""

    def __init__(self, records: Records, *others: object) -> None:
        super().__init__(records, *others)  # type: ignore[arg-type]  # as the base takes them
        self._manifest = open_store(records.folder)
        self._daemon: PrivateDaemon | None = None

    def start(self) -> None:
        config = self.folder / f"{self.name}.toml"
        config.write_text("[attach]\nmax_sessions_per_uid = 64\n")
        options = (f"--config={config}",)
        daemon = PrivateDaemon([self.records.folder], weight_cache_bytes=self.budget_bytes, options=options)
        daemon.start()
        self._daemon = daemon

    def stop(self) -> None:
        daemon, self._daemon = self._daemon, None
        if daemon is not None:
            daemon.stop()

    def pids(self) -> Sequence[int]:
        return () if self._daemon is None else (self._daemon.pid,)

    def open(self, sessions: int, words: int) -> Reader:
        return _Session(self._attach(self.width, self.waits), self.width, words, self.waits)

    def _attach(self, width: int, waits: bool) -> Session:
        assert self._daemon is not None
        largest = width * slot_bytes(self.records.record_bytes) if waits else 0
        return Session.attach(
            [self._manifest],
            selections_per_step=width,
            largest_set_bytes=min(largest, self.budget_bytes // 2),
            runtime_dir=self._daemon.runtime_dir,
            client="race",
        )

    def cold(self, order: Keys, seconds: float) -> tuple[int, float]:
        """One session keeps the daemon busy; what counts is what it filled."""
        assert self._daemon is not None
        scores, addresses = np.full(_OUTSTANDING, 128, np.uint8), np.zeros(_OUTSTANDING, np.uint64)
        with ExitStack() as stack:
            session = stack.enter_context(self._attach(_OUTSTANDING, False))
            control = stack.enter_context(Control(self._daemon.runtime_dir))
            before = int(control.stats().fills.fills)
            began, first, following = time.perf_counter(), 0, 0
            while time.perf_counter() - began < seconds:
                count = _OUTSTANDING - session.absent(0, order[first:following])
                if count * 8 >= _OUTSTANDING:
                    first, following = (0, 0) if following + count > order.size else (first, following)
                    with session.step():
                        batch = order[following : following + count]
                        session.lookup(0, batch, scores[:count], addresses[:count])
                    following += count
                    first = max(0, following - 2 * _OUTSTANDING)
                time.sleep(_NAP_SECONDS)
            return int(control.stats().fills.fills) - before, time.perf_counter() - began


class Waiting(Skipping):
    """The same daemon and look-ups, waiting in the step for what is absent, as the rivals do."""

    name = "strataflux, waiting"
    interface = "as strataflux, but a step waits for all of its records"
    kinds = ("steps",)
    waits = True
