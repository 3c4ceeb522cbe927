"""The simulator: the optimum against brute force, LRU against an OrderedDict, fill modes and weighted rates."""

from collections import OrderedDict
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strataflux.cache_policy import policies
from strataflux.cache_policy.simulate import Trace, lru_lazy, optimum, quantize_scores, run


def one_a_step(keys: list[int], n_keys: int = 6) -> Trace:
    return Trace("made", np.array(keys, np.int64)[:, None], n_keys)


def most_hits(keys: tuple[int, ...], slots: int) -> int:
    """By trying every choice."""

    @cache
    def best(at: int, resident: frozenset[int]) -> int:
        if at == len(keys):
            return 0
        if keys[at] in resident:
            return 1 + best(at + 1, resident)
        choices = [resident]
        choices += [resident - {out} | {keys[at]} for out in resident]
        if len(resident) < slots:
            choices.append(resident | {keys[at]})
        return max(best(at + 1, choice) for choice in choices)

    return best(0, frozenset())


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=14), st.integers(1, 3))
def test_the_optimum_is_what_trying_everything_finds(keys: list[int], slots: int) -> None:
    assert optimum(one_a_step(keys), slots).hit_rate * len(keys) == pytest.approx(most_hits(tuple(keys), slots))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 4))
def test_no_policy_beats_the_optimum_and_lru_is_lru(keys: list[int], slots: int) -> None:
    trace = one_a_step(keys)
    model: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for key in keys:
        hits += key in model
        model[key] = None
        model.move_to_end(key)
        if len(model) > slots:
            model.popitem(last=False)
    assert run(policies.POLICIES["lru"], trace, slots).hit_rate == pytest.approx(hits / len(keys))
    best = optimum(trace, slots).hit_rate
    for policy in policies.POLICIES.values():
        assert run(policy, trace, slots).hit_rate <= best + 1e-9


def test_next_step_fill_serves_a_repeat_within_the_step_as_a_miss() -> None:
    trace = Trace("made", np.array([[1, 1], [1, 1]], np.int64), 2)
    lru = policies.POLICIES["lru"]
    assert run(lru, trace, 1).hit_rate == 0.75
    assert run(lru, trace, 1, next_step=True).hit_rate == 0.5
    assert lru_lazy(trace, 1).hit_rate == 0.75
    assert lru_lazy(trace, 1, next_step=True).hit_rate == 0.5


def test_next_step_fill_saves_a_step_that_does_not_fit_from_itself() -> None:
    """With immediate fill a loop evicts what it needs next; filling after the step keeps what the step found."""
    keys = np.array([[0, 1, 2]] * 20, np.int64)
    lru = policies.POLICIES["lru"]
    assert run(lru, Trace("made", keys, 3), 2).hit_rate == 0
    assert run(lru, Trace("made", keys, 3), 2, next_step=True).hit_rate > 0.5


def test_the_weighted_rate_is_the_share_of_the_score() -> None:
    keys = np.array([[0, 1], [0, 2]], np.int64)
    scores = np.array([[1, 1], [6, 2]], np.float32)
    rates = run(policies.POLICIES["lru"], Trace("made", keys, 3, scores), 2)
    assert rates.hit_rate == 0.25
    assert rates.weighted_hit_rate == pytest.approx(0.6)
    assert optimum(Trace("made", keys, 3, scores), 2) == rates


def test_scores_are_quantized_as_requests_carry_them() -> None:
    scores = np.array([[0.0, 2.0**-12, 1.0, 2.0**9]], np.float32)
    assert quantize_scores(scores, (1, 4)).tolist() == [[1, 1, 193, 255]]
    assert quantize_scores(None, (1, 2)).tolist() == [[0, 0]]


def test_a_step_may_ask_for_less() -> None:
    """-1 is no request: the same stream without it gives the same hits."""
    holes = np.array([[0, -1, 1], [-1, -1, 0], [1, 2, -1], [0, 1, 2]], np.int64)
    scores = np.where(holes < 0, 9, 1).astype(np.float32)  # of what is not asked for, a score means nothing
    trace = Trace("made", holes, 3, scores)
    flat = one_a_step([key for key in holes.ravel().tolist() if key >= 0], 3)
    assert trace.requests == 8
    for slots in (1, 2):
        assert optimum(trace, slots) == optimum(flat, slots)
        assert lru_lazy(trace, slots) == lru_lazy(flat, slots)
        for policy in policies.POLICIES.values():
            assert 0 <= run(policy, trace, slots, next_step=True).hit_rate <= 1
        assert run(policies.POLICIES["lru"], trace, slots) == run(policies.POLICIES["lru"], flat, slots)
