"""A disk whose writes of KV blocks go wrong at random under the real reader, and a ledger of what must be counted.

Kinds, of which each write gets at most one: one that is torn (it says it is whole, but only its beginning reached the
file); a short one that goes on; one cut off at once; EIO; an interruption; one that is late; one that is overtaken by a
later one. A torn write can only be noticed when its records are read: each is asked for afterwards, and every record
that is not in the file as it was put must end in quarantine, after two reads.
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from strataflux.client import attach_block
from strataflux.daemon import cache, grants, slots
from strataflux.daemon.kv import KvSettings
from strataflux.daemon.rows import EVICTED_CLEAR
from strataflux.daemon.state import BLOCK_FAILED, BLOCK_WRITTEN
from strataflux.proto import layout
from strataflux.proto.messages import KvGeometry
from tests.fakes.board_worker import RIGHT, SHORT, TORN, BoardWorker, Fault, Job
from tests.fakes.core_rig import Client, Rig, make_store
from tests.fakes.held_jobs import LATE, OVERTAKEN, HeldJobs
from tests.fakes.ledger import Check, Ledger

__all__ = ["FAULTS", "WriteChaos"]

RECORD, STRIDE, RECORDS, UNIT = 200, 256, 16, 512
BLOCK_BYTES = RECORDS * RECORD
GEOMETRY = KvGeometry("kv_group", 64, 8, RECORDS, RECORD, 12)
DEPTH = 16
TABLE = 1
LATE_TURNS = 6
CHECK_CYCLES = 50

TORN_WRITE: Final = "torn write"
FAULTS: Final = (TORN_WRITE, "short write", "cut write", "write EIO", LATE, OVERTAKEN)
_KINDS: Final = (RIGHT, "interrupted", *FAULTS)  # an interruption is repeated, and no fault


def _at_once(action: Callable[[], Any]) -> Any:
    """The reader's loop runs in this thread, one sweep at a time."""
    return action()


class WriteChaos:
    """Pairs: construction / ``close``. ``run`` may be called again."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        settings = KvSettings(folder / "kv", cache_bytes=1 << 20, places=1, file_bytes=64 << 20, free_bytes=0)
        self.rig = Rig([make_store(folder / "store", [(16, RECORD)])], pages=1, depth=DEPTH, kv=settings)
        self.worker = BoardWorker(self.rig.engine, self._decision)  # type: ignore[arg-type]
        self.client = Client(self.rig.tier, kv=GEOMETRY)
        self.place = self.client.row.place
        self.ledger = Ledger()
        self.torn_records = self.torn_blocks = self.cycles = self.turns = self.reads = 0
        self._held = HeldJobs(LATE_TURNS)
        self._decided: dict[int, Fault] = {}
        self._put: dict[int, NDArray[np.uint8]] = {}  # what was put, u8 [RECORDS, RECORD], by block

    def close(self) -> None:
        self.rig.close()

    def run(self, faults: int) -> None:
        """Go on until so many faults were given in all."""
        while self.given < faults:
            self._cycle()
            if self.cycles % CHECK_CYCLES == 0:
                self.rig.intact()

    @property
    def given(self) -> int:
        """Faults so far."""
        return self.ledger.total(FAULTS)

    def checks(self) -> list[Check]:
        """Every number of the reader that the ledger knows."""
        row: Any = self.place.row if self.place is not None else {}
        counted = {name: int(self.rig.rd[name]) for name in ("short_reads", "io_errors", "corrupt")}
        counted |= {name: int(row[name]) for name in ("written", "failed")}
        counted["quarantined"] = int(self.rig.core.tables[int(row["table"])]["quarantined"])
        return [
            *(Check(name, self.ledger.expected(name), count) for name, count in counted.items()),
            Check("torn writes noticed", self.ledger.given[TORN_WRITE], self.torn_blocks),
            Check("retries", self.torn_records, int(self.rig.rd["retries"])),
            Check("reads", self.reads, int(self.rig.rd["reads"])),
            Check("puts", int(row["written"]) + int(row["failed"]), int(row["puts"])),
            Check("puts refused", 0, int(row["refused"])),
            Check("left in flight", 0, int(self.rig.rd["in_flight"]) + int(self.rig.rd["in_flight_writes"])),
            Check("wrong records served", 0, self.ledger.wrong),
        ]

    # --- the client --------------------------------------------------------------------------------------------------

    def _cycle(self) -> None:
        """Put four blocks, let their writes go wrong, read all of them back, give them back."""
        self.cycles += 1
        ranges = grants.grant(_at_once, self.rig.tier, self.client.index, layout.STAGING_BLOCKS)
        blocks = [first + i for first, count in ranges for i in range(count)]
        for staging, block in enumerate(blocks):
            self._stage(staging, block)
        done = attach_block.puts_done(self.client.block)
        while attach_block.puts_done(self.client.block) < done + len(blocks) or self._pending(blocks):
            self._turn()
        for block in blocks:
            self._read_back(block)
        settled = grants.release(_at_once, self.rig.tier, self.client.index, ranges)
        while not settled():
            self.rig.sweep()

    def _stage(self, staging: int, block: int) -> None:
        data = self.random.integers(0, 256, (RECORDS, RECORD), np.uint8)
        at = int(self.client.block[attach_block.STAGING]) + staging * int(
            self.client.block[attach_block.STAGING_STRIDE]
        )
        ctypes.memmove(at, data.ctypes.data, BLOCK_BYTES)
        attach_block.announce_put(self.client.block, staging, block)
        self._put[block] = data

    def _states(self) -> NDArray[np.uint8]:
        assert self.place is not None
        return self.place._blocks

    def _pending(self, blocks: list[int]) -> bool:
        return bool((self._states()[blocks] < BLOCK_WRITTEN).any())

    def _read_back(self, block: int) -> None:
        """Have a block's records read from the file; compare them, and account for what was torn."""
        oids = range(block * RECORDS, (block + 1) * RECORDS)
        self._compare(block)
        if self._states()[block] == BLOCK_FAILED:
            return
        for oid in oids:
            if self._entry(oid) != layout.ENTRY_ABSENT:
                cache.retire(self.rig.core, slots.slot_entry(self.rig.core, self._entry(oid) - 1), EVICTED_CLEAR)
        self.rig.recycle()
        bad = set(self._bad_in_file(block))
        self.ledger.add(TORN_WRITE if bad else RIGHT, corrupt=2 * len(bad), quarantined=len(bad))
        self.torn_blocks += bool(bad)
        self.torn_records += len(bad)
        while any(self._entry(oid) == layout.ENTRY_ABSENT for oid in oids):
            self._compare(block)
            self._turn()
        assert {oid for oid in oids if self._entry(oid) == layout.ENTRY_QUARANTINED} == bad
        self._compare(block)

    def _compare(self, block: int) -> None:
        """Look a block up; whatever is there must be what was put."""
        self.client.begin()
        oids = range(block * RECORDS, (block + 1) * RECORDS)
        for index, address in enumerate(self.client.look_up(oids, table=TABLE).tolist()):
            found = ctypes.string_at(address, RECORD) if address else None
            self.ledger.compare(found, self._put[block][index].tobytes())
        assert self.client.end()

    def _entry(self, oid: int) -> int:
        assert self.place is not None
        assert self.place.directory is not None
        return int(ctypes.c_uint32.from_address(self.place.directory.address + 4 * oid).value)

    def _bad_in_file(self, block: int) -> list[int]:
        """The oracle: records that the file holds otherwise than they were put."""
        assert self.place is not None
        raw = os.pread(self.place._descriptors[0], RECORDS * STRIDE, block * RECORDS * STRIDE)
        rows = np.frombuffer(raw, np.uint8).reshape(RECORDS, STRIDE)[:, :RECORD]
        differ = (rows != self._put[block]).any(axis=1)
        return [block * RECORDS + int(index) for index in np.flatnonzero(differ)]

    # --- the disk ----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self.turns += 1
        due = self._held.due(self.turns)
        for job, kind in due:
            fault, counters = self._fault(job, kind)
            self._decided[job.window] = fault
            self.ledger.note(kind, **counters)
        self.worker.complete(job for job, _ in due)
        self.rig.sweep()
        self.worker.jobs.clear()
        for job in self.worker.take():
            if job.write:
                self._held.add(job, self._kind(job), self.turns)
            else:
                self.reads += 1
                self.worker.complete([job])

    def _kind(self, job: Job) -> str:
        """What is to become of a write. Only a whole block is torn: of a rest the file may hold the end already."""
        kind = _KINDS[int(self.random.integers(len(_KINDS)))]
        return RIGHT if kind == TORN_WRITE and job.length < RECORDS * STRIDE else kind

    def _fault(self, job: Job, kind: str) -> tuple[Fault, dict[str, int]]:
        if kind == TORN_WRITE:
            return Fault(TORN, UNIT * int(self.random.integers(job.length // UNIT))), {"written": 1}
        if kind == "short write":
            return Fault(SHORT, int(self.random.integers(1, job.length))), {"short_reads": 1}
        if kind == "cut write":
            return Fault(SHORT, 0), {"io_errors": 1, "failed": 1}
        if kind == "write EIO":
            return Fault("eio"), {"io_errors": 1, "failed": 1}
        if kind == "interrupted":
            return Fault("eintr"), {}
        return Fault(), {"written": 1}

    def _decision(self, job: Job) -> Fault:
        return self._decided.pop(job.window, Fault())
