"""Options about the KV cache, and how their text is read."""

import re
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Final

import typer

from strataflux.client.errors import MisuseError

if TYPE_CHECKING:
    from strataflux.client.kv_options import KvOptions

__all__ = [
    "FractionOption",
    "GroupOption",
    "KvCacheOption",
    "KvOption",
    "KvSelectOption",
    "PrenormalizeOption",
    "RefineKvOption",
    "StartsOption",
    "parse_fraction",
    "parse_kv",
    "parse_starts",
]

_WIDTHS: Final = re.compile(r"(\d)/(\d)")
_SELECT: Final = re.compile(r"step|(before)(?::(\d{1,4}))?")

KvOption = Annotated[
    str | None,
    typer.Option(
        "--kv",
        help="Keep keys/values in so many bits, such as 2/2 or 3/2; off: exact. eval: or a METHOD, such as fsq:16x.",
        show_default="off",
    ),
]
RefineKvOption = Annotated[
    str,
    typer.Option(
        "--refine-kv", help="Bits that refine keys/values, such as 4/4; 0/0: none. eval, of --kv fsq:16x: fsq:8x."
    ),
]
GroupOption = Annotated[int, typer.Option("--group", help="Tokens of a group that is refined together.")]
FractionOption = Annotated[str, typer.Option("--fraction", help="Share of a KV head's groups refined at each step.")]
KvSelectOption = Annotated[
    str,
    typer.Option(
        "--kv-select", help="Refine what a step selects: step; or what the last one did, or some: before[:4]."
    ),
]
KvCacheOption = Annotated[
    str | None,
    typer.Option("--kv-cache", help="RAM for KV records: bytes, or % of all of a window.", show_default="10%"),
]
StartsOption = Annotated[
    str | None,
    typer.Option(
        "--starts",
        help="With --kv: tokens at which windows begin, such as 5000,60000.",
        show_default="one after another",
    ),
]
PrenormalizeOption = Annotated[
    bool, typer.Option("--prenormalize", help="Scale tiles to RMS 1 first, for models with small keys or values.")
]


def parse_kv(
    kv: str, refine: str, group: int, fraction: str, prenormalize: bool, select: str = "step"
) -> "KvOptions | None":
    """``--kv`` and what belongs to it; None for ``off``.

    Raises:
        MisuseError: a text cannot be read, or its numbers are outside what exists, naming the option.
    """
    if kv == "off":
        return None
    from strataflux.client.kv_options import KvOptions
    from strataflux.kernels.kv_encode import GROUP_TOKENS
    from strataflux.kernels.kv_pack import CODE_BITS, REFINE_BITS

    resident = _widths("--kv", kv, CODE_BITS)
    fine = _widths("--refine-kv", refine, REFINE_BITS)
    if group not in GROUP_TOKENS:
        raise MisuseError("--group", f"{group}", f"one of {', '.join(map(str, GROUP_TOKENS))} tokens", "change it")
    widths = (*resident, *fine, group)
    return KvOptions(*widths, parse_fraction(fraction), prenormalize, *_parse_select(select))


def _parse_select(text: str) -> tuple[int, int]:
    """Lag and kept steps of ``--kv-select``."""
    match = _SELECT.fullmatch(text)
    if match is None:
        expected = "step, before, or before:STEPS such as before:4"
        raise MisuseError("--kv-select", repr(text), expected, "write --kv-select before")
    return int(match[1] is not None), int(match[2] or 1)


def _widths(option: str, text: str, allowed: tuple[int, ...]) -> tuple[int, int]:
    match = _WIDTHS.fullmatch(text)
    widths = (int(match[1]), int(match[2])) if match else (-1, -1)
    if not set(widths) <= set(allowed):
        expected = f"KEYS/VALUES, each {allowed[0]} to {allowed[-1]} bits, such as {allowed[1]}/{allowed[1]}"
        raise MisuseError(option, repr(text), expected, f"write {option} {allowed[1]}/{allowed[1]}, or leave it out")
    return widths


def parse_fraction(text: str) -> Fraction:
    """``--fraction``: a number such as ``1/128`` or ``0.01``.

    Raises:
        MisuseError: it is none, or outside 0…1.
    """
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(-1)
    if not 0 <= value <= 1:
        raise MisuseError("--fraction", repr(text), "0 to 1, such as 1/128", "write --fraction 1/128")
    return value


def parse_starts(text: str | None) -> tuple[int, ...] | None:
    """``--starts``: tokens, separated by commas.

    Raises:
        MisuseError: it is something else.
    """
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,12}(,\d{1,12})*", text):
        raise MisuseError("--starts", repr(text), "tokens such as 5000,60000", "separate by commas alone")
    return tuple(int(part) for part in text.split(","))
