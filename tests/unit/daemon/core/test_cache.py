"""Slots, pages and directories against a model in plain Python, and a check that sees each broken invariant."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from strataflux.cache_policy import budget
from strataflux.daemon import cache, evict, slots
from strataflux.daemon.rows import EVICTED_PRESSURE
from strataflux.daemon.state import ABSENT, FILLING, FREE, NONE, RETIRED, VALID
from strataflux.proto import layout
from tests.fakes.core_rig import PAGE, Client, Rig, make_store

SHAPES = [(400, 60_000), (400, 100_000), (400, 20_000)]  # 4, 2 and 13 slots a page
PAGES = 5


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig([make_store(tmp_path / "store", SHAPES)], pages=PAGES)
    yield rig
    rig.close()


@dataclass
class Model:
    """What must be true: the record of each slot in use, each class's resident records from old to new."""

    rig: Rig
    filling: dict[int, int] = field(default_factory=dict)  # entry → oid
    valid: dict[int, int] = field(default_factory=dict)
    retired: set[int] = field(default_factory=set)
    order: list[OrderedDict[int, None]] = field(default_factory=lambda: [OrderedDict() for _ in SHAPES])

    def cls_of(self, oid: int) -> int:
        """Class of a record; sections are numbered like classes here."""
        return oid // SHAPES[0][0]

    def retire(self, entry: int) -> None:
        """An entry leaves the resident ones."""
        oid = self.valid.pop(entry)
        del self.order[self.cls_of(oid)][entry]
        self.retired.add(entry)

    def follow_retired(self) -> None:
        """What the cache retired by itself (a page that drains)."""
        states = self.rig.core.slots["state"]
        for entry in [e for e in self.valid if states[e] == RETIRED]:
            self.retire(entry)

    def check(self) -> None:
        """Compare everything."""
        core = self.rig.core
        states = core.slots["state"]
        for state, mine in ((FILLING, self.filling), (VALID, self.valid), (RETIRED, self.retired)):
            assert set(np.flatnonzero(states == state)) == set(mine)
        named = {int(slots.slot_number(core, entry)) + 1: oid for entry, oid in self.valid.items()}
        entries = self.rig.entries()
        assert {int(entries[oid]): int(oid) for oid in np.flatnonzero(entries)} == named
        assert int(core.tables[0]["resident"]) == len(self.valid)
        self.check_bytes()
        self.rig.intact()

    def check_bytes(self) -> None:
        """No two slots in use share a byte, all lie in the cache's memory, and no more pages are owned than exist."""
        core = self.rig.core
        used = sorted([*self.filling, *self.valid, *self.retired], key=lambda e: slots.slot_address(core, e))
        end = self.rig.tier.segments[0].segment.address
        for entry in used:
            start = slots.slot_address(core, entry)
            assert start >= end
            end = start + int(core.classes[core.slots[entry]["cls"]]["units"]) * layout.SLOT_UNIT_BYTES
        assert end <= self.rig.tier.segments[0].segment.address + PAGES * PAGE
        assert int((core.pages.pages["state"] >= budget.OWNED).sum()) <= PAGES


Step = Callable[[Model, np.random.Generator], None]


def begin(model: Model, random: np.random.Generator) -> None:
    oid = int(random.integers(1200))
    if oid in model.filling.values() or oid in model.valid.values():
        return
    cls, core = model.cls_of(oid), model.rig.core
    room = core.classes[cls]["free"] > 0 or core.pages.pools[0]["unused"] > 0
    entry = cache.begin_fill(core, cls, 0, oid)
    assert (entry != NONE) == room
    if room:
        assert slots.pending_of(core, 0, oid) == entry + 1
        model.filling[entry] = oid
    else:
        evict.ask_page(core, cls)
        model.follow_retired()


def publish(model: Model, random: np.random.Generator) -> None:
    for entry in [e for e in model.filling if random.random() < 0.5]:
        oid = model.filling.pop(entry)
        if cache.is_draining(model.rig.core, entry):
            cache.abandon_fill(model.rig.core, entry)
        else:
            cache.publish(model.rig.core, entry)
            assert slots.was_resident(model.rig.core, 0, oid)
            model.valid[entry] = oid
            model.order[model.cls_of(oid)][entry] = None


def abandon(model: Model, random: np.random.Generator) -> None:
    if model.filling:
        entry = int(random.choice(list(model.filling)))
        oid = model.filling.pop(entry)
        cache.abandon_fill(model.rig.core, entry)
        assert slots.pending_of(model.rig.core, 0, oid) == 0


def retire_oldest(model: Model, random: np.random.Generator) -> None:
    cls = int(random.integers(len(SHAPES)))
    oldest = next(iter(model.order[cls]), None)
    assert evict.evict_one(model.rig.core, cls, True) == (oldest is not None)
    if oldest is not None:
        assert model.rig.core.slots[oldest]["state"] == RETIRED
        model.retire(oldest)


def evict_ahead(model: Model, random: np.random.Generator) -> None:
    evict.evict_ahead(model.rig.core)
    model.follow_retired()
    for group in model.rig.core.classes[: len(SHAPES)]:
        if group["slots"] and model.rig.core.pages.pools[0]["unused"] == 0:
            reserve = max(int(group["slots"]) // 16, 1)
            resident = int(group["slots"] - group["free"] - group["filling"] - group["retired"])
            assert group["free"] + group["retired"] >= reserve or resident == 0 or group["filling"]


def take_page(model: Model, random: np.random.Generator) -> None:
    page = int(random.integers(PAGES))
    if budget.release(model.rig.core.pages, page):
        cache.drain_page(model.rig.core, page, EVICTED_PRESSURE)
        model.follow_retired()


def pass_grace(model: Model, random: np.random.Generator) -> None:
    assert model.rig.recycle() == len(model.retired)
    model.retired.clear()


STEPS: list[tuple[Step, float]] = [
    (begin, 0.55),
    (publish, 0.2),
    (abandon, 0.05),
    (retire_oldest, 0.08),
    (evict_ahead, 0.02),
    (take_page, 0.02),
    (pass_grace, 0.08),
]


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_follow_the_model(rig: Rig, seed: int) -> None:
    random = np.random.default_rng(seed)
    model = Model(rig)
    steps, weights = zip(*STEPS, strict=True)
    for _ in range(600):
        steps[random.choice(len(steps), p=weights)](model, random)
        model.check()
    assert rig.rd["page_moves"] > 0
    assert rig.rd["evictions"] > 0


def resident(rig: Rig, *oids: int) -> list[int]:
    """Publish records; their entries."""
    entries = []
    for oid in oids:
        entries.append(int(cache.begin_fill(rig.core, oid // 400, 0, oid)))
        cache.publish(rig.core, entries[-1])
    return entries


def set_slot(field_name: str, value: int) -> Callable[[Rig, int], None]:
    def change(rig: Rig, entry: int) -> None:
        rig.core.slots[entry][field_name] = value

    return change


def set_class(field_name: str, by: int) -> Callable[[Rig, int], None]:
    def change(rig: Rig, entry: int) -> None:
        rig.core.classes[0][field_name] += by

    return change


def clear_entry(rig: Rig, entry: int) -> None:
    rig.entries()[0] = layout.ENTRY_ABSENT


def stale_entry(rig: Rig, entry: int) -> None:
    rig.entries()[9] = slots.slot_number(rig.core, entry) + 1


def stale_pending(rig: Rig, entry: int) -> None:
    slots.set_pending(rig.core, 0, 0, entry + 1)


def used_elsewhere(rig: Rig, entry: int) -> None:
    rig.core.pages.pages[entry // layout.UNITS_PER_PAGE]["used"] += 1


def free_in_list_of_another(rig: Rig, entry: int) -> None:
    rig.core.slots[int(rig.core.classes[0]["free_head"])]["cls"] = 1


def unlinked(rig: Rig, entry: int) -> None:
    rig.core.policies[0].nodes[entry]["next"] = entry


def class_counter(rig: Rig, entry: int) -> None:
    rig.core.pages.classes[0]["owned"] += 1


@pytest.mark.parametrize(
    ("harm", "codes"),
    [
        (used_elsewhere, {1}),
        (set_slot("state", FREE), {1, 4}),
        (set_slot("state", ABSENT), {1, 4}),
        (free_in_list_of_another, {2}),
        (set_class("free_head", 1), {2}),
        (clear_entry, {3}),
        (stale_pending, {3}),
        (set_slot("oid", 1), {3}),
        (set_class("free", 1), {4}),
        (set_class("retired", 1), {4}),
        (set_class("filling", 1), {4}),
        (stale_entry, {5}),
        (class_counter, set(range(11, 20))),
        (unlinked, set(range(21, 30))),
    ],
)
def test_each_broken_invariant_has_its_code(rig: Rig, harm: Callable[[Rig, int], None], codes: set[int]) -> None:
    entry, _ = resident(rig, 0, 5)
    rig.intact()
    harm(rig, entry)
    assert rig.integrity() in codes


def test_used_records_outlive_unused_ones(rig: Rig) -> None:
    """Lazy LRU: a client's stamp is found when its slot is about to go."""
    client = Client(rig.tier)
    resident(rig, 0, 1, 2)
    rig.rd["clock"] += 5
    rig.tier.daemon_page.view(layout.DAEMON_PAGE)["clock"] = rig.rd["clock"]
    assert client.ask([0]) == 1
    rig.core.stepped[0] = rig.rd["clock"]
    assert evict.evict_one(rig.core, 0, True)
    assert [bool(rig.entry(oid)) for oid in (0, 1, 2)] == [True, False, True]
    assert rig.rd["fills_useful"] == 1


def test_stamp_from_the_future_is_ignored(rig: Rig) -> None:
    client = Client(rig.tier)
    resident(rig, 0, 1)
    rig.tier.daemon_page.view(layout.DAEMON_PAGE)["clock"] = 1_000_000
    assert client.ask([0]) == 1
    rig.core.stepped[0] = rig.rd["clock"] + 1
    assert evict.evict_one(rig.core, 0, True)
    assert not rig.entry(0)


def test_pinned_fill_stays_until_used_or_overdue(rig: Rig) -> None:
    (entry,) = resident(rig, 0)
    rig.core.slots[entry]["pinned"] = rig.rd["clock"] + 10
    assert not evict.evict_one(rig.core, 0, True)
    rig.rd["clock"] += 10
    assert evict.evict_one(rig.core, 0, True)


@pytest.mark.parametrize("later", [0, 5], ids=["in the tick of the fill", "after it was moved"])
def test_a_pin_ends_with_the_first_use(rig: Rig, later: int) -> None:
    client = Client(rig.tier)
    (entry,) = resident(rig, 0)
    rig.core.slots[entry]["pinned"] = rig.rd["clock"] + 1000
    rig.tier.daemon_page.view(layout.DAEMON_PAGE)["clock"] = rig.core.stepped[0] = rig.rd["clock"]
    rig.rd["clock"] += later
    assert not evict.evict_one(rig.core, 0, True)
    assert client.ask([0]) == 1
    assert evict.evict_one(rig.core, 0, True)
    assert rig.rd["fills_useful"] == 1


def test_starving_class_takes_a_page_of_a_colder_one(rig: Rig) -> None:
    resident(rig, *range(4 * PAGES))
    assert cache.begin_fill(rig.core, 1, 0, 400) == NONE
    rig.rd["clock"] += 100
    evict.ask_page(rig.core, 1)
    assert cache.begin_fill(rig.core, 1, 0, 400) == NONE  # its old records are still in grace
    assert rig.recycle() == 4
    assert rig.rd["page_moves"] == 1
    assert cache.begin_fill(rig.core, 1, 0, 400) != NONE
    rig.intact()


def test_quarantine_outlives_requests(rig: Rig) -> None:
    cache.quarantine(rig.core, 0, 7)
    client = Client(rig.tier)
    assert client.ask([7]) == 0
    rig.sweep()
    assert rig.entry(7) == layout.ENTRY_QUARANTINED
    assert (int(rig.rd["requests"]), int(rig.core.tables[0]["quarantined"])) == (0, 1)
