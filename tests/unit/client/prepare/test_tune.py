"""The tuner against cost models whose best answer is known."""

import itertools
from collections.abc import Callable

import pytest

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.candidates import Candidate, Timing, common
from strataflux.client.prepare.tune import Space, Tuned, explain, shift_combinations, tune
from strataflux.client.runtime.models import SETS
from strataflux.client.schemes import Scheme

STILL = (0.0,) * 4
BASE = 1e-3
COST = (1.0, 0.5, 6.0, 3.0)
"""Thousandths of the base that a channel of each set costs."""
BOTH: tuple[Scheme, ...] = ("channels", "bundles")


def cost(candidate: Candidate) -> float:
    """Slowdown: linear in budgets, halved for a set that is shifted a block or more, and bundles cost a tenth more."""
    shares = [0.5 if blocks >= 1 else 0.8 if blocks else 1.0 for blocks in candidate.shift]
    factor = 1.1 if candidate.mlp == "bundles" else 1.0
    return factor * sum(k * c * share for k, c, share in zip(candidate.k, COST, shares, strict=True)) / 1000


class Machine:
    """A synthetic machine."""

    def __init__(self, noise: Callable[[], float] = lambda: 0.0) -> None:
        self.asked: list[Candidate] = []
        self._noise = noise

    def __call__(self, candidate: Candidate) -> Timing:
        self.asked.append(candidate)
        slowdown = cost(candidate) + self._noise()
        return Timing(BASE * (1 + slowdown), BASE, slowdown)


def quality(candidate: Candidate) -> float:
    """More channels are better, and each shift takes its share of what its set wins."""
    worth = (3.0, 1.0, 4.0, 2.0)
    terms = zip(candidate.k, worth, candidate.shift, strict=True)
    return 1 / (1 + sum(k * w * (1 - 0.15 * blocks) for k, w, blocks in terms))


def fits(candidate: Candidate, slowdown: float) -> bool:
    return cost(candidate) <= slowdown


def exhaustive(slowdown: float, space: Space) -> Candidate:
    """The best of the largest common budgets, by trying every budget of every combination."""
    retained = []
    for mlp, shift in itertools.product(space.schemes, space.shifts):
        k = max(k for k in range(space.largest + 1) if fits(common(k, shift, mlp), slowdown))
        retained.append(common(k, shift, mlp))
    return min(retained, key=quality)


def one_more(candidate: Candidate) -> list[Candidate]:
    positions = [i for i, name in enumerate(SETS) if not (candidate.mlp == "bundles" and name == "gate_up")]
    return [candidate.raised(position, 1) for position in positions]


def test_the_largest_common_budget_then_single_ones() -> None:
    machine = Machine()
    tuned = tune(machine, quality, 0.05, Space())
    # 10.5 thousandths a common channel: 4 fit 50 and use 42. The 8 left are what the largest step of qkv costs.
    assert common(4, STILL, "channels") in machine.asked
    assert tuned.chosen.k == (12, 4, 4, 4)
    assert tuned.timing.slowdown <= 0.05
    assert not any(fits(larger, 0.05) for larger in one_more(tuned.chosen))


@pytest.mark.parametrize("slowdown", [0.01, 0.025, 0.05, 0.2])
@pytest.mark.parametrize("schemes", [("channels",), BOTH])
def test_of_all_combinations_the_lowest_divergence_wins(slowdown: float, schemes: tuple[Scheme, ...]) -> None:
    space = Space(list(shift_combinations((0.0, 0.5, 1.0))), schemes)
    assert len(space.shifts) == 81
    best = exhaustive(slowdown, space)
    tuned = tune(Machine(), quality, slowdown, space)
    assert (tuned.chosen.shift, tuned.chosen.mlp) == (best.shift, best.mlp)
    assert all(a >= b for a, b in zip(tuned.chosen.k, best.k, strict=True))
    assert fits(tuned.chosen, slowdown)
    assert not any(fits(larger, slowdown) for larger in one_more(tuned.chosen))
    assert tuned.complete


def test_varying_sets_by_themselves_finds_what_trying_all_finds() -> None:
    every = (0.0, 0.5, 1.0, 1.5, 2.0)
    best = exhaustive(0.05, Space(list(shift_combinations(every))))
    assert len(set(best.shift)) > 1
    machine = Machine()
    tuned = tune(machine, quality, 0.05, Space([(blocks,) * 4 for blocks in every], varied=every))
    assert tuned.chosen.shift == best.shift
    assert len(machine.asked) < 200 < 3 * len(every) ** 4


@pytest.mark.parametrize("k", range(0, 129, 8))
def test_few_measurements_find_the_largest_common_budget(k: int) -> None:
    machine = Machine()
    slowdown = cost(common(k, STILL, "channels")) + 1e-6
    tuned = tune(machine, quality, slowdown, Space())
    assert min(tuned.chosen.k) == k
    searched = [one for one in machine.asked if len(set(one.k)) == 1]
    assert len(searched) <= 4


def test_a_cost_that_is_not_linear_takes_no_longer_than_halving() -> None:
    def steep(candidate: Candidate) -> Timing:
        asked.append(candidate)
        slowdown = 0.04 if sum(candidate.k) <= 4 * 77 else 0.06
        return Timing(BASE, BASE, slowdown)

    asked: list[Candidate] = []
    assert min(tune(steep, quality, 0.05, Space()).chosen.k) == 77
    assert len([one for one in asked if len(set(one.k)) == 1]) <= 3 * 7


def test_bundles_count_neurons_and_leave_gate_up_alone() -> None:
    assert common(32, STILL, "bundles").k == (32, 32, 0, 24)
    tuned = tune(
        Machine(),
        lambda candidate: float(candidate.mlp == "channels" or not any(candidate.k)),
        0.05,
        Space(schemes=BOTH),
    )
    assert tuned.chosen.mlp == "bundles"
    assert tuned.chosen.k[2] == 0
    assert all(trial.candidate.k[2] == 0 for trial in tuned.trials if trial.candidate.mlp == "bundles")


def test_nothing_fits_and_everything_fits() -> None:
    nothing = tune(Machine(), quality, 0.0, Space())
    assert nothing.chosen.k == (0, 0, 0, 0)
    assert (nothing.timing.slowdown, nothing.kl, nothing.base_kl) == (0.0, 1.0, 1.0)
    assert tune(Machine(), quality, 100.0, Space(largest=64)).chosen.k == (64, 64, 64, 64)


def test_where_all_sets_are_too_much_some_are_refined() -> None:
    # One common channel costs 10.5 thousandths, one of the outputs' half a thousandth.
    assert tune(Machine(), quality, 0.004, Space()).chosen.k == (0, 8, 0, 0)


def test_refinement_that_makes_it_worse_is_not_chosen() -> None:
    tuned = tune(Machine(), lambda candidate: 0.3 if any(candidate.k) else 0.2, 0.05, Space())
    assert not any(tuned.chosen.k)
    assert tuned.kl == tuned.base_kl == 0.2


def test_every_candidate_is_measured_once_and_listed() -> None:
    machine, space = Machine(), Space(list(shift_combinations((0.0, 0.5))), BOTH)
    tuned = tune(machine, quality, 0.2, space)
    assert len(machine.asked) == len(set(machine.asked))
    assert [trial.candidate for trial in tuned.trials] == machine.asked
    assert tune(Machine(), quality, 0.2, space) == tuned


def test_candidates_that_select_alike_are_measured_once() -> None:
    machine = Machine()

    def pairs(candidate: Candidate) -> object:
        return tuple((k + 1) // 2 for k in candidate.k), candidate.shift

    tuned = tune(machine, quality, 0.05, Space(), alike=pairs)
    assert len(machine.asked) == len({pairs(one) for one in machine.asked}) == len(tuned.trials)


def lucky() -> Callable[[], float]:
    noise = itertools.cycle((-0.03, 0.0, 0.03, -0.01))
    return lambda: next(noise)


def test_noise_never_breaks_the_limit() -> None:
    tuned = tune(Machine(lucky()), quality, 0.05, Space())
    assert tuned.timing.slowdown <= 0.05


def test_what_was_luck_is_taken_back_when_measured_longer() -> None:
    lucky_one, longer = tune(Machine(lucky()), quality, 0.05, Space()), Machine()
    assert not fits(lucky_one.chosen, 0.05)
    tuned = tune(Machine(lucky()), quality, 0.05, Space(), confirm=longer)
    assert fits(tuned.chosen, 0.05)
    assert tuned.chosen.k != lucky_one.chosen.k
    assert any(tuned.chosen.k)
    confirming = [trial for trial in tuned.trials if trial.confirming]
    assert [trial.candidate for trial in confirming] == longer.asked
    held = [trial for trial in confirming if trial.fits]
    assert max(held, key=lambda trial: sum(trial.candidate.k)).candidate == tuned.chosen
    assert tuned.timing in [trial.timing for trial in held]
    assert len(confirming) < 8


@pytest.mark.parametrize("holds", range(1, 9))
def test_what_holds_may_be_far_below_what_luck_gave(holds: int) -> None:
    def longer(candidate: Candidate) -> Timing:
        return Timing(BASE, BASE, 0.01 if max(candidate.k) <= holds else 0.2)

    lucky_machine = Machine(lambda: -0.5)
    tuned = tune(lucky_machine, quality, 0.05, Space(largest=64), confirm=longer)
    assert 0 < max(tuned.chosen.k) <= holds


def test_a_machine_where_nothing_holds_gives_nothing() -> None:
    tuned = tune(Machine(), quality, 0.05, Space(), confirm=lambda _: Timing(2 * BASE, BASE, 1.0))
    assert not any(tuned.chosen.k)
    assert tuned.timing.slowdown == 0.0


def until(machine: Machine, measurements: int, space: Space) -> Tuned:
    return tune(machine, quality, 0.05, space, expired=lambda: len(machine.asked) >= measurements)


def test_when_time_is_up_the_best_so_far_is_the_outcome() -> None:
    space = Space(list(shift_combinations((0.0, 1.0))))
    whole = tune(Machine(), quality, 0.05, space)
    machine = Machine()
    tuned = until(machine, 1, space)
    assert not tuned.complete
    assert {one.shift for one in machine.asked} == {STILL}
    assert tuned.chosen == common(4, STILL, "channels")
    assert until(Machine(), 10_000, space) == whole


def test_it_explains_itself() -> None:
    said = explain(tune(Machine(), quality, 0.05, Space(), confirm=Machine()))
    assert said["k"] == {"qkv": 12, "o": 4, "gate_up": 4, "down": 4}
    assert said["slowdown"] == pytest.approx(0.05)
    candidates = said["candidates"]
    assert isinstance(candidates, list)
    assert {tuple(one["k"]) for one in candidates} == {SETS}
    assert {"seconds", "slowdown", "kl", "fits", "confirming"} <= candidates[0].keys()
    assert [one["kl"] is not None for one in candidates] == [
        one["k"] in (said["k"], dict.fromkeys(SETS, 4)) for one in candidates
    ]


def test_refusals() -> None:
    for slowdown in (-0.1, float("nan"), float("inf")):
        with pytest.raises(MisuseError, match="--slowdown"):
            tune(Machine(), quality, slowdown, Space())
    with pytest.raises(MisuseError, match="1 to 1024"):
        Space(largest=2000)
