"""``strataflux tune``: budgets that a decode step on this machine can pay for."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strataflux.client.cli.options import JsonOption, PreparedArgument
from strataflux.client.cli.output import Output, progress
from strataflux.client.errors import InputError, MisuseError

if TYPE_CHECKING:
    from rich.table import Table

    from strataflux.client.prepare.tune import Tuned

__all__ = ["register"]

_SHARE = re.compile(r"(\d{1,3}(?:\.\d+)?) ?%")


def _command(
    folder: PreparedArgument,
    slowdown: Annotated[str, typer.Option(help="How much longer a step may take than the base's.")] = "5%",
    platform: Annotated[str, typer.Option(help="unified: misses are skipped, nothing is shifted.")] = "unified",
    reference: Annotated[
        Path | None, typer.Option(help="The unquantized model.", show_default="what was prepared, if still there")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text.", show_default="prose of Python's own help")] = None,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of a measurement.")] = 24,
    largest: Annotated[int, typer.Option(min=1, max=1024, help="Largest budget to try.")] = 128,
    as_json: JsonOption = False,
) -> None:
    """Find the channel budgets with which a decode step is at most --slowdown slower, and keep them in the model.

    Steps are measured end to end through a daemon of its own. Refinement values stay as they were prepared: a model
    that was fitted for other budgets is best prepared again with the ones found here.
    """
    from strataflux.client.evaluate.compare import cut_windows
    from strataflux.client.evaluate.text import python_prose, read_text
    from strataflux.client.launch import PrivateDaemon
    from strataflux.client.prepare.prepared import open_prepared
    from strataflux.client.prepare.source import open_source
    from strataflux.client.prepare.tune import explain, tune
    from strataflux.client.refined import store_slot_bytes
    from strataflux.client.runtime.models import SETS, DecoderWeights
    from strataflux.client.tuning import DecodeTimer, keep, make_judge

    output = Output(as_json)
    limit = _share(slowdown)
    if platform != "unified":
        raise MisuseError(
            "--platform", repr(platform), "unified", "fetch lead and lag are searched where a GPU decodes"
        )
    prepared = open_prepared(folder)
    origin = reference or (Path(prepared.manifest.origin) if prepared.manifest.origin else None)
    if origin is None or not origin.exists():
        raise InputError(folder, "no unquantized model to compare with", "--reference", "pass the model it was made of")
    with progress("reading the models"):
        low, exact = DecoderWeights.read(prepared), DecoderWeights.read(open_source(origin))
        ids = prepared.tokenizer().encode(python_prose() if text is None else read_text(text)).ids
        windows = cut_windows(text or "pydoc_data.topics", ids, 8 * tokens, 2)
    # Slots of a size class come in pages, so a cache of exactly the store's slots could lack a page.
    daemon = PrivateDaemon([prepared.store], weight_cache_bytes=2 * store_slot_bytes(prepared.config))
    with progress("measuring candidates"), daemon as running:
        timer = DecodeTimer(prepared, low, windows[0][:tokens], running.runtime_dir)
        found = tune(timer, make_judge(prepared, exact, low, windows), limit, [(0.0,) * len(SETS)], largest=largest)
    keep(prepared, found)
    output.print(_table(found))
    stale = "fit" in prepared.manifest.identity["layout"] and dict(prepared.manifest.k) != found.chosen.budgets()
    if stale:
        output.print("refinement was fitted for other budgets: prepare again with those found")
    output.result({**explain(found), "prepared": folder, "platform": platform, "fitted_for_other_budgets": stale})


def _share(text: str) -> float:
    match = _SHARE.fullmatch(text)
    if match is None:
        raise MisuseError("--slowdown", repr(text), "a percentage such as 5%", "mend it")
    return float(match[1]) / 100


def _table(found: "Tuned") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("qkv", "o", "gate_up", "down", "ms a step", "slower by", "KL", ""):
        table.add_column(heading, justify="right")
    for trial in found.trials:
        table.add_row(
            *map(str, trial.candidate.k),
            f"{1e3 * trial.seconds:.2f}",
            f"{trial.seconds / found.base_seconds - 1:.1%}",
            "-" if trial.kl is None else f"{trial.kl:.3f}",
            "chosen" if trial.candidate == found.chosen else "" if trial.fits else "too slow",
        )
    return table


def register(app: typer.Typer) -> None:
    """Add ``tune``."""
    app.command("tune")(_command)
