"""What is resident, by its last use, and what is read again after a start."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strataflux.daemon import heat
from strataflux.daemon.interface import HotRecords
from tests.fakes.core_rig import Disk, Rig, make_store

SHAPES = [(300, 1000), (300, 3000)]
CALL = lambda action: action()  # noqa: E731 - what a reader thread is asked runs in it; here there is none


def make_disk(tmp_path: Path, pages: int = 4, names: tuple[str, ...] = ("a",)) -> Disk:
    folders = [tmp_path / name for name in names]
    for folder in folders:
        if not folder.exists():
            make_store(folder, SHAPES, folder.name)
    return Disk(Rig(folders, pages=pages))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = make_disk(tmp_path)
    yield disk
    disk.rig.close()


def tick(disk: Disk) -> None:
    disk.rig.core.rd[0]["tick_us"] = 0
    disk.rig.sweep()


def collected(disk: Disk) -> list[HotRecords]:
    return heat.collect(disk.rig.tier, CALL)


def oids_of(disk: Disk) -> list[int]:
    (part,) = collected(disk)
    return [int(oid) for oid in part.oids]


def test_the_most_recently_used_come_first(disk: Disk) -> None:
    disk.fill(1, 2, 3, 310)
    for oid in (2, 310, 1, 3):
        tick(disk)
        disk.client.ask([oid])
    tick(disk)
    assert oids_of(disk) == [3, 1, 310, 2]


def test_it_names_its_store(disk: Disk) -> None:
    manifest = disk.rig.tier.stores[0].manifest
    (part,) = collected(disk)
    assert (part.digest, part.records, part.oids.tolist()) == (manifest.identity_digest, 600, [])


def restarted(disk: Disk, tmp_path: Path, hot: list[HotRecords], pages: int = 4) -> Disk:
    disk.rig.close()
    fresh = make_disk(tmp_path, pages)
    heat.keep_warm(fresh.rig.tier, hot)
    return fresh


def warm_up(disk: Disk) -> None:
    while disk.rig.core.tables[0]["warm_left"] or disk.rig.rd["in_flight"]:
        disk.rig.sweep()
        disk.worker.work()
    disk.rig.intact()


def test_what_was_resident_is_resident_after_a_start(tmp_path: Path) -> None:
    disk = make_disk(tmp_path)
    disk.fill(1, 2, 3, 310, 599)
    disk = restarted(disk, tmp_path, collected(disk))
    warm_up(disk)
    disk.check_served(1, 2, 3, 310, 599)
    assert (disk.rig.rd["warmed"], disk.rig.rd["requests"]) == (5, 0)
    disk.rig.close()


def test_the_hottest_that_fit_are_read_and_nothing_is_evicted_for_the_rest(tmp_path: Path) -> None:
    """A smaller cache than before: the first of the list fill it up to the reserve for misses."""
    disk = make_disk(tmp_path)
    hot = [HotRecords(collected(disk)[0].digest, 600, np.arange(299, -1, -1, dtype=np.uint32))]
    disk = restarted(disk, tmp_path, hot, pages=1)
    warm_up(disk)
    resident = [oid for oid in range(300) if disk.rig.entry(oid)]
    assert len(resident) > 230
    assert resident == list(range(300 - len(resident), 300))
    assert disk.rig.rd["evictions"] == 0
    assert disk.rig.core.classes[0]["free"] >= disk.rig.core.classes[0]["slots"] // 16
    disk.rig.close()


def test_misses_come_first(disk: Disk) -> None:
    heat.keep_warm(disk.rig.tier, [collected(disk)[0]._replace(oids=np.arange(0, 200, 2, dtype=np.uint32))])
    disk.client.ask([401, 403, 405])
    disk.rig.sweep()
    first: list[Any] = disk.worker.take()[:3]
    assert all(job.offset > 300 * 1024 for job in first)
    disk.worker.complete(first)


def test_a_stop_before_all_was_read_forgets_nothing(disk: Disk) -> None:
    """What was still to be read again is told after what is resident; only what is being read just then is not."""
    heat.keep_warm(disk.rig.tier, [collected(disk)[0]._replace(oids=np.arange(100, dtype=np.uint32))])
    assert oids_of(disk) == list(range(100))
    disk.rig.sweep()
    disk.worker.work()
    disk.rig.sweep()
    told = oids_of(disk)
    resident, under_way = int(disk.rig.core.tables[0]["resident"]), disk.rig.rd["in_flight"]
    assert 0 < resident < 100
    assert set(told[:resident]) == {oid for oid in range(100) if disk.rig.entry(oid)}
    assert len(set(told)) == len(told) == 100 - under_way
    warm_up(disk)


def test_other_stores_and_other_sizes_are_left_alone(disk: Disk) -> None:
    mine = collected(disk)[0]._replace(oids=np.array([1], np.uint32))
    assert heat.keep_warm(disk.rig.tier, [mine._replace(digest="00" * 32), mine._replace(records=601)]) == 0
    assert heat.keep_warm(disk.rig.tier, [mine]) == 1
    warm_up(disk)


def test_stores_are_told_apart(tmp_path: Path) -> None:
    disk = make_disk(tmp_path, names=("a", "b"))
    disk.fill(4, 5)
    heat.keep_warm(disk.rig.tier, [collected(disk)[1]._replace(oids=np.array([7], np.uint32))])
    disk.settle()
    assert [sorted(part.oids.tolist()) for part in collected(disk)] == [[4, 5], [7]]
    disk.rig.close()


def test_a_store_that_goes_takes_its_list_along(disk: Disk) -> None:
    heat.keep_warm(disk.rig.tier, [collected(disk)[0]._replace(oids=np.array([1, 2], np.uint32))])
    disk.rig.tier.tables.remove(0).close()
    assert collected(disk) == []
    disk.rig.sweep()
    assert disk.rig.rd["in_flight"] == 0


def test_a_cache_of_any_size_is_told_in_bounded_memory(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thirty times as many resident records as are told, later ones used more recently, few are held at a time."""
    told, chunks = heat._PAGES * heat._UNITS, 30

    def gather(_core: Any, first: int, _last: int, out: Any) -> int:
        out[:, 0] = chunks - first // heat._PAGES
        out[:, 1] = 0
        out[:, 2] = first // heat._PAGES
        return len(out)

    monkeypatch.setattr(heat, "_gather", gather)
    monkeypatch.setattr(heat, "MAX_RECORDS", told)
    disk.rig.core.rd[0]["kv_page"] = heat._PAGES * chunks
    tracemalloc.start()
    try:
        assert oids_of(disk) == [chunks - 1]
        assert tracemalloc.get_traced_memory()[1] < 12 * told * 12
    finally:
        tracemalloc.stop()
