"""Numbers of the data path as the control plane and the metrics show them: plain integers, read at one moment.

Counters only grow while a daemon lives; gauges are the live state. Ratios are left to whoever reads: look-ups and hits
come from the same event. Each class has the fields of the message of its name in ``control.proto``.
"""

from dataclasses import dataclass, field

__all__ = [
    "CacheStats",
    "ClassStats",
    "FillStats",
    "IoErrorStats",
    "KindStats",
    "KvStats",
    "LookupStats",
    "ReadStats",
    "RequestStats",
    "SessionStats",
    "Stats",
    "StoreStats",
    "TenantStats",
    "WriteStats",
]


@dataclass(frozen=True)
class LookupStats:
    """Counted by clients; each session's share is bounded and never seen to go back. Ended sessions are included."""

    weight_lookups: int = 0
    weight_hits: int = 0
    kv_lookups: int = 0
    kv_hits: int = 0
    waits: int = 0
    wait_nanoseconds: int = 0
    deadlines_exceeded: int = 0
    steps_invalid: int = 0


@dataclass(frozen=True)
class RequestStats:
    """What became of requests. Each one taken is a duplicate, resident already, quarantined, dropped, or read."""

    taken: int = 0
    cold: int = 0
    """Read because the record never was resident …"""
    evicted: int = 0
    """… or was, and is not any more."""
    duplicates: int = 0
    resident_already: int = 0
    quarantined: int = 0
    invalid: int = 0
    """Ring positions without a valid entry: rubbish, or a hole."""
    dropped_ring: int = 0
    """By clients, their ring being full: never taken."""
    dropped_queue: int = 0
    dropped_grace: int = 0
    rejected: int = 0
    """Not read: the policy would rather keep what they would replace."""


@dataclass(frozen=True)
class FillStats:
    """Records that became readable. Counts of a histogram have one entry more than its bounds, for the rest."""

    fills: int = 0
    useful: int = 0
    """Looked up at least once before they were evicted; known at eviction."""
    preloaded: int = 0
    corrupt: int = 0
    retries: int = 0
    evictions: int = 0
    latency_us: int = 0
    latency_bounds_us: tuple[int, ...] = ()
    latency_counts: tuple[int, ...] = ()
    unused: int = 0
    """Evicted without ever having been looked up."""
    put: int = 0
    """KV records that became readable when they were put; not among ``fills``."""
    prefetched: int = 0


@dataclass(frozen=True)
class KindStats:
    """The parts that weights and KV have in :class:`RequestStats`, :class:`FillStats` and :class:`ReadStats`.

    Counters with a common total never overlap: requests = cold + evicted + duplicates + resident_already + quarantined;
    what became readable = asked + preloaded + put + prefetched; what left = the four evictions.
    """

    kind: str
    requests: int = 0
    cold: int = 0
    evicted: int = 0
    duplicates: int = 0
    resident_already: int = 0
    quarantined: int = 0
    asked: int = 0
    preloaded: int = 0
    put: int = 0
    useful: int = 0
    unused: int = 0
    corrupt: int = 0
    retries: int = 0
    evictions_capacity: int = 0
    evictions_pressure: int = 0
    evictions_epoch: int = 0
    evictions_clear: int = 0
    demand_bytes: int = 0
    ahead_bytes: int = 0
    write_bytes: int = 0
    entries: int = 0
    """Records that can be asked for now. A gauge."""
    latency_us: int = 0
    latency_counts: tuple[int, ...] = ()
    age_counts: tuple[int, ...] = ()
    """Sampled fills by the steps that whoever asked began until the first use; the last: later, or never."""
    reuse_us: int = 0
    reuse_counts: tuple[int, ...] = ()
    """Sampled uses by the time since the use before."""
    idle_us: int = 0
    idle_counts: tuple[int, ...] = ()
    """Sampled evictions by the time since the last use."""
    rejected: int = 0
    """Requests not read: the policy would rather keep what they would replace."""
    prefetches: int = 0
    """Records that clients expected to look up and had not missed; not among ``requests``."""
    prefetch_needless: int = 0
    """Of these: resident or under way."""
    prefetch_dropped: int = 0
    """Of these: not read for want of time or room."""
    prefetched: int = 0
    """Of these: became readable …"""
    prefetch_used: int = 0
    """… and was looked up since, …"""
    prefetch_unused: int = 0
    """… or left before that."""


@dataclass(frozen=True)
class ReadStats:
    """Reads of the device; ``short_reads`` counts short writes, too. ``in_flight`` and ``queued`` are gauges."""

    reads: int = 0
    bytes: int = 0
    merged: int = 0
    short_reads: int = 0
    errors: int = 0
    direct_fallbacks: int = 0
    microseconds: int = 0
    in_flight: int = 0
    queued: int = 0
    latency_bounds_us: tuple[int, ...] = ()
    latency_counts: tuple[int, ...] = ()
    """Completed reads by their time from submission to completion; ``microseconds`` is its sum."""
    depth_bounds: tuple[int, ...] = ()
    depth_counts: tuple[int, ...] = ()
    """Submitted reads by how many were in flight then, themselves included."""
    depth_sum: int = 0


@dataclass(frozen=True)
class WriteStats:
    """Writes of KV blocks. ``in_flight`` is a gauge; bounds are those of :class:`ReadStats`."""

    writes: int = 0
    bytes: int = 0
    microseconds: int = 0
    in_flight: int = 0
    latency_counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class IoErrorStats:
    """Reads or writes that failed with one errno, by its name; ``EOF``: the file ended early."""

    op: str
    errno: str
    count: int = 0


@dataclass(frozen=True)
class KvStats:
    """KV blocks of all sessions there were. ``granted_bytes`` and ``free_bytes`` (of their file system) are gauges."""

    put: int = 0
    refused: int = 0
    written: int = 0
    failed: int = 0
    granted_bytes: int = 0
    limit_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True)
class TenantStats:
    """A tenant, or ``others``. ``kv_bytes`` is a gauge."""

    tenant: str
    requests: int = 0
    fills: int = 0
    dropped: int = 0
    kv_bytes: int = 0


@dataclass(frozen=True)
class CacheStats:
    """One budget, ``weight`` or ``kv``. Gauges: bytes of slots, padding included."""

    kind: str
    capacity_bytes: int = 0
    free_bytes: int = 0
    filling_bytes: int = 0
    valid_bytes: int = 0
    retired_bytes: int = 0


@dataclass(frozen=True)
class ClassStats:
    """One size class of the cache. Gauges, counted in slots."""

    kind: str
    slot_bytes: int
    slots: int = 0
    free: int = 0
    filling: int = 0
    retired: int = 0


@dataclass(frozen=True)
class StoreStats:
    """One served store; ``index`` is its table number."""

    index: int = 0
    resident_records: int = 0
    fills: int = 0
    quarantined: int = 0
    direct: bool = False
    direct_fallbacks: int = 0
    section_misses: tuple[int, ...] = ()
    """Misses that began to be filled, by section of the store in its order; what is read ahead is none."""


@dataclass(frozen=True)
class SessionStats:
    """One session that lives."""

    index: int
    lookups: int = 0
    hits: int = 0
    requests: int = 0
    dropped: int = 0
    invalid: int = 0
    fills: int = 0
    steps: int = 0
    steps_invalid: int = 0
    waits: int = 0
    wait_nanoseconds: int = 0
    deadlines_exceeded: int = 0
    fenced: bool = False


@dataclass(frozen=True)
class Stats:
    """Everything, at one moment."""

    lookups: LookupStats = field(default_factory=LookupStats)
    requests: RequestStats = field(default_factory=RequestStats)
    fills: FillStats = field(default_factory=FillStats)
    reads: ReadStats = field(default_factory=ReadStats)
    writes: WriteStats = field(default_factory=WriteStats)
    kv: KvStats = field(default_factory=KvStats)
    kinds: tuple[KindStats, ...] = ()
    io_errors: tuple[IoErrorStats, ...] = ()
    tenants: tuple[TenantStats, ...] = ()
    """Empty where none is configured."""
    ring_depth: int = 0
    """Requests that wait in the sessions' rings. A gauge."""
    age_bounds_steps: tuple[int, ...] = ()
    gap_bounds_us: tuple[int, ...] = ()
    caches: tuple[CacheStats, ...] = ()
    classes: tuple[ClassStats, ...] = ()
    stores: tuple[StoreStats, ...] = ()
    sessions: tuple[SessionStats, ...] = ()
    turns: int = 0
    """Sweeps of the reader's loop."""
    fences: int = 0
    """Sessions cut off because they held slots too long."""
    page_moves: int = 0
    """Cache pages that went from one size class to another."""
    metadata_bytes: int = 0
    """Memory beside the cache itself: directories, checksums, slot tables. A gauge."""
    warmed: int = 0
    """Records read again that were resident before the start."""
