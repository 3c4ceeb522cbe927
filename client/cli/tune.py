"""``strataflux tune``: budgets, shifts and MLP scheme that a decode step on this machine can pay for."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strataflux.client.cli.options import JsonOption, MissOption, PreparedArgument, parse_cache, parse_miss
from strataflux.client.cli.output import Output, progress
from strataflux.client.errors import InputError, MisuseError

if TYPE_CHECKING:
    from rich.table import Table

    from strataflux.client.prepare.candidates import Trial
    from strataflux.client.prepare.prepared import PreparedModel
    from strataflux.client.prepare.tune import Tuned
    from strataflux.client.tune_run import Outcome

__all__ = ["register"]

_SHARE = re.compile(r"(\d{1,3}(?:\.\d+)?) ?%")


def _command(
    folder: PreparedArgument,
    slowdown: Annotated[str, typer.Option(help="How much longer a step may take than the base's.")] = "5%",
    platform: Annotated[
        str, typer.Option(help="unified: a RAM cache over an SSD; dedicated: all refinement in host RAM.")
    ] = "unified",
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text to judge by.", show_default="prose of Python's own help")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="The unquantized model.", show_default="what was prepared, if still there")
    ] = None,
    miss: MissOption = "skip",
    weight_cache: Annotated[
        str, typer.Option("--weight-cache", help="RAM of the daemon's weight cache: bytes, or % of the store.")
    ] = "100%",
    tokens: Annotated[int, typer.Option(min=8, max=128, help="Pairs of steps of a measurement.")] = 24,
    windows: Annotated[int, typer.Option(min=1, help="Stretches of 128 tokens to judge by, the text's last.")] = 2,
    largest: Annotated[int, typer.Option(min=1, max=1024, help="Largest budget to try.")] = 128,
    minutes: Annotated[float, typer.Option(min=0, help="When to end the search with the best so far.")] = 8.0,
    as_json: JsonOption = False,
) -> None:
    """Find what refines best while a decode step is at most --slowdown slower, and keep it in the prepared model.

    Steps are measured end to end, through a daemon of its own. Fetch lead and lag are searched where something waits
    for records: with --platform dedicated, or --miss wait:MS. The model changes at the end, all at once; stopped
    before, it stays as it was.
    """
    from strataflux.client.prepare.prepared import open_prepared
    from strataflux.client.tune_run import TuneSettings, tune_prepared

    output, policy, limit = Output(as_json), parse_miss(miss), _share(slowdown)
    if platform not in ("unified", "dedicated"):
        raise MisuseError("--platform", repr(platform), "unified or dedicated", "choose one of these")
    prepared = open_prepared(folder)
    settings = TuneSettings(
        slowdown=limit,
        dedicated=platform == "dedicated",
        miss=policy,
        weight_cache_bytes=_cache_bytes(prepared, weight_cache),
        text=text,
        windows=windows,
        tokens=tokens,
        largest=largest,
        search_seconds=60 * minutes,
    )
    outcome = tune_prepared(prepared, _reference(prepared, reference), settings, progress)
    _show(output, outcome, platform)


def _share(text: str) -> float:
    match = _SHARE.fullmatch(text)
    if match is None:
        raise MisuseError("--slowdown", repr(text), "a percentage of 0 or more, such as 5%", "write --slowdown 5%")
    return float(match[1]) / 100


def _cache_bytes(prepared: "PreparedModel", asked: str) -> int:
    from strataflux.client.schemes import store_slot_bytes

    # Slots of a size class come in pages, so a cache of exactly the store's slots could lack a page.
    whole = store_slot_bytes(prepared.config, prepared.sets)
    return 2 * whole if asked == "100%" else parse_cache(asked, whole)


def _reference(prepared: "PreparedModel", asked: Path | None) -> Path:
    origin = asked or (Path(prepared.manifest.origin) if prepared.manifest.origin else None)
    if origin is None or not origin.exists():
        raise InputError(
            prepared.folder, "no unquantized model to compare with", "--reference", "pass the model it was made of"
        )
    return origin


def _show(output: Output, outcome: "Outcome", platform: str) -> None:
    from strataflux.client.prepare.tune import explain

    found, folder = outcome.found, outcome.prepared.folder
    output.print(_table(found))
    if any(found.chosen.k):
        fitted = f"; fitted anew at these budgets {outcome.kl:.3f}" if outcome.refitted else ""
        output.print(
            f"{folder}: a step is {found.timing.slowdown:.1%} slower, and KL {found.kl:.3f} where it was "
            f"{found.base_kl:.3f} unrefined{fitted}"
        )
    else:
        output.print(f"{folder}: nothing is refined, for nothing tried was fast enough and better than the base")
    if not found.complete:
        output.print("time was up before all was searched: --minutes gives it more")
    told = {"prepared": folder, "platform": platform, "refitted": outcome.refitted, "kl_stored": outcome.kl}
    output.result({**explain(found), **told})


def _table(found: "Tuned") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("qkv", "o", "gate_up", "down", "shift", "MLP", "ms a step", "slower by", "KL", ""):
        table.add_column(heading, justify="left" if heading in ("MLP", "") else "right", no_wrap=True)
    for trial in found.trials:
        one = trial.candidate
        table.add_row(
            *map(str, one.k),
            " ".join(f"{blocks:g}" for blocks in one.shift) if any(one.shift) else "-",
            one.mlp,
            f"{1e3 * trial.timing.seconds:.2f}",
            f"{trial.timing.slowdown:.1%}",
            "-" if trial.kl is None else f"{trial.kl:.3f}",
            _verdict(trial, found),
        )
    return table


def _verdict(trial: "Trial", found: "Tuned") -> str:
    chosen = trial.candidate == found.chosen and trial.timing == found.timing
    verdict = "chosen" if chosen else "fits" if trial.fits else "too slow"
    return f"again: {verdict}" if trial.confirming else verdict


def register(app: typer.Typer) -> None:
    """Add ``tune``."""
    app.command("tune")(_command)
