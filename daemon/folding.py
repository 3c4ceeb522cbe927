"""Statistics: the reader's counters as they are, and the clients' own counters folded in.

A client counts its look-ups and hits in its session page, where a hostile one may write anything. So only non-negative,
clamped differences are added, and what was folded never goes back.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from strataflux.daemon.kind_stats import IO_READ, read_errors, read_kinds, read_kv, read_tenants, read_writes
from strataflux.daemon.rows import AGE_BUCKETS_STEPS, GAP_BUCKETS_US, KINDS
from strataflux.daemon.state import DEPTH_BUCKETS, FILL_BUCKETS_US
from strataflux.daemon.stats import (
    CacheStats,
    ClassStats,
    FillStats,
    KindStats,
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
    """A :class:`Stats` of this moment. Totals are sums of the numbers by kind, each read once."""
    rd = tier.core.rd[0]
    kinds = read_kinds(tier)
    return Stats(
        lookups=LookupStats(**{name: fold.totals[name] for name in LookupStats.__dataclass_fields__}),
        requests=_requests(tier, fold, kinds),
        fills=_fills(kinds),
        reads=_reads(tier, kinds),
        writes=read_writes(tier),
        kv=read_kv(tier),
        kinds=kinds,
        io_errors=read_errors(tier),
        tenants=read_tenants(tier),
        ring_depth=sum(_waiting(tier, index) for index in list(tier.rows)),
        age_bounds_steps=AGE_BUCKETS_STEPS,
        gap_bounds_us=GAP_BUCKETS_US,
        caches=tuple(_cache(tier, kind) for kind in range(len(KINDS))),
        classes=tuple(_classes(tier)),
        stores=tuple(_stores(tier)),
        sessions=tuple(_sessions(tier, fold)),
        turns=int(rd["turns"]),
        fences=int(rd["fences"]),
        page_moves=int(rd["page_moves"]),
        metadata_bytes=tier.metadata_bytes,
        warmed=int(rd["warmed"]),
    )


def _requests(tier: Tier, fold: CounterFold, kinds: tuple[KindStats, ...]) -> RequestStats:
    rd = tier.core.rd[0]
    return RequestStats(
        taken=sum(kind.requests for kind in kinds),
        cold=sum(kind.cold for kind in kinds),
        evicted=sum(kind.evicted for kind in kinds),
        duplicates=sum(kind.duplicates for kind in kinds),
        resident_already=sum(kind.resident_already for kind in kinds),
        quarantined=sum(kind.quarantined for kind in kinds),
        invalid=int((tier.core.sessions["invalid"] + tier.core.sessions["holes"]).sum()) + tier.invalid_closed,
        dropped_ring=fold.totals["ring_dropped"],
        dropped_queue=int(rd["dropped_queue"]),
        dropped_grace=int(rd["dropped_grace"]),
        rejected=sum(kind.rejected for kind in kinds),
    )


def _fills(kinds: tuple[KindStats, ...]) -> FillStats:
    return FillStats(
        fills=sum(kind.asked + kind.preloaded + kind.prefetched for kind in kinds),
        useful=sum(kind.useful for kind in kinds),
        unused=sum(kind.unused for kind in kinds),
        preloaded=sum(kind.preloaded for kind in kinds),
        prefetched=sum(kind.prefetched for kind in kinds),
        put=sum(kind.put for kind in kinds),
        corrupt=sum(kind.corrupt for kind in kinds),
        retries=sum(kind.retries for kind in kinds),
        evictions=sum(
            kind.evictions_capacity + kind.evictions_pressure + kind.evictions_epoch + kind.evictions_clear
            for kind in kinds
        ),
        latency_us=sum(kind.latency_us for kind in kinds),
        latency_bounds_us=FILL_BUCKETS_US,
        latency_counts=tuple(map(sum, zip(*(kind.latency_counts for kind in kinds), strict=True))),
    )


def _reads(tier: Tier, kinds: tuple[KindStats, ...]) -> ReadStats:
    rd = tier.core.rd[0]
    return ReadStats(
        reads=int(rd["reads"]),
        bytes=sum(kind.demand_bytes + kind.ahead_bytes for kind in kinds),
        merged=int(rd["merged"]),
        short_reads=int(rd["short_reads"]),
        errors=int(tier.core.errnos[IO_READ].sum()),
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


def _waiting(tier: Tier, index: int) -> int:
    """Entries of a session's ring that were not taken yet; its tail may be rubbish."""
    row, session = tier.rows.get(index), tier.core.sessions[index]
    if row is None:
        return 0
    waiting = int(row.page.view(layout.SESSION_PAGE)[0]["ring_tail"]) - int(session["head"])
    return waiting if 0 < waiting <= 1 << int(session["ring_log2"]) else 0


def _is_kv(tier: Tier, budget: int) -> bool:
    """KV places have the budgets after those of the stores."""
    return budget >= len(tier.core.pages.pools) - len(tier.places)


def _cache(tier: Tier, kind: int) -> CacheStats:
    pools = tier.core.pages.pools["pages"]
    mine = [at for at in range(len(pools)) if _is_kv(tier, at) == (kind == 1)]
    known = int(tier.core.rd[0]["n_classes"])
    classes = tier.core.classes[:known][np.isin(tier.core.pages.classes["budget"][:known], mine)]
    size = classes["units"] * layout.SLOT_UNIT_BYTES
    valid = classes["slots"] - classes["free"] - classes["filling"] - classes["retired"]
    return CacheStats(
        kind=KINDS[kind],
        capacity_bytes=int(pools[mine].sum()) * layout.CACHE_PAGE_BYTES,
        free_bytes=int((classes["free"] * size).sum()),
        filling_bytes=int((classes["filling"] * size).sum()),
        valid_bytes=int((valid * size).sum()),
        retired_bytes=int((classes["retired"] * size).sum()),
    )


def _classes(tier: Tier) -> list[ClassStats]:
    rows = tier.core.classes[: int(tier.core.rd[0]["n_classes"])]
    budgets = tier.core.pages.classes["budget"]
    return [
        ClassStats(
            KINDS[_is_kv(tier, int(budgets[cls]))],
            slot_bytes=int(row["units"]) * layout.SLOT_UNIT_BYTES,
            slots=int(row["slots"]),
            free=int(row["free"]),
            filling=int(row["filling"]),
            retired=int(row["retired"]),
        )
        for cls, row in enumerate(rows)
    ]


def _stores(tier: Tier) -> list[StoreStats]:
    rows = [(number, tier.core.tables[number]) for number in sorted(tier.stores)]
    return [
        StoreStats(
            index=number,
            resident_records=int(row["resident"]),
            fills=int(row["fills"]),
            quarantined=int(row["quarantined"]),
            direct=bool(row["direct"]),
            direct_fallbacks=int(row["fallbacks"]),
            section_misses=_section_misses(tier, row),
        )
        for number, row in rows
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
