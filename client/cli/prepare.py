"""``strataflux prepare``: quantize a model and store what quantization took away."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strataflux.client.cli.fsq_options import (
    FsqBoundOption,
    FsqLevelsOption,
    FsqOption,
    FsqWeightsOption,
    OwnTextOption,
    TiersOption,
    TuneOption,
    TuneTextOption,
    parse_requests,
    report_codes,
)
from strataflux.client.cli.options import JsonOption
from strataflux.client.cli.output import Output, progress
from strataflux.client.errors import InputError, MisuseError

if TYPE_CHECKING:
    from torch import Tensor

    from strataflux.client.prepare.fsq_request import FsqTraining
    from strataflux.client.prepare.prepared import PreparedModel
    from strataflux.client.prepare.settings import FitSettings
    from strataflux.client.prepare.source import ModelSource

__all__ = ["register"]

_SEQUENCE = 512

_CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        help="A UTF-8 text like those to decode, for all but plain rtn and nf4.", show_default="Python's help"
    ),
]
_BitsOption = Annotated[
    int | None, typer.Option(help="Bits of the resident weights: 2, 3 or 4.", show_default="3; 4 for nf4")
]
_MlpOption = Annotated[
    str, typer.Option(help="Refine MLPs by channels or bundles of neurons; both: `strataflux tune` chooses.")
]
_LadderOption = Annotated[
    str,
    typer.Option(help="With --fit: other budgets to fit for, such as 8,128, for a tuner; auto: k/4 and 4k; none."),
]


def _command(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A .gguf file, or a Hugging Face folder with safetensors.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="Where the prepared model shall lie.")],
    bits: _BitsOption = None,
    group: Annotated[int, typer.Option(help="Weights that share a scale: 64 or 128.")] = 64,
    base: Annotated[str, typer.Option(help="How weights are quantized: rtn, awq, sqllm, lnq or nf4.")] = "rtn",
    guide_groups: Annotated[int, typer.Option(help="Of lnq: row groups with a Hessian of their own, 1 or 4.")] = 4,
    fit: Annotated[str, typer.Option(help="Refinement values: off (residuals), auto, or a multiplier of λ.")] = "off",
    calibration: _CalibrationOption = None,
    calibration_tokens: Annotated[int, typer.Option(min=2048, help="How much of it to use.")] = 16384,
    device: Annotated[str, typer.Option(help="Where calibration runs: cpu or cuda.")] = "cpu",
    restart: Annotated[bool, typer.Option("--restart", help="Drop what an interrupted run finished.")] = False,
    k: Annotated[int, typer.Option(min=0, max=1024, help="Default of --k when decoding.")] = 32,
    mlp: _MlpOption = "channels",
    ladder: _LadderOption = "auto",
    fsq: FsqOption = None,
    fsq_levels: FsqLevelsOption = None,
    fsq_bound: FsqBoundOption = None,
    fsq_weights: FsqWeightsOption = None,
    tiers: TiersOption = None,
    tune: TuneOption = None,
    text: TuneTextOption = None,
    own_text: OwnTextOption = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace a prepared model that is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Prepare a model: low-bit weights to keep in memory, and a store of refinement bits.

    Nothing is at OUT before it is whole; with --force the old model is there until the new one takes its place. What
    an interrupted run with a base that calibrates, or with --fit or --fsq, finished is taken up by the next one.
    """
    from strataflux.client.prepare.settings import PrepareSettings, base_settings
    from strataflux.client.prepare.source import open_source
    from strataflux.client.prepare.write import prepare, prepare_steps

    output = Output(as_json)
    started = time.monotonic()
    chosen, fitting = base_settings(base, bits, group, guide_groups), _fit(fit)
    _check_target(folder, force)
    with progress("reading the model"):
        model = open_source(source)
        training = _training(model, tune, text or calibration, own_text)
        codes = parse_requests(model, fsq, fsq_levels, fsq_bound, fsq_weights, training, tiers)
        needed = base not in ("rtn", "nf4") or fitting is not None or codes
        tokens = _tokens(model, calibration, calibration_tokens) if needed else None
    rungs = _ladder(ladder, k) if fitting or ladder != "auto" else ()
    origin = str(source.resolve())
    settings = PrepareSettings(chosen, k, fitting, tokens, device, origin, mlp, ladder=rungs, codes=codes)
    with progress("preparing layers", prepare_steps(model.config, settings)) as advance:
        prepared = prepare(model, folder, settings, advance, restart=restart)
    _report(output, prepared, model, fit, time.monotonic() - started)


def _report(output: Output, prepared: "PreparedModel", model: "ModelSource", fit: str, seconds: float) -> None:
    from strataflux.client.prepare.refinement import ladder_rungs

    manifest = prepared.manifest
    store_bytes = sum(file.stat().st_size for file in prepared.store.iterdir())
    grouped = f"in groups of {manifest.group}" if manifest.group else "with a codebook a row"
    output.print(
        f"{prepared.folder}: {manifest.base}, {manifest.bits} bits {grouped}, "
        f"{prepared.resident_bytes / 1e6:.1f} MB resident, "
        f"{store_bytes / 1e6:.1f} MB of refinement bits, in {seconds:.1f} s"
    )
    codes = report_codes(output, prepared, model)
    output.result(
        {
            "prepared": prepared.folder,
            "base": manifest.base,
            "bits": manifest.bits,
            "group": manifest.group,
            "bits_per_weight": prepared.bits_per_weight,
            "fit": fit,
            "mlp": manifest.mlp_scheme,
            "sets": prepared.sets,
            "ladder": ladder_rungs(prepared),
            "codes": codes,
            "resident_bytes": prepared.resident_bytes,
            "store_bytes": store_bytes,
            "identity_digest": prepared.manifest.digest,
            "seconds": seconds,
        }
    )


def _fit(text: str) -> "FitSettings | None":
    from strataflux.client.prepare.settings import FitSettings

    if text in ("off", "auto"):
        return FitSettings() if text == "auto" else None
    try:
        return FitSettings(float(text))
    except ValueError as error:
        raise MisuseError("--fit", repr(text), "off, auto, or a number above 0", "auto is the safe choice") from error


def _ladder(text: str, k: int) -> tuple[int, ...]:
    from strataflux.client.prepare.settings import default_ladder

    if text in ("auto", "none"):
        return default_ladder(k) if text == "auto" else ()
    try:
        return tuple(sorted({int(part) for part in text.split(",")} - {k}))
    except ValueError as error:
        raise MisuseError("--ladder", repr(text), "auto, none, or budgets such as 8,128", "mend the list") from error


def _tokens(model: "ModelSource", text: Path | None, count: int) -> "Tensor":
    from strataflux.client.evaluate.text import python_prose, read_text
    from strataflux.client.prepare.calibrate import calibration_windows

    words, subject = (python_prose(), "pydoc_data.topics") if text is None else (read_text(text), text)
    return calibration_windows(subject, model.tokenizer(), words, count // _SEQUENCE, _SEQUENCE)


def _training(model: "ModelSource", minutes: float | None, text: Path | None, own: int) -> "FsqTraining | None":
    if not minutes:
        if own:
            raise MisuseError("--own-text", f"{own} tokens", "--tune beside it", "say for how long to train")
        return None
    import torch

    from strataflux.client.evaluate.text import python_prose, read_texts
    from strataflux.client.prepare.fsq_request import FsqTraining

    if minutes < 0:
        raise MisuseError("--tune", f"{minutes:g} minutes", "0 or more", "say for how long to train")
    tokenizer = model.tokenizer()
    texts = [python_prose()] if text is None else read_texts(text)
    tokens = torch.tensor([token for one in texts for token in tokenizer.encode(one).ids])
    return FsqTraining(tokens, 60 * minutes, own=own)


def _check_target(folder: Path, force: bool) -> None:
    """Before the minutes of work, not after. What is no prepared model is never replaced."""
    from strataflux.client.prepare.prepared import MANIFEST

    if (folder / MANIFEST).is_file() and not force:
        raise InputError(folder, "a prepared model", "a new folder", "pass --force to replace it")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).is_file()):
        raise InputError(folder, "files that are no prepared model", "a new folder", "choose another folder")


def register(app: typer.Typer) -> None:
    """Add ``prepare``."""
    app.command("prepare")(_command)
