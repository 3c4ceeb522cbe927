"""Spend a slowdown budget on refinement (Section 3.5, Appendix B.7).

For every combination of shifts and MLP scheme the largest common budget k is found whose decode step, measured end to
end, takes at most ``1 + slowdown`` times the base's; bundles get kn = round(3k/4), which fetches as many bytes. Of
these the one with the lowest divergence on held-out text is kept. Its budgets are then raised one set at a time, in
steps of 16, 8 … 1, as long as the measured step stays within the limit.

What measures and what judges are the caller's, so equal answers give an equal result, and everything asked is listed.
A larger common k is taken to be slower; noise that says otherwise costs optimality, never the limit: only budgets that
were measured to fit are given out.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.models import SETS
from strataflux.kernels.topk import CHUNK

__all__ = [
    "Candidate",
    "Judge",
    "Scheme",
    "Timer",
    "Trial",
    "Tuned",
    "common",
    "explain",
    "shift_combinations",
    "tune",
]

Scheme = Literal["channels", "bundles"]

_STEPS = (16, 8, 4, 2, 1)


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


Timer = Callable[[Candidate | None], float]
"""Seconds of a decode step; None is the base alone."""
Judge = Callable[[Candidate], float]
"""Divergence from the unquantized model on held-out text."""


@dataclass(frozen=True)
class Trial:
    """One candidate that was measured."""

    candidate: Candidate
    seconds: float
    fits: bool
    kl: float | None = None


@dataclass(frozen=True)
class Tuned:
    """What came of tuning."""

    chosen: Candidate
    base_seconds: float
    limit_seconds: float
    seconds: float
    """Of the chosen candidate."""
    trials: Sequence[Trial]
    """All that were measured, in order."""


def common(k: int, shift: tuple[float, ...], mlp: Scheme) -> Candidate:
    """The candidate with one budget ``k`` for all sets, or for bundles as many bytes in the MLP."""
    return Candidate((k, k, 0, round(3 * k / 4)) if mlp == "bundles" else (k,) * len(SETS), shift, mlp)


def shift_combinations(shifts: Sequence[float]) -> Iterator[tuple[float, ...]]:
    """Every assignment of ``shifts`` to the sets."""
    return itertools.product(shifts, repeat=len(SETS))


def tune(
    timer: Timer,
    judge: Judge,
    slowdown: float,
    shifts: Sequence[tuple[float, ...]],
    schemes: Sequence[Scheme] = ("channels",),
    largest: int = 128,
) -> Tuned:
    """Find the best candidate whose step takes at most ``1 + slowdown`` times the base's.

    Args:
        timer: measures.
        judge: compares the combinations.
        slowdown: such as 0.05.
        shifts: those to try, one tuple a combination; on platforms that skip misses only zeros.
        schemes: of the MLP.
        largest: budgets beyond this are not tried.

    Raises:
        MisuseError: the slowdown is negative, or ``largest`` is outside 1…1,024.
    """
    if not slowdown >= 0:
        raise MisuseError("--slowdown", f"{slowdown:.1%}", "0 % or more", "5% is usual")
    if not 1 <= largest <= CHUNK:
        raise MisuseError("largest budget", f"{largest}", f"1 to {CHUNK}", "128 is usual")
    search = _Search(timer, slowdown, largest)
    retained = [search.largest_common(shift, mlp) for shift in shifts for mlp in schemes]
    judged = [(judge(candidate), candidate) for candidate in retained]
    # Of equals the first: combinations come in the caller's order of preference.
    best = min(judged, key=lambda pair: pair[0])[1]
    for kl, candidate in judged:
        search.note(candidate, kl)
    chosen = search.raised(best)
    return Tuned(chosen, search.base, search.limit, search.seconds(chosen), search.listed())


@dataclass
class _Search:
    timer: Timer
    slowdown: float
    largest: int
    base: float = field(init=False)
    limit: float = field(init=False)
    trials: dict[Candidate, Trial] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.base = self.timer(None)
        self.limit = self.base * (1 + self.slowdown)

    def fits(self, candidate: Candidate) -> bool:
        if candidate not in self.trials:
            # Selecting nothing is the base by definition, whatever noise says.
            seconds = self.timer(candidate) if any(candidate.k) else self.base
            self.trials[candidate] = Trial(candidate, seconds, seconds <= self.limit)
        return self.trials[candidate].fits

    def largest_common(self, shift: tuple[float, ...], mlp: Scheme) -> Candidate:
        low, high = 0, self.largest + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.fits(common(middle, shift, mlp)):
                low = middle
            else:
                high = middle
        found = common(low, shift, mlp)
        self.fits(found)
        return found

    def raised(self, candidate: Candidate) -> Candidate:
        for step in _STEPS:
            for position, name in enumerate(SETS):
                if candidate.mlp == "bundles" and name == "gate_up":
                    continue
                while (more := _with(candidate, position, step)).k[position] <= self.largest and self.fits(more):
                    candidate = more
        return candidate

    def note(self, candidate: Candidate, kl: float) -> None:
        self.trials[candidate] = replace(self.trials[candidate], kl=kl)

    def seconds(self, candidate: Candidate) -> float:
        return self.trials[candidate].seconds

    def listed(self) -> list[Trial]:
        return list(self.trials.values())


def _with(candidate: Candidate, position: int, step: int) -> Candidate:
    budgets = list(candidate.k)
    budgets[position] += step
    return replace(candidate, k=tuple(budgets))


def explain(tuned: Tuned) -> Mapping[str, object]:
    """``tuned`` as a JSON object."""
    chosen = tuned.chosen
    return {
        "k": chosen.budgets(),
        "shift": dict(zip(SETS, chosen.shift, strict=True)),
        "mlp_scheme": chosen.mlp,
        "base_seconds": tuned.base_seconds,
        "limit_seconds": tuned.limit_seconds,
        "seconds": tuned.seconds,
        "slowdown": tuned.seconds / tuned.base_seconds - 1,
        "candidates": [
            {
                "k": trial.candidate.budgets(),
                "shift": dict(zip(SETS, trial.candidate.shift, strict=True)),
                "mlp_scheme": trial.candidate.mlp,
                "seconds": trial.seconds,
                "fits": trial.fits,
                "kl": trial.kl,
            }
            for trial in tuned.trials
        ],
    }
