"""How fast records are looked up, against a plain gather of the same ids in the same run.

What is timed is a session's own path: steps begun and ended, directory loads, stamps, ring pushes. The memory is a
daemon's (memfds, mapped), and a second thread plays the daemon: it takes the requests and moves the clock. The gather
does the least that any look-up must do: one load of the directory an id, nothing else.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from strataflux.client import attach_block, directory
from strataflux.client.attach_block import Mapped
from strataflux.proto import layout, ring
from strataflux.proto.atomics import U64, load_u32, load_u64, pause, store_u32
from strataflux.proto.compiled import compiled
from strataflux.proto.segment import Segment, create

__all__ = [
    "LookupResult",
    "LookupSetup",
    "bench_lookup",
    "drain",
    "gather",
]


@dataclass(frozen=True)
class LookupSetup:
    """What is measured. A step of ``batches_per_step`` batches is about one of an 8B model with a long context. Ids
    are fresh in every batch of a round, as they are in a decode.
    """

    records: int = 1_000_000
    record_bytes: int = 512
    cached_share: float = 0.25
    hit_share: float = 0.8
    batch: int = 4096
    batches: int = 256
    batches_per_step: int = 4
    rounds: int = 7
    ring_log2: int = 16


@dataclass(frozen=True)
class LookupResult:
    """Rates are the best round's; ``ratio_to_gather`` is of the two bests."""

    lookups_per_second: float
    gathers_per_second: float
    ratio_to_gather: float
    hit_share: float
    dropped_share: float


@compiled
def gather(words: NDArray[np.uint32], oids: NDArray[np.int64], out: NDArray[np.uint32]) -> None:
    """Load the directory entry of each id."""
    for i in range(oids.size):
        out[i] = words[oids[i]]


@compiled
def drain(cells: U64, log2: U64, tail_at: U64, head_at: U64, clock_at: U64, stop_at: U64) -> int:
    """Take requests as the daemon does, sweep by sweep, until told to stop; returns how many were taken."""
    head, taken, sweeps = load_u64(head_at), 0, 0
    while load_u32(stop_at) == np.uint32(0):
        tail = ring.load_tail(tail_at, head, log2)
        before = head
        while True:
            status, _ = ring.consume(cells, log2, head, tail)
            if status == ring.EMPTY:
                break
            head += np.uint64(1)
        ring.publish_head(head_at, head)
        taken += int(head - before)
        sweeps += 1
        if sweeps % 64 == 0:
            # SYNC: clock (publish).
            store_u32(clock_at, load_u32(clock_at) + np.uint32(1))
        for _ in range(256):
            pause()
    return taken


class _Memory:
    """A daemon's memory with a part of the records cached, and the attach block of a client of it."""

    def __init__(self, setup: LookupSetup, random: np.random.Generator) -> None:
        units = layout.slot_bytes(setup.record_bytes) // layout.SLOT_UNIT_BYTES
        cached = int(setup.records * setup.cached_share)
        pages = -(-cached * units // layout.UNITS_PER_PAGE)
        geometry = layout.session_geometry(setup.ring_log2, pages * layout.UNITS_PER_PAGE, 0)
        self.page = create("bench-daemon", layout.PAGE_HEADER_BYTES, reserve=False)
        self.view = create("bench-view", layout.PAGE_HEADER_BYTES, reserve=False)
        self.session = create("bench-session", geometry.total_bytes, reserve=True)
        self.directory = create("bench-directory", layout.round_up(4 * setup.records, 4096), reserve=True)
        self.words = self.directory.view(np.dtype((np.uint32, (setup.records,))))[0]
        self.cached = random.choice(setup.records, cached, replace=False)
        self.words[self.cached] = random.permutation(cached) * units + 1
        addresses = (self.page.address, self.view.address, self.session.address)
        self.block = attach_block.make_block(addresses, setup.ring_log2, geometry)
        attach_block.set_table(self.block, 0, self.directory.address, setup.records, kv=False)
        # Records are looked up, not read: the directory's own pages stand for the cache's.
        attach_block.set_bases(self.block, [Mapped(0, self.directory.address, pages * layout.CACHE_PAGE_BYTES)])

    def start_daemon(self) -> Callable[[], None]:
        """Start the thread that plays the daemon; what is returned stops it."""
        words = (
            int(self.block[attach_block.RING]),
            int(self.block[attach_block.RING_LOG2]),
            self.session.address + layout.offset_of(layout.SESSION_PAGE, "ring_tail"),
            self.view.address + layout.offset_of(layout.SESSION_VIEW, "ring_head"),
            self.page.address + layout.offset_of(layout.DAEMON_PAGE, "clock"),
            self.page.address + layout.offset_of(layout.DAEMON_PAGE, "stopping"),
        )
        stopping = self.page.view(layout.DAEMON_PAGE)["stopping"]
        arguments = [np.uint64(word) for word in words]
        stopping[0] = 1
        drain(*arguments)  # compiles
        stopping[0] = 0
        thread = threading.Thread(target=drain, args=arguments)
        thread.start()

        def stop() -> None:
            stopping[0] = 1
            thread.join()

        return stop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        del self.words
        segments: list[Segment] = [self.page, self.view, self.session, self.directory]
        for segment in segments:
            segment.close()


def bench_lookup(setup: LookupSetup) -> LookupResult:
    """Measure look-ups and gathers in alternating rounds."""
    random = np.random.default_rng(0)
    with _Memory(setup, random) as memory:
        batches = [_batch(setup, memory, random) for _ in range(setup.batches)]
        _round_of_lookups(setup, memory, batches[: setup.batches_per_step])  # compiles
        _round_of_gathers(setup, memory, batches[:1])
        counters = memory.block[attach_block.COUNTERS :]
        stop = memory.start_daemon()
        try:
            times = [
                (_round_of_lookups(setup, memory, batches), _round_of_gathers(setup, memory, batches))
                for _ in range(setup.rounds)
            ]
        finally:
            stop()
        count = setup.batches * setup.batch
        lookup_seconds, gather_seconds = (min(column) for column in zip(*times, strict=True))
        lookups, hits = int(counters[0]), int(counters[1])
        return LookupResult(
            lookups_per_second=count / lookup_seconds,
            gathers_per_second=count / gather_seconds,
            ratio_to_gather=gather_seconds / lookup_seconds,
            hit_share=hits / lookups,
            dropped_share=int(memory.block[attach_block.DROPPED]) / max(lookups - hits, 1),
        )


def _batch(setup: LookupSetup, memory: _Memory, random: np.random.Generator) -> NDArray[np.int64]:
    """Random ids of which ``hit_share`` are cached."""
    absent = np.flatnonzero(memory.words == 0)
    hit = random.random(setup.batch) < setup.hit_share
    return np.where(hit, random.choice(memory.cached, setup.batch), random.choice(absent, setup.batch)).astype(np.int64)


def _round_of_lookups(setup: LookupSetup, memory: _Memory, batches: list[NDArray[np.int64]]) -> float:
    scores = np.full(setup.batch, 100, np.uint8)
    addresses = np.empty(setup.batch, np.uint64)
    block = memory.block
    started = time.perf_counter()
    for first in range(0, len(batches), setup.batches_per_step):
        attach_block.begin_step(block)
        for oids in batches[first : first + setup.batches_per_step]:
            directory.look_up(block, 0, oids, scores, addresses, False)
        attach_block.end_step(block)
    return time.perf_counter() - started


def _round_of_gathers(setup: LookupSetup, memory: _Memory, batches: list[NDArray[np.int64]]) -> float:
    entries = np.empty(setup.batch, np.uint32)
    started = time.perf_counter()
    for oids in batches:
        gather(memory.words, oids, entries)
    return time.perf_counter() - started
