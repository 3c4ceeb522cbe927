"""Statistics: the reader's counters as they are, and the clients' own counters folded in.

A client counts its look-ups and hits in its session page, where a hostile one may write anything. So only non-negative,
clamped differences are added, and what was folded never goes back.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from strataflux.daemon.state import AGE_BUCKETS, DEPTH_BUCKETS, FILL_BUCKETS_US
from strataflux.daemon.stats import (
    CacheStats,
    ClassStats,
    FillStats,
    LookupStats,
    ReadStats,
    RequestStats,
    SessionStats,
    Stats,
    StoreStats,
)
from strataflux.daemon.tier import Tier
from strataflux.proto import layout

__all__ = ["CounterFold", "read_stats"]

_CLAMP: Final = 1 << 40
_AGE_BOUNDS: Final = tuple((1 << bucket) - 1 for bucket in range(AGE_BUCKETS - 2))


@dataclass
class CounterFold:
    """Totals over all sessions there ever were, and what was last seen of each live one."""

    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(layout.COUNTERS, 0))
    live: dict[int, dict[str, int]] = field(default_factory=dict)
    _seen: dict[int, dict[str, int]] = field(default_factory=dict)

    def fold(self, tier: Tier) -> None:
        """Add what the live sessions counted since the last call."""
        for index in list(tier.rows):
            self._fold_one(tier, index)

    def close(self, tier: Tier, index: int) -> None:
        """Fold a session for the last time and forget it."""
        self._fold_one(tier, index)
        self._seen.pop(index, None)
        self.live.pop(index, None)

    def _fold_one(self, tier: Tier, index: int) -> None:
        row = tier.rows.get(index)
        if row is None:
            return
        page = row.page.view(layout.SESSION_PAGE)[0]
        now = {name: int(page[name]) for name in layout.COUNTERS}
        seen = self._seen.setdefault(index, dict.fromkeys(layout.COUNTERS, 0))
        mine = self.live.setdefault(index, dict.fromkeys(layout.COUNTERS, 0))
        for name, value in now.items():
            delta = value - seen[name]
            if delta > 0:
                delta = min(delta, _CLAMP)
                mine[name] += delta
                self.totals[name] += delta
            seen[name] = value


def read_stats(tier: Tier, fold: CounterFold) -> Stats:
    """A :class:`Stats` of this moment."""
    rd = tier.core.rd[0]
    totals = fold.totals
    return Stats(
        lookups=LookupStats(**{name: totals[name] for name in LookupStats.__dataclass_fields__}),
        requests=RequestStats(
            taken=int(rd["requests"]),
            cold=int(rd["cold"]),
            evicted=int(rd["evicted_again"]),
            duplicates=int(rd["duplicates"]),
            resident_already=int(rd["resident_already"]),
            quarantined=int(rd["quarantine_hits"]),
            invalid=int((tier.core.sessions["invalid"] + tier.core.sessions["holes"]).sum()) + tier.invalid_closed,
            dropped_ring=totals["ring_dropped"],
            dropped_queue=int(rd["dropped_queue"]),
            dropped_grace=int(rd["dropped_grace"]),
        ),
        fills=_fills(tier),
        reads=_reads(tier),
        caches=(_cache(tier),),
        classes=tuple(_classes(tier)),
        stores=tuple(_stores(tier)),
        sessions=tuple(_sessions(tier, fold)),
        turns=int(rd["turns"]),
        fences=int(rd["fences"]),
        page_moves=int(rd["page_moves"]),
        metadata_bytes=tier.metadata_bytes,
    )


def _fills(tier: Tier) -> FillStats:
    rd = tier.core.rd[0]
    return FillStats(
        fills=int(rd["fills"]),
        useful=int(rd["fills_useful"]),
        preloaded=int(rd["fills_preload"]),
        corrupt=int(rd["corrupt"]),
        retries=int(rd["retries"]),
        evictions=int(rd["evictions"]),
        latency_us=int(rd["fill_us_sum"]),
        latency_bounds_us=FILL_BUCKETS_US,
        latency_counts=tuple(int(n) for n in tier.core.fill_us),
        unused=int(tier.core.ages[-1]),
        age_bounds_ticks=_AGE_BOUNDS,
        age_counts=tuple(int(n) for n in tier.core.ages[:-1]),
    )


def _reads(tier: Tier) -> ReadStats:
    rd = tier.core.rd[0]
    return ReadStats(
        reads=int(rd["reads"]),
        bytes=int(rd["read_bytes"]),
        merged=int(rd["merged"]),
        short_reads=int(rd["short_reads"]),
        errors=int(rd["io_errors"]),
        direct_fallbacks=int(tier.core.tables["fallbacks"].sum()),
        microseconds=int(rd["read_us_sum"]),
        in_flight=int(rd["in_flight"]),
        queued=int(rd["queued"]),
        latency_bounds_us=FILL_BUCKETS_US,
        latency_counts=tuple(int(n) for n in tier.core.read_us),
        depth_bounds=DEPTH_BUCKETS,
        depth_counts=tuple(int(n) for n in tier.core.depths),
        depth_sum=int(rd["depth_sum"]),
    )


def _cache(tier: Tier) -> CacheStats:
    classes = tier.core.classes[: int(tier.core.rd[0]["n_classes"])]
    size = classes["units"] * layout.SLOT_UNIT_BYTES
    valid = classes["slots"] - classes["free"] - classes["filling"] - classes["retired"]
    return CacheStats(
        kind="weight",
        capacity_bytes=int(tier.core.pages.pools["pages"].sum()) * layout.CACHE_PAGE_BYTES,
        free_bytes=int((classes["free"] * size).sum()),
        filling_bytes=int((classes["filling"] * size).sum()),
        valid_bytes=int((valid * size).sum()),
        retired_bytes=int((classes["retired"] * size).sum()),
    )


def _classes(tier: Tier) -> list[ClassStats]:
    rows = tier.core.classes[: int(tier.core.rd[0]["n_classes"])]
    return [
        ClassStats(
            "weight",
            slot_bytes=int(row["units"]) * layout.SLOT_UNIT_BYTES,
            slots=int(row["slots"]),
            free=int(row["free"]),
            filling=int(row["filling"]),
            retired=int(row["retired"]),
        )
        for row in rows
    ]


def _stores(tier: Tier) -> list[StoreStats]:
    return [
        StoreStats(
            resident_records=int(row["resident"]),
            fills=int(row["fills"]),
            quarantined=int(row["quarantined"]),
            direct=bool(row["direct"]),
            direct_fallbacks=int(row["fallbacks"]),
            section_misses=_section_misses(tier, row),
        )
        for row in tier.core.tables[: len(tier.stores)]
    ]


def _section_misses(tier: Tier, row: np.void) -> tuple[int, ...]:
    first, count = int(row["first_section"]), int(row["sections"])
    return tuple(tier.core.sections["misses"][first : first + count].tolist())


def _sessions(tier: Tier, fold: CounterFold) -> list[SessionStats]:
    found = []
    for index in sorted(tier.rows):
        counted = fold.live.get(index, dict.fromkeys(layout.COUNTERS, 0))
        row = tier.core.sessions[index]
        found.append(
            SessionStats(
                index=index,
                lookups=counted["weight_lookups"] + counted["kv_lookups"],
                hits=counted["weight_hits"] + counted["kv_hits"],
                requests=int(row["taken"]),
                dropped=counted["ring_dropped"] + int(row["dropped_queue"]) + int(row["dropped_grace"]),
                invalid=int(row["invalid"]) + int(row["holes"]),
                fills=int(row["fills"]),
                steps=int(row["steps"]),
                steps_invalid=counted["steps_invalid"],
                waits=counted["waits"],
                wait_nanoseconds=counted["wait_nanoseconds"],
                deadlines_exceeded=counted["deadlines_exceeded"],
                fenced=bool(row["fenced"]),
            )
        )
    return found
