"""Configuration: one TOML file and a few flags become frozen dataclasses, or the start stops with the reason.

Nothing is ignored: an unknown key, a value of another kind and one out of bounds are errors that name file and key.
Order of precedence: flag, file, default. systemd/stratafluxd.toml shows every key.
"""

import os
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from strataflux.daemon import values
from strataflux.daemon.errors import ConfigError
from strataflux.daemon.values import Address, key
from strataflux.proto import layout

__all__ = [
    "MAX_TENANTS",
    "AttachConfig",
    "CacheConfig",
    "Config",
    "HealthConfig",
    "ImportsConfig",
    "KvConfig",
    "LifeConfig",
    "LogConfig",
    "MemoryConfig",
    "MetricsConfig",
    "Override",
    "ReaderConfig",
    "ScrubConfig",
    "StoreConfig",
    "TenantConfig",
    "load_config",
    "resolve_config",
]

MAX_TENANTS: Final = 16
_MIB: Final = 1 << 20
_LARGEST_BUDGET: Final = layout.MAX_SEGMENTS * layout.SEGMENT_MAX_BYTES
_FILE_MAX_BYTES: Final = 1 << 20

S = TypeVar("S")


@dataclass(frozen=True)
class StoreConfig:
    """One ``[[store]]``."""

    path: Path
    # behaviour
    share: str = key(values.choice("all", "uid", "session"), "all")
    """Who may use the store at the same time. Sharing slots lets one user time what another looked up; narrower sharing
    costs the second user: it is refused until the first has gone."""
    allow_uids: tuple[int, ...] | None = key(values.user_list, None)
    allow_groups: tuple[int, ...] | None = key(values.group_list, None)
    """Absent: anybody who can reach the socket. root and the daemon's own user are always allowed."""
    # performance
    preload: bool = key(values.boolean, False)
    """Reading ahead costs one sequential pass over the store; without it the cache warms by misses."""


@dataclass(frozen=True)
class TenantConfig:
    """One ``[[tenant]]``. Behaviour: a group of users, and what it may hold. Whoever is in none is not bounded so."""

    name: str
    """In metrics and listings."""
    uids: tuple[int, ...] | None = key(values.user_list, None)
    gids: tuple[int, ...] | None = key(values.group_list, None)
    """Who belongs to it; of several that name a user the first counts."""
    max_sessions: int = key(values.number(0, layout.MAX_SESSIONS), layout.MAX_SESSIONS)
    kv_sessions: int = key(values.number(0, 16), 16)
    """Of ``kv.sessions``."""
    kv_file_bytes: int = key(values.size(0, 1 << 50), 1 << 50)
    """On disk, for the KV blocks of all its sessions together."""
    share: int = key(values.number(1, 100), 10)
    """Of the reads, in relation to the other tenants' while several ask; everybody in no tenant counts as 10."""


@dataclass(frozen=True)
class ImportsConfig:
    """``[imports]``. Behaviour: the folder of stores that are imported, added and removed while the service runs."""

    folder: Path | None = key(values.optional_folder, None)  # noqa: RUF009 – a field, as in the other sections
    """Absent: ``stores`` in the service's state folder; without one there is none."""
    free_bytes: int = key(values.size(0, 1 << 50), 1 << 30)
    """Left free on its file system by imports."""


@dataclass(frozen=True)
class CacheConfig:
    """``[cache]``. Performance: memory that is taken at the start and given back at the end."""

    weight_bytes: int = key(values.size(_MIB, _LARGEST_BUDGET), 128 * _MIB)
    """A small share of a model's records already holds most look-ups; each byte is pinned shared memory."""
    kv_bytes: int = key(values.size(_MIB, _LARGEST_BUDGET), 128 * _MIB)
    """Shared by the sessions of ``[kv]``; taken when one attaches. It pays for six write buffers each, too."""
    policy: str = key(values.policy, "lru")
    """What leaves when room is needed. Others than lru cost more memory and time a slot, and a start of their own to
    compile."""
    warm_start: bool = key(values.boolean, True)
    """Reading again what was resident before a restart costs these reads, and a small file in the state folder."""


@dataclass(frozen=True)
class KvConfig:
    """``[kv]``. Behaviour: refinement bits of KV caches, which live as long as their session."""

    sessions: int = key(values.number(0, 16), 1)
    """Sessions with KV at the same time; each gets an even share of ``cache.kv_bytes``. 0 refuses KV."""
    folder: Path | None = key(values.optional_folder, None)  # noqa: RUF009 – a field, as in the other sections
    """Where their files lie (without names: nothing is left behind). Absent: the service's state folder, else the
    folder for temporary files."""
    file_bytes: int = key(values.size(_MIB, 1 << 50), 64 << 30)
    """The most that one session may put on disk; a 128K context of an 8B model takes 4 GiB."""
    free_bytes: int = key(values.size(0, 1 << 50), 1 << 30)
    """Left free on that file system whatever clients ask for."""


@dataclass(frozen=True)
class ReaderConfig:
    """``[reader]``."""

    # behaviour
    direct_io: str = key(values.choice("require", "prefer", "off"), "prefer")
    """``prefer`` falls back to the page cache where a file system refuses direct reads, which costs memory twice."""
    grace_seconds: float = key(values.seconds(0.05, 60), 2.0)
    """How long a step may hold evicted slots before its session is fenced; longer suits slow decoders, costs slots."""
    quarantine_seconds: float = key(values.seconds(0.1, 86_400), 60.0)
    """A record that could not be read twice is left alone for as long, and twice as long each further time."""
    # performance
    engine: str = key(values.choice("uring", "threads", "liburing"), "uring")
    """``threads`` works where containers forbid io_uring, and costs more CPU per read."""
    queue_depth: int = key(values.number(1, 1024), 128)
    """Reads in flight; each costs a bounce buffer of one record's window."""
    threads: int = key(values.number(1, 64), 4)
    """Of the ``threads`` engine only; more than the cores at hand cut throughput."""


@dataclass(frozen=True)
class AttachConfig:
    """``[attach]``. Behaviour: bounds on what clients may hold."""

    max_sessions: int = key(values.number(1, layout.MAX_SESSIONS), layout.MAX_SESSIONS)
    """Every session costs one look at its page per sweep and a segment of stamps (4 bytes a 256 bytes of cache)."""
    max_sessions_per_uid: int = key(values.number(1, layout.MAX_SESSIONS), 16)
    hello_seconds: float = key(values.seconds(0.001, 60), 2.0)
    """A connection that says nothing holds a descriptor for this long."""


@dataclass(frozen=True)
class LifeConfig:
    """``[life]``. Behaviour."""

    drain_seconds: float = key(values.seconds(0, 600), 5.0)
    """The most that a stop waits for reads in flight; a second signal ends the wait."""


@dataclass(frozen=True)
class HealthConfig:
    """``[health]``. Behaviour."""

    limit_seconds: float = key(values.seconds(0.01, 600), 2.0)
    """The service is not ready while the reader and one read of each device take longer; longer suits disks that
    sleep."""
    interval_seconds: float = key(values.seconds(0.1, 3600), 10.0)
    """Between two such looks; each costs one small read of each store."""


@dataclass(frozen=True)
class MemoryConfig:
    """``[memory]``. Behaviour: when cache is given back to the machine, one segment at a time, and taken again."""

    low_bytes: int = key(values.size(0, 1 << 50), 256 * _MIB)
    """Less free memory releases cache; 0 never does. Every record released is read again when it is wanted."""
    high_bytes: int = key(values.size(0, 1 << 50), 512 * _MIB)
    """What has to stay free when cache is taken again; a distance to ``low_bytes`` keeps it from going to and fro."""
    pressure_percent: float = key(values.percent(0.1, 100), 10.0)
    """Share of the last ten seconds in which some task waited for memory, from which on cache is released."""
    calm_seconds: float = key(values.seconds(0, 86_400), 60.0)
    """Without either for as long, cache is taken again."""


@dataclass(frozen=True)
class ScrubConfig:
    """``[scrub]``. Performance: reading stores in the background to find damage before a client meets it."""

    bytes_per_day: int = key(values.size(0, 1 << 60), 0)
    """0: never. The device reads as much more; a tenth of it a day finds everything within ten."""


@dataclass(frozen=True)
class MetricsConfig:
    """``[metrics]``. Behaviour."""

    listen: Address | None = key(values.address, None)  # noqa: RUF009 – a field, as in the other sections
    """Off unless set: the port is readable by everybody who reaches it, and costs one thread."""


@dataclass(frozen=True)
class LogConfig:
    """``[log]``. Behaviour."""

    level: str = key(values.choice("debug", "info", "warning", "error"), "info")
    json: bool = key(values.boolean, False)


@dataclass(frozen=True)
class Config:
    """All of it. ``runtime_dir`` is None where neither file nor flag names one: the environment decides then."""

    runtime_dir: Path | None = None
    stores: tuple[StoreConfig, ...] = ()
    tenants: tuple[TenantConfig, ...] = ()
    imports: ImportsConfig = field(default_factory=ImportsConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    kv: KvConfig = field(default_factory=KvConfig)
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    attach: AttachConfig = field(default_factory=AttachConfig)
    life: LifeConfig = field(default_factory=LifeConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    scrub: ScrubConfig = field(default_factory=ScrubConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True)
class Override:
    """A flag's value for one key, such as ``cache.weight_bytes``."""

    key: str
    flag: str
    value: object


def load_config(path: Path | None, overrides: Sequence[Override] = (), stores: Sequence[str] = ()) -> Config:
    """The configuration in file ``path`` (None: defaults), with flags over it and ``stores`` added to its stores.

    Raises:
        ConfigError: whatever cannot be followed, by file and key, or by flag.
    """
    return resolve_config({} if path is None else _read(path), str(path), overrides, stores)


def resolve_config(
    table: Mapping[str, Any], source: str, overrides: Sequence[Override] = (), stores: Sequence[str] = ()
) -> Config:
    """As :func:`load_config`, for a table that was parsed from ``source``."""
    sections = {
        "imports": ImportsConfig,
        "cache": CacheConfig,
        "kv": KvConfig,
        "reader": ReaderConfig,
        "attach": AttachConfig,
        "life": LifeConfig,
        "health": HealthConfig,
        "memory": MemoryConfig,
        "scrub": ScrubConfig,
        "metrics": MetricsConfig,
        "log": LogConfig,
    }
    known = {"runtime_dir", "store", "tenant", *sections}
    _refuse_unknown(table, known, source, "")
    flags = {override.key: override for override in overrides}
    runtime_dir = None
    if "runtime_dir" in flags:
        runtime_dir = _parse(values.folder, flags["runtime_dir"].value, flags["runtime_dir"].flag)
    elif "runtime_dir" in table:
        runtime_dir = _parse(values.folder, table["runtime_dir"], f"{source}:runtime_dir")
    parsed: dict[str, Any] = {
        name: _section(kind, table.get(name, {}), source, name, flags) for name, kind in sections.items()
    }
    _refuse_crossed(parsed["memory"], source)
    return Config(
        runtime_dir=runtime_dir,
        stores=_stores(table.get("store", []), source, stores),
        tenants=_tenants(table.get("tenant", []), source),
        **parsed,
    )


def _refuse_crossed(memory: MemoryConfig, source: str) -> None:
    if memory.high_bytes < memory.low_bytes:
        raise ConfigError(
            f"{source}:memory.high_bytes",
            values.size_text(memory.high_bytes),
            f"at least memory.low_bytes, {values.size_text(memory.low_bytes)}",
            "raise it, or lower memory.low_bytes",
        )


def _open_at_once(path: str, flags: int) -> int:
    """Never wait for whoever might write into a pipe of that name."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _read(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(path, "no regular file", "a TOML file", "name one: each reload reads it again")
            raw = file.read(_FILE_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(path, str(error.strerror), "a readable TOML file", "check the path and its mode") from error
    if len(raw) > _FILE_MAX_BYTES:
        raise ConfigError(path, f"more than {_FILE_MAX_BYTES} bytes", "a TOML file within that", "check the path")
    if not raw.strip():  # what an editor leaves on a full disk
        raise ConfigError(path, "an empty file", "a TOML file", "write it again; for defaults alone a comment will do")
    try:
        return tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        remedy = "mend it; systemd/stratafluxd.toml shows every key"
        raise ConfigError(path, f"no TOML ({error})", "a TOML file in UTF-8", remedy) from error


def _stores(raw: object, source: str, added: Sequence[str]) -> tuple[StoreConfig, ...]:
    found = list(_named(StoreConfig, raw, source, "store", "path", values.folder))
    found.extend(StoreConfig(_parse(values.folder, path, "--store")) for path in added)
    _refuse_twice([store.path for store in found], f"{source}:store")
    return tuple(found)


def _tenants(raw: object, source: str) -> tuple[TenantConfig, ...]:
    found = list(_named(TenantConfig, raw, source, "tenant", "name", values.label))
    _refuse_twice([tenant.name for tenant in found], f"{source}:tenant")
    if len(found) > MAX_TENANTS:
        raise ConfigError(
            f"{source}:tenant", f"{len(found)} of them", f"at most {MAX_TENANTS}", "name groups, and not single users"
        )
    return tuple(found)


def _named(kind: type[S], raw: object, source: str, table: str, name: str, name_kind: values.Kind[Any]) -> Iterator[S]:
    """Each of ``[[table]]``, whose key ``name`` has to be there."""
    if not isinstance(raw, list) or not all(isinstance(item, dict) for item in raw):
        raise ConfigError(
            f"{source}:{table}", _shown(raw), f"[[{table}]] tables", f"write [[{table}]], once for each of them"
        )
    for number, item in enumerate(raw):
        prefix = f"{table}[{number}]"
        if name not in item:
            raise ConfigError(f"{source}:{prefix}.{name}", "no such key", name_kind.expected, f"set {name}")
        given = {name: _parse(name_kind, item[name], f"{source}:{prefix}.{name}")}
        yield _section(kind, {k: v for k, v in item.items() if k != name}, source, prefix, {}, **given)


def _refuse_twice(names: Sequence[object], subject: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(subject, f"{name} twice", "each once", "remove one of the two")


def _section(kind: type[S], table: object, source: str, prefix: str, flags: Mapping[str, Override], **given: Any) -> S:
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"{source}:{prefix}", _shown(table), f"a table [{prefix}]", f"write [{prefix}] above its keys"
        )
    keys = {f.name: f.metadata["kind"] for f in fields(kind) if "kind" in f.metadata}  # type: ignore[arg-type]
    _refuse_unknown(table, keys.keys() | given.keys(), source, f"{prefix}.")
    chosen = {name: _parse(keys[name], value, f"{source}:{prefix}.{name}") for name, value in table.items()}
    for name, value_kind in keys.items():
        if (override := flags.get(f"{prefix}.{name}")) is not None:
            chosen[name] = _parse(value_kind, override.value, override.flag)
    return kind(**given, **chosen)


def _refuse_unknown(table: Mapping[str, Any], known: "set[str]", source: str, prefix: str) -> None:
    for name in table:
        if name not in known:
            raise ConfigError(
                f"{source}:{prefix}{name}",
                "an unknown key",
                f"one of {', '.join(sorted(known))}",
                "remove it, or mend its spelling",
            )


def _parse(kind: values.Kind[S], value: object, subject: str) -> S:
    try:
        return kind.parse(value)
    except ValueError as error:
        raise ConfigError(subject, str(error) or _shown(value), kind.expected, "mend the value") from error


def _shown(value: object) -> str:
    return f"{value!r}"[:120]
