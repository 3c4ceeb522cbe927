"""What a tuner tries, and what it is told about it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from strataflux.client.runtime.models import SETS
from strataflux.client.schemes import Scheme, budgets_by_set

__all__ = ["Candidate", "Judge", "Timer", "Timing", "Trial", "common"]


@dataclass(frozen=True)
class Candidate:
    """A way to refine."""

    k: tuple[int, ...]
    """Budget of each set of ``SETS``; with bundles that of ``gate_up`` is 0 and that of ``down`` counts neurons."""
    shift: tuple[float, ...] = (0.0,) * len(SETS)
    """Blocks of fetch lead or lag of each set."""
    mlp: Scheme = "channels"

    def budgets(self) -> dict[str, int]:
        """Budgets by set."""
        return dict(zip(SETS, self.k, strict=True))

    def shifts(self) -> dict[str, float]:
        """Shifts by set."""
        return dict(zip(SETS, self.shift, strict=True))

    def raised(self, position: int, by: int) -> "Candidate":
        """The same with ``by`` more for the set at ``position``."""
        budgets = list(self.k)
        budgets[position] += by
        return replace(self, k=tuple(budgets))


@dataclass(frozen=True)
class Timing:
    """Decode steps with a candidate and without refinement, taken in turn."""

    seconds: float
    """Median of a step."""
    base_seconds: float
    """Median of a step without refinement."""
    slowdown: float
    """Median over neighbouring steps of one's time over the other's, less 1."""


@dataclass(frozen=True)
class Trial:
    """One candidate that was measured."""

    candidate: Candidate
    timing: Timing
    fits: bool
    confirming: bool = False
    """Measured longer, at the end."""
    kl: float | None = None
    """Divergence, if it was asked for."""


Timer = Callable[[Candidate], Timing]
"""Measures decode steps."""
Judge = Callable[[Candidate], float]
"""Divergence from the unquantized model on held-out text, in nats a token."""


def common(k: int, shift: tuple[float, ...], mlp: Scheme) -> Candidate:
    """The candidate with one budget ``k`` for all sets, or for bundles as many bytes in the MLP."""
    budgets = budgets_by_set(k, mlp)
    return Candidate(tuple(budgets[name] for name in SETS), shift, mlp)
