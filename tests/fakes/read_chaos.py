"""A disk whose reads go wrong at random under the real reader, and a ledger of what must have been counted of it.

Kinds, of which each read gets at most one: a flipped bit in a record; a short read that goes on; one cut off within its
first unit or at once, as at the end of a file; EIO; a direct read that is refused; an interruption; a read that is late
(held back while hundreds of later ones complete); one that is overtaken by a later one.
"""

import ctypes
from pathlib import Path
from typing import Final

import numpy as np

from strataflux.daemon.state import FILL_BUCKETS_US
from strataflux.proto import layout
from tests.fakes.board_worker import FLIPPED, RIGHT, SHORT, Fault, Job
from tests.fakes.core_rig import Disk, Rig, make_store
from tests.fakes.held_jobs import LATE, OVERTAKEN, HeldJobs
from tests.fakes.ledger import Check, Ledger

__all__ = ["FAULTS", "ReadChaos"]

STRIDE, BYTES, RECORDS, UNIT = 1024, 1000, 1500, 512
DEPTH, PAGES = 64, 2
ASKED = 48
LATE_TURNS = 12
CHECK_TURNS = 100
DIRECT_TURNS = 8
"""After so many turns direct reads are allowed again."""

REFUSED: Final = "direct refused"
FAULTS: Final = ("bit flip", "short read", "cut read", "EIO", REFUSED, LATE, OVERTAKEN)
_KINDS: Final = (RIGHT, "interrupted", *FAULTS)  # an interruption is repeated, and no fault
_COUNTERS: Final = ("reads", "timed", "corrupt", "short_reads", "io_errors", "fallbacks")


class ReadChaos:
    """Pairs: construction / ``close``. ``run`` may be called again."""

    def __init__(self, folder: Path, seed: int, policy: str = "lru") -> None:
        self.random = np.random.default_rng(seed)
        self.rig = Rig([make_store(folder, [(RECORDS, BYTES)])], pages=PAGES, depth=DEPTH, policy=policy)
        self.rig.pretend_direct(alignment=UNIT)
        self.disk = Disk(self.rig)
        self.disk.worker.script = lambda job: self._decided.pop(job.window)
        self.ledger = Ledger()
        self.right = [self.rig.record(oid) for oid in range(RECORDS)]
        self.latencies = np.zeros(len(FILL_BUCKETS_US) + 1, np.int64)
        self.failed = self.filled = self.paroled = self.turns = 0
        self._decided: dict[int, Fault] = {}
        self._records: dict[int, int] = {}  # of the window in flight, by window
        self._held = HeldJobs(LATE_TURNS)

    def close(self) -> None:
        self.rig.close()

    def run(self, faults: int) -> None:
        """Go on until so many faults were given in all, then let everything settle."""
        while self.given < faults:
            if int(self.rig.rd["in_flight"]) + int(self.rig.rd["queued"]) < DEPTH:
                self._ask()
            self._turn()
            if self.turns % CHECK_TURNS == 0:
                self._check()
        while self.rig.rd["in_flight"] or self.rig.rd["queued"]:
            self._turn()
        self._check()

    @property
    def given(self) -> int:
        """Faults so far."""
        return self.ledger.total(FAULTS)

    def checks(self) -> list[Check]:
        """Every number of the reader that the ledger knows."""
        counted = {name: int(self.rig.rd[name]) for name in ("reads", "corrupt", "short_reads", "io_errors")}
        counted["timed"] = int(self.rig.core.read_us.sum())
        counted["fallbacks"] = int(self.rig.core.tables[0]["fallbacks"])
        lost = int(self.rig.rd["retries"]) + self.paroled
        return [
            *(Check(name, self.ledger.expected(name), counted[name]) for name in _COUNTERS),
            Check("retries + quarantined", self.failed, lost),
            Check("fills", self.filled, int(self.rig.rd["fills"])),
            Check("read_bytes", self.disk.worker.bytes_given, int(self.rig.rd["read_bytes"])),
            Check("latencies as timed by hand", int(np.array_equal(self.latencies, self.rig.core.read_us)), 1),
            Check("left in flight or queued", 0, int(self.rig.rd["in_flight"]) + int(self.rig.rd["queued"])),
            Check("dropped", 0, int(self.rig.rd["dropped_queue"]) + int(self.rig.rd["dropped_grace"])),
            Check("wrong records served", 0, self.ledger.wrong),
        ]

    # --- the client --------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Look some neighbours and some others up; compare those that are there."""
        start = int(self.random.integers(RECORDS - 8))
        others = self.random.integers(0, RECORDS, ASKED - 8)
        self._read([*range(start, start + 8), *map(int, others)], int(self.random.integers(256)))

    def _read(self, oids: list[int], score: int = 0) -> None:
        client = self.disk.client
        client.begin()
        for oid, address in zip(oids, client.look_up(oids, score=score).tolist(), strict=True):
            self.ledger.compare(ctypes.string_at(address, BYTES) if address else None, self.right[oid])
        assert client.end()

    def _check(self) -> None:
        """Compare all that is resident; let what is quarantined be tried again."""
        entries = self.rig.entries()
        bad = entries == layout.ENTRY_QUARANTINED
        self._read(np.flatnonzero(~bad & (entries != layout.ENTRY_ABSENT)).tolist())
        self.paroled += int(bad.sum())
        entries[bad] = layout.ENTRY_ABSENT
        self.rig.intact()

    # --- the disk ----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self.turns += 1
        if self.turns % DIRECT_TURNS == 0:
            table = self.rig.core.tables[0]
            table["descriptor"], table["direct"] = self.rig.tier.stores[0].descriptor, 1
        ended = self._complete()
        submitted = [int(self.rig.core.windows[window]["submitted_us"]) for window in ended]
        self.rig.sweep()
        took = int(self.rig.rd["now_us"]) - np.array(submitted, np.int64)
        np.add.at(self.latencies, np.searchsorted(FILL_BUCKETS_US, took), 1)
        self.disk.worker.jobs.clear()
        refuses = bool(self.rig.core.tables[0]["direct"])
        for job in self.disk.worker.take():
            self._records.setdefault(job.window, -(-job.length // STRIDE))
            kind = self._kind(job, refuses)
            refuses &= kind != REFUSED
            self._held.add(job, kind, self.turns)

    def _kind(self, job: Job, refuses: bool) -> str:
        """What is to become of a job. Direct reads are refused once: others under way then are only sent again."""
        kind = _KINDS[int(self.random.integers(len(_KINDS)))]
        if kind == "short read" and job.length < 2 * UNIT:
            return "cut read"  # nothing shorter would be a whole unit
        if kind == REFUSED and not (refuses and job.descriptor == self.rig.tier.stores[0].descriptor):
            return RIGHT
        return kind

    def _complete(self) -> list[int]:
        """Complete what is due, in any order; the windows that end right."""
        due = self._held.due(self.turns)
        self.random.shuffle(due)
        ended = [job.window for job, kind in due if self._decide(job, kind)]
        self.disk.worker.complete(job for job, _ in due)
        return ended

    def _decide(self, job: Job, kind: str) -> bool:
        """Make the fault of one read and note what it must lead to; whether its window ends right."""
        fault, counters = self._fault(job, kind)
        self._decided[job.window] = fault
        lost = "io_errors" in counters
        ends = fault.kind in (RIGHT, FLIPPED)
        records = self._records.pop(job.window) if lost or ends else 0
        self.failed += records if lost else counters.get("corrupt", 0)
        self.filled += records - counters.get("corrupt", 0) if ends else 0
        self.ledger.note(kind, reads=1, timed=int(ends), **counters)
        return ends

    def _fault(self, job: Job, kind: str) -> tuple[Fault, dict[str, int]]:
        if kind == "bit flip":
            at = job.offset + int(self.random.integers(job.length))
            inside = (at - self._first) % STRIDE
            return Fault(FLIPPED, at - max(inside - BYTES + 1, 0)), {"corrupt": 1}
        if kind == "short read":
            return Fault(SHORT, int(self.random.integers(UNIT, job.length - UNIT + 1))), {"short_reads": 1}
        if kind == "cut read":
            at = int(self.random.integers(UNIT - (STRIDE - BYTES)))  # it may hold a record's last unit
            return Fault(SHORT, at), {"io_errors": 1, "short_reads": int(at > 0)}
        named = {"EIO": "eio", REFUSED: "einval", "interrupted": "eintr"}
        counters = {"EIO": {"io_errors": 1}, REFUSED: {"fallbacks": 1}}
        return Fault(named.get(kind, RIGHT)), counters.get(kind, {})

    @property
    def _first(self) -> int:
        return self.rig.tier.stores[0].manifest.sections[0].offset
