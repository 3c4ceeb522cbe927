"""Spend a slowdown budget on refinement (Section 3.5, Appendix B.7).

For every combination of shifts and MLP scheme the largest common budget k is found with which a decode step, measured
end to end, is at most ``slowdown`` slower than the base's; bundles get kn = round(3k/4), which fetches as many bytes.
Of these the one with the lowest divergence on held-out text is kept, and if wanted each set's shift is then varied by
itself while that lowers it. Its budgets are raised one set after the other, in steps of 8, 4, 2 and 1, as long as the
measured step stays within the limit. What came out so is measured anew, longer: of many short measurements the best
owes something to luck, and if the limit does not hold the last raises are taken back. Where refining diverges more than
not refining, nothing is refined.

What measures, what judges and what says that time is up are the caller's, so equal answers give an equal result, and
everything asked is listed. A larger common k is taken to be slower; noise that says otherwise costs optimality, never
the limit: only budgets that were measured to fit are given out.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.candidates import Candidate, Judge, Timer, Timing, Trial, common
from strataflux.client.prepare.tune_search import Search
from strataflux.client.runtime.models import SETS
from strataflux.client.schemes import Scheme
from strataflux.kernels.topk import CHUNK

__all__ = ["Space", "Tuned", "explain", "shift_combinations", "tune"]


@dataclass(frozen=True)
class Space:
    """What is searched.

    Raises:
        MisuseError: on construction, if ``largest`` is outside 1…1,024.
    """

    shifts: Sequence[tuple[float, ...]] = ((0.0,) * len(SETS),)
    """Combinations of shifts, a number of blocks for each set; on platforms that skip misses only zeros."""
    schemes: Sequence[Scheme] = ("channels",)
    """Of the MLP."""
    varied: Sequence[float] = ()
    """Shifts that each set by itself is then given, as long as that lowers the divergence."""
    largest: int = 128
    """Budgets beyond this are not tried."""

    def __post_init__(self) -> None:
        if not 1 <= self.largest <= CHUNK:
            raise MisuseError("largest budget", f"{self.largest}", f"1 to {CHUNK}", "128 is usual")


@dataclass(frozen=True)
class Tuned:
    """What came of tuning."""

    chosen: Candidate
    timing: Timing
    """Of the chosen candidate, as last measured."""
    slowdown: float
    """The limit."""
    kl: float
    """Divergence of the chosen candidate."""
    base_kl: float
    """Divergence without refinement."""
    trials: Sequence[Trial]
    """All that were measured, in order; those measured longer at the end once more."""
    complete: bool
    """Whether all of the space was searched; if not, time was up."""


def shift_combinations(shifts: Sequence[float]) -> Iterator[tuple[float, ...]]:
    """Every assignment of ``shifts`` to the sets."""
    return itertools.product(shifts, repeat=len(SETS))


def tune(
    timer: Timer,
    judge: Judge,
    slowdown: float,
    space: Space,
    *,
    confirm: Timer | None = None,
    expired: Callable[[], bool] = lambda: False,
    alike: Callable[[Candidate], object] = lambda candidate: candidate,
) -> Tuned:
    """Find the best candidate whose step is at most ``slowdown`` slower than the base's.

    Args:
        timer: measures.
        judge: compares the combinations.
        slowdown: such as 0.05.
        space: what is searched.
        confirm: measures the outcome again; None takes it as it is.
        expired: says whether time is up: what was found so far is the outcome then. One combination is always tried.
        alike: equal for candidates that select equally many of everything, so that one measurement tells of all.

    Raises:
        MisuseError: the slowdown is negative or no number.
    """
    if not 0 <= slowdown < float("inf"):
        raise MisuseError("--slowdown", f"{slowdown:.1%}", "0 % or more", "5% is usual")
    choice = _Choice(Search(timer, slowdown, space.largest, expired, alike), judge)
    for mlp, shift in itertools.product(space.schemes, space.shifts):
        choice.consider(shift, mlp)
    while choice.vary(space.varied):
        pass
    return choice.finish(confirm)


@dataclass
class _Choice:
    """The best combination so far."""

    search: Search
    judge: Judge
    seen: dict[tuple[tuple[float, ...], Scheme], float] = field(default_factory=dict)
    best: Candidate | None = None
    lowest: float = float("inf")
    complete: bool = True

    def consider(self, shift: tuple[float, ...], mlp: Scheme) -> bool:
        """Whether this combination is better than all before; of equals the first stays."""
        if (shift, mlp) in self.seen:
            return False
        if self.best is not None and self.search.expired():
            self.complete = False
            return False
        candidate = self.search.largest_common(shift, mlp)
        kl = self.seen[shift, mlp] = self._judged(candidate)
        if self.best is not None and kl >= self.lowest:
            return False
        self.best, self.lowest = candidate, kl
        return True

    def vary(self, shifts: Sequence[float]) -> bool:
        """Give each set each of ``shifts`` in turn; whether anything got better."""
        better = False
        for position, blocks in itertools.product(range(len(SETS)), shifts):
            assert self.best is not None, "a space has at least one combination"
            if self.best.mlp == "bundles" and SETS[position] == "gate_up":
                continue
            varied = list(self.best.shift)
            varied[position] = blocks
            better |= self.consider(tuple(varied), self.best.mlp)
        return better

    def finish(self, confirm: Timer | None) -> Tuned:
        """Raise the best one's budgets, measure again, and sum up."""
        assert self.best is not None, "a space has at least one combination"
        search = self.search
        chosen, complete = search.raised(self.best)
        timing = search.timing(chosen)
        if confirm is not None:
            chosen, timing = search.confirmed(chosen, confirm)
        nothing = common(0, chosen.shift, chosen.mlp)
        base_kl, kl = self._judged(nothing), self._judged(chosen)
        if kl >= base_kl:
            chosen, timing, kl = nothing, search.timing(nothing), base_kl
        return Tuned(chosen, timing, search.slowdown, kl, base_kl, search.listed(), self.complete and complete)

    def _judged(self, candidate: Candidate) -> float:
        known = self.search.kl(candidate)
        if known is None:
            known = self.judge(candidate)
            self.search.note(candidate, known)
        return known


def explain(tuned: Tuned) -> Mapping[str, object]:
    """``tuned`` as a JSON object."""
    return {
        **_told(tuned.chosen),
        "limit": tuned.slowdown,
        "base_seconds": tuned.timing.base_seconds,
        "seconds": tuned.timing.seconds,
        "slowdown": tuned.timing.slowdown,
        "kl": tuned.kl,
        "base_kl": tuned.base_kl,
        "complete": tuned.complete,
        "candidates": [
            {
                **_told(trial.candidate),
                "seconds": trial.timing.seconds,
                "base_seconds": trial.timing.base_seconds,
                "slowdown": trial.timing.slowdown,
                "fits": trial.fits,
                "confirming": trial.confirming,
                "kl": trial.kl,
            }
            for trial in tuned.trials
        ],
    }


def _told(candidate: Candidate) -> dict[str, object]:
    shift = dict(zip(SETS, candidate.shift, strict=True))
    return {"k": candidate.budgets(), "shift": shift, "mlp_scheme": candidate.mlp}
