"""Blocks of a low-bit KV cache: a tile of every layer and KV head, shared by sequences, and its records at a daemon.

A block's resident half lies in a pool here, under its *place*; its refinement lies at a daemon, under an *id* that the
daemon granted. Sequences hold places, and a fork holds the same ones: references are counted here, the daemon knows of
no sequences. States of a place, and what moves it:

    FREE      nobody holds it                        → HELD by take
    HELD      by one sequence or more; written once  → FREE by drop of the last one

and of its id, which stands for reserved disk space, so that a place gets one only when it is taken:

    NONE      no id: not taken yet, nobody answered, or its attachment ended  → CLEAN by an id of the daemon
    CLEAN     granted, nothing put                                            → PUT by put
    PUT       under way                                                       → REFINED, or SPENT where it was refused
    REFINED   its records can be looked up                                    → SPENT by drop
    SPENT     to be given back before the place is taken again                → NONE

Pairs: :meth:`take` / :meth:`drop`, :meth:`share` / :meth:`drop`; :meth:`give_back` after the last of these.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from strataflux.client.errors import MisuseError, StrataFluxError
from strataflux.client.kv_puts import PUT_RESULTS, Settled
from strataflux.client.runtime.models import ModelConfig
from strataflux.kernels.kv_encode import KEY_ROWS, VALUE_ROWS, EncodedTiles, HalfTiles, KvFormat

__all__ = ["KvBlocks", "PutTarget"]

_LOG: Final = logging.getLogger(__name__)
_SETTLE_SECONDS: Final = 10.0

_NONE, _CLEAN, _PUT, _REFINED, _SPENT = range(5)


class PutTarget(Protocol):
    """Where records are put: a session's :class:`~strataflux.client.kv_puts.KvPuts`, or a stand-in."""

    @property
    def epoch(self) -> int:
        """Moves on whenever all ids granted before mean nothing any more."""

    def reserve(self, blocks: int) -> list[int]:
        """Ids of more blocks; raises :class:`StrataFluxError`."""

    def release(self, ids: Sequence[int]) -> None:
        """Give ids back; raises :class:`StrataFluxError`."""

    def put(self, block: int, payload: NDArray[np.uint8]) -> bool:
        """Hand a block's records over; False if that cannot be done now."""

    def put_waiting(self, block: int, payload: NDArray[np.uint8], deadline: float) -> bool:
        """The same, trying until ``deadline``."""

    def settled(self) -> list[Settled]:
        """Puts settled since the last call."""

    def wait_settled(self, deadline: float) -> bool:
        """Wait until none is under way."""

    def count_dropped(self, blocks: int = 1) -> None:
        """Count blocks that stay unrefined."""


class KvBlocks:
    """The pool of one model's blocks. One thread at a time."""

    def __init__(
        self,
        config: ModelConfig,
        form: KvFormat,
        capacity: int,
        target: PutTarget | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate ``capacity`` blocks on ``device``; without a ``target``, or where nothing is refined, records go
        nowhere.

        Raises:
            ValueError: the model's heads are not of the format's size.
        """
        if config.head_dim != form.head_dim:
            raise ValueError(f"heads of {config.head_dim} channels in a format for {form.head_dim}")
        leading = (config.layers, capacity, config.kv_heads)
        # fixed after construction
        self.config = config
        self.form = form
        self.capacity = capacity
        self.keys = HalfTiles.empty(leading, form.key_bits, form.head_dim, KEY_ROWS, device)
        """[layers, capacity, kv_heads, ...]"""
        self.values = HalfTiles.empty(leading, form.value_bits, form.head_dim, VALUE_ROWS, device)
        self.records_a_block = config.layers * config.kv_heads * form.groups_per_tile
        # changed by calls
        self._target = target if form.record_bytes else None
        self._references = np.zeros(capacity, np.int64)
        self._ids = np.full(capacity, -1, np.int64)
        self._states = np.zeros(capacity, np.int64)
        self._epoch = 0 if self._target is None else self._target.epoch
        self._told_refusal = False
        self.refused = 0
        """Blocks whose put the daemon refused, or that were lost with an attachment."""
        self.unrefined = 0
        """Blocks that nobody took in time."""
        self.bases = np.full(capacity, -1, np.int64)
        """Object id of each place's first record; -1 where there are no records to look up."""

    @property
    def block_bytes(self) -> int:
        """Resident bytes of a block: its tiles of all layers and heads."""
        return self.config.layers * self.config.kv_heads * self.form.tile_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of a block's records."""
        return self.records_a_block * self.form.record_bytes

    @property
    def nbytes(self) -> int:
        """Bytes allocated for resident tiles."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def free(self) -> int:
        """Places that nobody holds."""
        return int((self._references == 0).sum())

    @property
    def recording(self) -> bool:
        """Whether records go anywhere."""
        return self._target is not None

    def connect(self, target: PutTarget) -> None:
        """Let records go to ``target`` from now on, those of what is held and not written yet; once, if there was none.

        Raises:
            RefusedError: the daemon has no room for the records of so many. DaemonUnavailableError: nobody answers.
        """
        if self.form.record_bytes:
            self._target, self._epoch = target, target.epoch
            self._grant(np.flatnonzero(self._references > 0))

    def take(self, count: int, *, refined: bool = False) -> list[int]:
        """Places for ``count`` blocks, each held once. Ids that nobody grants leave their blocks unrefined, unless they
        must be ``refined``.

        Raises:
            MisuseError: fewer are free; nothing has changed.
            RefusedError: the daemon has no room for the records of so many. DaemonUnavailableError: nobody answers.
        """
        places = np.flatnonzero(self._references == 0)[:count]
        if len(places) < count:
            found, expected = f"{count} blocks of 128 tokens", f"at most {len(places)} of {self.capacity}"
            raise MisuseError("KV sequence", found, expected, "close another sequence, or raise --context")
        try:
            self._recycle(places)
        except StrataFluxError as error:
            if refined:
                raise
            _LOG.warning("%d KV blocks without ids, their tokens stay unrefined: %s", count, error)
        self._references[places] = 1
        return [int(place) for place in places]

    def share(self, places: Sequence[int]) -> None:
        """Hold ``places`` once more."""
        self._references[list(places)] += 1

    def drop(self, places: Sequence[int]) -> None:
        """Hold ``places`` once less. What nobody holds is free, and its records are not looked up again; its id goes
        back when it is taken again, or by :meth:`give_back`.
        """
        held = list(places)
        self._references[held] -= 1
        for place in held:
            if self._references[place] == 0:
                self.bases[place] = -1
                if self._states[place] == _REFINED:
                    self._states[place] = _SPENT

    def store(self, place: int, tiles: EncodedTiles) -> NDArray[np.uint8]:
        """Write the tiles [layers, kv_heads] of a block; its records [payload_bytes]."""
        index = (slice(None), place)
        self.keys.store(index, tiles.keys)
        self.values.store(index, tiles.values)
        return tiles.records.flatten().numpy()

    def put(self, place: int, payload: NDArray[np.uint8], wait_seconds: float = 0.0) -> bool:
        """Hand a block's records over; True when nothing is left to do about them.

        False: all staging memory is taken. Try again later, or :meth:`give_up`.
        """
        self._renew()
        if self._target is None:
            return True
        if self._states[place] != _CLEAN:  # nobody granted an id for it
            self.give_up()
            return True
        if wait_seconds:
            done = self._target.put_waiting(int(self._ids[place]), payload, time.monotonic() + wait_seconds)
        else:
            done = self._target.put(int(self._ids[place]), payload)
        if done:
            self._states[place] = _PUT
        return done

    def give_up(self) -> None:
        """Count a block that stays unrefined: nobody took it in time, or nobody granted an id for it."""
        self.unrefined += 1
        if self._target is not None:
            self._target.count_dropped()

    def settle(self, wait_seconds: float = 0.0) -> None:
        """Learn what became of puts; with ``wait_seconds``, of all that are under way."""
        if self._target is None:
            return
        self._renew()
        if wait_seconds and (self._states == _PUT).any():
            self._target.wait_settled(time.monotonic() + wait_seconds)
        for settled in self._target.settled():
            if settled.result == 0:  # of an attachment that ended
                self.refused += 1
                continue
            place = int(np.flatnonzero(self._ids == settled.block)[0])
            held = self._references[place] > 0
            if settled.accepted and held:
                self._states[place] = _REFINED
                self.bases[place] = settled.block * self.records_a_block
            else:
                self._states[place] = _SPENT
            if not settled.accepted:
                self._refuse(settled)

    def _refuse(self, settled: Settled) -> None:
        self.refused += 1
        if not self._told_refusal:
            self._told_refusal = True
            reason = PUT_RESULTS.get(settled.result, f"refused: code {settled.result}")
            _LOG.warning("KV block %d stays unrefined: %s (told once)", settled.block, reason)

    def give_back(self) -> None:
        """Give back the ids, and with them the disk, of all places that nobody holds. Outside of steps, because the
        daemon waits for those.
        """
        try:
            self._give_back(np.flatnonzero(self._references == 0), (_SPENT, _CLEAN))
        except StrataFluxError as error:  # they go back with the attachment
            _LOG.info("ids of KV blocks are kept: %s", error)

    def _renew(self) -> None:
        """After another attachment took over: what was put is gone; ask for ids for what is not written yet."""
        if self._target is None or self._target.epoch == self._epoch:
            return
        self._epoch = self._target.epoch
        self._ids[:] = -1
        self.bases[:] = -1
        clean = np.flatnonzero((self._states == _CLEAN) & (self._references > 0))
        self._states[:] = _NONE
        with contextlib.suppress(StrataFluxError):
            self._grant(clean)

    def _recycle(self, places: NDArray[np.int64]) -> None:
        """Make ids of ``places`` clean."""
        self._give_back(places, (_SPENT,))
        self._grant(places[self._states[places] == _NONE])

    def _give_back(self, places: NDArray[np.int64], states: tuple[int, ...]) -> None:
        """Give back the ids of ``places``, which nobody holds, that are in one of ``states``."""
        if self._target is None:
            return
        self.settle()
        if (self._states[places] == _PUT).any():  # dropped while under way
            self._target.wait_settled(time.monotonic() + _SETTLE_SECONDS)
            self.settle()
        done = places[np.isin(self._states[places], states)]
        self._target.release([int(i) for i in self._ids[done]])
        self._ids[done], self._states[done] = -1, _NONE

    def _grant(self, places: NDArray[np.int64]) -> None:
        if self._target is not None and len(places):
            self._ids[places] = self._target.reserve(len(places))
            self._states[places] = _CLEAN
