"""The options about misses of weights beside ``--miss``: running ahead of them, and using what is there."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from strataflux.cache_policy.miss import MissPolicy

if TYPE_CHECKING:
    from strataflux.client.prefetches import PrefetchCounts

__all__ = ["AboutMisses", "LagOption", "ReadAheadOption", "ResidentsOption", "spoken_prefetches", "spoken_residents"]

ReadAheadOption = Annotated[
    float,
    typer.Option(
        "--read-ahead",
        help="Blocks before a layer at which what it will probably select is asked for: 0.5, 1, 1.5 or 2; 0: never.",
    ),
]
ResidentsOption = Annotated[
    int,
    typer.Option(
        "--residents",
        min=0,
        max=1024,
        help="Channels per 1,024 beyond --k, the next largest, that refine, too, where they are in the cache anyway.",
    ),
]
LagOption = Annotated[
    float | None,
    typer.Option(
        "--lag",
        help="Blocks by which what refines o and down is added later, so that records come: 0, 0.5, 1, 1.5 or 2.",
        show_default="the prepared model's",
    ),
]


class AboutMisses(NamedTuple):
    """What is done about records that are absent."""

    policy: MissPolicy
    ahead: float
    residents: int
    lag: float | None

    def shift(self, kept: Mapping[str, float]) -> Mapping[str, float]:
        """Shifts of the projection sets: those that a prepared model has ``kept``, but for a lag that was asked for.

        Raises:
            MisuseError: there is no such lag.
        """
        from strataflux.client.runtime.shifted import check_shift

        shift = kept if self.lag is None else {**kept, "o": self.lag, "down": self.lag}
        check_shift(shift)
        return shift


def spoken_prefetches(counts: "PrefetchCounts") -> str:
    """On one line, for a person."""
    useful = "none known yet to be used" if counts.useful is None else f"{counts.useful:.0%} of those known were used"
    return f"{counts.asked} records asked for ahead, {counts.fills} read; {useful}"


def spoken_residents(rate: float | None) -> str:
    """On one line, for a person; ``rate`` for each channel that was looked up."""
    return f"{rate or 0:.2f} channels that were there anyway refined beside each that was looked up"
