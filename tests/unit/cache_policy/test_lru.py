"""Lazy LRU against a model with the same rules, exact LRU against an OrderedDict, and hit rates on traces."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strataflux.cache_policy import base, lru
from strataflux.proto.compiled import compiled

SLOTS, CLASSES = 12, 2
DATA = Path(__file__).parents[2] / "data"


class Stamps:
    """``last_used`` of some sessions, as the addresses that the compiled driver reads."""

    def __init__(self, sessions: int, slots: int, start: int) -> None:
        self.last_used = np.full((sessions, slots), start, np.uint32)
        self.stepped = np.full(sessions, start, np.uint32)
        self.addresses = np.array([row.ctypes.data for row in self.last_used], np.uint64)

    def stamp(self, session: int, slot: int, clock: int) -> None:
        self.last_used[session, slot] = self.stepped[session] = clock % 2**32

    def victim(self, s: lru.State, cls: int, clock: int) -> int:
        sessions = len(self.stepped)
        return lru.choose_victim(s, cls, clock % 2**32, self.addresses, self.stepped, sessions)


class LazyModel:
    """What DESIGN says lazy LRU does, on an OrderedDict of slot → position (clocks do not wrap here)."""

    def __init__(self) -> None:
        self.queues: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(CLASSES)]
        self.stamps: dict[tuple[int, int], int] = {}

    def victim(self, cls: int, clock: int) -> int:
        queue = self.queues[cls]
        for _ in range(lru.REINSERTIONS):
            if not queue:
                return base.NO_SLOT
            slot, position = next(iter(queue.items()))
            seen = [stamp for (_, at), stamp in self.stamps.items() if at == slot and position < stamp <= clock]
            if not seen:
                return slot
            queue[slot] = max(seen)
            queue.move_to_end(slot)
        return next(iter(queue))


events = st.lists(
    st.tuples(st.sampled_from(["fill", "evict", "stamp", "future"]), st.integers(0, SLOTS - 1), st.integers(0, 2)),
    max_size=120,
)


@settings(deadline=None, max_examples=200)
@given(events, st.sampled_from([100, 2**32 - 40]))
def test_lazy_lru_names_the_same_victims_as_the_model(steps: list[tuple[str, int, int]], start: int) -> None:
    s = lru.make_state(SLOTS, CLASSES, 0)
    stamps, model = Stamps(3, SLOTS, start), LazyModel()
    for clock, (what, slot, session) in enumerate(steps, start + 1):
        cls = slot % CLASSES
        if what == "fill" and slot not in model.queues[cls]:
            lru.insert(s, slot, cls, slot, clock % 2**32, 0)
            model.queues[cls][slot] = clock
        elif what in ("stamp", "future"):
            at = clock + (1000 if what == "future" else 0)
            stamps.stamp(session, slot, at)
            model.stamps[session, slot] = at
        elif what == "evict":
            victim = stamps.victim(s, cls, clock)
            assert victim == model.victim(cls, clock)
            if victim >= 0:
                assert lru.tail_clock(s, cls) == model.queues[cls].pop(victim) % 2**32
                lru.remove(s, victim, True)
    assert lru.check_integrity(s) == base.INTACT


def test_the_tail_is_taken_after_thirty_two_reinsertions() -> None:
    slots = lru.REINSERTIONS + 4
    s, stamps = lru.make_state(slots, 1, 0), Stamps(1, slots, 0)
    for slot in range(slots):
        lru.insert(s, slot, 0, slot, 1, 0)
        stamps.stamp(0, slot, 2)
    assert stamps.victim(s, 0, 3) == lru.REINSERTIONS
    assert lru.check_integrity(s) == base.INTACT


def test_a_session_that_has_not_stepped_since_is_not_asked() -> None:
    s, stamps = lru.make_state(2, 1, 0), Stamps(1, 2, 0)
    for slot in range(2):
        lru.insert(s, slot, 0, slot, 5, 0)
    stamps.last_used[0, 0] = 9
    assert stamps.victim(s, 0, 10) == 0
    stamps.stepped[0] = 9
    assert stamps.victim(s, 0, 10) == 1


def test_an_empty_class_has_no_victim() -> None:
    s, stamps = lru.make_state(2, 2, 0), Stamps(1, 2, 0)
    lru.insert(s, 0, 1, 0, 7, 0)
    assert (stamps.victim(s, 0, 9), lru.tail_clock(s, 0)) == (base.NO_SLOT, base.NO_SLOT)
    assert (stamps.victim(s, 1, 9), lru.tail_clock(s, 1)) == (0, 7)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 19), max_size=200))
def test_exact_lru_equals_an_ordered_dict(keys: list[int]) -> None:
    s = lru.make_state(SLOTS, 1, 0)
    free, where = list(range(SLOTS)), dict[int, int]()
    model: OrderedDict[int, None] = OrderedDict()
    for clock, key in enumerate(keys):
        if key in where:
            lru.touch(s, where[key], clock, 0)
            model.move_to_end(key)
            continue
        if not free:
            oldest, _ = model.popitem(last=False)
            assert lru.candidate(s, 0) == where[oldest]
            lru.remove(s, where[oldest], True)
            free.append(where.pop(oldest))
        where[key] = free.pop()
        lru.insert(s, where[key], 0, key, clock, 0)
        model[key] = None
    assert lru.check_integrity(s) == base.INTACT


def test_an_invalidated_slot_can_be_used_again() -> None:
    s = lru.make_state(3, 1, 0)
    for slot in range(3):
        lru.insert(s, slot, 0, slot, slot, 0)
    lru.remove(s, 1, False)
    lru.insert(s, 1, 0, 9, 5, 0)
    order = []
    while (slot := lru.candidate(s, 0)) >= 0:
        order.append(slot)
        lru.remove(s, slot, True)
    assert order == [0, 2, 1]
    assert lru.check_integrity(s) == base.INTACT


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("prev", 3, base.BROKEN_LINK),
        ("next", 1, base.BROKEN_LINK),
        ("cls", 1, base.WRONG_CLASS),
    ],
)
def test_a_broken_node_is_found(field: str, value: int, code: int) -> None:
    s = lru.make_state(4, 2, 0)
    for slot in range(4):
        lru.insert(s, slot, 0, slot, slot, 0)
    s.nodes[1][field] = value
    assert lru.check_integrity(s) == code


def test_broken_counts_and_lost_slots_are_found() -> None:
    s = lru.make_state(4, 2, 0)
    lru.insert(s, 0, 0, 0, 0, 0)
    s.counts[0] = 2
    assert lru.check_integrity(s) == base.WRONG_COUNT
    s.counts[0] = 0
    assert lru.check_integrity(s) == base.WRONG_COUNT
    s.counts[0] = 1
    s.nodes[3]["cls"] = 1
    assert lru.check_integrity(s) == base.LOST_SLOT


@compiled
def exact_hits(s: lru.State, steps: NDArray[Any], directory: NDArray[Any], held: NDArray[Any]) -> int:
    hits, used = 0, 0
    for step in range(steps.shape[0]):
        for key in steps[step]:
            slot = directory[key]
            if slot >= 0:
                lru.touch(s, slot, step + 1, 0)
                hits += 1
                continue
            slot = used
            if used < len(held):
                used += 1
            else:
                slot = lru.candidate(s, 0)
                directory[held[slot]] = -1
                lru.remove(s, slot, True)
            lru.insert(s, slot, 0, key, step + 1, 0)
            directory[key], held[slot] = slot, key
    return hits


@compiled
def lazy_hits(
    s: lru.State,
    steps: NDArray[Any],
    directory: NDArray[Any],
    held: NDArray[Any],
    last_used: NDArray[Any],
    addresses: NDArray[Any],
    stepped: NDArray[Any],
) -> int:
    hits, used = 0, 0
    for step in range(steps.shape[0]):
        stepped[0] = step + 1
        for key in steps[step]:
            slot = directory[key]
            if slot >= 0:
                last_used[slot] = step + 1
                hits += 1
                continue
            slot = used
            if used < len(held):
                used += 1
            else:
                slot = lru.choose_victim(s, 0, step + 1, addresses, stepped, 1)
                directory[held[slot]] = -1
                lru.remove(s, slot, True)
            lru.insert(s, slot, 0, key, step + 1, 0)
            directory[key], held[slot] = slot, key
    return hits


def synthetic_steps() -> NDArray[np.int64]:
    """Like recorded selections: a few keys of each of 12 sets a step, skewed, and some of them drifting with time."""
    rng = np.random.default_rng(7)
    weight = 1 / (1 + np.arange(96)) ** 0.8
    rows = []
    for step in range(300):
        row = []
        for section in range(12):
            noise = rng.gumbel(size=96) + np.log(np.roll(weight, 3 * (step // 20)))
            row.append(np.sort(np.argsort(-noise)[:6]) + 96 * section)
        rows.append(np.concatenate(row))
    return np.array(rows, np.int64)


def recorded_steps(name: str) -> NDArray[np.int64]:
    """Selections recorded while SmolLM2-135M read English text, [step, keys of 4 of its 30 layers].

    ``weights``: 32 of 1,024 channels of the four projection sets; ``kv``: 4-token groups, 1 of 64, of three heads.
    """
    with np.load(DATA / "selections.npz") as excerpt:
        return np.asarray(excerpt[name], np.int64)


RECORDED = [(trace, share) for trace in ("weights", "kv") for share in (0.05, 0.08, 0.12, 0.25, 0.5)]
# Below about three steps' selections the two differ by more, either way: the model says which slot a stamp saves.
SYNTHETIC = [("synthetic", share) for share in (0.2, 0.25, 0.5)]


@pytest.mark.parametrize(("trace", "share"), RECORDED + SYNTHETIC)
def test_lazy_lru_hits_as_often_as_exact_lru(trace: str, share: float) -> None:
    steps = synthetic_steps() if trace == "synthetic" else recorded_steps(trace)
    n_keys = int(steps.max()) + 1
    slots = int(n_keys * share)
    directory, held = np.full(n_keys, -1, np.int64), np.zeros(slots, np.int64)
    exact_state = lru.make_state(slots, 1, 0)
    exact = exact_hits(exact_state, steps, directory.copy(), held.copy())
    stamps, lazy_state = Stamps(1, slots, 0), lru.make_state(slots, 1, 0)
    row = stamps.last_used[0]
    lazy = lazy_hits(lazy_state, steps, directory, held, row, stamps.addresses, stamps.stepped)
    assert lazy / steps.size >= exact / steps.size - 0.005
    assert exact < steps.size
    assert lru.check_integrity(exact_state) == lru.check_integrity(lazy_state) == base.INTACT
