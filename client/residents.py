"""What is resident refines, too: beside the selected channels, the next largest whose records are there anyway.

A cache of a tenth of the records holds three times as many of a projection set's channels as a step selects; most of
them are among the larger ones. Selections say what is asked for and kept; to refine by whatever else is there costs a
look into the directory and its arithmetic, and no read. Nothing is asked for or stamped by it and none of it counts as
a look-up, so that what is cached stays a matter of selections alone. What it brings: docs/CACHING.md, "What is resident
refines, too". Ours.
"""

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from strataflux.client.errors import MisuseError
from strataflux.kernels.select import select_channels
from strataflux.kernels.topk import CHUNK, selected_count
from strataflux.proto.compiled import compiled

__all__ = ["PresentSource", "Residents", "UsesResidents"]

_Channels = NDArray[np.int64]
_Addresses = NDArray[np.uint64]


class PresentSource(Protocol):
    """Where records are found without being asked for: a session, or a stand-in."""

    def present(self, table: int, oids: NDArray[np.int64], addresses: NDArray[np.uint64]) -> int:
        """Find those of ``oids`` [n] of ``table`` that are present, in an open step; how many there are.

        ``addresses`` [n] is filled with where they lie, 0 for all others, and holds as after a look-up. Nothing is
        asked for, counted, or kept any longer for it.
        """


@runtime_checkable
class UsesResidents(Protocol):
    """A refiner."""

    @property
    def residents(self) -> int:
        """Channels that refined without having been selected so far."""


class Residents:
    """Of one projection set; scratch that is reused in every call. Not safe for use from two threads."""

    def __init__(self, source: PresentSource, table: int, k: int, more: int, width: int) -> None:
        """Nothing is looked for yet.

        Args:
            source: finds records.
            table: number of the store in ``source``.
            k: channels per 1,024 that are selected; none beside none.
            more: channels per 1,024 beyond them that refine where they are present, 0…1,024.
            width: channels of the set's input.

        Raises:
            MisuseError: ``more`` is out of range.
        """
        if not 0 <= more <= CHUNK:
            remedy = f"change --residents; {CHUNK} considers every channel"
            raise MisuseError("residents", f"{more}", f"0 to {CHUNK} per {CHUNK}", remedy)
        # fixed after construction
        self._source = source
        self._table = table
        self._considered = min(CHUNK, k + more) if k and more else 0
        # changed by calls
        count = selected_count(self._considered, width)
        most = selected_count(k, width) + count
        self._candidates, self._scores = np.empty(count, np.int64), np.empty(count, np.uint8)
        self._channels, self._oids = np.empty(most, np.int64), np.empty(count, np.int64)
        self._addresses = np.empty(most, np.uint64)
        self.used = 0
        """Channels that refined without having been selected so far."""

    def join(
        self, x: NDArray[np.float32], base: np.int64, channels: _Channels, addresses: _Addresses
    ) -> tuple[_Channels, _Addresses]:
        """Channels and their records' addresses: those that were selected, then others, 0 where one is absent.

        Args:
            x: [width], what the channels are multiplied with.
            base: object id of channel 0.
            channels: [selected] in ascending order.
            addresses: [selected] of their records.

        Returns:
            Both, as long as each other; they hold until the next call. What was given where nothing is considered.
        """
        if not self._considered:
            return channels, addresses
        select_channels(x, self._considered, self._candidates, self._scores)
        selected = channels.size
        left = _leave_out(self._candidates, channels, self._channels[selected:])
        both = selected + left
        self._channels[:selected], self._addresses[:selected] = channels, addresses
        np.add(self._channels[selected:both], base, out=self._oids[:left])
        self.used += self._source.present(self._table, self._oids[:left], self._addresses[selected:both])
        return self._channels[:both], self._addresses[:both]


@compiled
def _leave_out(candidates: NDArray[np.int64], channels: NDArray[np.int64], others: NDArray[np.int64]) -> int:
    """Put those of ``candidates`` that are not in ``channels`` (both ascending) into ``others``; how many they are."""
    left = chosen = 0
    for candidate in candidates:
        while chosen < channels.size and channels[chosen] < candidate:
            chosen += 1
        if chosen == channels.size or channels[chosen] != candidate:
            others[left] = candidate
            left += 1
    return left
