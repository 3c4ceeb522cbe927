"""Numbers of the data path as the control plane and the metrics show them: plain integers, read at one moment.

Counters only grow while a daemon lives; gauges are the live state. Ratios are left to whoever reads: look-ups and hits
come from the same event. Each class has the fields of the message of its name in ``control.proto``.
"""

from dataclasses import dataclass, field

__all__ = [
    "CacheStats",
    "ClassStats",
    "FillStats",
    "LookupStats",
    "ReadStats",
    "RequestStats",
    "SessionStats",
    "Stats",
    "StoreStats",
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
    age_bounds_ticks: tuple[int, ...] = ()
    age_counts: tuple[int, ...] = ()
    """Useful ones by their age at first use, in ticks of the reader's clock; known at eviction, as ``useful`` is."""


@dataclass(frozen=True)
class ReadStats:
    """Reads of the device. ``in_flight`` and ``queued`` are gauges."""

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
    """One served store, in the order of the served stores."""

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
