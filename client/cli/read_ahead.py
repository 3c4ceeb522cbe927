"""The option about running ahead of misses, and how what came of it is said."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from strataflux.client.prefetches import PrefetchCounts

__all__ = ["ReadAheadOption", "spoken_prefetches"]

ReadAheadOption = Annotated[
    float,
    typer.Option(
        "--read-ahead",
        help="Blocks before a layer at which what it will probably select is asked for: 0.5, 1, 1.5 or 2; 0: never.",
    ),
]


def spoken_prefetches(counts: "PrefetchCounts") -> str:
    """On one line, for a person."""
    useful = "none known yet to be used" if counts.useful is None else f"{counts.useful:.0%} of those known were used"
    return f"{counts.asked} records asked for ahead, {counts.fills} read; {useful}"
