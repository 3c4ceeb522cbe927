"""``strataflux bench``: measure this machine."""

from dataclasses import asdict
from typing import Annotated

import typer

from strataflux.client.cli.output import Output

__all__ = [
    "lookup",
    "register",
]


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


def register(app: typer.Typer) -> None:
    """Add ``bench`` and its sub-commands."""
    bench = typer.Typer(no_args_is_help=True, help="Measure this machine.")
    bench.command()(lookup)
    app.add_typer(bench, name="bench")
