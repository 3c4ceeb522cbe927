"""The model of reuse: what it learns, and what one request changes."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from strataflux.cache_policy import reuse


class Model(NamedTuple):
    numbers: NDArray[np.int64]


def model(learn_every: int = 1, shortest_tick: int = 1) -> Model:
    return Model(reuse.make_numbers(shortest_tick, learn_every, 0))


def pasts(m: Model, count: int) -> NDArray[np.void]:
    """Keys first seen now."""
    made = np.zeros(count, reuse.PAST)
    for past in made:
        reuse.begin(m, past, 1)
    return made


def ask(m: Model, clock: int) -> bool:
    """A request; whether it is one to learn from."""
    return bool(reuse.advance(m, clock) and reuse.attend(m, clock))


def use(m: Model, past: Any) -> None:
    reuse.learn_use(m, past)
    reuse.used(m, past, reuse.now(m))


def test_a_key_used_at_every_tick_is_preferred_and_one_used_once_is_not_expected() -> None:
    m = model()
    ask(m, 1)
    often, once = pasts(m, 2)
    for tick in range(2, 60):
        ask(m, tick)
        use(m, often)
        reuse.learn_absence(m, once, 1.0)
    assert reuse.estimate(m, often) > 65536 > -65536 > reuse.estimate(m, once)
    assert reuse.pace(m) == 1


def test_before_anything_is_learnt_the_later_and_the_more_often_used_key_is_preferred() -> None:
    m = model()
    ask(m, 1)
    early, often = pasts(m, 2)
    for tick in range(2, 6):
        ask(m, tick)
        reuse.used(m, often, reuse.now(m))
    (late,) = pasts(m, 1)
    assert reuse.estimate(m, often) > reuse.estimate(m, late) > reuse.estimate(m, early)


def test_uses_within_half_a_tick_count_once() -> None:
    m = model(shortest_tick=8)
    for clock in range(1, 5):
        for _ in range(8):
            ask(m, clock)
    (past,) = pasts(m, 1)
    before = past.copy()
    reuse.used(m, past, reuse.now(m))
    assert past == before
    for _ in range(8):
        ask(m, 5)
    reuse.used(m, past, reuse.now(m))
    assert past["uses"] == 3
    assert past["rate"] > before["rate"]


def test_the_turns_of_a_key_are_kept_bit_by_bit_and_forgotten_after_32() -> None:
    m = model()
    ask(m, 1)
    (past,) = pasts(m, 1)
    for clock, uses in ((2, 0b11), (4, 0b1101), (35, 1 << 31 | 1), (80, 1)):
        while reuse.now(m) // 256 - 1 < clock:
            ask(m, int(reuse.now(m) // 256))
        reuse.used(m, past, reuse.now(m))
        assert past["uses"] == uses


def test_time_may_pass_the_end_of_its_32_bits() -> None:
    m = model()
    ask(m, 1)
    m.numbers[1] = (1 << 24) - 2  # the tick
    ask(m, 2)
    (past,) = pasts(m, 1)
    for clock in range(3, 8):
        ask(m, clock)
        use(m, past)
    assert past["uses"] == 0b111111
    assert reuse.since(m, past) == 0
    assert reuse.last_clock(m, past) == 7


@pytest.mark.parametrize("late", [False, True])
def test_of_two_keys_as_likely_the_one_whose_turn_comes_first_is_preferred_if_fills_come_at_once(late: bool) -> None:
    m = model()
    keys = pasts(m, 64)
    for clock in range(1, 200):
        for at, past in enumerate(keys):
            ask(m, clock)
            use(m, past)
            reuse.filled(m, keys[(at + 32) % 64 if late else at])
            if at == 31:
                first, last = reuse.estimate(m, keys[32]), reuse.estimate(m, keys[31])
    assert (first > last) != late


def test_a_tick_is_cut_short_where_keys_repeat_within_one_clock_value() -> None:
    m = model()
    for clock in range(1, 40):
        keys = pasts(m, 4)
        for turn in range(256):
            ask(m, clock)
            reuse.used(m, keys[turn % 4], reuse.now(m))
    assert reuse.pace(m) < 128


def test_a_clock_finer_than_the_time_in_which_keys_repeat_makes_ticks_of_several_values() -> None:
    m = model()
    keys = pasts(m, 32)
    for step in range(1200):
        for at, past in enumerate(keys):
            ask(m, 1 + step * 8 + at // 4)
            use(m, past)
    assert 24 <= reuse.pace(m) <= 40


def test_one_request_in_so_many_is_learnt_from() -> None:
    m = model(learn_every=8)
    assert sum(ask(m, 1 + at // 64) for at in range(64 * 5)) == 5 * 8


def test_the_clock_of_a_use_is_remembered_and_then_that_of_the_oldest_tick() -> None:
    m = model()
    ask(m, 10)
    old, (new,) = pasts(m, 1)[0], pasts(m, 1)
    for clock in range(20, 20 + 3 * 2000, 3):
        ask(m, clock)
        if clock == 20 + 3 * 1000:
            reuse.begin(m, new, 1)
    assert reuse.last_clock(m, new) == 20 + 3 * 1000
    assert 20 + 3 * 900 < reuse.last_clock(m, old) < 20 + 3 * 1000


@pytest.mark.parametrize("pause", [1, 1 << 20, 1 << 31, 3 << 30])
def test_time_goes_on_after_a_pause_of_any_length(pause: int) -> None:
    """What is kept of KV may hear of nothing for a month, while the clock of the cache goes round."""
    m = model()
    for clock in (1, 2, 9):
        ask(m, clock)
    before = reuse.now(m)
    for clock in (9 + pause, 10 + pause):
        ask(m, clock & 0xFFFFFFFF)
    assert reuse.now(m) == before + 2 * 256
    ask(m, 5 + pause & 0xFFFFFFFF)  # a use that was seen late
    assert reuse.now(m) < before + 3 * 256
