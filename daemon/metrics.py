"""Prometheus metrics: declared once, read from live state when scraped, served only where told to.

The data path adds to plain integers; nothing here is touched until somebody scrapes. Ratios are left to PromQL:
samples of one metric that differ in a label are disjoint and add up to their whole. No label has more values than there
are kinds, states, errnos, served stores or configured tenants.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from strataflux.daemon.declarations import Declaration, Labels, Read, Sample, kinds, one, split
from strataflux.daemon.moment import Moment, ServedFiles

__all__ = ["METRICS"]


def _lookups(m: Moment) -> Iterator[Sample]:
    lookups = m.stats.lookups
    for kind, asked, hits in (
        ("weight", lookups.weight_lookups, lookups.weight_hits),
        ("kv", lookups.kv_lookups, lookups.kv_hits),
    ):
        yield (kind, "hit"), hits
        yield (kind, "miss"), max(0, asked - hits)  # a client may write nonsense


def _dropped(m: Moment) -> Iterator[Sample]:
    requests = m.stats.requests
    yield ("ring", "full"), requests.dropped_ring
    yield ("queue", "full"), requests.dropped_queue
    yield ("reader", "grace"), requests.dropped_grace
    yield ("reader", "admission"), requests.rejected


def _cache_bytes(m: Moment) -> Iterator[Sample]:
    for cache in m.stats.caches:
        for state in ("free", "filling", "valid", "retired"):
            yield (cache.kind, state), getattr(cache, f"{state}_bytes")


def _cache_slots(m: Moment) -> Iterator[Sample]:
    sums: dict[Labels, int] = {}
    for row in m.stats.classes:  # access rules and KV sessions keep classes of the same size apart
        valid = row.slots - row.free - row.filling - row.retired
        states = {"free": row.free, "filling": row.filling, "retired": row.retired, "valid": valid}
        for state, count in states.items():
            label = (row.kind, str(row.slot_bytes), state)
            sums[label] = sums.get(label, 0) + count
    yield from sums.items()


def _per_store(read: Callable[[Any], float]) -> Read:
    """A number of each served store that is in both views of this moment."""
    return lambda m: [((m.stores[row.index].digest,), read(row)) for row in m.stats.stores if row.index in m.stores]


def _per_file(read: Callable[[ServedFiles], float]) -> Read:
    return lambda m: [((served.digest,), read(served)) for served in m.stores.values()]


def _denied(m: Moment) -> Iterator[Sample]:
    yield ("store",), m.attach.refused["denied"]
    yield ("role",), sum(count for (_, code), count in m.rpcs.items() if code == "PERMISSION_DENIED")


def _tenants(field: str) -> Read:
    return lambda m: [((row.tenant,), getattr(row, field)) for row in m.stats.tenants]


def _tenant_sessions(m: Moment) -> Iterator[Sample]:
    """Those of a tenant that is configured no more are everybody else's."""
    left = dict(m.tenant_sessions)
    for row in m.stats.tenants[1:]:
        yield (row.tenant,), left.pop(row.tenant, 0)
    for row in m.stats.tenants[:1]:
        yield (row.tenant,), sum(left.values())


_C: Final = CounterMetricFamily
_G: Final = GaugeMetricFamily
_S: Final = Declaration
_KIND: Final = ("kind",)
_MODEL: Final = ("model",)
_TENANT: Final = ("tenant",)

_REQUESTS: Final = (
    _S("strataflux_lookups", _C, "Look-ups by clients, by result.", ("kind", "result"), _lookups),
    _S("strataflux_requests", _C, "Requests taken from rings.", _KIND, kinds("requests")),
    _S(
        "strataflux_miss_reason",
        _C,
        "Requests, by why the record missed.",
        ("kind", "reason"),
        split(cold="cold", evicted="evicted", pending="duplicates", resident="resident_already", corrupt="quarantined"),
    ),
    _S("strataflux_requests_dropped", _C, "Requests nobody will answer, by hop.", ("hop", "why"), _dropped),
    _S("strataflux_ring_depth", _G, "Requests that wait in rings.", (), one(lambda m: m.stats.ring_depth)),
    _S(
        "strataflux_ring_invalid",
        _C,
        "Ring positions without an entry.",
        (),
        one(lambda m: m.stats.requests.invalid),
    ),
    _S("strataflux_waits", _C, "Waits of clients for fills.", (), one(lambda m: m.stats.lookups.waits)),
    _S(
        "strataflux_wait_seconds",
        _C,
        "Time clients waited.",
        (),
        one(lambda m: m.stats.lookups.wait_nanoseconds / 1e9),
    ),
    _S(
        "strataflux_deadline_exceeded",
        _C,
        "Waits that ended without the record.",
        (),
        one(lambda m: m.stats.lookups.deadlines_exceeded),
    ),
    _S("strataflux_steps_invalid", _C, "Steps run again.", (), one(lambda m: m.stats.lookups.steps_invalid)),
    _S("strataflux_fences", _C, "Sessions cut off from slots held too long.", (), one(lambda m: m.stats.fences)),
)

_FILLS: Final = (
    _S(
        "strataflux_fills",
        _C,
        "Records that became readable: asked for, read ahead, shown as they were put, or prefetched.",
        ("kind", "cause"),
        split(request="asked", ahead="preloaded", put="put", prefetch="prefetched"),
    ),
    _S("strataflux_prefetches", _C, "Records that clients expected to look up.", _KIND, kinds("prefetches")),
    _S(
        "strataflux_prefetches_unread",
        _C,
        "Of these, those not read: resident or under way, or no time or room.",
        ("kind", "why"),
        split(needless="prefetch_needless", dropped="prefetch_dropped"),
    ),
    _S("strataflux_prefetches_used", _C, "Those read and looked up since.", _KIND, kinds("prefetch_used")),
    _S("strataflux_prefetches_unused", _C, "Those that left before that.", _KIND, kinds("prefetch_unused")),
    _S("strataflux_warm_reads", _C, "Records read again after a start.", (), one(lambda m: m.stats.warmed)),
    _S(
        "strataflux_hot_set",
        _C,
        "Times that the set of resident records was saved, or read at the start, by result.",
        ("op", "result"),
        lambda m: sorted(m.hot_set.items()),
    ),
    _S("strataflux_fills_useful", _C, "Records found used by the time they aged.", _KIND, kinds("useful")),
    _S("strataflux_fills_unused", _C, "Records evicted without a use.", _KIND, kinds("unused")),
    _S("strataflux_fill_retries", _C, "Fills tried again after an error.", _KIND, kinds("retries")),
    _S(
        "strataflux_evictions",
        _C,
        "Records evicted, by why.",
        ("kind", "cause"),
        split(**{name: f"evictions_{name}" for name in ("capacity", "pressure", "epoch", "clear")}),
    ),
    _S("strataflux_records_corrupt", _C, "Records read with a wrong checksum.", _KIND, kinds("corrupt")),
    _S(
        "strataflux_records_quarantined",
        _G,
        "Records that are not read any more, by store.",
        _MODEL,
        _per_store(lambda row: row.quarantined),
    ),
)

_CACHE: Final = (
    _S("strataflux_cache_bytes", _G, "Bytes of slots, by state.", ("kind", "state"), _cache_bytes),
    _S(
        "strataflux_cache_capacity_bytes",
        _G,
        "Memory of the cache as it is now.",
        _KIND,
        lambda m: [((cache.kind,), cache.capacity_bytes) for cache in m.stats.caches],
    ),
    _S("strataflux_cache_slots", _G, "Slots by size and state.", ("kind", "slot_bytes", "state"), _cache_slots),
    _S("strataflux_cache_page_moves", _C, "Pages that changed class.", (), one(lambda m: m.stats.page_moves)),
    _S("strataflux_index_entries", _G, "Records that can be asked for.", _KIND, kinds("entries")),
    _S("strataflux_metadata_bytes", _G, "Memory beside the cache.", (), one(lambda m: m.stats.metadata_bytes)),
    _S(
        "strataflux_memory_pressure",
        _G,
        "Share of the last 10 s in which tasks waited for memory.",
        _KIND,
        lambda m: [(("some",), m.memory.some_percent / 100), (("full",), m.memory.full_percent / 100)],
    ),
    _S(
        "strataflux_memory_available_bytes",
        _G,
        "Free for this service: of the machine, or of its tightest limit.",
        (),
        lambda m: [] if m.memory.available is None else [((), m.memory.available)],
    ),
    _S("strataflux_pressure_releases", _C, "Cache segments given back.", (), one(lambda m: m.releases)),
    _S("strataflux_pressure_released_bytes", _C, "Their bytes.", (), one(lambda m: m.released_bytes)),
)

_DEVICE: Final = (
    _S("strataflux_ssd_reads", _C, "Reads submitted.", (), one(lambda m: m.stats.reads.reads)),
    _S(
        "strataflux_ssd_read_bytes",
        _C,
        "Bytes read, by what for.",
        ("kind", "class"),
        split(demand="demand_bytes", prefetch="ahead_bytes"),
    ),
    _S("strataflux_ssd_write_bytes", _C, "Bytes written.", _KIND, kinds("write_bytes")),
    _S(
        "strataflux_io_inflight",
        _G,
        "Reads and writes in flight.",
        ("op",),
        lambda m: [(("read",), m.stats.reads.in_flight), (("write",), m.stats.writes.in_flight)],
    ),
    _S("strataflux_io_queued", _G, "Requests that wait for a read.", (), one(lambda m: m.stats.reads.queued)),
    _S(
        "strataflux_io_errors",
        _C,
        "Reads and writes that failed.",
        ("op", "errno"),
        lambda m: [((row.op, row.errno), row.count) for row in m.stats.io_errors],
    ),
    _S("strataflux_short_reads", _C, "Reads and writes that came short.", (), one(lambda m: m.stats.reads.short_reads)),
    _S(
        "strataflux_direct_io_fallbacks",
        _C,
        "Files that turned out to refuse direct reads.",
        (),
        one(lambda m: m.stats.reads.direct_fallbacks),
    ),
    _S("strataflux_scrub_bytes", _C, "Read in the background to find damage.", (), one(lambda m: m.scrubbed_bytes)),
    _S("strataflux_scrub_passes", _C, "Times that all stores were read so.", (), one(lambda m: m.scrub_passes)),
    _S("strataflux_scrub_damaged_records", _G, "Damaged in the last pass.", (), one(lambda m: m.scrub_damaged)),
)

_STORES: Final = (
    _S("strataflux_shard_records", _G, "Records of a store.", _MODEL, _per_file(lambda served: served.records)),
    _S("strataflux_shard_bytes", _G, "Bytes of a store.", _MODEL, _per_file(lambda served: served.bytes)),
    _S(
        "strataflux_shard_resident_records",
        _G,
        "Records of a store in the cache.",
        _MODEL,
        _per_store(lambda row: row.resident_records),
    ),
    _S("strataflux_shard_direct", _G, "Whether it is read directly.", _MODEL, _per_store(lambda row: row.direct)),
    _S(
        "strataflux_disk_used_bytes",
        _G,
        "Blocks that a store's files occupy.",
        _MODEL,
        _per_file(lambda served: served.used),
    ),
    _S(
        "strataflux_disk_free_bytes",
        _G,
        "Free in the file system of a store.",
        _MODEL,
        _per_file(lambda served: served.free),
    ),
    _S(
        "strataflux_kv_blocks",
        _C,
        "KV blocks put by clients, and what became of writing them.",
        ("result",),
        lambda m: [((name,), getattr(m.stats.kv, name)) for name in ("put", "refused", "written", "failed")],
    ),
    _S("strataflux_kv_file_bytes", _G, "Disk held for KV blocks.", (), one(lambda m: m.stats.kv.granted_bytes)),
    _S("strataflux_kv_file_limit_bytes", _G, "The most it may be.", (), one(lambda m: m.stats.kv.limit_bytes)),
    _S("strataflux_kv_disk_free_bytes", _G, "Free where it lies.", (), one(lambda m: m.stats.kv.free_bytes)),
)

_CLIENTS: Final = (
    _S("strataflux_clients", _G, "Sessions that live.", (), one(lambda m: m.sessions)),
    _S("strataflux_sessions", _C, "Sessions that were made.", (), one(lambda m: m.attach.attached)),
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
    _S("strataflux_attach_malformed", _C, "Malformed messages.", (), one(lambda m: m.attach.malformed)),
    _S("strataflux_attach_turned_away", _C, "Connections beyond the bound.", (), one(lambda m: m.attach.turned_away)),
    _S("strataflux_auth_denied", _C, "Refused for who asked: a store, or a role.", ("reason",), _denied),
    _S("strataflux_tenant_sessions", _G, "Sessions of a tenant that live.", _TENANT, _tenant_sessions),
    _S("strataflux_tenant_requests", _C, "Requests taken from its rings.", _TENANT, _tenants("requests")),
    _S("strataflux_tenant_fills", _C, "Fills that it asked for first.", _TENANT, _tenants("fills")),
    _S("strataflux_tenant_dropped", _C, "Requests dropped from a full queue.", _TENANT, _tenants("dropped")),
    _S("strataflux_tenant_bytes", _G, "Disk held for its KV blocks.", _TENANT, _tenants("kv_bytes")),
    _S(
        "strataflux_tenant_quota_bytes",
        _G,
        "The most it may be.",
        _TENANT,
        lambda m: [((tenant.name,), tenant.kv_file_bytes) for tenant in m.tenants],
    ),
)

_SERVICE: Final = (
    _S(
        "strataflux_control_connections",
        _C,
        "Connections to the control socket, by role.",
        ("role",),
        lambda m: [((role,), count) for role, count in sorted(m.control_connections.items())],
    ),
    _S(
        "strataflux_rpc",
        _C,
        "Calls of the control plane that ended.",
        ("method", "code"),
        lambda m: sorted(m.rpcs.items()),
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
        one(lambda m: m.last_reload),
    ),
    _S("strataflux_ready", _G, "1 while requests are taken.", (), one(lambda m: m.ready)),
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
        one(lambda m: m.progress_age_seconds),
    ),
)

METRICS: Final[tuple[Declaration, ...]] = (*_REQUESTS, *_FILLS, *_CACHE, *_DEVICE, *_STORES, *_CLIENTS, *_SERVICE)
