"""Every exit of a read, through a worker that breaks the disk: wrong bytes are never served and every fault counts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from strataflux.cache_policy import budget
from strataflux.daemon import cache
from strataflux.daemon.rows import EVICTED_PRESSURE
from strataflux.daemon.state import FILLING, VALID
from strataflux.proto import layout
from tests.fakes.board_worker import FLIPPED, SHORT, Fault, always, covering, in_turn
from tests.fakes.core_rig import Client, Disk, Rig, make_store

RECORDS, BYTES, STRIDE, UNIT = 64, 1000, 1024, 512
FIRST = 4096  # offset of record 0
BAD = layout.ENTRY_QUARANTINED
EIO, EINVAL, EINTR, EAGAIN = (Fault(kind) for kind in ("eio", "einval", "eintr", "eagain"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    rig = Rig([make_store(tmp_path / "store", [(RECORDS, BYTES)])])
    rig.pretend_direct()
    yield Disk(rig)
    rig.close()


def test_right_read_is_published(disk: Disk) -> None:
    disk.fill(3, 40)
    disk.check_served(3, 40)
    assert disk.count("fills", "reads", "read_bytes", "io_errors", "corrupt") == (2, 2, 2 * STRIDE, 0, 0)
    assert disk.rig.core.fill_us.sum() == 2


def test_neighbours_are_read_at_once(disk: Disk) -> None:
    disk.fill(12, 10, 11, 13, 20)
    disk.check_served(10, 11, 12, 13, 20)
    assert [(job.offset, job.length) for job in disk.worker.jobs] == [
        (FIRST + 10 * STRIDE, 4 * STRIDE),
        (FIRST + 20 * STRIDE, STRIDE),
    ]
    assert disk.count("reads", "merged") == (2, 3)


def test_last_record_ends_before_its_window(disk: Disk) -> None:
    """The file ends inside the last aligned unit: a read of less than was asked for is whole all the same."""
    disk.rig.core.tables[0]["alignment"] = 4096
    disk.fill(RECORDS - 1)
    disk.check_served(RECORDS - 1)
    assert disk.count("short_reads", "io_errors") == (0, 0)


@pytest.mark.parametrize(("given", "next_offset"), [(512, 512), (700, 512), (999, 512)])
def test_short_read_goes_on_at_the_unit_it_broke_in(disk: Disk, given: int, next_offset: int) -> None:
    disk.worker.script = in_turn(Fault(SHORT, given))
    disk.fill(5)
    disk.check_served(5)
    first, second = disk.worker.jobs
    assert (second.offset - first.offset, second.length) == (next_offset, STRIDE - next_offset)
    assert second.address - first.address == next_offset
    assert disk.count("short_reads", "reads", "io_errors", "retries") == (1, 2, 0, 0)


def test_short_read_that_covers_the_record_is_whole(disk: Disk) -> None:
    disk.worker.script = in_turn(Fault(SHORT, BYTES))
    disk.fill(5)
    disk.check_served(5)
    assert disk.count("short_reads", "reads") == (0, 1)


@pytest.mark.parametrize(("given", "short_reads"), [(0, 0), (100, 1)])
def test_read_that_does_not_advance_is_an_error(disk: Disk, given: int, short_reads: int) -> None:
    """As at the end of a file that was cut: going on from there would go on for ever."""
    disk.worker.script = in_turn(Fault(SHORT, given))
    disk.fill(5)
    disk.check_served(5)
    assert disk.count("short_reads", "io_errors", "retries") == (short_reads, 1, 1)


def test_cut_file_ends_in_quarantine(disk: Disk) -> None:
    end = FIRST + 5 * STRIDE + 600
    disk.worker.script = lambda job: Fault(SHORT, max(end - job.offset, 0))
    disk.fill(5)
    assert disk.rig.entry(5) == BAD
    assert disk.count("io_errors", "fills") == (2, 0)


@pytest.mark.parametrize("fault", [EIO, Fault(FLIPPED, FIRST + 5 * STRIDE + BYTES - 1)], ids=["eio", "flipped"])
def test_first_failure_is_a_miss_and_a_second_try(disk: Disk, fault: Fault) -> None:
    disk.worker.script = in_turn(fault)
    disk.fill(5)
    disk.check_served(5)
    assert disk.count("retries", "fills") == (1, 1)
    assert sum(disk.count("io_errors", "corrupt")) == 1


@pytest.mark.parametrize("fault", [EIO, Fault(FLIPPED, FIRST + 5 * STRIDE)], ids=["eio", "flipped"])
def test_second_failure_is_quarantine(disk: Disk, fault: Fault) -> None:
    disk.worker.script = in_turn(fault, fault)
    disk.fill(5)
    assert disk.rig.entry(5) == BAD
    assert disk.client.read([5]) == [None]
    disk.settle()
    assert len(disk.worker.jobs) == 2
    assert disk.count("fills", "retries") == (0, 1)
    assert int(disk.rig.core.tables[0]["quarantined"]) == 1


def test_request_of_a_quarantined_record_costs_no_read(disk: Disk) -> None:
    disk.worker.script = in_turn(EIO, EIO)
    disk.fill(5)
    disk.client.push(5)
    disk.settle()
    assert disk.count("quarantine_hits", "reads") == (1, 2)


def test_flip_outside_of_records_harms_nobody(disk: Disk) -> None:
    disk.worker.script = always(Fault(FLIPPED, FIRST + 5 * STRIDE + BYTES))
    disk.fill(5)
    disk.check_served(5)
    assert disk.count("corrupt") == (0,)


def test_bad_sector_takes_none_of_its_neighbours(disk: Disk) -> None:
    disk.worker.script = covering(FIRST + 12 * STRIDE, EIO, EIO)
    disk.fill(10, 11, 12, 13)
    disk.check_served(10, 11, 13)
    assert disk.rig.entry(12) == BAD
    assert [job.length for job in disk.worker.jobs] == [4 * STRIDE] + 4 * [STRIDE]
    assert disk.count("io_errors", "retries", "fills") == (2, 4, 3)


def test_flipped_bit_sends_only_its_record_round_again(disk: Disk) -> None:
    flip = Fault(FLIPPED, FIRST + 12 * STRIDE + 7)
    disk.worker.script = covering(FIRST + 12 * STRIDE, flip, flip)
    disk.fill(10, 11, 12, 13)
    disk.check_served(10, 11, 13)
    assert disk.rig.entry(12) == BAD
    assert [(job.offset, job.length) for job in disk.worker.jobs[1:]] == [(FIRST + 12 * STRIDE, STRIDE)]
    assert disk.count("corrupt", "retries", "fills") == (2, 1, 3)


def test_direct_reads_that_are_refused_become_buffered(disk: Disk) -> None:
    """Both reads in flight learn it, the table falls back once."""
    direct, buffered = disk.rig.tier.stores[0].descriptor, disk.rig.tier.stores[0].buffered
    disk.worker.script = in_turn(EINVAL, EINVAL)
    disk.fill(5, 30)
    disk.check_served(5, 30)
    assert [job.descriptor for job in disk.worker.jobs] == [direct, direct, buffered, buffered]
    table = disk.rig.core.tables[0]
    assert (int(table["direct"]), int(table["fallbacks"])) == (0, 1)
    assert disk.count("io_errors", "retries") == (0, 0)


def test_refused_read_without_a_way_back_is_an_error(disk: Disk) -> None:
    disk.rig.core.tables[0]["buffered"] = -1
    disk.worker.script = always(EINVAL)
    disk.fill(5)
    assert disk.rig.entry(5) == BAD
    assert disk.count("io_errors") == (2,)


@pytest.mark.parametrize("fault", [EINTR, EAGAIN], ids=lambda fault: str(fault.kind))
def test_interruption_is_no_failure(disk: Disk, fault: Fault) -> None:
    disk.worker.script = in_turn(fault, fault, fault)
    disk.fill(5)
    disk.check_served(5)
    assert disk.count("reads", "io_errors", "retries") == (4, 0, 0)


def test_late_reads_hold_nobody_up(disk: Disk) -> None:
    assert disk.client.ask([5, 15, 25]) == 0
    disk.rig.sweep()
    late, *others = disk.worker.take()
    disk.worker.complete(reversed(others))
    disk.rig.sweep()
    assert disk.client.read([5, 15, 25]) == [None, disk.rig.record(15), disk.rig.record(25)]
    disk.rig.sweep()
    assert disk.count("duplicates", "in_flight") == (1, 1)
    disk.worker.complete([late])
    disk.settle()
    disk.check_served(5, 15, 25)


def test_page_taken_away_meanwhile_gets_no_record(disk: Disk) -> None:
    assert disk.client.ask([5]) == 0
    disk.rig.sweep()
    entry = next(e for e, slot in enumerate(disk.rig.core.slots) if slot["state"] == FILLING)
    page = entry // layout.UNITS_PER_PAGE
    assert budget.release(disk.rig.core.pages, page)
    cache.drain_page(disk.rig.core, page, EVICTED_PRESSURE)
    disk.settle()
    assert disk.rig.entry(5) == layout.ENTRY_ABSENT
    assert disk.count("fills", "page_moves") == (0, 1)
    disk.fill(5)
    disk.check_served(5)


def test_session_that_leaves_orphans_its_reads(disk: Disk) -> None:
    disk.worker.script = in_turn(EIO)
    assert disk.client.ask([5]) == 0
    disk.rig.sweep()
    disk.rig.tier.close_session(disk.client.index)
    disk.settle()
    reader = Client(disk.rig.tier)
    assert reader.read([5]) == [disk.rig.record(5)]
    assert int(reader.counters["fills"]) == 0


@pytest.mark.parametrize(("ahead", "pinned"), [(1000, True), (-5, False), (100_000, False)])
def test_awaited_fill_is_pinned_until_the_deadline(disk: Disk, ahead: int, pinned: bool) -> None:
    deadline = (int(disk.rig.rd["clock"]) + ahead) & 0xFFFFFFFF
    disk.client.page["awaiting"] = deadline
    disk.fill(5)
    (slot,) = [slot for slot in disk.rig.core.slots if slot["state"] == VALID]
    assert int(slot["pinned"]) == (deadline if pinned else 0)


def test_large_records_wait_for_each_other_and_take_no_page_of_others(tmp_path: Path) -> None:
    """One slot a page: only so many may be filling at a time, and unused pages are taken before anybody's."""
    rig = Rig([make_store(tmp_path / "store", [(10, 1000), (6, 262_144)])], pages=8)
    disk = Disk(rig)
    disk.fill(*range(16))
    disk.check_served(*range(16))
    assert disk.count("fills", "evictions", "page_moves") == (16, 0, 0)
    rig.close()
