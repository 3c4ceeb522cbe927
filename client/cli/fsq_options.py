"""Options about discrete codes in the place of keys and values, and how their text is read."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, get_args

import typer

from strataflux.client.cli.output import Output, print_note
from strataflux.client.errors import MisuseError

if TYPE_CHECKING:
    from strataflux.client.prepare.fsq_file import FsqCodes
    from strataflux.client.prepare.fsq_request import FsqRequest, FsqTraining
    from strataflux.client.prepare.prepared import PreparedModel
    from strataflux.client.prepare.source import ModelSource

__all__ = [
    "FsqBoundOption",
    "FsqLevelsOption",
    "FsqOption",
    "FsqWeightsOption",
    "OwnTextOption",
    "TiersOption",
    "TuneOption",
    "TuneTextOption",
    "parse_requests",
    "report_codes",
]

FsqOption = Annotated[
    str | None,
    typer.Option("--fsq", help="Make discrete codes so many times smaller than keys and values: 16x, or 8x,16x."),
]
FsqLevelsOption = Annotated[
    str | None,
    typer.Option("--fsq-levels", help="Of a coordinate: mixed (by direction), 4, 16 or 256.", show_default="mixed"),
]
FsqBoundOption = Annotated[
    str | None, typer.Option("--fsq-bound", help="Bound of coordinates: tanh, floor or clamp.", show_default="clamp")
]
FsqWeightsOption = Annotated[
    str | None,
    typer.Option("--fsq-weights", help="Make codes over the base, or the original model.", show_default="base"),
]
TiersOption = Annotated[
    str | None,
    typer.Option("--tiers", help="Divide the codes of --fsq: what is resident of them, such as 16x; the rest refines."),
]
TuneOption = Annotated[
    float | None, typer.Option("--tune", help="Train the codes of each ratio for so many minutes.", show_default="0")
]
OwnTextOption = Annotated[
    int, typer.Option("--own-text", min=0, help="With --tune: further tokens, which the model itself writes.")
]
TuneTextOption = Annotated[
    Path | None,
    typer.Option("--text", help="With --tune: a text, or a folder of texts.", show_default="the calibration text"),
]

_RATIO: Final = re.compile(r"(\d{1,4}(?:\.\d{1,4})?)x")
_LEVELS: Final = {"mixed": 0, "2": 2, "4": 4, "16": 16, "256": 256}


def parse_requests(
    model: "ModelSource",
    fsq: str | None,
    levels: str | None,
    bound: str | None,
    weights: str | None,
    training: "FsqTraining | None",
    tiers: str | None = None,
) -> "tuple[FsqRequest, ...]":
    """``--fsq`` and what belongs to it; nothing without it.

    Raises:
        MisuseError: a text cannot be read, or belongs to an option that is not there.
        InputError: a ratio leaves no byte.
    """
    others = {"--fsq-levels": levels, "--fsq-bound": bound, "--fsq-weights": weights, "--tune": training}
    others["--tiers"] = tiers
    if fsq is None:
        for name, value in others.items():
            if value is not None:
                raise MisuseError(name, "no --fsq", "--fsq RATIOx beside it", "add --fsq 16x, or leave this out")
        return ()
    from strataflux.client.prepare.fsq import FsqSettings, code_bytes
    from strataflux.client.prepare.fsq_request import FsqRequest
    from strataflux.kernels.fsq import Bound

    chosen = _LEVELS[_one_of("--fsq-levels", levels or "mixed", tuple(_LEVELS))]
    kind: Bound = _one_of("--fsq-bound", bound or "clamp", get_args(Bound))  # type: ignore[assignment]
    over: Literal["base", "original"] = _one_of(  # type: ignore[assignment]
        "--fsq-weights", weights or "base", ("base", "original")
    )
    ratios = _ratios("--fsq", fsq)
    resident = 0 if tiers is None else code_bytes(model.config, _resident(tiers, max(ratios), kind, model))
    return tuple(
        FsqRequest(f"{ratio:g}x", FsqSettings(code_bytes(model.config, ratio), chosen, kind), over, training, resident)
        for ratio in ratios
    )


def _resident(text: str, most: float, bound: str, model: "ModelSource") -> float:
    """The ratio of what is resident."""
    from strataflux.client.runtime.cache import require_no_windows

    require_no_windows(model.config, "--tiers")
    (ratio, *others) = _ratios("--tiers", text)
    if others or ratio <= most:
        raise MisuseError("--tiers", repr(text), f"one ratio above {most:g}x of --fsq", "write --fsq 8x --tiers 16x")
    if bound == "tanh":
        raise MisuseError("--tiers", "--fsq-bound tanh", "cells that nest: floor or clamp", "leave out --fsq-bound")
    return ratio


def _ratios(option: str, text: str) -> list[float]:
    ratios = []
    for part in text.split(","):
        match = _RATIO.fullmatch(part.strip())
        if match is None or float(match[1]) < 1:
            raise MisuseError(option, repr(text), "ratios from 1x on, such as 16x or 8x,16x", f"write {option} 16x")
        ratios.append(float(match[1]))
    return sorted(set(ratios))


def _one_of(option: str, text: str, allowed: tuple[str, ...]) -> str:
    if text not in allowed:
        why = " (bits of a coordinate divide a byte)" if option == "--fsq-levels" else ""
        raise MisuseError(option, repr(text), ", ".join(allowed) + why, "choose one of these")
    return text


def report_codes(output: Output, prepared: "PreparedModel", source: "ModelSource") -> dict[str, object]:
    """Say what codes a prepared model has, and warn of those that waste bytes; by name, for the result."""
    from strataflux.client.prepare.fsq_file import load_codes, read_about, weights_digest

    told: dict[str, object] = {}
    config = prepared.config
    if prepared.codes and config.sliding:
        output.print(
            f"fsq: {len(config.sliding)} of {config.layers} layers attend to the newest "
            f"{_range([config.window(at) for at in config.sliding])} positions and stay as they are, without a code"
        )
    for name, path in prepared.codes.items():
        over = source if read_about(path).weights == "original" else prepared
        codes = load_codes(path, prepared.config, weights_digest(over))
        output.print(_spoken(name, codes))
        if codes.about.rank and codes.width > codes.about.rank:
            print_note(
                f"fsq {name}: {codes.width} coordinates, but keys and values have {codes.about.rank} directions; the "
                "others repeat some and tell nothing new: --fsq-levels mixed or 256 makes use of the bytes"
            )
        told[name] = _facts(codes)
    return told


def _range(numbers: list[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least}" if least == most else f"{least} to {most}"


def _spoken(name: str, codes: "FsqCodes") -> str:
    about = codes.about
    resident = f", {about.resident_nbytes} of them resident" if about.resident_nbytes else ""
    text = f"fsq {name}: {about.nbytes} bytes a token and layer{resident}, {codes.width} coordinates"
    text += f", over the {about.weights}"
    if about.key_errors:
        text += f", error {_mean(about.key_errors):.3f} of keys, {_mean(about.value_errors):.3f} of values"
    if about.tuned_seconds:
        before, after = about.held_out
        text += f"; trained {about.tuned_seconds:.0f} s, KL on held-out text {before:.4f} -> {after:.4f}"
    return text


def _facts(codes: "FsqCodes") -> dict[str, object]:
    about = codes.about
    return {
        "bytes": about.nbytes,
        "resident_bytes": about.resident_nbytes,
        "levels": about.levels or "mixed",
        "bound": about.bound,
        "weights": about.weights,
        "width": codes.width,
        "rank": about.rank,
        "key_errors": about.key_errors,
        "value_errors": about.value_errors,
        "tuned_seconds": about.tuned_seconds,
        "held_out_kl": about.held_out,
    }


def _mean(numbers: tuple[float, ...]) -> float:
    return sum(numbers) / len(numbers)
