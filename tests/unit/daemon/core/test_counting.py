"""The sample of fills: what is told of when they were used, and that it costs a bounded look a tick."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from strataflux.client import attach_block
from strataflux.daemon import cache, counting, evict, slots
from strataflux.daemon.counting import HASHES
from strataflux.daemon.folding import CounterFold, read_stats
from strataflux.daemon.rows import AGE_BUCKETS_STEPS, EVICTED_CAPACITY, MAX_SAMPLED
from strataflux.daemon.tables import sampled_hashes
from strataflux.proto import layout
from tests.fakes.core_rig import Client, Disk, Rig, make_store


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    rig = Rig([make_store(tmp_path / "s", [(200, 1000)])])
    rig.rd["sampled_hashes"] = HASHES
    yield Disk(rig)
    rig.close()


def tick(rig: Rig) -> None:
    """A sweep in which the clock moves."""
    rig.rd["tick_us"] = 0
    rig.sweep()


def steps(disk: Disk, count: int, *oids: int) -> None:
    """So many steps, the last of which looks these up."""
    for number in range(count):
        disk.client.ask(oids if number == count - 1 else [])
        tick(disk.rig)


def ages(disk: Disk) -> list[int]:
    return [int(count) for count in disk.rig.core.ages[0]]


def test_steps_to_the_first_use_are_those_of_who_asked(disk: Disk) -> None:
    disk.fill(1, 2, 3)
    assert disk.rig.rd["sampled"] == 3
    steps(disk, 1, 1)
    steps(disk, 4, 2)  # the fifth step since
    expected = [0] * (len(AGE_BUCKETS_STEPS) + 1)
    expected[AGE_BUCKETS_STEPS.index(1)] += 1
    expected[AGE_BUCKETS_STEPS.index(8)] += 1
    assert ages(disk) == expected
    entry = slots.slot_entry(disk.rig.core, disk.rig.entry(3) - 1)
    cache.retire(disk.rig.core, entry, EVICTED_CAPACITY)
    expected[-1] += 1  # never
    assert ages(disk) == expected
    assert disk.rig.rd["sampled"] == 2
    disk.rig.intact()


def test_steps_that_go_on_with_the_one_before_are_not_counted(disk: Disk) -> None:
    rig, client = disk.rig, disk.client
    for renewals in (0, 3, 1):
        client.begin()
        for _ in range(renewals):
            client.end()
            rig.sweep()
            attach_block.announce_renewal(client.block)
            client.begin()
            rig.sweep()
        client.end()
    rig.sweep()
    assert client.page["step_begun"] == 7
    assert client.counters["steps"] == 3


def test_a_count_of_renewals_that_is_rubbish_stops_the_count_of_steps_and_nothing_else(disk: Disk) -> None:
    client, random = disk.client, np.random.default_rng(1)
    before = 0
    for renewals in random.integers(0, 1 << 32, 50):
        client.page["renewals"] = renewals
        client.ask([])
        disk.rig.sweep()
        assert before <= client.counters["steps"] <= client.page["step_begun"]
        before = int(client.counters["steps"])
    disk.rig.intact()


def test_every_use_but_the_first_has_a_gap_and_every_eviction_an_idle_time(disk: Disk) -> None:
    disk.fill(1)
    for _ in range(5):
        steps(disk, 1, 1)
    assert disk.rig.core.gaps[0, 0, :-1].sum() == 4
    assert disk.rig.core.gaps[0, 0, -1] > 0
    assert evict.evict_one(disk.rig.core, 0, True)
    assert disk.rig.core.gaps[0, 1, :-1].sum() == 1
    kind = read_stats(disk.rig.tier, CounterFold()).kinds[0]
    assert (sum(kind.reuse_counts), sum(kind.idle_counts), sum(kind.age_counts)) == (4, 1, 1)
    assert (kind.useful, kind.unused, kind.evictions_capacity) == (1, 0, 1)


def test_whoever_goes_leaves_samples_that_count_no_steps(disk: Disk) -> None:
    disk.fill(1, 2)
    other = Client(disk.rig.tier)
    disk.rig.tier.close_session(disk.client.index)
    other.ask([1, 2])
    tick(disk.rig)
    assert sum(ages(disk)) == 0
    other.ask([1, 2])
    tick(disk.rig)
    assert disk.rig.core.gaps[0, 0, :-1].sum() == 2


def test_a_use_is_seen_by_whoever_evicts_for_another_reason(disk: Disk) -> None:
    """Also outside the sample: what left unused never was stamped."""
    disk.rig.rd["sampled_hashes"] = 0
    disk.fill(1, 2)
    steps(disk, 1, 1)
    cache.drain_page(disk.rig.core, 0, EVICTED_CAPACITY)
    assert (disk.rig.rd["fills_useful"], disk.rig.rd["fills_unused"], disk.rig.rd["sampled"]) == (1, 1, 0)


def test_the_sample_is_bounded_and_so_is_a_look(disk: Disk) -> None:
    core = disk.rig.core
    for oid in range(199):
        cache.publish(core, cache.begin_fill(core, 0, 0, oid))
    assert disk.rig.rd["sampled"] == 199
    counting.look(core)
    assert disk.rig.rd["sample_next"] == 128
    disk.rig.rd["sampled"] = MAX_SAMPLED
    entry = cache.begin_fill(core, 0, 0, 199)
    cache.publish(core, entry)
    assert (int(core.slots[entry]["prev"]), disk.rig.rd["sampled"]) == (-1, MAX_SAMPLED)
    disk.rig.rd["sampled"] = 199


def test_about_one_record_in_64_is_followed_fewer_in_large_caches(disk: Disk) -> None:
    stores = list(disk.rig.tier.stores.values())
    assert sampled_hashes(stores, 16) == HASHES // 64
    slots = 4096 * layout.CACHE_PAGE_BYTES // 1024
    assert slots * sampled_hashes(stores, 4096) // HASHES <= MAX_SAMPLED // 2
