"""The tuner against cost models whose best answer is known."""

import itertools

import pytest

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.tune import Candidate, common, explain, shift_combinations, tune
from strataflux.client.runtime.models import SETS

STILL = [(0.0,) * 4]
COST = (1.0, 0.5, 6.0, 3.0)
"""Microseconds a channel of each set costs on top of a step of 1,000."""


class Machine:
    """A synthetic machine: cost is linear in budgets, and halved for sets that are shifted."""

    def __init__(self) -> None:
        self.asked: list[Candidate | None] = []

    def __call__(self, candidate: Candidate | None) -> float:
        self.asked.append(candidate)
        if candidate is None:
            return 1000e-6
        shares = [0.5 if blocks else 1.0 for blocks in candidate.shift]
        factor = 0.9 if candidate.mlp == "bundles" else 1.0
        terms = zip(candidate.k, COST, shares, strict=True)
        return (1000 + factor * sum(k * cost * share for k, cost, share in terms)) * 1e-6


def quality(candidate: Candidate) -> float:
    """More channels are better, shifts cost a little."""
    return 1 / (1 + sum(candidate.k)) + 0.0001 * sum(candidate.shift)


def test_the_largest_common_budget_then_single_ones() -> None:
    machine = Machine()
    tuned = tune(machine, quality, 0.05, STILL)
    # 10.5 us a common channel: 4 fit 50 us and use 42. The 8 left buy 16 of the outputs' channels, the largest step.
    assert common(4, STILL[0], "channels") in machine.asked
    assert tuned.chosen.k == (4, 4 + 16, 4, 4)
    assert tuned.seconds <= tuned.limit_seconds == pytest.approx(1050e-6)
    assert all(machine(larger) > tuned.limit_seconds for larger in one_more(tuned.chosen))


def one_more(candidate: Candidate) -> list[Candidate]:
    moved = [tuple(k + (i == j) for j, k in enumerate(candidate.k)) for i in range(4)]
    return [Candidate(k, candidate.shift, candidate.mlp) for k in moved]


def test_of_all_shifts_the_lowest_divergence_wins() -> None:
    shifts = list(shift_combinations((0.0, 1.0)))
    assert len(shifts) == 16
    tuned = tune(Machine(), quality, 0.10, shifts)
    retained = {}
    for shift in shifts:
        k = max(k for k in range(129) if Machine()(common(k, shift, "channels")) <= 1100e-6 or k == 0)
        retained[shift] = quality(common(k, shift, "channels"))
    assert tuned.chosen.shift == min(retained, key=retained.__getitem__)
    assert any(tuned.chosen.shift)
    judged = {trial.candidate.shift: trial.kl for trial in tuned.trials if trial.kl is not None}
    assert judged == retained


def test_bundles_count_neurons_and_leave_gate_up_alone() -> None:
    assert common(32, STILL[0], "bundles").k == (32, 32, 0, 24)
    tuned = tune(Machine(), lambda candidate: float(candidate.mlp == "channels"), 0.05, STILL, ("channels", "bundles"))
    assert tuned.chosen.mlp == "bundles"
    assert tuned.chosen.k[2] == 0
    assert all(trial.candidate.k[2] == 0 for trial in tuned.trials if trial.candidate.mlp == "bundles")


def test_nothing_fits_and_everything_fits() -> None:
    nothing = tune(Machine(), quality, 0.0, STILL)
    assert nothing.chosen.k == (0, 0, 0, 0)
    assert nothing.seconds == nothing.base_seconds
    assert tune(Machine(), quality, 100.0, STILL, largest=64).chosen.k == (64, 64, 64, 64)


def test_every_candidate_is_measured_once_and_listed() -> None:
    machine = Machine()
    tuned = tune(machine, quality, 0.2, list(shift_combinations((0.0, 0.5))), ("channels", "bundles"))
    measured = [one for one in machine.asked if one is not None]
    assert len(measured) == len(set(measured))
    listed = [trial.candidate for trial in tuned.trials if any(trial.candidate.k)]
    assert sorted(listed, key=repr) == sorted(measured, key=repr)
    again = tune(Machine(), quality, 0.2, list(shift_combinations((0.0, 0.5))), ("channels", "bundles"))
    assert again == tuned


def test_noise_never_breaks_the_limit() -> None:
    noise = itertools.cycle((0.97, 1.0, 1.03, 1.06))

    def noisy(candidate: Candidate | None) -> float:
        return Machine()(candidate) * (next(noise) if candidate else 1.0)

    tuned = tune(noisy, quality, 0.05, STILL)
    assert tuned.seconds <= tuned.limit_seconds


def test_it_explains_itself() -> None:
    said = explain(tune(Machine(), quality, 0.05, STILL))
    assert said["k"] == {"qkv": 4, "o": 20, "gate_up": 4, "down": 4}
    assert said["slowdown"] == pytest.approx(0.05)
    candidates = said["candidates"]
    assert isinstance(candidates, list)
    assert {tuple(one["k"]) for one in candidates} == {SETS}
    assert [one["kl"] is not None for one in candidates].count(True) == 1


def test_refusals() -> None:
    with pytest.raises(MisuseError, match="--slowdown"):
        tune(Machine(), quality, -0.1, STILL)
    with pytest.raises(MisuseError, match="1 to 1024"):
        tune(Machine(), quality, 0.1, STILL, largest=2000)
