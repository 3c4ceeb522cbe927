"""``strataflux bench``: measure this machine."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from strataflux.client.cli.bench_gpu import decode, kernels
from strataflux.client.cli.output import Output, progress

__all__ = ["fill", "lookup", "put", "register"]


def lookup(
    records: Annotated[int, typer.Option(min=4096, help="Records in the directory.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the best counts.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout.")] = False,
) -> None:
    """Directory look-ups per second on one core, against a plain gather of the same ids."""
    from strataflux.client.bench.lookup import LookupSetup, bench_lookup

    output = Output(as_json)
    setup = LookupSetup(records=records, rounds=rounds)
    result = bench_lookup(setup)
    output.print(
        f"{result.lookups_per_second / 1e6:.1f} M look-ups/s ({result.hit_share:.0%} hits), plain gather "
        f"{result.gathers_per_second / 1e6:.1f} M/s: ratio {result.ratio_to_gather:.2f}; "
        f"{result.dropped_share:.1%} of requests dropped by a full ring"
    )
    output.result({**asdict(setup), **asdict(result)})


def fill(
    record_bytes: Annotated[list[int] | None, typer.Option("--record-bytes", help="Repeatable; 4096 and 2048.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each; medians count.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a round.")] = 3.0,
    store_mib: Annotated[int, typer.Option(min=64, help="Size of the store; it is made once and kept.")] = 2048,
    engine: Annotated[str, typer.Option(help="uring or threads.")] = "uring",
    folder: Annotated[Path | None, typer.Option(help="Where the store is kept; else the user's cache folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout.")] = False,
) -> None:
    """Records a second that a daemon of its own brings into its cache, against fio on the same file."""
    from strataflux.client.bench.fill import FillSetup, bench_fill, bench_store, default_folder

    output = Output(as_json)
    found: dict[str, object] = {}
    for size in record_bytes or [4096, 2048]:
        setup = FillSetup(store_mib << 20, size, rounds=rounds, seconds=seconds, engine=engine)
        with progress("making the store", (store_mib << 20) // size) as advance:
            manifest = bench_store(folder or default_folder(), setup, advance)
        result = bench_fill(manifest, setup)
        fio = "fio is not installed"
        if result.ratio_to_fio is not None:
            fio = f"{result.ratio_to_fio:.2f} of fio's rate, {result.cpu_ratio_to_fio:.2f} of its CPU"
        output.print(
            f"{size} B: {result.fills_per_second:,.0f} fills/s, {result.cpu_microseconds_per_fill:.2f} us of CPU each "
            f"({result.engine}, {result.direct_io}); {fio}"
        )
        found = found or asdict(result)
        found[f"{size}"] = {**asdict(setup), **asdict(result)}
    output.result(found)


def put(
    blocks: Annotated[int, typer.Option(min=8, help="Blocks of 4 MiB a slice.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of slices, ours and fio's; medians count.")] = 11,
    folder: Annotated[Path | None, typer.Option(help="Where the files lie; else the user's cache folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout.")] = False,
) -> None:
    """Bytes a second of KV blocks that a daemon of its own writes, against fio writing in sequence."""
    from strataflux.client.bench.fill import default_folder
    from strataflux.client.bench.put import PutSetup, bench_put

    output = Output(as_json)
    setup = PutSetup(blocks=blocks, rounds=rounds)
    root = folder or default_folder()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as own, progress("putting blocks", rounds) as advance:
        result = bench_put(Path(own), setup, advance)
    fio = "fio is not installed"
    if result.ratio_to_fio:
        quartiles = f"{result.ratio_lower_quartile:.2f} to {result.ratio_upper_quartile:.2f}"
        delayed = f"the daemon without a CPU {result.daemon_delayed_share:.0%} of the time"
        fio = f"{result.ratio_to_fio:.2f} of fio's rate (quartiles {quartiles}; {delayed})"
    output.print(
        f"{result.bytes_per_second / 1e6:,.0f} MB/s; {fio}; a step of 2,048 look-ups: "
        f"{result.step_microseconds_quiet:.0f} us, with puts under way {result.step_microseconds_with_puts:.0f} us"
    )
    output.result({**asdict(setup), **asdict(result)})


def register(app: typer.Typer) -> None:
    """Add ``bench`` and its sub-commands."""
    bench = typer.Typer(no_args_is_help=True, help="Measure this machine.")
    bench.command()(lookup)
    bench.command()(fill)
    bench.command()(put)
    bench.command()(decode)
    bench.command()(kernels)
    app.add_typer(bench, name="bench")
