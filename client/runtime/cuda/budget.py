"""How much of what is refined on a device, and when."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.cuda.routes import Link
from strataflux.client.runtime.models import SETS
from strataflux.client.runtime.shifted import check_shift
from strataflux.client.schemes import budgets_by_set

__all__ = ["READERS", "Budget"]

READERS: Final = (0, 2)
"""Sets (numbers in ``SETS``) that read the residual stream; the others write to it."""
_LINK: Final = Link()


@dataclass(frozen=True)
class Budget:
    """Channels and shifts of each set.

    Raises:
        MisuseError: on construction: a budget or shift out of range, or for an unknown set.
    """

    k: Mapping[str, int]
    """Channels per 1,024 of each set."""
    shift: Mapping[str, float]
    """Blocks of fetch lead or lag of each set."""
    programs: int = 64
    """Programs that refine in place: the more, the fuller the link and the fewer are left to projections."""
    ordered: bool = False
    """What is refined in place adds each output's records in list order: equal lists give equal bits, and the link is
    filled less well. What is fetched ahead always does.
    """
    link: Link = _LINK
    """What is taken to be brought beside each product."""
    errands_below: int = 12
    """Channels per 1,024: with so many or more, records take longer than products leave time to errands, and side lanes
    bring them (docs/PERFORMANCE.md).
    """
    errands_from: float = 1.5
    """Blocks of lead or lag: with less, too few products lie between selection and use for errands."""

    def __post_init__(self) -> None:
        budgets_by_set(self.k, "channels")
        check_shift(self.shift)
        if self.programs < 1:
            raise MisuseError("programs", f"{self.programs}", "at least 1", "64 fill a link")

    @classmethod
    def common(cls, k: int, shift: float = 0.0, programs: int = 64) -> "Budget":
        """The same for all sets."""
        return cls(dict.fromkeys(SETS, k), dict.fromkeys(SETS, shift), programs)

    def behind(self) -> list[int]:
        """Positions of the residual stream that each set leads or lags by: two to a block."""
        return [round(2 * self.shift[name]) for name in SETS]

    def by_errands(self, name: str) -> bool:
        """Whether a set's refinement is left to errands wherever there is a route for it."""
        return 0 < self.k[name] < self.errands_below and 0 < self.shift[name] >= self.errands_from
