"""Options that several commands take, and how their text is read."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from strataflux.cache_policy.errors import MissPolicyError
from strataflux.cache_policy.miss import MissPolicy, parse_miss_policy
from strataflux.client.errors import MisuseError

if TYPE_CHECKING:
    from strataflux.client.prepare.prepared import Manifest

__all__ = [
    "ChannelsOption",
    "HotTierOption",
    "JsonOption",
    "MissOption",
    "PreparedArgument",
    "RuntimeDirOption",
    "WeightCacheOption",
    "parse_cache",
    "parse_miss",
    "refined_by",
    "spoken_refinement",
]

_UNITS: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE: Final = re.compile(r"(\d{1,15}) ?(B|KiB|MiB|GiB|TiB)?")
_MISS_REMEDY: Final = "write --miss skip, --miss wait:20 to wait 20 ms at most, or --miss budget:3%"
_SHARE: Final = re.compile(r"(\d{1,3}(?:\.\d+)?) ?%")

PreparedArgument = Annotated[
    Path, typer.Argument(metavar="PREPARED", help="A prepared model (see strataflux prepare).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout, all else to stderr.")]
ChannelsOption = Annotated[
    int | None,
    typer.Option("--k", min=0, max=1024, help="Refined channels per 1,024.", show_default="the prepared model's"),
]
MissOption = Annotated[
    str, typer.Option("--miss", help="What is not in the cache: skip, wait:MILLISECONDS, or budget:PERCENT% of a step.")
]
RuntimeDirOption = Annotated[
    Path | None, typer.Option("--runtime-dir", help="Folder of a running daemon.", show_default=False)
]
WeightCacheOption = Annotated[
    str | None,
    typer.Option(
        "--weight-cache", help="RAM of the daemon's weight cache: bytes, or % of the store.", show_default="25%"
    ),
]
HotTierOption = Annotated[
    str | None,
    typer.Option(
        "--hot-tier",
        help="Device memory for the most used records of a pinned store: bytes, or % of it.",
        show_default="0",
    ),
]


def parse_cache(text: str, whole: int, option: str = "--weight-cache") -> int:
    """Bytes that ``text`` asks for: a size such as ``64MiB``, or a share such as ``25%`` of ``whole``.

    Raises:
        MisuseError: it is neither, or a share of 0 or above 100 %.
    """
    if match := _SIZE.fullmatch(text):
        return int(match[1]) * _UNITS[match[2] or ""]
    share = float(match[1]) if (match := _SHARE.fullmatch(text)) else 0.0
    if not 0 < share <= 100:
        expected = "bytes such as 64MiB, or above 0 to 100 % of the store such as 25%"
        raise MisuseError(option, repr(text), expected, f"write {option} 25%, or leave it out")
    return round(whole * share / 100)


def parse_miss(text: str) -> MissPolicy:
    """``--miss``.

    Raises:
        MisuseError: it is neither ``skip``, ``wait:MS`` nor ``budget:P%`` within bounds.
    """
    try:
        return parse_miss_policy(text)
    except MissPolicyError as error:
        expected = "skip, wait:MS with 0 < MS <= 60000, or budget:P% with 0 < P <= 100"
        raise MisuseError("--miss", repr(text), expected, _MISS_REMEDY) from error


def refined_by(manifest: "Manifest", k: int | None) -> dict[str, object]:
    """What a result says of how a prepared model was refined, with ``k`` as it was asked for."""
    budgets = dict(manifest.k) if k is None else dict.fromkeys(manifest.k, k)
    return {"k": budgets, "shift": manifest.shift, "mlp_scheme": manifest.mlp_scheme}


def spoken_refinement(manifest: "Manifest", k: int | None) -> str:
    """The same for a person, on one line."""
    budgets = f"{k}" if k is not None else ", ".join(f"{name} {budget}" for name, budget in manifest.k.items())
    blocks = ", ".join(f"{name} {one:g}" for name, one in manifest.shift.items() if one)
    return f"refined with k = {budgets}; blocks of lead and lag: {blocks or 'none'}; MLP by {manifest.mlp_scheme}"
