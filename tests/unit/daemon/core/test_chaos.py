"""All faults mixed, tens of thousands of them: nothing wrong is served, every fault is counted, nothing leaks."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from strataflux.proto import layout
from tests.fakes.board_worker import FLIPPED, RIGHT, SHORT, Fault, Job
from tests.fakes.core_rig import Disk, Rig, make_store

FIRST, STRIDE, BYTES, RECORDS, UNIT = 4096, 1024, 1000, 1500, 512
FAULTS = 20_000
RECORDS_A_ROUND = 48


class Chaos:
    """A script of random faults that also says what the reader must have counted of them."""

    def __init__(self, random: np.random.Generator, direct: int) -> None:
        self.random = random
        self.direct = direct
        self.expected: Counter[str] = Counter()
        self._records: dict[int, int] = {}  # records of the window in flight

    def __call__(self, job: Job) -> Fault:
        records = self._records.pop(job.window, -(-job.length // STRIDE))
        fault = self._choose(job)
        ends = self._account(job, fault, records)
        if not ends:
            self._records[job.window] = records
        return fault

    def _choose(self, job: Job) -> Fault:
        kinds = [RIGHT, RIGHT, RIGHT, "eio", "eintr", "eagain", SHORT, FLIPPED, "einval"]
        kind = kinds[int(self.random.integers(len(kinds)))]
        if kind == SHORT:
            at = int(self.random.integers(0, job.length - UNIT)) if job.length > UNIT else 0
            return Fault(SHORT, at)
        if kind == FLIPPED:
            at = job.offset + int(self.random.integers(job.length))
            inside = (at - FIRST) % STRIDE < BYTES
            return Fault(FLIPPED, at) if inside else Fault()
        return Fault(kind)

    def _account(self, job: Job, fault: Fault, records: int) -> bool:
        """Note what this must lead to; whether the window's life ends with it."""
        lost = fault.kind == "eio" or (fault.kind == "einval" and job.descriptor != self.direct)
        if fault.kind == SHORT:
            self.expected["short_reads"] += fault.at > 0
            lost = fault.at < UNIT
        if lost:
            self.expected["io_errors"] += 1
            self.expected["failed_records"] += records
        if fault.kind == FLIPPED:
            self.expected["corrupt"] += 1
            self.expected["failed_records"] += 1
        return lost or fault.kind in (RIGHT, FLIPPED)


def play_round(disk: Disk, random: np.random.Generator) -> None:
    """Ask for some records and complete the reads late and out of order until all is quiet."""
    start = int(random.integers(RECORDS - 8))
    near = np.arange(start, start + 8)
    disk.client.ask([*near, *random.integers(0, RECORDS, RECORDS_A_ROUND - 8)], score=int(random.integers(256)))
    waiting: list[Job] = []
    disk.rig.sweep()
    while disk.rig.rd["in_flight"] or disk.rig.rd["queued"]:
        waiting += disk.worker.take()
        random.shuffle(waiting)
        done = max(len(waiting) // 2, 1)
        disk.worker.complete(waiting[:done])
        del waiting[:done]
        disk.rig.sweep()


def check_and_repair(disk: Disk) -> tuple[int, int]:
    """Compare everything that is resident with the file; let quarantined records be tried again. How many of each."""
    entries = disk.rig.entries()
    bad = np.flatnonzero(entries == layout.ENTRY_QUARANTINED)
    resident = np.flatnonzero((entries != layout.ENTRY_ABSENT) & (entries != layout.ENTRY_QUARANTINED))
    assert disk.client.read(resident.tolist()) == [disk.rig.record(int(oid)) for oid in resident]
    disk.rig.entries()[bad] = layout.ENTRY_ABSENT
    return int(resident.size), int(bad.size)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_faults(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    rig = Rig([make_store(tmp_path / "store", [(RECORDS, BYTES)])], pages=2, depth=16)
    rig.pretend_direct(alignment=UNIT)
    disk = Disk(rig)
    disk.worker.script = chaos = Chaos(random, rig.tier.stores[0].descriptor)
    table = rig.core.tables[0]
    quarantined = served = rounds = 0
    while sum(n for kind, n in disk.worker.given.items() if kind != RIGHT) < FAULTS:
        play_round(disk, random)
        rounds += 1
        if rounds % 20 == 0:
            rig.intact()
            resident, bad = check_and_repair(disk)
            served, quarantined = served + resident, quarantined + bad
            table["descriptor"], table["direct"] = rig.tier.stores[0].descriptor, 1
    disk.settle()
    quarantined += check_and_repair(disk)[1]
    assert served > rounds
    assert rig.rd["evictions"] > 0
    assert disk.count("short_reads", "io_errors", "corrupt") == tuple(
        chaos.expected[name] for name in ("short_reads", "io_errors", "corrupt")
    )
    assert disk.count("read_bytes") == (disk.worker.bytes_given,)
    assert disk.count("reads") == (len(disk.worker.jobs),)
    assert int(table["quarantined"]) == quarantined
    assert disk.count("retries")[0] + quarantined == chaos.expected["failed_records"]
    assert disk.count("in_flight", "queued", "dropped_queue") == (0, 0, 0)
    rig.close()
