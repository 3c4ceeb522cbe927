"""Stores that come and go under a tier that runs: nothing is left of one that went, and nothing else is touched."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strataflux.daemon.errors import Refusal
from strataflux.daemon.generation import remove_store
from strataflux.daemon.rows import EVICTED_EPOCH
from strataflux.daemon.store import Store, open_served
from strataflux.daemon.tier import Tier
from tests.fakes.board_worker import BoardWorker
from tests.fakes.core_rig import PAGE, Client, Disk, Rig, make_store


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig([make_store(tmp_path / "a", [(40, 1000), (20, 300)], "a")])
    yield rig
    rig.close()


def store(tmp_path: Path, name: str, shapes: list[tuple[int, int]], **settings: object) -> Store:
    return open_served(make_store(tmp_path / name, shapes, name), direct_io="off", **settings)  # type: ignore[arg-type]


def turn(rig: Rig, worker: BoardWorker) -> Callable[[], None]:
    """What a reader thread gives as ``settle``."""

    def settle() -> None:
        rig.rd["intake"] = 0
        while rig.rd["in_flight"]:
            worker.work()
            rig.sweep()
        rig.rd["intake"] = 1

    return settle


def test_a_store_that_comes_later_is_served_beside_the_first(rig: Rig, tmp_path: Path) -> None:
    disk = Disk(rig)
    disk.fill(1, 2, 45)
    number = rig.tier.add_store(store(tmp_path, "b", [(30, 1000), (10, 2000)]))
    assert (number, rig.rd["n_tables"]) == (1, 2)
    disk.client = Client(rig.tier, (1, 0))
    disk.fill(0, 29, 35)
    assert disk.client.read([0, 29, 35]) == [rig.record(oid, 1) for oid in (0, 29, 35)]
    assert disk.client.read([1, 2, 45], table=1) == [rig.record(oid) for oid in (1, 2, 45)]


def test_of_a_store_that_goes_nothing_is_left(rig: Rig, tmp_path: Path) -> None:
    disk = Disk(rig)
    disk.fill(1, 45)
    descriptors = len(os.listdir("/proc/self/fd"))
    rig.tier.add_store(store(tmp_path, "b", [(30, 5000)]))
    guest = Client(rig.tier, (1,))
    guest.ask(range(30))
    disk.worker.take()
    rig.sweep()
    with pytest.raises(Refusal, match="1 sessions that use it"):
        remove_store(rig.tier, 1, turn(rig, disk.worker))
    assert int(rig.core.tables[1]["records"]) == 30
    rig.tier.close_session(guest.index)
    remove_store(rig.tier, 1, turn(rig, disk.worker))
    gone = int(rig.core.evicted[0, EVICTED_EPOCH])
    assert gone == int(rig.core.kinds[0]["fills"]) - 2 > 0
    disk.settle()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert (rig.rd["queued"], rig.rd["in_flight"], rig.rd["n_tables"]) == (0, 0, 1)
    assert int(rig.core.classes[2]["slots"]) == 0  # the pages of its size are free for others
    disk.check_served(1, 45)


def test_places_of_one_that_went_are_used_again(rig: Rig, tmp_path: Path) -> None:
    disk = Disk(rig)
    for round_ in range(3):
        for name, shapes in (("b", [(30, 1000)] * 3), ("c", [(30, 1000)] * 5)):
            rig.tier.add_store(store(tmp_path, f"{name}{round_}", shapes))
        assert sorted(rig.tier.stores) == [0, 1, 2]
        first = [int(rig.core.tables[number]["first_section"]) for number in (1, 2)]
        assert first == [2, 5]
        for number in (1, 2):
            remove_store(rig.tier, number, turn(rig, disk.worker))
    disk.settle()


def test_what_does_not_fit_is_refused_and_closed(rig: Rig, tmp_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    for shapes, settings, word in (
        ([(4, 200_000)], {}, "to read one"),
        ([(4, 100)], {"rule": "another"}, "access rule"),
        ([(4, 256 * size) for size in range(1, 40)], {}, "slot sizes"),
    ):
        with pytest.raises(Refusal, match=word):
            rig.tier.add_store(store(tmp_path, word, shapes, **settings))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert sorted(rig.tier.stores) == [0]
    rig.intact()


def test_a_tier_without_stores_takes_its_memory_with_the_first(tmp_path: Path) -> None:
    tier = Tier([], 8 * PAGE, 4, 2.0)
    try:
        assert tier.segments == []
        assert tier.add_store(store(tmp_path, "b", [(4, 100)], rule=("uid", (5,), None))) == 0
        assert sum(s.segment.size for s in tier.segments) == 8 * PAGE
        with pytest.raises(Refusal, match="access rule"):
            tier.add_store(store(tmp_path, "c", [(4, 100)]))
        assert tier.add_store(store(tmp_path, "d", [(4, 100)], rule=("uid", (5,), None))) == 1
    finally:
        tier.close()
