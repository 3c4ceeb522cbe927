"""The duel: what it says of LRU without keeping one, when it chooses it, and for how long."""

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from strataflux.cache_policy import duel

SLOTS = 200
PACE = 16  # units of time a request


class Race:
    """A duel in a cache of ``SLOTS``, with an LRU kept in full beside it."""

    def __init__(self, n_slots: int = SLOTS) -> None:
        self.numbers: NDArray[np.int64] = np.zeros(duel.SIZE, np.int64)
        duel.make_duel(self.numbers, 0, n_slots)
        self.last: dict[int, int] = {}
        self.lru: OrderedDict[int, None] = OrderedDict()
        self.now = 256
        self.lru_hits = 0

    def ask(self, key: int, hit: bool | None, counts: bool = True) -> bool:
        """Whether the choice changed; ``hit`` None: what LRU says."""
        had = key in self.lru
        self.lru_hits += had
        self.lru[key] = None
        self.lru.move_to_end(key)
        if len(self.lru) > SLOTS:
            self.lru.popitem(last=False)
        age = self.now - self.last[key] if key in self.last else duel.UNKNOWN
        took = duel.asked(self.numbers, 0, self.now, age, int(had if hit is None else hit), SLOTS, True, counts)
        self.last[key] = self.now
        self.now += PACE
        return bool(took)

    def until_changed(self, keys: Iterable[int], hit: bool | None) -> int:
        """Requests until the choice changes; the ``keys`` must not end before."""
        return next(count for count, key in enumerate(keys, 1) if self.ask(key, hit))


def skewed(seed: int, count: int) -> list[int]:
    keys: list[int] = (np.random.default_rng(seed).zipf(1.2, count) % 1500).tolist()
    return keys


@pytest.mark.parametrize("worse", [0.0, 0.02])
def test_a_cache_that_has_what_lru_has_is_not_found_behind_and_one_that_has_less_is(worse: float) -> None:
    race, rng = Race(), np.random.default_rng(5)
    changed = False
    for key in skewed(1, 40_000):
        had = key in race.lru
        changed |= race.ask(key, had and rng.random() >= worse)
    assert changed == (worse > 0)
    assert 0.3 < race.lru_hits / 40_000 < 0.95


def test_keys_that_come_round_and_do_not_fit_are_not_lrus() -> None:
    race = Race()
    assert not any(race.ask(at % (SLOTS + 20), at % 50 == 0) for at in range(20_000))
    assert race.lru_hits == 0


def test_lru_is_chosen_for_longer_each_time_the_other_soon_falls_behind_again() -> None:
    race, keys = Race(), iter(skewed(2, 400_000))
    terms = []
    for _ in range(3):
        race.until_changed(keys, False)
        assert duel.recency_leads(race.numbers, 0)
        terms.append(race.until_changed(keys, None))
        assert not duel.recency_leads(race.numbers, 0)
    assert terms[1] == 2 * terms[0]
    assert terms[2] == 2 * terms[1]
    assert not any(race.ask(next(keys), None) for _ in range(terms[0]))
    race.until_changed(keys, False)
    assert race.until_changed(keys, None) == terms[0]


def test_a_long_lead_does_not_hide_that_it_was_lost() -> None:
    race, keys = Race(), iter(skewed(3, 400_000))
    assert not any(race.ask(next(keys), True) for _ in range(100_000))
    assert race.until_changed(keys, False) < 2_000


def test_requests_that_say_nothing_change_nothing() -> None:
    race = Race()
    assert not any(race.ask(key, False, counts=False) for key in skewed(4, 5_000))


def test_a_pause_longer_than_the_ring_forgets_all() -> None:
    race = Race()
    for key in range(SLOTS):
        race.ask(key, None)
    race.now += 1 << 20
    race.lru.clear()
    for key in [*range(SLOTS), *range(SLOTS)]:
        assert not race.ask(key, None)
    assert race.lru_hits == SLOTS


@pytest.mark.parametrize("bins", [4095, 4097, 8500, 1 << 17])
def test_a_pause_forgets_no_more_than_all(bins: int) -> None:
    """What LRU had let go of before is not taken from what it keeps once more."""
    race = Race()
    for key in range(3 * SLOTS):
        race.ask(key, None)
    race.now += bins * 8
    race.lru.clear()
    assert not any(race.ask(key, None) for key in skewed(6, 20_000))
    assert duel.check_duel(race.numbers, 0)


def test_small_caches_count_every_key_and_large_ones_as_few_as_fit() -> None:
    for n_slots, share in ((10, 1), (4095, 1), (8192, 4), (1 << 20, 512)):
        race = Race(n_slots)
        tags = np.random.default_rng(0).integers(0, 1 << 32, 40_000).tolist()
        counted = sum(duel.sampled(race.numbers, 0, tag) for tag in tags)
        assert abs(counted - 40_000 / share) < 6 * (40_000 / share) ** 0.5


@pytest.mark.parametrize("n_slots", [1 << 20, 1 << 29])
def test_one_key_is_counted_in_as_many_as_the_room_is_divided_by(n_slots: int) -> None:
    """Also where the hash has no bits for fewer keys."""
    numbers = Race(n_slots).numbers
    counted = sum(duel.sampled(numbers, 0, upper << 16) for upper in range(1 << 16))
    assert counted * (1 << numbers[duel._SHIFT]) == 1 << 16
