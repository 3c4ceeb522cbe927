"""Numbers of the data path as the control plane and the metrics show them: plain integers, read at one moment.

Counters only grow while a daemon lives; gauges are the live state. Labelled counters map from the label's value.
Ratios are left to whoever reads: hits and look-ups come from the same event.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ClassStats", "KindStats", "SessionStats", "Stats", "StoreStats"]


@dataclass(frozen=True)
class KindStats:
    """One budget of the cache, ``weight`` or ``kv``."""

    lookups: int = 0
    hits: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    """By reason, as the reader saw each request it took: cold, evicted, …"""
    fills: int = 0
    fills_useful: int = 0
    """Slots used at least once before they were evicted, counted at eviction."""
    evictions: Mapping[str, int] = field(default_factory=dict)
    """By cause."""
    corrupt: int = 0
    quarantined: int = 0
    capacity_bytes: int = 0
    slot_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of slots by state: free, filling, valid, retired."""


@dataclass(frozen=True)
class ClassStats:
    """One size class of the cache. Gauges."""

    kind: str
    slot_bytes: int
    pages: int
    slots: int
    valid: int


@dataclass(frozen=True)
class StoreStats:
    """One served store, in the order of the served stores."""

    resident_records: int = 0
    fills: int = 0
    read_bytes: int = 0
    corrupt: int = 0
    quarantined: int = 0
    direct: bool = False


@dataclass(frozen=True)
class SessionStats:
    """One session. Counters are the client's own, bounded and never seen to go back."""

    index: int
    session_id: int
    lookups: int = 0
    hits: int = 0
    ring_dropped: int = 0
    ring_invalid: int = 0
    waits: int = 0
    wait_nanoseconds: int = 0
    deadlines_exceeded: int = 0
    steps_invalid: int = 0
    steps: int = 0
    fenced: bool = False


@dataclass(frozen=True)
class Stats:
    """Everything, at one moment."""

    kinds: Mapping[str, KindStats] = field(default_factory=dict)
    classes: tuple[ClassStats, ...] = ()
    stores: tuple[StoreStats, ...] = ()
    sessions: tuple[SessionStats, ...] = ()
    requests_dropped: Mapping[str, int] = field(default_factory=dict)
    """Requests that nobody will answer, by hop: ring (full at the client), reader (no slot, grace, limit)."""
    ring_invalid: int = 0
    reads: int = 0
    read_bytes: int = 0
    short_reads: int = 0
    io_errors: int = 0
    direct_io_fallbacks: int = 0
    in_flight: int = 0
    sweeps: int = 0
    registered_buffers: bool = False
    setup_flags: tuple[str, ...] = ()
    metadata_bytes: int = 0
