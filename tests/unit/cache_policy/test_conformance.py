"""One suite that every replacement policy passes: the contract of ``base.Policy``."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strataflux.cache_policy import base, policies
from strataflux.cache_policy.errors import UnknownPolicyError
from strataflux.cache_policy.simulate import Trace, run

SLOTS, CLASSES, KEYS = 24, 3, 80

# (name, arguments of make_state) of every policy, small enough for ghosts and levels to overflow.
CASES = [(name, (SLOTS, CLASSES, hint)) for name in policies.POLICIES for hint in (KEYS, 0)]
# What large caches do differently, with the few slots that are used of one.
CASES.append(("blend", (1 << 19, CLASSES, KEYS)))


class Tier:
    """What a tier does around a policy, for caches of several classes: key k belongs to class k % CLASSES."""

    def __init__(self, policy: base.Policy, arguments: tuple[int, int, int]) -> None:
        self.policy = policy
        self.state = policy.make_state(*arguments)
        self.where: dict[int, int] = {}
        self.free = list(range(SLOTS))

    def request(self, key: int, clock: int) -> bool:
        """Whether it was a hit."""
        p, s, cls, clock = self.policy, self.state, key % CLASSES, clock % 2**32
        if key in self.where:
            p.touch(s, self.where[key], clock, 7)
            return True
        p.requested(s, key, 7, clock)
        if not self.free and not self.make_room(key, clock):
            return False
        self.where[key] = self.free.pop()
        p.insert(s, self.where[key], cls, key, clock, 7)
        return False

    def make_room(self, key: int, clock: int) -> bool:
        p, s, cls = self.policy, self.state, key % CLASSES
        slot = p.candidate(s, cls)
        if slot == base.NO_SLOT:  # none of this class is resident: another must give
            cls = next(c for c in range(CLASSES) if p.candidate(s, c) >= 0)
            slot = p.candidate(s, cls)
        elif not p.admit(s, key, cls, 7, clock):
            return False
        held = {at: k for k, at in self.where.items()}
        assert held[slot] % CLASSES == cls
        self.drop(held[slot], evicted=True)
        return True

    def drop(self, key: int, evicted: bool) -> None:
        slot = self.where.pop(key)
        self.policy.remove(self.state, slot, evicted)
        self.free.append(slot)

    def check(self) -> None:
        assert self.policy.check_integrity(self.state) == base.INTACT


@pytest.fixture(params=CASES, ids=[f"{name}-{a[0]}-{a[2]}" for name, a in CASES])
def tier(request: pytest.FixtureRequest) -> Tier:
    name, arguments = request.param
    return Tier(policies.POLICIES[name], arguments)


def test_an_empty_cache_has_no_candidate_and_no_age(tier: Tier) -> None:
    for cls in range(CLASSES):
        assert tier.policy.candidate(tier.state, cls) == base.NO_SLOT
        assert tier.policy.tail_clock(tier.state, cls) == base.NO_SLOT
    tier.check()


def test_the_candidate_is_of_its_class_and_stays_until_removed(tier: Tier) -> None:
    for key in range(SLOTS):
        tier.request(key, 5)
    for cls in range(CLASSES):
        slot = tier.policy.candidate(tier.state, cls)
        assert slot == tier.policy.candidate(tier.state, cls)
        assert {at: key for key, at in tier.where.items()}[slot] % CLASSES == cls
        assert tier.policy.tail_clock(tier.state, cls) == 5
    assert len(tier.where) == SLOTS
    tier.check()


def test_every_slot_of_a_class_is_named_once_as_it_empties(tier: Tier) -> None:
    for key in range(SLOTS):
        tier.request(key, key)
    named = []
    while (slot := tier.policy.candidate(tier.state, 1)) >= 0:
        named.append(slot)
        tier.policy.remove(tier.state, slot, True)
    assert sorted(named) == sorted(at for key, at in tier.where.items() if key % CLASSES == 1)
    tier.check()


def test_an_invalidated_slot_serves_another_class(tier: Tier) -> None:
    for key in range(SLOTS):
        tier.request(key, 1)
    tier.drop(0, evicted=False)
    tier.request(KEYS - 1, 2)
    assert (KEYS - 1) in tier.where
    tier.check()


operations = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "ask", "ask", "drop"]), st.integers(0, KEYS - 1)), max_size=150
)


@pytest.mark.parametrize(("name", "arguments"), CASES)
@settings(deadline=None, max_examples=40)
@given(operations, st.sampled_from([1, 2**32 - 9]))
def test_any_life_keeps_the_invariants(
    name: str, arguments: tuple[int, int, int], steps: list[tuple[str, int]], start: int
) -> None:
    tier = Tier(policies.POLICIES[name], arguments)
    for number, (what, key) in enumerate(steps):
        if what == "ask":
            tier.request(key, start + number // 7)
        elif key in tier.where:
            tier.drop(key, evicted=False)
    tier.check()
    assert len(tier.where) + len(tier.free) == SLOTS


def test_the_same_calls_give_the_same_victims(tier: Tier) -> None:
    rng = np.random.default_rng(3)
    keys = rng.zipf(1.3, 600) % KEYS
    twin = Tier(tier.policy, (SLOTS, CLASSES, KEYS))
    other = Tier(tier.policy, (SLOTS, CLASSES, KEYS))
    for number, key in enumerate(keys.tolist()):
        assert twin.request(key, number // 20) == other.request(key, number // 20)
    assert twin.where == other.where
    twin.check()


def test_a_hot_key_is_kept_through_a_stream_of_others(tier: Tier) -> None:
    hits = 0
    for step in range(1, 400):
        hits += tier.request(3, step)
        for cold in range(3):
            tier.request(10 + (step * 3 + cold) % (KEYS - 10), step)
    assert hits > 390
    tier.check()


def slots_of(tier: Tier) -> NDArray[np.void]:
    """The records of a policy's slots, whatever it calls them."""
    records: NDArray[np.void] = tier.state.pasts if hasattr(tier.state, "pasts") else tier.state.nodes
    return records


def test_a_slot_of_another_class_is_found(tier: Tier) -> None:
    for key in range(SLOTS):
        tier.request(key, 1)
    tier.check()
    slot = slots_of(tier)[tier.where[4]]
    slot["cls"] = (slot["cls"] + 1) % CLASSES
    assert tier.policy.check_integrity(tier.state) != base.INTACT


@pytest.mark.parametrize(("name", "arguments"), [case for case in CASES if case[0] != "blend"])
def test_a_broken_link_is_found(name: str, arguments: tuple[int, int, int]) -> None:
    """Of policies that link their slots."""
    tier = Tier(policies.POLICIES[name], arguments)
    for key in range(SLOTS):
        tier.request(key, 1)
    tier.state.nodes[tier.where[4]]["next"] = 0
    assert tier.policy.check_integrity(tier.state) != base.INTACT


def test_a_slot_that_nobody_counted_is_found(tier: Tier) -> None:
    tier.request(0, 1)
    slots_of(tier)[SLOTS - 2]["cls"] = 0
    assert tier.policy.check_integrity(tier.state) in (base.LOST_SLOT, base.WRONG_COUNT)


def test_an_unknown_name_is_refused_with_those_known() -> None:
    with pytest.raises(UnknownPolicyError, match=r"'belady2'; known: all, lru, sieve"):
        policies.find_policies("lru,belady2")
    assert list(policies.find_policies("arc, lru")) == ["arc", "lru"]
    assert policies.DEFAULT in policies.find_policies("all")


def steps_of(draw: Any, steps: int, per_step: int, n_keys: int) -> Trace:
    rows = np.array([draw(step) for step in range(steps)]).astype(np.int64)
    assert rows.shape == (steps, per_step)
    return Trace("made", rows, n_keys)


def skewed(rng: np.random.Generator, drift: int) -> Trace:
    """Each step selects some keys of every set, skewed; favourites drift by ``drift`` keys every ten steps."""
    log_weight = -0.9 * np.log1p(np.arange(128))

    def draw(step: int) -> Any:
        parts = []
        for section in range(16):
            noise = rng.gumbel(size=128) + np.roll(log_weight, drift * (step // 10))
            parts.append(np.sort(np.argsort(-noise)[:8]) + 128 * section)
        return np.concatenate(parts)

    return steps_of(draw, 400, 128, 2048)


def looping(rng: np.random.Generator) -> Trace:
    """A scan that repeats and does not fit."""
    return steps_of(lambda step: (np.arange(64) + 64 * step) % 640, 200, 64, 1024)


def recent(rng: np.random.Generator) -> Trace:
    """Stack distances: what was used lately is used again, no key is favoured for good."""
    stack = list(rng.permutation(1024))

    def draw(step: int) -> Any:
        depths = np.minimum(rng.geometric(0.01, 64) - 1, 1023)
        row = []
        for depth in depths.tolist():
            stack.insert(0, stack.pop(depth))
            row.append(stack[0])
        return row

    return steps_of(draw, 400, 64, 1024)


def phases(rng: np.random.Generator) -> Trace:
    """The favourites change all at once, four times."""
    orders = [rng.permutation(1024) for _ in range(4)]
    return steps_of(lambda step: orders[step // 100][np.minimum(rng.zipf(1.2, 64) - 1, 1023)], 400, 64, 1024)


MADE = {
    "skewed": lambda rng: skewed(rng, 0),
    "drifting": lambda rng: skewed(rng, 5),
    "looping": looping,
    "recent": recent,
    "phases": phases,
}


@pytest.mark.parametrize("share", [0.05, 0.1, 0.25])
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("seed", [11, 12])
def test_the_default_keeps_up_with_lru(seed: int, made: str, share: float) -> None:
    """Half a point at most below it."""
    trace = MADE[made](np.random.default_rng(seed))
    slots = int(share * trace.n_keys)
    lru = run(policies.POLICIES["lru"], trace, slots).hit_rate
    assert run(policies.POLICIES[policies.DEFAULT], trace, slots).hit_rate >= lru - 0.005
