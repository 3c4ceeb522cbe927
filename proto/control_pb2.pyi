from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorDetail(_message.Message):
    __slots__ = ("subject", "found", "expected", "remedy")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    subject: str
    found: str
    expected: str
    remedy: str
    def __init__(self, subject: _Optional[str] = ..., found: _Optional[str] = ..., expected: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("version", "generation", "pid", "state", "degraded", "engine", "direct_io", "registered_buffers", "setup_flags", "uptime_seconds", "layout_version", "role", "policy")
    class DegradedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    DIRECT_IO_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    SETUP_FLAGS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    version: str
    generation: int
    pid: int
    state: str
    degraded: _containers.ScalarMap[str, str]
    engine: str
    direct_io: str
    registered_buffers: bool
    setup_flags: _containers.RepeatedScalarFieldContainer[str]
    uptime_seconds: float
    layout_version: int
    role: str
    policy: str
    def __init__(self, version: _Optional[str] = ..., generation: _Optional[int] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., degraded: _Optional[_Mapping[str, str]] = ..., engine: _Optional[str] = ..., direct_io: _Optional[str] = ..., registered_buffers: _Optional[bool] = ..., setup_flags: _Optional[_Iterable[str]] = ..., uptime_seconds: _Optional[float] = ..., layout_version: _Optional[int] = ..., role: _Optional[str] = ..., policy: _Optional[str] = ...) -> None: ...

class ListStoresRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListStoresResponse(_message.Message):
    __slots__ = ("stores",)
    STORES_FIELD_NUMBER: _ClassVar[int]
    stores: _containers.RepeatedCompositeFieldContainer[Store]
    def __init__(self, stores: _Optional[_Iterable[_Union[Store, _Mapping]]] = ...) -> None: ...

class Store(_message.Message):
    __slots__ = ("digest", "identity_json", "generation", "records", "bytes", "preload", "share", "sessions", "path", "stats", "sections")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_JSON_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PRELOAD_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    SECTIONS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    identity_json: str
    generation: int
    records: int
    bytes: int
    preload: bool
    share: str
    sessions: int
    path: str
    stats: StoreStats
    sections: _containers.RepeatedCompositeFieldContainer[Section]
    def __init__(self, digest: _Optional[str] = ..., identity_json: _Optional[str] = ..., generation: _Optional[int] = ..., records: _Optional[int] = ..., bytes: _Optional[int] = ..., preload: _Optional[bool] = ..., share: _Optional[str] = ..., sessions: _Optional[int] = ..., path: _Optional[str] = ..., stats: _Optional[_Union[StoreStats, _Mapping]] = ..., sections: _Optional[_Iterable[_Union[Section, _Mapping]]] = ...) -> None: ...

class Section(_message.Message):
    __slots__ = ("layer", "set", "records")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    set: str
    records: int
    def __init__(self, layer: _Optional[int] = ..., set: _Optional[str] = ..., records: _Optional[int] = ...) -> None: ...

class AddStoreRequest(_message.Message):
    __slots__ = ("name", "settings")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    settings: StoreSettings
    def __init__(self, name: _Optional[str] = ..., settings: _Optional[_Union[StoreSettings, _Mapping]] = ...) -> None: ...

class AddStoreResponse(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class StoreSettings(_message.Message):
    __slots__ = ("share", "preload", "allow")
    SHARE_FIELD_NUMBER: _ClassVar[int]
    PRELOAD_FIELD_NUMBER: _ClassVar[int]
    ALLOW_FIELD_NUMBER: _ClassVar[int]
    share: str
    preload: bool
    allow: Access
    def __init__(self, share: _Optional[str] = ..., preload: _Optional[bool] = ..., allow: _Optional[_Union[Access, _Mapping]] = ...) -> None: ...

class Access(_message.Message):
    __slots__ = ("uids", "groups")
    UIDS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    uids: _containers.RepeatedScalarFieldContainer[int]
    groups: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, uids: _Optional[_Iterable[int]] = ..., groups: _Optional[_Iterable[int]] = ...) -> None: ...

class RemoveStoreRequest(_message.Message):
    __slots__ = ("store", "delete_files")
    STORE_FIELD_NUMBER: _ClassVar[int]
    DELETE_FILES_FIELD_NUMBER: _ClassVar[int]
    store: str
    delete_files: bool
    def __init__(self, store: _Optional[str] = ..., delete_files: _Optional[bool] = ...) -> None: ...

class RemoveStoreResponse(_message.Message):
    __slots__ = ("digest", "sessions")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    sessions: int
    def __init__(self, digest: _Optional[str] = ..., sessions: _Optional[int] = ...) -> None: ...

class ImportStoreRequest(_message.Message):
    __slots__ = ("begin", "data")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    begin: ImportBegin
    data: bytes
    def __init__(self, begin: _Optional[_Union[ImportBegin, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ImportBegin(_message.Message):
    __slots__ = ("name", "settings", "manifest_bytes", "checksums_bytes", "records_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    settings: StoreSettings
    manifest_bytes: int
    checksums_bytes: int
    records_bytes: int
    def __init__(self, name: _Optional[str] = ..., settings: _Optional[_Union[StoreSettings, _Mapping]] = ..., manifest_bytes: _Optional[int] = ..., checksums_bytes: _Optional[int] = ..., records_bytes: _Optional[int] = ...) -> None: ...

class ImportStoreResponse(_message.Message):
    __slots__ = ("digest", "records")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    records: int
    def __init__(self, digest: _Optional[str] = ..., records: _Optional[int] = ...) -> None: ...

class StoreStats(_message.Message):
    __slots__ = ("resident_records", "fills", "quarantined", "direct", "direct_fallbacks", "section_misses", "index")
    RESIDENT_RECORDS_FIELD_NUMBER: _ClassVar[int]
    FILLS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    SECTION_MISSES_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    resident_records: int
    fills: int
    quarantined: int
    direct: bool
    direct_fallbacks: int
    section_misses: _containers.RepeatedScalarFieldContainer[int]
    index: int
    def __init__(self, resident_records: _Optional[int] = ..., fills: _Optional[int] = ..., quarantined: _Optional[int] = ..., direct: _Optional[bool] = ..., direct_fallbacks: _Optional[int] = ..., section_misses: _Optional[_Iterable[int]] = ..., index: _Optional[int] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("session", "client", "uid", "pid", "stores", "stats", "tenant")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    session: int
    client: str
    uid: int
    pid: int
    stores: _containers.RepeatedScalarFieldContainer[str]
    stats: SessionStats
    tenant: str
    def __init__(self, session: _Optional[int] = ..., client: _Optional[str] = ..., uid: _Optional[int] = ..., pid: _Optional[int] = ..., stores: _Optional[_Iterable[str]] = ..., stats: _Optional[_Union[SessionStats, _Mapping]] = ..., tenant: _Optional[str] = ...) -> None: ...

class SessionStats(_message.Message):
    __slots__ = ("index", "lookups", "hits", "requests", "dropped", "invalid", "fills", "steps", "steps_invalid", "waits", "wait_nanoseconds", "deadlines_exceeded", "fenced")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    INVALID_FIELD_NUMBER: _ClassVar[int]
    FILLS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_INVALID_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    WAIT_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    DEADLINES_EXCEEDED_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    index: int
    lookups: int
    hits: int
    requests: int
    dropped: int
    invalid: int
    fills: int
    steps: int
    steps_invalid: int
    waits: int
    wait_nanoseconds: int
    deadlines_exceeded: int
    fenced: bool
    def __init__(self, index: _Optional[int] = ..., lookups: _Optional[int] = ..., hits: _Optional[int] = ..., requests: _Optional[int] = ..., dropped: _Optional[int] = ..., invalid: _Optional[int] = ..., fills: _Optional[int] = ..., steps: _Optional[int] = ..., steps_invalid: _Optional[int] = ..., waits: _Optional[int] = ..., wait_nanoseconds: _Optional[int] = ..., deadlines_exceeded: _Optional[int] = ..., fenced: _Optional[bool] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStatsRequest(_message.Message):
    __slots__ = ("interval_seconds",)
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    interval_seconds: float
    def __init__(self, interval_seconds: _Optional[float] = ...) -> None: ...

class Stats(_message.Message):
    __slots__ = ("at_seconds", "lookups", "requests", "fills", "reads", "caches", "classes", "stores", "sessions", "turns", "fences", "page_moves", "metadata_bytes", "writes", "kv", "kinds", "io_errors", "tenants", "ring_depth", "age_bounds_steps", "gap_bounds_us", "warmed")
    AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FILLS_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    CACHES_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    FENCES_FIELD_NUMBER: _ClassVar[int]
    PAGE_MOVES_FIELD_NUMBER: _ClassVar[int]
    METADATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    IO_ERRORS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    RING_DEPTH_FIELD_NUMBER: _ClassVar[int]
    AGE_BOUNDS_STEPS_FIELD_NUMBER: _ClassVar[int]
    GAP_BOUNDS_US_FIELD_NUMBER: _ClassVar[int]
    WARMED_FIELD_NUMBER: _ClassVar[int]
    at_seconds: float
    lookups: LookupStats
    requests: RequestStats
    fills: FillStats
    reads: ReadStats
    caches: _containers.RepeatedCompositeFieldContainer[CacheStats]
    classes: _containers.RepeatedCompositeFieldContainer[ClassStats]
    stores: _containers.RepeatedCompositeFieldContainer[StoreStats]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStats]
    turns: int
    fences: int
    page_moves: int
    metadata_bytes: int
    writes: WriteStats
    kv: KvStats
    kinds: _containers.RepeatedCompositeFieldContainer[KindStats]
    io_errors: _containers.RepeatedCompositeFieldContainer[IoErrorStats]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStats]
    ring_depth: int
    age_bounds_steps: _containers.RepeatedScalarFieldContainer[int]
    gap_bounds_us: _containers.RepeatedScalarFieldContainer[int]
    warmed: int
    def __init__(self, at_seconds: _Optional[float] = ..., lookups: _Optional[_Union[LookupStats, _Mapping]] = ..., requests: _Optional[_Union[RequestStats, _Mapping]] = ..., fills: _Optional[_Union[FillStats, _Mapping]] = ..., reads: _Optional[_Union[ReadStats, _Mapping]] = ..., caches: _Optional[_Iterable[_Union[CacheStats, _Mapping]]] = ..., classes: _Optional[_Iterable[_Union[ClassStats, _Mapping]]] = ..., stores: _Optional[_Iterable[_Union[StoreStats, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStats, _Mapping]]] = ..., turns: _Optional[int] = ..., fences: _Optional[int] = ..., page_moves: _Optional[int] = ..., metadata_bytes: _Optional[int] = ..., writes: _Optional[_Union[WriteStats, _Mapping]] = ..., kv: _Optional[_Union[KvStats, _Mapping]] = ..., kinds: _Optional[_Iterable[_Union[KindStats, _Mapping]]] = ..., io_errors: _Optional[_Iterable[_Union[IoErrorStats, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[TenantStats, _Mapping]]] = ..., ring_depth: _Optional[int] = ..., age_bounds_steps: _Optional[_Iterable[int]] = ..., gap_bounds_us: _Optional[_Iterable[int]] = ..., warmed: _Optional[int] = ...) -> None: ...

class LookupStats(_message.Message):
    __slots__ = ("weight_lookups", "weight_hits", "kv_lookups", "kv_hits", "waits", "wait_nanoseconds", "deadlines_exceeded", "steps_invalid")
    WEIGHT_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_HITS_FIELD_NUMBER: _ClassVar[int]
    KV_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    KV_HITS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    WAIT_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    DEADLINES_EXCEEDED_FIELD_NUMBER: _ClassVar[int]
    STEPS_INVALID_FIELD_NUMBER: _ClassVar[int]
    weight_lookups: int
    weight_hits: int
    kv_lookups: int
    kv_hits: int
    waits: int
    wait_nanoseconds: int
    deadlines_exceeded: int
    steps_invalid: int
    def __init__(self, weight_lookups: _Optional[int] = ..., weight_hits: _Optional[int] = ..., kv_lookups: _Optional[int] = ..., kv_hits: _Optional[int] = ..., waits: _Optional[int] = ..., wait_nanoseconds: _Optional[int] = ..., deadlines_exceeded: _Optional[int] = ..., steps_invalid: _Optional[int] = ...) -> None: ...

class RequestStats(_message.Message):
    __slots__ = ("taken", "duplicates", "resident_already", "quarantined", "invalid", "dropped_ring", "dropped_queue", "dropped_grace", "cold", "evicted", "rejected")
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_ALREADY_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    INVALID_FIELD_NUMBER: _ClassVar[int]
    DROPPED_RING_FIELD_NUMBER: _ClassVar[int]
    DROPPED_QUEUE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_GRACE_FIELD_NUMBER: _ClassVar[int]
    COLD_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    taken: int
    duplicates: int
    resident_already: int
    quarantined: int
    invalid: int
    dropped_ring: int
    dropped_queue: int
    dropped_grace: int
    cold: int
    evicted: int
    rejected: int
    def __init__(self, taken: _Optional[int] = ..., duplicates: _Optional[int] = ..., resident_already: _Optional[int] = ..., quarantined: _Optional[int] = ..., invalid: _Optional[int] = ..., dropped_ring: _Optional[int] = ..., dropped_queue: _Optional[int] = ..., dropped_grace: _Optional[int] = ..., cold: _Optional[int] = ..., evicted: _Optional[int] = ..., rejected: _Optional[int] = ...) -> None: ...

class FillStats(_message.Message):
    __slots__ = ("fills", "useful", "preloaded", "corrupt", "retries", "evictions", "latency_us", "latency_bounds_us", "latency_counts", "unused", "put", "prefetched")
    FILLS_FIELD_NUMBER: _ClassVar[int]
    USEFUL_FIELD_NUMBER: _ClassVar[int]
    PRELOADED_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_US_FIELD_NUMBER: _ClassVar[int]
    LATENCY_BOUNDS_US_FIELD_NUMBER: _ClassVar[int]
    LATENCY_COUNTS_FIELD_NUMBER: _ClassVar[int]
    UNUSED_FIELD_NUMBER: _ClassVar[int]
    PUT_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_FIELD_NUMBER: _ClassVar[int]
    fills: int
    useful: int
    preloaded: int
    corrupt: int
    retries: int
    evictions: int
    latency_us: int
    latency_bounds_us: _containers.RepeatedScalarFieldContainer[int]
    latency_counts: _containers.RepeatedScalarFieldContainer[int]
    unused: int
    put: int
    prefetched: int
    def __init__(self, fills: _Optional[int] = ..., useful: _Optional[int] = ..., preloaded: _Optional[int] = ..., corrupt: _Optional[int] = ..., retries: _Optional[int] = ..., evictions: _Optional[int] = ..., latency_us: _Optional[int] = ..., latency_bounds_us: _Optional[_Iterable[int]] = ..., latency_counts: _Optional[_Iterable[int]] = ..., unused: _Optional[int] = ..., put: _Optional[int] = ..., prefetched: _Optional[int] = ...) -> None: ...

class KindStats(_message.Message):
    __slots__ = ("kind", "requests", "cold", "evicted", "duplicates", "resident_already", "quarantined", "asked", "preloaded", "put", "useful", "unused", "corrupt", "retries", "evictions_capacity", "evictions_pressure", "evictions_epoch", "evictions_clear", "demand_bytes", "ahead_bytes", "write_bytes", "entries", "latency_us", "latency_counts", "age_counts", "reuse_us", "reuse_counts", "idle_us", "idle_counts", "rejected", "prefetches", "prefetch_needless", "prefetch_dropped", "prefetched", "prefetch_used", "prefetch_unused")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    COLD_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_ALREADY_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    PRELOADED_FIELD_NUMBER: _ClassVar[int]
    PUT_FIELD_NUMBER: _ClassVar[int]
    USEFUL_FIELD_NUMBER: _ClassVar[int]
    UNUSED_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_CLEAR_FIELD_NUMBER: _ClassVar[int]
    DEMAND_BYTES_FIELD_NUMBER: _ClassVar[int]
    AHEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LATENCY_US_FIELD_NUMBER: _ClassVar[int]
    LATENCY_COUNTS_FIELD_NUMBER: _ClassVar[int]
    AGE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    REUSE_US_FIELD_NUMBER: _ClassVar[int]
    REUSE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    IDLE_US_FIELD_NUMBER: _ClassVar[int]
    IDLE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    PREFETCHES_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_NEEDLESS_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_DROPPED_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_USED_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_UNUSED_FIELD_NUMBER: _ClassVar[int]
    kind: str
    requests: int
    cold: int
    evicted: int
    duplicates: int
    resident_already: int
    quarantined: int
    asked: int
    preloaded: int
    put: int
    useful: int
    unused: int
    corrupt: int
    retries: int
    evictions_capacity: int
    evictions_pressure: int
    evictions_epoch: int
    evictions_clear: int
    demand_bytes: int
    ahead_bytes: int
    write_bytes: int
    entries: int
    latency_us: int
    latency_counts: _containers.RepeatedScalarFieldContainer[int]
    age_counts: _containers.RepeatedScalarFieldContainer[int]
    reuse_us: int
    reuse_counts: _containers.RepeatedScalarFieldContainer[int]
    idle_us: int
    idle_counts: _containers.RepeatedScalarFieldContainer[int]
    rejected: int
    prefetches: int
    prefetch_needless: int
    prefetch_dropped: int
    prefetched: int
    prefetch_used: int
    prefetch_unused: int
    def __init__(self, kind: _Optional[str] = ..., requests: _Optional[int] = ..., cold: _Optional[int] = ..., evicted: _Optional[int] = ..., duplicates: _Optional[int] = ..., resident_already: _Optional[int] = ..., quarantined: _Optional[int] = ..., asked: _Optional[int] = ..., preloaded: _Optional[int] = ..., put: _Optional[int] = ..., useful: _Optional[int] = ..., unused: _Optional[int] = ..., corrupt: _Optional[int] = ..., retries: _Optional[int] = ..., evictions_capacity: _Optional[int] = ..., evictions_pressure: _Optional[int] = ..., evictions_epoch: _Optional[int] = ..., evictions_clear: _Optional[int] = ..., demand_bytes: _Optional[int] = ..., ahead_bytes: _Optional[int] = ..., write_bytes: _Optional[int] = ..., entries: _Optional[int] = ..., latency_us: _Optional[int] = ..., latency_counts: _Optional[_Iterable[int]] = ..., age_counts: _Optional[_Iterable[int]] = ..., reuse_us: _Optional[int] = ..., reuse_counts: _Optional[_Iterable[int]] = ..., idle_us: _Optional[int] = ..., idle_counts: _Optional[_Iterable[int]] = ..., rejected: _Optional[int] = ..., prefetches: _Optional[int] = ..., prefetch_needless: _Optional[int] = ..., prefetch_dropped: _Optional[int] = ..., prefetched: _Optional[int] = ..., prefetch_used: _Optional[int] = ..., prefetch_unused: _Optional[int] = ...) -> None: ...

class WriteStats(_message.Message):
    __slots__ = ("writes", "bytes", "microseconds", "in_flight", "latency_counts")
    WRITES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    LATENCY_COUNTS_FIELD_NUMBER: _ClassVar[int]
    writes: int
    bytes: int
    microseconds: int
    in_flight: int
    latency_counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, writes: _Optional[int] = ..., bytes: _Optional[int] = ..., microseconds: _Optional[int] = ..., in_flight: _Optional[int] = ..., latency_counts: _Optional[_Iterable[int]] = ...) -> None: ...

class IoErrorStats(_message.Message):
    __slots__ = ("op", "errno", "count")
    OP_FIELD_NUMBER: _ClassVar[int]
    ERRNO_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    op: str
    errno: str
    count: int
    def __init__(self, op: _Optional[str] = ..., errno: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class KvStats(_message.Message):
    __slots__ = ("put", "refused", "written", "failed", "granted_bytes", "limit_bytes", "free_bytes")
    PUT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    GRANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    put: int
    refused: int
    written: int
    failed: int
    granted_bytes: int
    limit_bytes: int
    free_bytes: int
    def __init__(self, put: _Optional[int] = ..., refused: _Optional[int] = ..., written: _Optional[int] = ..., failed: _Optional[int] = ..., granted_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ...) -> None: ...

class TenantStats(_message.Message):
    __slots__ = ("tenant", "requests", "fills", "dropped", "kv_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FILLS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    requests: int
    fills: int
    dropped: int
    kv_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., requests: _Optional[int] = ..., fills: _Optional[int] = ..., dropped: _Optional[int] = ..., kv_bytes: _Optional[int] = ...) -> None: ...

class ReadStats(_message.Message):
    __slots__ = ("reads", "bytes", "merged", "short_reads", "errors", "direct_fallbacks", "microseconds", "in_flight", "queued", "latency_bounds_us", "latency_counts", "depth_bounds", "depth_counts", "depth_sum")
    READS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    SHORT_READS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    LATENCY_BOUNDS_US_FIELD_NUMBER: _ClassVar[int]
    LATENCY_COUNTS_FIELD_NUMBER: _ClassVar[int]
    DEPTH_BOUNDS_FIELD_NUMBER: _ClassVar[int]
    DEPTH_COUNTS_FIELD_NUMBER: _ClassVar[int]
    DEPTH_SUM_FIELD_NUMBER: _ClassVar[int]
    reads: int
    bytes: int
    merged: int
    short_reads: int
    errors: int
    direct_fallbacks: int
    microseconds: int
    in_flight: int
    queued: int
    latency_bounds_us: _containers.RepeatedScalarFieldContainer[int]
    latency_counts: _containers.RepeatedScalarFieldContainer[int]
    depth_bounds: _containers.RepeatedScalarFieldContainer[int]
    depth_counts: _containers.RepeatedScalarFieldContainer[int]
    depth_sum: int
    def __init__(self, reads: _Optional[int] = ..., bytes: _Optional[int] = ..., merged: _Optional[int] = ..., short_reads: _Optional[int] = ..., errors: _Optional[int] = ..., direct_fallbacks: _Optional[int] = ..., microseconds: _Optional[int] = ..., in_flight: _Optional[int] = ..., queued: _Optional[int] = ..., latency_bounds_us: _Optional[_Iterable[int]] = ..., latency_counts: _Optional[_Iterable[int]] = ..., depth_bounds: _Optional[_Iterable[int]] = ..., depth_counts: _Optional[_Iterable[int]] = ..., depth_sum: _Optional[int] = ...) -> None: ...

class CacheStats(_message.Message):
    __slots__ = ("kind", "capacity_bytes", "free_bytes", "filling_bytes", "valid_bytes", "retired_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILLING_BYTES_FIELD_NUMBER: _ClassVar[int]
    VALID_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETIRED_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    capacity_bytes: int
    free_bytes: int
    filling_bytes: int
    valid_bytes: int
    retired_bytes: int
    def __init__(self, kind: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., filling_bytes: _Optional[int] = ..., valid_bytes: _Optional[int] = ..., retired_bytes: _Optional[int] = ...) -> None: ...

class ClassStats(_message.Message):
    __slots__ = ("kind", "slot_bytes", "slots", "free", "filling", "retired")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    FILLING_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    kind: str
    slot_bytes: int
    slots: int
    free: int
    filling: int
    retired: int
    def __init__(self, kind: _Optional[str] = ..., slot_bytes: _Optional[int] = ..., slots: _Optional[int] = ..., free: _Optional[int] = ..., filling: _Optional[int] = ..., retired: _Optional[int] = ...) -> None: ...

class GetConfigRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetConfigResponse(_message.Message):
    __slots__ = ("config_json",)
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    config_json: str
    def __init__(self, config_json: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("begun",)
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    begun: bool
    def __init__(self, begun: _Optional[bool] = ...) -> None: ...
