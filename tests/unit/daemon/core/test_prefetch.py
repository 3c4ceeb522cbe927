"""What clients expect to look up: read behind what was missed, at nobody's cost, and told whether it paid."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from strataflux.cache_policy.policies import DEFAULT
from strataflux.daemon import evict, requests, slots
from strataflux.daemon.folding import CounterFold, read_stats
from strataflux.daemon.state import PENDING_NONE, PREFETCHES
from strataflux.proto import layout
from tests.fakes.board_worker import FLIPPED, Fault, always
from tests.fakes.core_rig import Client, Disk, Rig, make_store

RECORDS, BYTES = 4000, 1000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    rig = Rig([make_store(tmp_path / "store", [(RECORDS, BYTES)])], pages=1)
    yield Disk(rig)
    rig.close()


def ahead(*oids: int, table: int = 0) -> list[int]:
    return [layout.PREFETCH | table << layout.TABLE_SHIFT | oid for oid in oids]


def advice(client: Client) -> dict[str, int]:
    """What the client reads of its prefetches of weights."""
    return {name: int(client.view[f"prefetch_{name}"][0]) for name in ("fills", "used", "unused", "dropped")}


def test_a_prefetched_record_is_there_when_it_is_looked_up(disk: Disk) -> None:
    disk.client.push(*ahead(5, 6, 9))
    disk.settle()
    assert advice(disk.client) == {"fills": 3, "used": 0, "unused": 0, "dropped": 0}
    disk.check_served(5, 6)
    disk.rig.core.rd[0]["tick_us"] = 0
    disk.rig.sweep()
    assert advice(disk.client)["used"] == 2
    kind = read_stats(disk.rig.tier, CounterFold()).kinds[0]
    assert (kind.prefetches, kind.prefetched, kind.prefetch_used, kind.useful) == (3, 3, 2, 2)
    # It was no miss: nothing else counts it.
    assert (kind.requests, kind.asked, int(disk.client.counters["taken"])) == (0, 0, 0)


def test_neighbours_are_read_as_one(disk: Disk) -> None:
    disk.rig.pretend_direct()
    disk.client.push(*ahead(5, 6, 7))
    disk.settle()
    assert disk.count("reads", "merged") == (1, 2)


def test_what_is_there_or_under_way_is_not_read_again(disk: Disk) -> None:
    disk.fill(1)
    disk.client.push(*ahead(1, 2, 2))
    disk.settle()
    kind = read_stats(disk.rig.tier, CounterFold()).kinds[0]
    assert (kind.prefetches, kind.prefetch_needless, kind.prefetched) == (3, 2, 1)


def test_misses_of_every_session_come_first(disk: Disk) -> None:
    other = Client(disk.rig.tier)
    disk.client.push(*ahead(*range(0, 100, 10)))
    other.push(*range(1000, 1010))
    disk.settle()
    offsets = [job.offset // 1024 for job in disk.worker.jobs]
    first_ahead = min(at for at, offset in enumerate(offsets) if offset < 900)
    assert all(offset >= 900 for offset in offsets[:first_ahead])
    assert advice(disk.client)["fills"] == 10


def test_sessions_take_turns(disk: Disk) -> None:
    """However much one asks for ahead, another waits for its turn only."""
    modest = Client(disk.rig.tier)
    disk.client.push(*ahead(*range(0, 1200, 4)))
    modest.push(*ahead(3002, 3006))
    disk.rig.sweep()
    assert int(modest.counters["prefetches"]) == 0
    assert int(disk.client.counters["prefetches"]) > 200
    disk.settle()


def test_a_miss_takes_the_place_of_a_prefetch(disk: Disk) -> None:
    disk.rig.core.rd[0]["intake"] = 0
    disk.client.push(*ahead(7), 7)
    requests.take_requests(disk.rig.core)
    assert disk.rig.rd["queued"] == 1
    disk.rig.core.rd[0]["intake"] = 1
    disk.settle()
    assert disk.count("reads", "requests", "fills_prefetch") == (1, 1, 0)
    disk.check_served(7)


def test_what_a_running_step_uses_is_never_evicted_for_it(disk: Disk) -> None:
    for oid in range(0, 300, 10):
        disk.fill(*range(oid, oid + 10))
    used = [oid for oid in range(300) if disk.rig.entry(oid)]
    assert len(used) > 200
    disk.client.begin()
    assert disk.client.look_up(used).all()
    disk.rig.sweep(3)
    before = disk.rig.rd["evictions"]
    other = Client(disk.rig.tier)
    other.push(*ahead(*range(1000, 1400)))
    for _ in range(50):
        disk.rig.sweep()
        disk.worker.work()
    assert all(disk.rig.entry(oid) for oid in used)
    assert disk.rig.rd["evictions"] == before
    disk.client.end()


def test_old_prefetches_are_dropped_and_told(disk: Disk) -> None:
    disk.rig.core.rd[0]["intake"] = 0
    disk.client.push(*ahead(*range(0, 40, 2)))
    requests.take_requests(disk.rig.core)
    disk.rig.core.prefetches["asked_us"] -= 200_000
    disk.rig.core.rd[0]["tick_us"] = 0
    disk.rig.sweep()
    assert advice(disk.client)["dropped"] == 20
    assert slots.pending_of(disk.rig.core, 0, 0) == PENDING_NONE


def test_the_oldest_make_room_for_the_newest(tmp_path: Path) -> None:
    rig = Rig([make_store(tmp_path / "store", [(RECORDS, BYTES)])])
    client = Client(rig.tier, ring_log2=11)
    client.push(*ahead(*range(PREFETCHES + 3)))
    while requests.take_requests(rig.core):
        pass
    assert advice(client)["dropped"] == 3
    assert [slots.pending_of(rig.core, 0, oid) == PENDING_NONE for oid in (0, 2, 3)] == [True, True, False]
    rig.close()


def test_rubbish_is_counted_against_its_session(disk: Disk) -> None:
    disk.client.push(*ahead(RECORDS), *ahead(1, table=3), layout.PREFETCH | layout.OID_MASK)
    disk.settle()
    assert (int(disk.client.counters["invalid"]), int(disk.client.counters["taken"])) == (3, 3)
    assert read_stats(disk.rig.tier, CounterFold()).kinds[0].prefetches == 0


def test_who_leaves_takes_its_expectations_along(disk: Disk) -> None:
    other = Client(disk.rig.tier)
    other.push(*ahead(1, 2))
    requests.take_requests(disk.rig.core)
    disk.rig.tier.close_session(other.index)
    assert disk.rig.rd["prefetches"] == 0
    assert slots.pending_of(disk.rig.core, 0, 1) == PENDING_NONE
    disk.settle()
    assert disk.rig.entry(1) == 0


def test_a_table_that_goes_is_named_by_none(tmp_path: Path) -> None:
    stores = [make_store(tmp_path / name, [(100, 1000)], name) for name in ("a", "b")]
    rig = Rig(stores)
    client = Client(rig.tier, (0, 1))
    client.push(*ahead(1, 2), *ahead(3, 4, table=1), *ahead(5))
    requests.take_requests(rig.core)
    requests.drop_table(rig.core, 0)
    assert int(client.counters["prefetches"]) == 2
    rows = rig.core.prefetches[client.index]
    first = int(client.counters["first_prefetch"])
    assert [int(rows["key"][(first + i) % PREFETCHES]) for i in range(2)] == [1 << 32 | 3, 1 << 32 | 4]
    rig.close()


def test_unused_ones_are_told_when_they_leave(disk: Disk) -> None:
    disk.client.push(*ahead(1, 2, 3))
    disk.settle()
    disk.check_served(2)
    while evict.evict_one(disk.rig.core, 0, True):
        pass
    assert advice(disk.client) == {"fills": 3, "used": 1, "unused": 2, "dropped": 0}
    assert disk.rig.rd["unseen"] == 0


def test_use_by_another_session_is_told_to_who_guessed(disk: Disk) -> None:
    other = Client(disk.rig.tier)
    other.push(*ahead(1))
    disk.settle()
    disk.check_served(1)
    disk.rig.sweep()
    while evict.evict_one(disk.rig.core, 0, True):
        pass
    assert (advice(other)["used"], advice(disk.client)["used"]) == (1, 0)


def test_a_new_session_in_the_place_is_told_nothing_of_the_old(disk: Disk) -> None:
    other = Client(disk.rig.tier)
    other.push(*ahead(1))
    disk.settle()
    disk.rig.tier.close_session(other.index)
    disk.rig.core.rd[0]["clock"] += 5
    newcomer = Client(disk.rig.tier)
    assert newcomer.index == other.index
    while evict.evict_one(disk.rig.core, 0, True):
        pass
    assert advice(newcomer) == {"fills": 0, "used": 0, "unused": 0, "dropped": 0}
    assert disk.rig.rd["prefetch_unused"] == 1


def test_a_bad_read_is_left_to_who_misses_the_record(disk: Disk) -> None:
    disk.worker.script = always(Fault(FLIPPED, 4096 + 4 * 1024))
    disk.client.push(*ahead(4))
    disk.settle()
    assert disk.rig.entry(4) == 0
    assert disk.count("corrupt", "retries", "queued") == (1, 0, 0)
    # It was not read, and whoever asked is told.
    assert (advice(disk.client)["dropped"], disk.rig.rd["prefetch_dropped"]) == (1, 1)
    disk.client.ask([4])
    disk.settle()
    assert disk.rig.entry(4) == layout.ENTRY_QUARANTINED


@pytest.mark.parametrize("policy", sorted({"lru", DEFAULT}))
def test_misses_and_guesses_mixed(tmp_path: Path, policy: str) -> None:
    """Every prefetch has one result, bytes are right, and what is told of use adds up to what was filled."""
    random = np.random.default_rng(8)
    disk = Disk(Rig([make_store(tmp_path / "store", [(RECORDS, BYTES)])], pages=1, policy=policy))
    rig, other = disk.rig, Client(disk.rig.tier)
    for turn in range(400):
        guesses = random.integers(0, RECORDS // 4, 30).tolist()
        (disk.client if turn % 3 else other).push(*ahead(*guesses))
        if turn % 3 == 0:
            disk.settle()
        wanted = [*guesses[:: 1 + turn % 4], *random.integers(0, RECORDS, 5).tolist()]
        for oid, found in zip(wanted, disk.client.read(wanted), strict=True):
            assert found in (None, rig.record(oid))
        rig.core.rd[0]["tick_us"] = 0
        rig.sweep(1 + turn % 3)
        if turn % 2:
            disk.worker.work()
        if turn % 50 == 0:
            rig.intact()
    disk.settle()
    row, told = rig.core.kinds[0], [advice(client) for client in (disk.client, other)]
    assert row["fills_prefetch"] == sum(each["fills"] for each in told) > 500
    assert row["prefetch_dropped"] == sum(each["dropped"] for each in told)
    assert row["prefetch_used"] == sum(each["used"] for each in told) > 100
    assert row["prefetch_used"] + row["prefetch_unused"] + rig.rd["unseen"] == row["fills_prefetch"]
    void = row["prefetch_asked"] - row["prefetch_needless"] - row["prefetch_dropped"] - row["fills_prefetch"]
    assert 0 <= void <= row["cold"] + row["evicted_again"]  # a miss took its place
    rig.close()
