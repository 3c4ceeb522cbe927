"""Which weight records are resident, by their last use: what a hot set is made of. Gathered in the reader thread a few
pages at a time, so that the data path waits for no more than that.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy import budget
from strataflux.cache_policy.base import later_by, wide
from strataflux.daemon.hot_set import MAX_RECORDS
from strataflux.daemon.interface import HotRecords
from strataflux.daemon.state import VALID, Core
from strataflux.daemon.tier import Tier
from strataflux.daemon.uses import newest_use
from strataflux.proto import layout
from strataflux.proto.compiled import borrowing

__all__ = ["collect", "compile_heat", "keep_warm"]

_UNITS = layout.UNITS_PER_PAGE
_PAGES = 16


@borrowing
def _gather(c: Core, first: int, last: int, out: Any) -> int:
    """Rows (ticks since the last use, table, oid) of the VALID slots of pages ``first`` … ``last - 1``; how many."""
    found = 0
    for page in range(first, last):
        if c.pages.pages[page].state != budget.OWNED:
            continue
        for entry in range(page * _UNITS, page * _UNITS + _UNITS // c.classes[c.pages.pages[page].owner].units):
            slot = c.slots[entry]
            if slot.state == VALID:
                out[found, 0] = later_by(c.rd[0].clock, newest_use(c, entry))
                out[found, 1] = slot.table
                out[found, 2] = slot.oid
                found += 1
    return wide(found)


def compile_heat(core: Core) -> None:
    """Compile, or load, what :func:`collect` runs in the reader thread."""
    dispatcher: Any = _gather
    kinds = (numba.typeof(core), numba.int64, numba.int64, numba.int64[:, ::1])  # type: ignore[no-untyped-call]
    dispatcher.compile(kinds)


def collect(tier: Tier, execute: Callable[[Callable[[], Any]], Any]) -> list[HotRecords]:
    """The resident records of each served store, the most recently used first, then those that were to be read again
    and have not been; ``MAX_RECORDS`` at most. Not the reader thread: that is what ``execute`` calls into.
    """
    pages, rows = int(tier.core.rd[0]["kv_page"]), np.empty((0, 3), np.uint32)
    parts: list[NDArray[np.uint32]] = []
    for first in range(0, pages, _PAGES):

        def gather(first: int = first) -> Any:
            out = np.empty((_PAGES * _UNITS, 3), np.int64)
            return out[: _gather(tier.core, first, min(first + _PAGES, pages), out)].astype(np.uint32)

        parts.append(execute(gather))
        if sum(map(len, parts)) >= MAX_RECORDS:  # a cache may hold many times what is told
            rows, parts = _newest([rows, *parts]), []
    rows = _newest([rows, *parts])
    hot: list[HotRecords] = execute(lambda: _by_store(tier, rows))
    return hot


def _newest(parts: list[NDArray[np.uint32]]) -> NDArray[np.uint32]:
    rows = np.concatenate(parts)
    return rows[np.argsort(rows[:, 0], kind="stable")[:MAX_RECORDS]]


def _by_store(tier: Tier, rows: NDArray[np.uint32]) -> list[HotRecords]:
    left, found = MAX_RECORDS - len(rows), []
    for number, store in tier.stores.items():
        resident = rows[rows[:, 1] == number, 2].astype(np.uint32)
        waiting = tier.tables.warm_left(number)
        waiting = waiting[~np.isin(waiting, resident)][:left]
        left -= waiting.size
        manifest = store.manifest
        # A store that came since the rows were gathered may have another's number: its records bound what is told.
        oids = np.concatenate([resident[resident < manifest.record_count], waiting])
        _, first = np.unique(oids, return_index=True)
        found.append(HotRecords(manifest.identity_digest, manifest.record_count, oids[np.sort(first)]))
    return found


def keep_warm(tier: Tier, hot: list[HotRecords]) -> int:
    """Have the records of served stores read when nothing else is to be done; how many. The reader thread only."""
    wanted = {(part.digest, part.records): part.oids for part in hot}
    count = 0
    for number, store in tier.stores.items():
        oids = wanted.get((store.manifest.identity_digest, store.manifest.record_count))
        if oids is not None:
            tier.tables.warm(number, oids)
            count += oids.size
    return count
