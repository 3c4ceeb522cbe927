"""Budgets that fit a slowdown: the largest common one, single ones raised, and the outcome measured again."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from strataflux.client.prepare.candidates import Candidate, Timer, Timing, Trial, common
from strataflux.client.runtime.models import SETS
from strataflux.client.schemes import Scheme

__all__ = ["Search"]

_STEPS = (8, 4, 2, 1)
_FIRST_GUESS = 16


@dataclass
class _Bracket:
    """A common budget that fits and a larger one that does not, with their slowdowns."""

    low: int
    low_slowdown: float
    high: int
    high_slowdown: float | None
    """None as long as no budget was too slow: ``high`` is then just beyond what may be tried."""

    def guess(self, limit: float, first: int, turn: int) -> int:
        """The budget to try next, between the two. Slowdown is taken to be linear in it, which is nearly so; every
        third time the middle, so that the end comes soon even where it is not.
        """
        if turn % 3 == 2:
            guess = (self.low + self.high) // 2
        elif self.high_slowdown is not None:
            rise = (self.high_slowdown - self.low_slowdown) / (self.high - self.low)
            guess = self.low + int((limit - self.low_slowdown) / rise) if rise > 0 else self.low
        elif self.low and self.low_slowdown > 0:
            guess = int(self.low * limit / self.low_slowdown)
        else:
            guess = max(first, 2 * self.low)
        return min(max(guess, self.low + 1), self.high - 1)


@dataclass
class Search:
    """Measures candidates, each once, and remembers what came of it."""

    timer: Timer
    slowdown: float
    largest: int
    expired: Callable[[], bool]
    alike: Callable[[Candidate], object]
    _trials: dict[object, Trial] = field(default_factory=dict)
    _confirmations: list[Trial] = field(default_factory=list)
    _kl: dict[object, float] = field(default_factory=dict)
    _guess: int = _FIRST_GUESS

    def largest_common(self, shift: tuple[float, ...], mlp: Scheme) -> Candidate:
        """The largest common budget that fits; 0 if none does. One of two neighbours fits and the other does not."""
        bracket = _Bracket(0, 0.0, self.largest + 1, None)
        turn = 0
        while bracket.high - bracket.low > 1:
            k = bracket.guess(self.slowdown, self._guess, turn)
            trial = self._trial(common(k, shift, mlp))
            if trial.fits:
                bracket.low, bracket.low_slowdown = k, trial.timing.slowdown
            else:
                bracket.high, bracket.high_slowdown = k, trial.timing.slowdown
            turn += 1
        self._guess = max(1, bracket.low)
        return common(bracket.low, shift, mlp)

    def raised(self, candidate: Candidate) -> tuple[Candidate, bool]:
        """``candidate`` with single budgets raised while it fits, in turn, so that no set takes all; and whether
        that came to its end before time was up.
        """
        for step in _STEPS:
            open_sets = [i for i, name in enumerate(SETS) if not (candidate.mlp == "bundles" and name == "gate_up")]
            while open_sets:
                for position in tuple(open_sets):
                    if self.expired():
                        return candidate, False
                    more = candidate.raised(position, step)
                    if more.k[position] <= self.largest and self._trial(more).fits:
                        candidate = more
                    else:
                        open_sets.remove(position)
        return candidate, True

    def confirmed(self, candidate: Candidate, confirm: Timer) -> tuple[Candidate, Timing]:
        """The largest that fits by ``confirm``, too, of ``candidate``, what fitted on the way to it, and halves.

        If ``candidate`` fits that is one measurement; else about twice as many as the length of the way has digits.
        """
        ladder = [candidate, *self._below(candidate)]
        # Selecting nothing, the last, always fits. More and more is taken back, then some of it given again.
        failed, fitting, stride, timing = -1, len(ladder) - 1, 1, self._nothing()
        index = 0
        while fitting - failed > 1:
            longer = confirm(ladder[index])
            fits = longer.slowdown <= self.slowdown
            self._confirmations.append(Trial(ladder[index], longer, fits, confirming=True))
            if fits:
                fitting, timing = index, longer
            else:
                failed, stride = index, 2 * stride
            index = failed + stride // 2 if failed + stride // 2 < fitting else (failed + fitting) // 2
        return ladder[fitting], timing

    def timing(self, candidate: Candidate) -> Timing:
        """Of a candidate that was given out."""
        return self._trial(candidate).timing

    def kl(self, candidate: Candidate) -> float | None:
        """What was noted of it, or of one that selects as much."""
        return self._kl.get(self.alike(candidate))

    def note(self, candidate: Candidate, kl: float) -> None:
        """Remember a candidate's divergence."""
        self._kl[self.alike(candidate)] = kl

    def listed(self) -> list[Trial]:
        """All trials, in order."""
        trials = [*self._trials.values(), *self._confirmations]
        return [replace(trial, kl=self.kl(trial.candidate)) for trial in trials]

    def _trial(self, candidate: Candidate) -> Trial:
        if not any(candidate.k):
            # Selecting nothing is the base by definition, whatever noise says.
            return Trial(candidate, self._nothing(), fits=True)
        key = self.alike(candidate)
        if key not in self._trials:
            timing = self.timer(candidate)
            self._trials[key] = Trial(candidate, timing, timing.slowdown <= self.slowdown)
        return self._trials[key]

    def _nothing(self) -> Timing:
        seconds = next((trial.timing.base_seconds for trial in reversed(self._trials.values())), 0.0)
        return Timing(seconds, seconds, 0.0)

    def _below(self, candidate: Candidate) -> list[Candidate]:
        """What fitted and selects no more than ``candidate`` of any set, the largest first; then halves of the smallest
        down to nothing.
        """
        fitting = [trial.candidate for trial in self._trials.values() if trial.fits]
        below = [one for one in fitting if _within(one, candidate)]
        below.sort(key=lambda one: sum(one.k), reverse=True)
        smallest = below[-1] if below else candidate
        while any(smallest.k):
            smallest = replace(smallest, k=tuple(k // 2 for k in smallest.k))
            below.append(smallest)
        return below


def _within(one: Candidate, other: Candidate) -> bool:
    same = (one.shift, one.mlp) == (other.shift, other.mlp)
    return same and one.k != other.k and all(a <= b for a, b in zip(one.k, other.k, strict=True))
