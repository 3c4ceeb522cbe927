"""The byte budget: page states, who drains for whom, shrinking and growing, and every invariant."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strataflux.cache_policy import base, budget
from strataflux.cache_policy.errors import CachePolicyError, SlotTooLargeError, TooManyClassesError

PER_SEGMENT = 4


def make(segments: int = 1) -> budget.Budget:
    b = budget.make_budget(8, PER_SEGMENT)
    for segment in range(segments):
        assert budget.grow(b, budget.WEIGHTS, segment)
    return b


def tails(**clocks: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    table = np.full(budget.MAX_CLASSES, -1, np.int64)
    for name, clock in clocks.items():
        table[int(name[1:])] = clock
    return table


def test_same_size_in_the_same_budget_is_one_class() -> None:
    b = make()
    small = budget.add_class(b, 512, budget.WEIGHTS)
    assert budget.add_class(b, 512, budget.WEIGHTS) == small
    assert budget.add_class(b, 512, budget.KV) != small


@pytest.mark.parametrize("size", [budget.PAGE_BYTES + 256, 0, -256, 300])
def test_a_slot_that_fits_no_page_is_refused_with_numbers(size: int) -> None:
    with pytest.raises(SlotTooLargeError, match=rf"slots of {size} bytes.*{budget.PAGE_BYTES} bytes"):
        budget.add_class(make(), size, budget.WEIGHTS)


def test_class_table_is_bounded() -> None:
    b = make()
    for n in range(1, budget.MAX_CLASSES + 1):
        budget.add_class(b, n * 256, budget.WEIGHTS)
    with pytest.raises(TooManyClassesError, match="size class 33; the limit is 32"):
        budget.add_class(b, 33 * 256, budget.WEIGHTS)
    assert issubclass(TooManyClassesError, CachePolicyError)
    assert issubclass(CachePolicyError, ValueError)


def test_unused_pages_come_first_and_only_from_the_own_budget() -> None:
    b = make()
    weights = budget.add_class(b, 4096, budget.WEIGHTS)
    kv = budget.add_class(b, 4096, budget.KV)
    assert [budget.want_page(b, weights) for _ in range(5)] == [0, 1, 2, 3, budget.NO_PAGE]
    assert budget.want_page(b, kv) == budget.NO_PAGE
    assert budget.grow(b, budget.KV, 1)
    assert budget.want_page(b, weights) == budget.NO_PAGE
    assert budget.want_page(b, kv) == 4
    assert budget.check_integrity(b) == base.INTACT


def test_the_oldest_class_gives_its_emptiest_page_when_older_by_an_eighth() -> None:
    b = make()
    old, need = budget.add_class(b, 65536, 0), budget.add_class(b, 1024, 0)
    pages = [budget.want_page(b, old) for _ in range(3)]
    assert budget.want_page(b, need) == 3
    for page, slots in zip(pages, (2, 1, 1), strict=True):
        for _ in range(slots):
            assert budget.take_slot(b, page)
    # Ages 80 and 70: the difference is exactly 1/8 of the span, which is not more.
    assert budget.pick_drain(b, need, tails(_0=20, _1=30), 100) == budget.NO_PAGE
    assert budget.pick_drain(b, need, tails(_0=20, _1=31), 100) == pages[1]
    assert not budget.take_slot(b, pages[1])  # a draining page gives no slots
    assert budget.pick_drain(b, need, tails(_0=20, _1=31), 100) == budget.NO_PAGE  # one at a time
    assert budget.page_drained(b, pages[1]) == budget.REFUSED  # one slot is not free yet
    assert budget.give_slot(b, pages[1]) == 0
    assert budget.page_drained(b, pages[1]) == need
    assert budget.page_drained(b, pages[1]) == budget.REFUSED
    assert budget.check_integrity(b) == base.INTACT


def test_a_younger_class_gives_nothing_and_an_idle_one_gives_first() -> None:
    b = make()
    young, need = budget.add_class(b, 512, 0), budget.add_class(b, 1024, 0)
    budget.want_page(b, young)
    budget.want_page(b, need)
    assert budget.pick_drain(b, need, tails(_0=90, _1=10), 100) == budget.NO_PAGE
    assert budget.pick_drain(b, need, tails(_1=10), 100) == 0


def test_a_class_without_a_page_takes_one_however_young_the_others_are() -> None:
    b = make()
    other, need = budget.add_class(b, 512, 0), budget.add_class(b, 1024, 0)
    for _ in range(PER_SEGMENT):
        budget.want_page(b, other)
    assert budget.pick_drain(b, need, tails(_0=100), 100) == 0


def test_ages_compare_across_the_wrap_of_the_clock() -> None:
    b = make()
    old, need = budget.add_class(b, 512, 0), budget.add_class(b, 1024, 0)
    budget.want_page(b, old)
    budget.want_page(b, need)
    assert budget.pick_drain(b, need, tails(_0=2**32 - 50, _1=5), 10) == 0


def test_the_other_budget_never_gives() -> None:
    b = make()
    kv, need = budget.add_class(b, 512, budget.KV), budget.add_class(b, 1024, budget.WEIGHTS)
    budget.grow(b, budget.KV, 1)
    budget.want_page(b, kv)
    budget.want_page(b, need)
    assert budget.pick_drain(b, need, tails(_0=1, _1=90), 100) == budget.NO_PAGE


def test_shrinking_drains_a_whole_segment_and_growing_brings_it_back() -> None:
    b = make(segments=2)
    cls, other = budget.add_class(b, 512, 0), budget.add_class(b, 1024, 0)
    used, owned = budget.want_page(b, cls), budget.want_page(b, cls)
    budget.take_slot(b, used)
    assert budget.pick_drain(b, other, tails(_0=1), 9) == owned  # was to go to `other`, now leaves instead
    assert budget.shrink(b, 0) == 2
    assert not budget.grow(b, 0, 0)
    assert budget.page_drained(b, owned) == budget.GONE
    assert budget.page_drained(b, used) == budget.REFUSED
    budget.give_slot(b, used)
    assert budget.page_drained(b, used) == budget.GONE
    assert budget.segment_pages(b, 0) == 0
    assert budget.want_page(b, other) == PER_SEGMENT
    assert budget.grow(b, 0, 0)
    assert budget.want_page(b, other) == 0
    assert budget.check_integrity(b) == base.INTACT


def test_a_released_page_serves_another_class() -> None:
    b = make()
    cls, other = budget.add_class(b, 512, 0), budget.add_class(b, 1024, 0)
    page = budget.want_page(b, cls)
    assert budget.release(b, page)
    assert not budget.release(b, page)
    assert budget.page_drained(b, page) == budget.GONE
    assert budget.want_page(b, other) == page


def test_slots_of_a_page_are_bounded() -> None:
    b = make()
    page = budget.want_page(b, budget.add_class(b, budget.PAGE_BYTES // 2, 0))
    assert [budget.take_slot(b, page) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("state", budget.UNUSED, base.WRONG_CLASS),
        ("owner", 7, base.WRONG_CLASS),
        ("used", -1, base.WRONG_VALUE),
        ("state", budget.DRAINING, base.WRONG_COUNT),
    ],
)
def test_a_broken_page_is_found(field: str, value: int, code: int) -> None:
    b = make()
    page = budget.want_page(b, budget.add_class(b, 512, 0))
    assert budget.check_integrity(b) == base.INTACT
    b.pages[page][field] = value
    assert budget.check_integrity(b) == code


def test_broken_counters_are_found() -> None:
    b = make()
    b.pools[0]["unused"] += 1
    assert budget.check_integrity(b) == base.WRONG_COUNT
    b = make()
    b.pools[0]["first"] = 1
    assert budget.check_integrity(b) == base.BROKEN_LINK


operations = st.lists(st.tuples(st.sampled_from("wtgdprsG"), st.integers(0, 31), st.integers(1, 99)), max_size=60)


@settings(deadline=None, max_examples=200)
@given(operations)
def test_any_sequence_of_calls_keeps_the_page_table_whole(steps: list[tuple[str, int, int]]) -> None:
    b = make(segments=4)
    classes = [budget.add_class(b, size, size % 512 and 1) for size in (512, 1024, 65536, 256 * 3)]
    budget.grow(b, budget.KV, 4)
    for name, where, clock in steps:
        cls, page = classes[where % 4], where
        if name == "w":
            budget.want_page(b, cls)
        elif name == "t":
            budget.take_slot(b, page)
        elif name == "g" and b.pages[page]["used"]:
            budget.give_slot(b, page)
        elif name == "d":
            budget.page_drained(b, page)
        elif name == "p":
            budget.pick_drain(b, cls, tails(_0=clock, _1=50, _2=100 - clock, _3=clock), 100)
        elif name == "r":
            budget.release(b, page)
        elif name == "s":
            budget.shrink(b, where % 8)
        elif name == "G":
            budget.grow(b, where % 2, where % 8)
        assert budget.check_integrity(b) == base.INTACT
