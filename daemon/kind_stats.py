"""Statistics apart by kind of record, by tenant, by errno: read from the reader's rows at one moment."""

import errno
import os
from typing import Final

from strataflux.daemon.rows import EVICTION_CAUSES, KINDS
from strataflux.daemon.state import NONE
from strataflux.daemon.stats import IoErrorStats, KindStats, KvStats, TenantStats, WriteStats
from strataflux.daemon.tier import Tier

__all__ = ["IO_READ", "read_errors", "read_kinds", "read_kv", "read_tenants", "read_writes"]

_OPS: Final = ("read", "write")
IO_READ: Final = 0
"""Row of the core's ``errnos`` for reads; the other is for writes."""
_RESULTS: Final = {
    "cold": "cold",
    "evicted": "evicted_again",
    "duplicates": "duplicates",
    "resident_already": "resident_already",
    "quarantined": "quarantine_hits",
}
"""What becomes of a request, by the words of a kind's row."""


def read_kinds(tier: Tier) -> tuple[KindStats, ...]:
    """One row a kind, in the order of :data:`strataflux.daemon.rows.KINDS`."""
    return tuple(_read_kind(tier, number, name) for number, name in enumerate(KINDS))


def _read_kind(tier: Tier, number: int, name: str) -> KindStats:
    core = tier.core
    row, evicted = core.kinds[number], core.evicted[number].tolist()
    reuse, idle = core.gaps[number].tolist()
    results = {name: int(row[field]) for name, field in _RESULTS.items()}
    active = core.tables[core.tables["active"] == 1]
    mine = active[(active["kv"] != NONE) == (name == "kv")]
    return KindStats(
        kind=name,
        requests=sum(results.values()),
        **results,
        asked=int(row["fills"]),
        preloaded=int(row["fills_preload"]),
        put=int(row["fills_put"]),
        useful=int(row["fills_useful"]),
        unused=int(row["fills_unused"]),
        corrupt=int(row["corrupt"]),
        retries=int(row["retries"]),
        demand_bytes=int(row["read_bytes"]),
        ahead_bytes=int(row["ahead_bytes"]),
        write_bytes=int(row["write_bytes"]),
        entries=int(mine["records"].sum()),
        latency_us=int(row["fill_us_sum"]),
        latency_counts=tuple(core.fill_us[number].tolist()),
        age_counts=tuple(core.ages[number].tolist()),
        reuse_us=reuse[-1],
        reuse_counts=tuple(reuse[:-1]),
        idle_us=idle[-1],
        idle_counts=tuple(idle[:-1]),
        rejected=int(row["rejected"]),
        prefetches=int(row["prefetch_asked"]),
        prefetch_needless=int(row["prefetch_needless"]),
        prefetch_dropped=int(row["prefetch_dropped"]),
        prefetched=int(row["fills_prefetch"]),
        prefetch_used=int(row["prefetch_used"]),
        prefetch_unused=int(row["prefetch_unused"]),
        **{f"evictions_{cause}": evicted[at] for at, cause in enumerate(EVICTION_CAUSES)},
    )


def read_errors(tier: Tier) -> tuple[IoErrorStats, ...]:
    """Failed reads and writes by errno; EIO always, others once they were seen."""
    rows = []
    for op, counts in zip(_OPS, tier.core.errnos.tolist(), strict=True):
        for number, count in enumerate(counts):
            if count or number == errno.EIO:
                rows.append(IoErrorStats(op, errno.errorcode.get(number, "EOF" if number == 0 else "other"), count))
    return tuple(rows)


def read_writes(tier: Tier) -> WriteStats:
    """Writes of KV blocks."""
    core = tier.core
    counts = tuple(core.write_us.tolist())
    return WriteStats(
        writes=sum(counts),
        bytes=int(core.kinds["write_bytes"].sum()),
        microseconds=int(core.rd[0]["write_us_sum"]),
        in_flight=int(core.rd[0]["in_flight_writes"]),
        latency_counts=counts,
    )


def read_kv(tier: Tier) -> KvStats:
    """KV blocks: counts over all sessions, and what they hold on disk now."""
    if not tier.places:
        return KvStats()
    rows, settings = tier.core.kv, tier.places[0].settings
    try:
        system = os.statvfs(settings.folder)
        free = system.f_bavail * system.f_frsize
    except OSError:  # made with the first session that needs it
        free = 0
    return KvStats(
        put=int(rows["puts"].sum()),
        refused=int(rows["refused"].sum()),
        written=int(rows["written"].sum()),
        failed=int(rows["failed"].sum()),
        granted_bytes=sum(place.granted_bytes for place in tier.places),
        limit_bytes=settings.file_bytes * settings.places,
        free_bytes=free,
    )


def read_tenants(tier: Tier) -> tuple[TenantStats, ...]:
    """One row a tenant and one for everybody else; none where no tenant is configured."""
    rows = tier.core.tenants
    return tuple(
        TenantStats(
            tenant=name,
            requests=int(rows[at]["requests"]),
            fills=int(rows[at]["fills"]),
            dropped=int(rows[at]["dropped"]),
            kv_bytes=tier.granted_bytes(name),
        )
        for name, at in tier.tenants.names()
    )
