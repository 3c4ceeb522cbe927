"""Substitutes: where a selected channel's record is absent, the next largest channel whose record is present refines.

A product is refined by as many channels as were selected, of those that are present the largest: the selection says
which records to ask for, what is resident says which can serve until they come. Nothing is asked for by a substitute,
none counts as a look-up or as a hit, and the cost is one look into the directory for each candidate, where something
missed. What it brings: docs/CACHING.md, "Substitutes". Ours.
"""

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from strataflux.client.errors import MisuseError
from strataflux.kernels.select import select_channels
from strataflux.kernels.topk import CHUNK, selected_count
from strataflux.proto.compiled import compiled

__all__ = ["PresentSource", "Substitutes", "Substituting"]


class PresentSource(Protocol):
    """Where records are found without being asked for: a session, or a stand-in."""

    def present(self, table: int, oids: NDArray[np.int64], addresses: NDArray[np.uint64], most: int) -> int:
        """Find the first ``most`` of ``oids`` [n] of ``table`` that are present, in an open step; how many there are.

        ``addresses`` [n] is filled with where they lie, 0 for all others, and holds as after a look-up.
        """


@runtime_checkable
class Substituting(Protocol):
    """A refiner."""

    @property
    def substitutes(self) -> int:
        """Channels that refined in place of absent ones so far."""


class Substitutes:
    """For one projection set; scratch that is reused in every call. Not safe for use from two threads."""

    def __init__(self, source: PresentSource, table: int, k: int, more: int, width: int) -> None:
        """Nothing is looked for yet.

        Args:
            source: finds records.
            table: number of the store in ``source``.
            k: channels per 1,024 that are selected.
            more: channels per 1,024 beyond them that may stand in, 0…1,024.
            width: channels of the set's input.

        Raises:
            MisuseError: ``more`` is out of range.
        """
        if not 0 <= more <= CHUNK:
            remedy = f"change --substitutes; {CHUNK} considers every channel"
            raise MisuseError("substitutes", f"{more}", f"0 to {CHUNK} per {CHUNK}", remedy)
        # fixed after construction
        self._source = source
        self._table = table
        self._considered = min(CHUNK, k + more) if k and more else 0
        # changed by calls
        count = selected_count(self._considered, width)
        self._candidates = np.empty(count, np.int64)
        self._scores = np.empty(count, np.uint8)
        self._oids = np.empty(count, np.int64)
        self._addresses = np.empty(count, np.uint64)
        self.placed = 0
        """Channels that stood in for others so far."""

    def fill(
        self, x: NDArray[np.float32], base: np.int64, channels: NDArray[np.int64], addresses: NDArray[np.uint64]
    ) -> None:
        """Put present channels in the places of absent ones, while there are any.

        Args:
            x: [width], what the channels are multiplied with.
            base: object id of channel 0.
            channels: [selected] in ascending order; absent ones are replaced.
            addresses: [selected] of their records, 0 where one is absent; likewise.
        """
        absent = channels.size - int(np.count_nonzero(addresses))
        if absent and self._considered:
            select_channels(x, self._considered, self._candidates, self._scores)
            left = _rank_others(x, channels, self._candidates)
            found, oids = self._addresses[:left], self._oids[:left]
            np.add(self._candidates[:left], base, out=oids)
            if self._source.present(self._table, oids, found, absent):
                self.placed += _place(self._candidates[:left], found, channels, addresses)


@compiled
def _rank_others(x: NDArray[np.float32], channels: NDArray[np.int64], candidates: NDArray[np.int64]) -> int:
    """Move those of ``candidates`` that are not in ``channels`` (both ascending) to the front, the largest ``|x|``
    first; how many they are.
    """
    left = chosen = 0
    for candidate in candidates:
        while chosen < channels.size and channels[chosen] < candidate:
            chosen += 1
        if chosen == channels.size or channels[chosen] != candidate:
            candidates[left] = candidate
            left += 1
    order = np.argsort(-np.abs(x[candidates[:left]]))
    candidates[:left] = candidates[:left][order]
    return left


@compiled
def _place(
    others: NDArray[np.int64],
    found: NDArray[np.uint64],
    channels: NDArray[np.int64],
    addresses: NDArray[np.uint64],
) -> int:
    """Give each of ``others`` that was found the place of an absent channel, of which there are enough."""
    place = placed = 0
    for i in range(others.size):
        if found[i]:
            while addresses[place]:
                place += 1
            channels[place], addresses[place] = others[i], found[i]
            placed += 1
    return placed
