"""Prometheus metrics: declared once, read from live state when scraped, served only where told to.

The data path adds to plain integers; nothing here is touched until somebody scrapes. Ratios are left to PromQL, and no
label has more values than there are kinds, states or served stores.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from strataflux.daemon.attached import AttachCounters
from strataflux.daemon.pressure import MemoryState
from strataflux.daemon.rpc_counter import RpcTimes
from strataflux.daemon.stats import Stats

__all__ = ["METRICS", "Declaration", "Moment", "ServedFiles"]

_Labels = tuple[str, ...]
_Sample = tuple[_Labels, float]


class ServedFiles(NamedTuple):
    """One served store. ``digest`` is shortened; ``used`` and ``free`` are bytes of the file system it lies in."""

    digest: str
    generation: int
    records: int
    bytes: int
    used: int
    free: int


class Moment(NamedTuple):
    """What one scrape sees."""

    stats: Stats
    attach: AttachCounters
    control_connections: Mapping[str, int]
    rpcs: Mapping[tuple[str, str], int]
    """Calls that ended, by method and code."""
    rpc_times: Mapping[str, RpcTimes]
    sessions: int
    stores: tuple[ServedFiles, ...]
    reloads: Mapping[str, int]
    last_reload: float
    """Seconds since the epoch."""
    scrubbed_bytes: int
    scrub_passes: int
    memory: MemoryState
    releases: int
    released_bytes: int
    """Cache segments given back to the machine so far, and their bytes."""
    ready: bool
    degraded: Mapping[str, str]
    progress_age_seconds: float
    engine: str
    direct_io: str
    registered_buffers: bool
    version: str


@dataclass(frozen=True)
class Declaration:
    """One metric. ``read`` gives a sample for each combination of label values that exists."""

    name: str
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    help: str
    labels: _Labels
    read: Callable[[Moment], Iterable[_Sample]]


def _one(read: Callable[[Moment], float]) -> Callable[[Moment], Iterable[_Sample]]:
    return lambda moment: [((), read(moment))]


def _lookups(m: Moment) -> Iterator[_Sample]:
    lookups = m.stats.lookups
    for kind, asked, hits in (
        ("weight", lookups.weight_lookups, lookups.weight_hits),
        ("kv", lookups.kv_lookups, lookups.kv_hits),
    ):
        yield (kind, "hit"), hits
        yield (kind, "miss"), max(0, asked - hits)  # a client may write nonsense


def _dropped(m: Moment) -> Iterator[_Sample]:
    requests = m.stats.requests
    yield ("ring", "full"), requests.dropped_ring
    yield ("queue", "full"), requests.dropped_queue
    yield ("reader", "grace"), requests.dropped_grace


def _miss_reasons(m: Moment) -> Iterator[_Sample]:
    requests = m.stats.requests
    yield ("weight", "cold"), requests.cold
    yield ("weight", "evicted"), requests.evicted
    yield ("weight", "pending"), requests.duplicates
    yield ("weight", "resident"), requests.resident_already
    yield ("weight", "corrupt"), requests.quarantined


def _cache_bytes(m: Moment) -> Iterator[_Sample]:
    for cache in m.stats.caches:
        for state in ("free", "filling", "valid", "retired"):
            yield (cache.kind, state), getattr(cache, f"{state}_bytes")


def _cache_slots(m: Moment) -> Iterator[_Sample]:
    for row in m.stats.classes:
        label = (row.kind, str(row.slot_bytes))
        yield (*label, "free"), row.free
        yield (*label, "filling"), row.filling
        yield (*label, "retired"), row.retired
        yield (*label, "valid"), row.slots - row.free - row.filling - row.retired


def _per_store(read: Callable[[Any], float]) -> Callable[[Moment], Iterator[_Sample]]:
    def samples(m: Moment) -> Iterator[_Sample]:
        for served, row in zip(m.stores, m.stats.stores, strict=False):
            yield (served.digest,), read(row)

    return samples


def _per_file(read: Callable[[ServedFiles], float]) -> Callable[[Moment], Iterator[_Sample]]:
    return lambda m: (((served.digest,), read(served)) for served in m.stores)


_C: Final = CounterMetricFamily
_G: Final = GaugeMetricFamily
_S: Final = Declaration

METRICS: Final[tuple[Declaration, ...]] = (
    _S("strataflux_lookups", _C, "Look-ups by clients, by result.", ("kind", "result"), _lookups),
    _S("strataflux_requests", _C, "Requests taken from rings.", (), _one(lambda m: m.stats.requests.taken)),
    _S("strataflux_miss_reason", _C, "Requests, by why the record missed.", ("kind", "reason"), _miss_reasons),
    _S("strataflux_requests_dropped", _C, "Requests nobody will answer, by hop.", ("hop", "why"), _dropped),
    _S(
        "strataflux_ring_invalid",
        _C,
        "Ring positions without an entry.",
        (),
        _one(lambda m: m.stats.requests.invalid),
    ),
    _S("strataflux_fills", _C, "Records that became readable.", (), _one(lambda m: m.stats.fills.fills)),
    _S("strataflux_fills_useful", _C, "Of these: looked up before eviction.", (), _one(lambda m: m.stats.fills.useful)),
    _S("strataflux_fills_unused", _C, "Of these: evicted without.", (), _one(lambda m: m.stats.fills.unused)),
    _S("strataflux_fills_preloaded", _C, "Of these: read ahead.", (), _one(lambda m: m.stats.fills.preloaded)),
    _S("strataflux_fill_retries", _C, "Fills tried again after an error.", (), _one(lambda m: m.stats.fills.retries)),
    _S("strataflux_evictions", _C, "Records evicted.", (), _one(lambda m: m.stats.fills.evictions)),
    _S("strataflux_records_corrupt", _C, "Records with a wrong checksum.", (), _one(lambda m: m.stats.fills.corrupt)),
    _S(
        "strataflux_records_quarantined",
        _G,
        "Records that are not read any more, by store.",
        ("model",),
        _per_store(lambda row: row.quarantined),
    ),
    _S("strataflux_waits", _C, "Waits of clients for fills.", (), _one(lambda m: m.stats.lookups.waits)),
    _S(
        "strataflux_wait_seconds",
        _C,
        "Time clients waited.",
        (),
        _one(lambda m: m.stats.lookups.wait_nanoseconds / 1e9),
    ),
    _S(
        "strataflux_deadline_exceeded",
        _C,
        "Waits that ended without the record.",
        (),
        _one(lambda m: m.stats.lookups.deadlines_exceeded),
    ),
    _S("strataflux_steps_invalid", _C, "Steps run again.", (), _one(lambda m: m.stats.lookups.steps_invalid)),
    _S("strataflux_fences", _C, "Sessions cut off from slots held too long.", (), _one(lambda m: m.stats.fences)),
    _S("strataflux_cache_bytes", _G, "Bytes of slots, by state.", ("kind", "state"), _cache_bytes),
    _S(
        "strataflux_cache_capacity_bytes",
        _G,
        "Budget of the cache.",
        ("kind",),
        lambda m: [((cache.kind,), cache.capacity_bytes) for cache in m.stats.caches],
    ),
    _S("strataflux_cache_slots", _G, "Slots by size and state.", ("kind", "slot_bytes", "state"), _cache_slots),
    _S("strataflux_cache_page_moves", _C, "Pages that changed class.", (), _one(lambda m: m.stats.page_moves)),
    _S("strataflux_metadata_bytes", _G, "Memory beside the cache.", (), _one(lambda m: m.stats.metadata_bytes)),
    _S(
        "strataflux_memory_pressure",
        _G,
        "Share of the last 10 s in which tasks waited for memory.",
        ("kind",),
        lambda m: [(("some",), m.memory.some_percent / 100), (("full",), m.memory.full_percent / 100)],
    ),
    _S(
        "strataflux_memory_available_bytes",
        _G,
        "Free for this service: of the machine, or of its tightest limit.",
        (),
        lambda m: [] if m.memory.available is None else [((), m.memory.available)],
    ),
    _S(
        "strataflux_config_reload",
        _C,
        "Reloads, by result.",
        ("result",),
        lambda m: sorted(((name,), count) for name, count in m.reloads.items()),
    ),
    _S(
        "strataflux_config_last_success_timestamp_seconds",
        _G,
        "When the configuration in force was read.",
        (),
        _one(lambda m: m.last_reload),
    ),
    _S("strataflux_scrub_bytes", _C, "Read in the background to find damage.", (), _one(lambda m: m.scrubbed_bytes)),
    _S("strataflux_scrub_passes", _C, "Times that all stores were read so.", (), _one(lambda m: m.scrub_passes)),
    _S("strataflux_pressure_releases", _C, "Cache segments given back.", (), _one(lambda m: m.releases)),
    _S("strataflux_pressure_released_bytes", _C, "Their bytes.", (), _one(lambda m: m.released_bytes)),
    _S("strataflux_ssd_reads", _C, "Reads that completed.", (), _one(lambda m: m.stats.reads.reads)),
    _S("strataflux_ssd_read_bytes", _C, "Bytes read.", (), _one(lambda m: m.stats.reads.bytes)),
    _S("strataflux_io_inflight", _G, "Reads in flight.", (), _one(lambda m: m.stats.reads.in_flight)),
    _S("strataflux_io_queued", _G, "Requests that wait for a read.", (), _one(lambda m: m.stats.reads.queued)),
    _S("strataflux_io_errors", _C, "Reads that failed.", (), _one(lambda m: m.stats.reads.errors)),
    _S("strataflux_short_reads", _C, "Reads that came short.", (), _one(lambda m: m.stats.reads.short_reads)),
    _S(
        "strataflux_direct_io_fallbacks",
        _C,
        "Files that turned out to refuse direct reads.",
        (),
        _one(lambda m: m.stats.reads.direct_fallbacks),
    ),
    _S(
        "strataflux_shard_records",
        _G,
        "Records of a store.",
        ("model",),
        _per_file(lambda served: served.records),
    ),
    _S(
        "strataflux_shard_bytes",
        _G,
        "Bytes of a store.",
        ("model",),
        _per_file(lambda served: served.bytes),
    ),
    _S(
        "strataflux_disk_used_bytes",
        _G,
        "Blocks that a store's files occupy.",
        ("model",),
        _per_file(lambda served: served.used),
    ),
    _S(
        "strataflux_disk_free_bytes",
        _G,
        "Free in the file system of a store.",
        ("model",),
        _per_file(lambda served: served.free),
    ),
    _S(
        "strataflux_shard_resident_records",
        _G,
        "Records of a store in the cache.",
        ("model",),
        _per_store(lambda row: row.resident_records),
    ),
    _S("strataflux_shard_direct", _G, "Whether it is read directly.", ("model",), _per_store(lambda row: row.direct)),
    _S("strataflux_clients", _G, "Sessions that live.", (), _one(lambda m: m.sessions)),
    _S("strataflux_sessions", _C, "Sessions that were made.", (), _one(lambda m: m.attach.attached)),
    _S(
        "strataflux_sessions_ended",
        _C,
        "Sessions that ended, by cause.",
        ("cause",),
        lambda m: [((cause,), count) for cause, count in sorted(m.attach.ended.items())],
    ),
    _S(
        "strataflux_attach_refused",
        _C,
        "Attach requests refused, by reason.",
        ("reason",),
        lambda m: [((code,), count) for code, count in sorted(m.attach.refused.items())],
    ),
    _S("strataflux_attach_malformed", _C, "Malformed messages.", (), _one(lambda m: m.attach.malformed)),
    _S("strataflux_attach_turned_away", _C, "Connections beyond the bound.", (), _one(lambda m: m.attach.turned_away)),
    _S(
        "strataflux_auth_denied",
        _C,
        "Attach requests for a store that the user may not use.",
        ("reason",),
        lambda m: [(("store",), m.attach.refused["denied"])],
    ),
    _S(
        "strataflux_control_connections",
        _C,
        "Connections to the control socket, by role.",
        ("role",),
        lambda m: [((role,), count) for role, count in sorted(m.control_connections.items())],
    ),
    _S("strataflux_ready", _G, "1 while requests are taken.", (), _one(lambda m: m.ready)),
    _S(
        "strataflux_degraded",
        _G,
        "1 for each reason that holds.",
        ("reason",),
        lambda m: [((reason,), 1) for reason in sorted(m.degraded)],
    ),
    _S(
        "strataflux_watchdog_last_progress_seconds",
        _G,
        "Age of the data path's last progress.",
        (),
        _one(lambda m: m.progress_age_seconds),
    ),
    _S(
        "strataflux_rpc",
        _C,
        "Calls of the control plane that ended.",
        ("method", "code"),
        lambda m: sorted(m.rpcs.items()),
    ),
)
