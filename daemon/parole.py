"""Quarantine with backoff: a record that could not be read twice is tried again later, ever more seldom.

The reader marks such a record in its directory, so that clients miss it without asking. A device that was busy, or a
file system that came back, would leave it lost until the next start; so the mark is taken off after a while, the next
request reads the record, and if that fails the time doubles. The reader thread only, between two turns of its loop.
"""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from strataflux.daemon.tier import Tier
from strataflux.proto import layout

__all__ = ["Parole"]

_LOG: Final = logging.getLogger(__name__)
_LONGEST_FACTOR: Final = 64
_TOLD: Final = 8
"""Records told one by one at a time: a device that is gone would fill the log."""


@dataclass
class _Strike:
    count: int
    due: float
    marked: bool


class Parole:
    """What is quarantined in one tier, since when, and how often it was before."""

    def __init__(self, tier: Tier, first_seconds: float, clock: Callable[[], float]) -> None:
        # fixed after construction
        self._tier = tier
        self._first_seconds = first_seconds
        self._clock = clock
        # reader thread only
        self._strikes: dict[tuple[int, int], _Strike] = {}

    def review(self) -> int:
        """Take note of what is newly quarantined and let go of what is due; how many were let go."""
        freed = 0
        for table in self._tier.stores:
            row = self._tier.core.tables[table]
            if row["active"] and row["quarantined"]:
                freed += self._review_table(table, self._entries(table))
        return freed

    def forget(self, table: int) -> None:
        """The store of that table has a new generation."""
        self._strikes = {key: strike for key, strike in self._strikes.items() if key[0] != table}

    def _review_table(self, table: int, entries: NDArray[np.uint32]) -> int:
        now, freed, noted = self._clock(), 0, 0
        folder = self._tier.stores[table].manifest.folder
        for oid in map(int, np.flatnonzero(entries == layout.ENTRY_QUARANTINED)):
            strike = self._strikes.setdefault((table, oid), _Strike(0, 0.0, False))
            if not strike.marked:
                seconds = self._first_seconds * min(1 << strike.count, _LONGEST_FACTOR)
                strike.count, strike.due, strike.marked = strike.count + 1, now + seconds, True
                noted += 1
                if noted <= _TOLD:
                    _LOG.warning("record %d of %s is unreadable; it is tried again in %g s", oid, folder, seconds)
            elif now >= strike.due:
                strike.marked = False
                # No bytes go with this value; whoever sees the old one misses without asking, as before.
                entries[oid] = layout.ENTRY_ABSENT
                self._tier.core.tables[table]["quarantined"] -= 1
                freed += 1
        if noted > _TOLD:
            _LOG.warning("%d more records of %s are unreadable", noted - _TOLD, folder)
        return freed

    def _entries(self, table: int) -> NDArray[np.uint32]:
        """The directory of a store, u32 [records], as it is in shared memory."""
        row = self._tier.core.tables[table]
        words = ctypes.c_uint32 * int(row["records"])
        return np.ctypeslib.as_array(words.from_address(int(row["directory"])))
