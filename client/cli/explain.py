"""``strataflux explain``: sizes by tier, what a token will fetch, and whether this machine suits."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from strataflux.client.cli.bars import Bars
from strataflux.client.cli.options import ChannelsOption, JsonOption, WeightCacheOption, parse_cache
from strataflux.client.cli.output import Output, progress
from strataflux.client.errors import InputError, MisuseError

if TYPE_CHECKING:
    from strataflux.client.disk import DiskSpeed
    from strataflux.client.explain import Explanation, Machine, Verdict

__all__ = ["register"]

_MANIFEST: Final = "prepared.json"
_SCRATCH_BYTES: Final = 256 << 20
_WRITE_SECONDS: Final = 2.0
_READ_SECONDS: Final = 2.0
_WIDTH: Final = 28

_ModelArgument = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A prepared model, or one to prepare: .gguf or a Hugging Face folder.")
]
_AtOption = Annotated[
    Path | None, typer.Option("--at", help="A folder on the disk to ask about.", show_default="the model's")
]
_SpeedOption = Annotated[float, typer.Option("--tokens-per-second", min=0.01, help="What the disk must keep up with.")]
_MeasureOption = Annotated[bool, typer.Option("--measure/--no-measure", help="Measure this machine's disk (5 s).")]


def _command(
    model: _ModelArgument,
    base: Annotated[str | None, typer.Option(help="As strataflux prepare.", show_default="rtn")] = None,
    bits: Annotated[int | None, typer.Option(help="As strataflux prepare.", show_default="3; 4 for nf4")] = None,
    group: Annotated[int | None, typer.Option(help="As strataflux prepare.", show_default="64")] = None,
    mlp: Annotated[str | None, typer.Option(help="As strataflux prepare.", show_default="channels")] = None,
    k: ChannelsOption = None,
    weight_cache: WeightCacheOption = None,
    tokens_per_second: _SpeedOption = 10.0,
    at: _AtOption = None,
    measure: _MeasureOption = True,
    as_json: JsonOption = False,
) -> None:
    """What a model keeps in fast memory, in RAM and on disk, and what a token fetches; before it is prepared, too.

    Then whether this machine suits it: memory and room as they are, and the speed of its disk, by random reads of the
    store or of a scratch file that is gone afterwards.
    """
    output = Output(as_json)
    chosen = {"--base": base, "--bits": bits, "--group": group, "--mlp": mlp}
    prepared = (model / _MANIFEST).is_file()
    if prepared:
        for name, value in chosen.items():
            if value is not None:
                raise MisuseError(name, "together with a prepared model", "a model to prepare", "leave it out")
        explained = _of_prepared(model, k, weight_cache)
    else:
        explained = _of_source(model, base or "rtn", bits, group or 64, mlp or "channels", k, weight_cache)
    folder = at or (model if model.is_dir() else model.parent)
    machine = _machine(folder, model if prepared and at is None else None, explained, measure)
    from strataflux.client.explain import judge

    verdicts = judge(explained, machine, tokens_per_second, prepared=prepared)
    _show(output, explained, machine, verdicts)
    output.result(
        {
            "prepared": prepared,
            **explained.to_json(),
            "machine": asdict(machine),
            "verdicts": [asdict(verdict) for verdict in verdicts],
            "suits": all(verdict.suits for verdict in verdicts),
        }
    )


def _of_prepared(folder: Path, k: int | None, cache: str | None) -> "Explanation":
    from strataflux.client.explain import explain_prepared
    from strataflux.client.prepare.prepared import open_prepared
    from strataflux.client.schemes import store_slot_bytes

    prepared = open_prepared(folder)
    cache_bytes = parse_cache(cache, store_slot_bytes(prepared.config, prepared.sets)) if cache else None
    return explain_prepared(prepared, k, cache_bytes)


def _of_source(
    model: Path, base: str, bits: int | None, group: int, mlp: str, k: int | None, cache: str | None
) -> "Explanation":
    import torch

    from strataflux.client.explain import explain_model
    from strataflux.client.prepare.settings import PrepareSettings, base_settings, check_inputs
    from strataflux.client.prepare.source import open_source
    from strataflux.client.schemes import store_slot_bytes

    with progress("reading the model's dimensions"):
        config = open_source(model).config
    # Sizes need no text to calibrate on, whatever the base.
    nothing = torch.empty((0, 0), dtype=torch.int64)
    settings = PrepareSettings(base_settings(base, bits, group), 32 if k is None else k, tokens=nothing, mlp=mlp)
    check_inputs(config, settings)
    cache_bytes = parse_cache(cache, store_slot_bytes(config, settings.sets)) if cache else None
    return explain_model(config, settings, cache_bytes)


def _machine(folder: Path, prepared: Path | None, explained: "Explanation", measure: bool) -> "Machine":
    import os

    import psutil

    from strataflux.client.explain import Machine

    try:
        system = os.statvfs(folder)
    except OSError as error:
        raise InputError(folder, error.strerror or str(error), "a folder", "name another with --at") from error
    memory = psutil.virtual_memory()
    disk = _disk(folder, prepared, explained) if measure else None
    return Machine(memory.total, memory.available, system.f_bavail * system.f_frsize, disk)


def _disk(folder: Path, prepared: Path | None, explained: "Explanation") -> "DiskSpeed":
    """Reads of the store itself where it is large enough not to lie in some cache, else of a scratch file."""
    from strataflux.client.disk import measure_reads, scratch_file
    from strataflux.proto.store_format import RECORDS_FILE

    size = max(1, explained.token.disk_bytes // max(explained.token.records, 1))
    records = prepared / "refine" / RECORDS_FILE if prepared is not None else None
    with progress("measuring the disk"):
        if records is not None and records.stat().st_size >= _SCRATCH_BYTES:
            return measure_reads(records, size, _READ_SECONDS)
        with scratch_file(folder, _SCRATCH_BYTES, _WRITE_SECONDS) as path:
            return measure_reads(path, size, _READ_SECONDS)


def _show(output: Output, found: "Explanation", machine: "Machine", verdicts: "list[Verdict]") -> None:
    from strataflux.client.explain import size_text

    grouped = f"in groups of {found.group}" if found.group else "with a codebook a row"
    output.print(
        f"{found.architecture}, {found.layers} layers, {found.weights / 1e6:,.1f} M weights in projections\n"
        f"base {found.base}, {found.bits} bits {grouped}: {found.bits_per_weight:.2f} bits a weight, "
        f"{found.refined_bits_per_weight:.2f} with all refinement\n"
    )
    output.print(_tiers(found))
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in found.fast_bytes.items() if size)
    token = found.token
    output.print(
        f"\nFast memory: {parts};\n"
        f"beside it {_kv(found)}, exact in float16.\n"
        f"A token looks {token.records:,} records up, {size_text(token.record_bytes)} in all. With this cache about "
        f"{1 - found.expected_hit_rate:.0%} miss: {found.misses_a_token:,.0f} reads, "
        f"{size_text(token.disk_bytes * (1 - found.expected_hit_rate))} of the disk\n"
        "(expected from recorded selections of SmolLM2-135M under LRU, docs/CACHING.md).\n"
    )
    for verdict in verdicts:
        mark = "[bold green]✓[/]" if verdict.suits else "[bold red]✗[/]"
        more = "" if verdict.suits else f" → {verdict.remedy}"
        output.print(f"{mark} {verdict.name}: {verdict.found}; needed: {verdict.needed}{more}")
    if machine.disk is not None:
        disk = machine.disk
        how = "past the page cache" if disk.direct else "through the page cache: perhaps the speed of memory"
        times = f"{disk.median_seconds * 1e3:.2f} ms in the middle, 99 of 100 within {disk.slow_seconds * 1e3:.2f} ms"
        output.print(f"  its reads took {times}; {how}")


def _kv(found: "Explanation") -> str:
    from strataflux.client.explain import size_text

    text = f"{size_text(found.kv_bytes_a_token)} of KV cache for each token of context"
    return f"{text} and {size_text(found.kv_window_bytes)} in windows" if found.kv_window_bytes else text


def _tiers(found: "Explanation") -> Table:
    from strataflux.client.explain import size_text

    rows = (
        ("fast memory", sum(found.fast_bytes.values()), "base and embeddings"),
        ("RAM cache", found.cache_bytes, f"{found.cache_share:.0%} of the records"),
        ("disk", found.store_bytes, f"{found.records:,} records"),
    )
    largest = max(size for _, size, _ in rows)
    bars, table = Bars(Console()), Table.grid(padding=(0, 2))
    for justify in ("left", "left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for name, size, text in rows:
        bar = bars.stack([(size, "v", "cyan"), (largest - size, ".", "dim")], _WIDTH)
        table.add_row(name, bar, size_text(size), text)
    return table


def register(app: typer.Typer) -> None:
    """Add ``explain``."""
    app.command("explain")(_command)
