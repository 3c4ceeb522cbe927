"""``strataflux status``, ``stores`` and ``sessions``: what a daemon serves, and to whom."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from strataflux.client.cli.options import JsonOption, RuntimeDirOption
from strataflux.client.cli.output import Output
from strataflux.proto.runtime import runtime_folder

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from strataflux.client.control import Control

__all__ = ["register", "sessions", "status", "stores"]


def status(runtime_dir: RuntimeDirOption = None, as_json: JsonOption = False) -> None:
    """State, caches and rates of a daemon."""
    output = Output(as_json)
    with _control(runtime_dir) as control:
        info, stats = control.info(), control.stats()
    output.print(
        f"stratafluxd {info.version}, process {info.pid}: {info.state}, up {info.uptime_seconds:.0f} s, "
        f"{info.engine} {info.direct_io}{', registered' if info.registered_buffers else ''}"
    )
    for name, text in sorted(info.degraded.items()):
        output.print(f"  {name}: {text}")
    for cache in stats.caches:
        output.print(
            f"  {cache.kind} cache: {cache.valid_bytes / 2**20:.1f} of {cache.capacity_bytes / 2**20:.1f} MiB in use "
            f"({info.policy})"
        )
    for tenant in stats.tenants:
        output.print(
            f"  tenant {tenant.tenant}: {tenant.fills:,} fills, {tenant.dropped:,} requests dropped, "
            f"{tenant.kv_bytes / 2**20:.1f} MiB of KV on disk"
        )
    lookups, fills = stats.lookups, stats.fills
    asked, hits = lookups.weight_lookups + lookups.kv_lookups, lookups.weight_hits + lookups.kv_hits
    output.print(f"  look-ups: {asked:,}, of them hits {_share(hits, asked)}")
    output.print(f"  fills: {fills.fills:,} in {_mean(fills.latency_us, fills.fills)}, evictions {fills.evictions:,}")
    if fills.prefetched:
        used, unused = (sum(getattr(k, f"prefetch_{fate}") for k in stats.kinds) for fate in ("used", "unused"))
        output.print(
            f"  read ahead: {fills.prefetched:,}, of those that were settled used {_share(used, used + unused)}"
        )
    output.print(f"  reads: {stats.reads.reads:,} in {_mean(stats.reads.microseconds, stats.reads.reads)}")
    output.result({"info": _plain(info), "stats": _plain(stats)})


def stores(runtime_dir: RuntimeDirOption = None, as_json: JsonOption = False) -> None:
    """The stores a daemon serves."""
    output = Output(as_json)
    with _control(runtime_dir) as control:
        found = control.stores()
    table = Table(box=None, pad_edge=False)
    for heading in ("digest", "generation", "records", "MB", "resident", "quarantined", "sessions", "share", "path"):
        table.add_column(heading, justify="left" if heading in ("digest", "share", "path") else "right")
    for store in found:
        table.add_row(
            store.digest[:12],
            str(store.generation),
            f"{store.records:,}",
            f"{store.bytes / 1e6:.1f}",
            f"{store.stats.resident_records:,}",
            f"{store.stats.quarantined:,}",
            str(store.sessions),
            store.share,
            store.path or "-",
        )
    output.print(table)
    output.result({"stores": [_plain(store) for store in found]})


def sessions(runtime_dir: RuntimeDirOption = None, as_json: JsonOption = False) -> None:
    """The sessions a daemon has."""
    output = Output(as_json)
    with _control(runtime_dir) as control:
        found = control.sessions()
    table = Table(box=None, pad_edge=False)
    headings = ("session", "client", "tenant", "uid", "pid", "steps", "look-ups", "hit rate", "dropped", "fenced")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in headings[:3] else "right")
    for session in found:
        row = session.stats
        table.add_row(
            f"{session.session:x}",
            session.client,
            session.tenant or "-",
            str(session.uid),
            str(session.pid),
            f"{row.steps:,}",
            f"{row.lookups:,}",
            _share(row.hits, row.lookups),
            f"{row.dropped:,}",
            "yes" if row.fenced else "no",
        )
    output.print(table)
    output.result({"sessions": [_plain(session) for session in found]})


def _control(runtime_dir: Path | None) -> "Control":
    from strataflux.client.control import Control

    return Control(runtime_folder(runtime_dir, os.environ))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _mean(microseconds: int, count: int) -> str:
    return f"{microseconds / count:,.0f} us each" if count else "no time"


def _plain(message: "Message") -> dict[str, object]:
    """Every field by its name in control.proto, those at zero included."""
    return {field.name: _value(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _value(value: object) -> object:
    from google.protobuf.message import Message

    if isinstance(value, Message):
        return _plain(value)
    if isinstance(value, Mapping):
        return {str(key): _value(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [_value(item) for item in value]
    return value


def register(app: typer.Typer) -> None:
    """Add the three commands."""
    app.command()(status)
    app.command()(stores)
    app.command()(sessions)
