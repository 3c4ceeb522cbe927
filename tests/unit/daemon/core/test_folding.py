"""Counters that clients write are added up as far as they can be true, and never go back."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from strataflux.daemon.folding import CounterFold, read_stats
from tests.fakes.core_rig import Client, Disk, Rig, make_store


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig([make_store(tmp_path / "store", [(64, 1000)])])
    yield rig
    rig.close()


def test_differences_are_added(rig: Rig) -> None:
    fold, client = CounterFold(), Client(rig.tier)
    client.page["weight_lookups"], client.page["weight_hits"] = 10, 4
    fold.fold(rig.tier)
    fold.fold(rig.tier)
    client.page["weight_lookups"] = 15
    fold.fold(rig.tier)
    assert (fold.totals["weight_lookups"], fold.totals["weight_hits"]) == (15, 4)


def test_counter_that_goes_back_adds_nothing(rig: Rig) -> None:
    fold, client = CounterFold(), Client(rig.tier)
    totals = []
    for written in (10, 3, 5, 0, 1):
        client.page["weight_lookups"] = written
        fold.fold(rig.tier)
        totals.append(fold.totals["weight_lookups"])
    assert totals == [10, 10, 12, 12, 13]


def test_impossible_counts_are_bounded(rig: Rig) -> None:
    fold, client = CounterFold(), Client(rig.tier)
    client.page["weight_lookups"] = 0xFFFFFFFFFFFFFFFF
    fold.fold(rig.tier)
    assert 0 < fold.totals["weight_lookups"] <= 1 << 40


def test_totals_outlive_sessions(rig: Rig) -> None:
    fold = CounterFold()
    for count in (10, 20):
        client = Client(rig.tier)
        client.page["weight_lookups"] = count
        fold.close(rig.tier, client.index)
        rig.tier.close_session(client.index)
    assert fold.totals["weight_lookups"] == 30
    assert not fold.live


def test_numbers_add_up(rig: Rig) -> None:
    """Every look-up is a hit or a miss, every miss a request, every request has one result."""
    disk, fold = Disk(rig), CounterFold()
    for oids in (range(20), range(10, 30), range(30)):
        disk.client.ask(oids)
        disk.settle()
    fold.fold(rig.tier)
    stats = read_stats(rig.tier, fold)
    lookups, requests = stats.lookups, stats.requests
    assert lookups.weight_lookups == 70
    assert lookups.weight_lookups - lookups.weight_hits == requests.taken + requests.dropped_ring
    results = (requests.cold, requests.evicted, requests.duplicates, requests.resident_already, requests.quarantined)
    assert requests.taken == sum(results)
    assert stats.fills.fills == requests.cold + requests.evicted
    assert sum(stats.fills.latency_counts) == stats.fills.fills
    (cache,) = [cache for cache in stats.caches if cache.kind == "weight"]
    assert cache.capacity_bytes == 4 * 256 * 1024
    assert cache.valid_bytes == 30 * 1024
    (session,) = stats.sessions
    assert (session.lookups, session.hits, session.fills) == (70, lookups.weight_hits, 30)
    assert session.steps == 3


def test_misses_are_told_apart_by_section(tmp_path: Path) -> None:
    first = make_store(tmp_path / "first", [(10, 500)], "first")
    rig = Rig([first, make_store(tmp_path / "second", [(20, 1000), (30, 700)])])
    try:
        disk = Disk(rig)
        disk.client = Client(rig.tier, (1,))
        disk.client.ask([*range(5), 20, 49])
        disk.settle()
        disk.client.ask([4, 5, 20, 21, 22])
        disk.settle()
        stats = read_stats(rig.tier, CounterFold())
        assert [row.section_misses for row in stats.stores] == [(0,), (6, 4)]
    finally:
        rig.close()


def test_rubbish_of_closed_sessions_stays_counted(rig: Rig) -> None:
    client = Client(rig.tier)
    client.push(1 << 40, 63)
    rig.sweep()
    rig.tier.close_session(client.index)
    assert read_stats(rig.tier, CounterFold()).requests.invalid == 1
