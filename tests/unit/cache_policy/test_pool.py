"""The pool of the lowest slots, against a sorted list; and the instructions Python has no word for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strataflux.cache_policy import bits, pool
from strataflux.proto.compiled import compiled

ENTRIES = 15
VALUES = st.integers(-(2**31), 2**31 - 1)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["offer", "offer", "offer", "drop", "pass"]), st.integers(0, 24), VALUES)))
def test_a_pool_holds_each_slot_once_and_the_lowest_first(steps: list[tuple[str, int, int]]) -> None:
    at = 3
    numbers = np.full(pool.SIZE + 6, 77, np.int64)
    numbers[at : at + pool.SIZE] = 0
    model: dict[int, int] = {}
    for what, slot, value in steps:
        order = sorted(model, key=lambda s: (model[s], s))
        if what == "offer":
            if len(model) < ENTRIES or (value, slot) < (model[order[-1]], order[-1]):
                if slot not in model and len(model) == ENTRIES:
                    del model[order[-1]]
                model[slot] = value
            pool.offer(numbers, at, slot, value)
        elif what == "drop" and model:
            del model[order[0]]
            pool.drop_lowest(numbers, at)
        elif what == "pass":
            if order and order[0] == slot:
                del model[slot]
            pool.pass_over(numbers, at, slot, 100)
            assert pool.was_passed(numbers, at, slot) or numbers[at + ENTRIES + 1] == 0
        order = sorted(model, key=lambda s: (model[s], s))
        assert pool.lowest(numbers, at) == (order[0] if order else -1)
        if order:
            assert pool.second(numbers, at) == order[min(1, len(order) - 1)]
        assert pool.second_value(numbers, at) == (model[order[1]] if len(order) > 1 else 2**31)
    assert (numbers[:at] == 77).all()
    assert (numbers[at + pool.SIZE :] == 77).all()


def test_one_slot_is_always_left_to_be_named() -> None:
    numbers = np.zeros(pool.SIZE, np.int64)
    for slot in (4, 5, 6):
        pool.pass_over(numbers, 0, slot, 4)
    assert [pool.was_passed(numbers, 0, slot) for slot in (4, 5, 6, 7)] == [True, True, True, False]
    pool.pass_over(numbers, 0, 7, 4)
    assert not any(pool.was_passed(numbers, 0, slot) for slot in (4, 5, 6, 7))
    pool.pass_over(numbers, 0, 5, 4)
    pool.take_back(numbers, 0)
    assert not pool.was_passed(numbers, 0, 5)


@compiled
def ones(value: int) -> int:
    return bits.count_ones(value)  # type: ignore[no-any-return]


@compiled
def octave(value: int) -> int:
    return bits.octave(value)  # type: ignore[no-any-return]


@compiled
def fetch(array: object, index: int) -> None:
    bits.prefetch(array, index)


@pytest.mark.parametrize("value", [1, 2, 3, 255, 256, 2**31, 2**40 - 1, 2**62])
def test_bits_are_counted_and_octaves_found(value: int) -> None:
    assert ones(value) == value.bit_count()
    assert octave(value) == value.bit_length() - 1


def test_zero_has_no_bits_and_no_octave() -> None:
    assert ones(0) == 0
    assert octave(0) == -1


def test_a_prefetch_changes_nothing_even_outside_the_array() -> None:
    array = np.arange(8)
    for index in (0, 7, 10**12, -(10**12)):
        fetch(array, index)
    assert (array == np.arange(8)).all()
