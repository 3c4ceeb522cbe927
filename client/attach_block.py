"""The attach block: all that compiled code needs to know of one attachment, in one array of u64.

Addresses are of this process. A look-up loads everything from here, so that another attachment is another block and no
compiled code keeps an address of its own. Its cells belong to the thread that runs steps; between steps the session may
change tables and bases.

    cell               content
    ENABLED            0: every look-up misses and requests nothing (the session was fenced)
    STEP, CLOCK        number of the current or last step; daemon clock copied at its begin, or later in it
    DAEMON_PAGE, VIEW, PAGE    addresses of the three pages
    RING, RING_LOG2    address and size of the request ring's cells
    TAIL, LIMIT, DROPPED       the producer's private state (proto/ring.py)
    STAMPS             address of the stamp of unit 0
    RUBBISH            entries that named a slot outside the mapped segments
    N_TABLES, LAST_CHUNK       tables in use; index of the base that stands for everything beyond the last segment
    SINK               written, never read: where stores go that mean nothing
    COUNTERS …         the session page's counters in their order there
    PUT_TAIL, PUT_LIMIT, PUTS_REFUSED    the private state of the put ring's producer
    PUT_RING, STAGING, STAGING_STRIDE    address of its cells; of the first staging block; from one to the next
    TABLES …           four cells a table: directory address, records, cell of its look-up counter, 0
    BASES …            one a chunk of 16 MiB of the cache's address range: address | pages mapped; 0 = nothing mapped

A base is a multiple of 4,096, so its low bits hold how many of the chunk's 64 pages are mapped: one load tells where a
slot lies and whether it is there at all.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strataflux.proto import layout, ring
from strataflux.proto.atomics import (
    fence,
    fence_acquire,
    load_acquire_u32,
    load_acquire_u64,
    load_u32,
    load_u64,
    store_release_u32,
    store_u32,
    store_u64,
)
from strataflux.proto.compiled import compiled

__all__ = [
    "BASES",
    "CHUNK_PAGES",
    "CHUNK_UNITS_LOG2",
    "CLOCK",
    "COUNTERS",
    "DAEMON_PAGE",
    "DEADLINES_EXCEEDED",
    "DROPPED",
    "ENABLED",
    "KV_LOOKUPS",
    "LAST_CHUNK",
    "LIMIT",
    "N_TABLES",
    "PAGE",
    "PAGES_MASK",
    "PAGE_UNITS_LOG2",
    "PUTS_DROPPED",
    "PUT_LIMIT",
    "PUT_RING",
    "PUT_TAIL",
    "RING",
    "RING_DROPPED",
    "RING_LOG2",
    "RUBBISH",
    "SINK",
    "STAGING",
    "STAGING_STRIDE",
    "STAMPS",
    "STEP",
    "STEPS_INVALID",
    "TABLES",
    "TABLE_CELLS",
    "TAIL",
    "UNIT_BYTES_LOG2",
    "VIEW",
    "WAITS",
    "WAIT_NANOSECONDS",
    "WEIGHT_LOOKUPS",
    "Block",
    "Mapped",
    "announce_put",
    "announce_renewal",
    "announce_wait",
    "begin_step",
    "copy_clock",
    "end_step",
    "end_wait",
    "fills_address",
    "fills_count",
    "is_fenced",
    "load_prefetches",
    "make_block",
    "put_result",
    "puts_done",
    "puts_done_address",
    "set_bases",
    "set_table",
]

Block = NDArray[np.uint64]

ENABLED: Final = 0
STEP: Final = 1
CLOCK: Final = 2
DAEMON_PAGE: Final = 3
VIEW: Final = 4
PAGE: Final = 5
RING: Final = 6
RING_LOG2: Final = 7
TAIL: Final = 8
LIMIT: Final = 9
DROPPED: Final = 10
STAMPS: Final = 11
RUBBISH: Final = 12
N_TABLES: Final = 13
LAST_CHUNK: Final = 14
SINK: Final = 15
COUNTERS: Final = 16
PUT_TAIL: Final = 26
PUT_LIMIT: Final = 27
PUT_RING: Final = 29
STAGING: Final = 30
STAGING_STRIDE: Final = 31
TABLES: Final = 32
TABLE_CELLS: Final = 4
BASES: Final = TABLES + TABLE_CELLS * layout.MAX_TABLES

CHUNK_UNITS_LOG2: Final = (layout.SEGMENT_MIN_BYTES // layout.SLOT_UNIT_BYTES).bit_length() - 1
PAGE_UNITS_LOG2: Final = layout.UNITS_PER_PAGE.bit_length() - 1
CHUNK_PAGES: Final = layout.SEGMENT_MIN_BYTES // layout.CACHE_PAGE_BYTES
UNIT_BYTES_LOG2: Final = layout.SLOT_UNIT_BYTES.bit_length() - 1
PAGES_MASK: Final = 0xFFF

WEIGHT_LOOKUPS: Final = COUNTERS + layout.COUNTERS.index("weight_lookups")
KV_LOOKUPS: Final = COUNTERS + layout.COUNTERS.index("kv_lookups")
"""Cells of the look-up counters; the hits of each follow in the next cell."""
RING_DROPPED: Final = COUNTERS + layout.COUNTERS.index("ring_dropped")
WAITS: Final = COUNTERS + layout.COUNTERS.index("waits")
WAIT_NANOSECONDS: Final = COUNTERS + layout.COUNTERS.index("wait_nanoseconds")
DEADLINES_EXCEEDED: Final = COUNTERS + layout.COUNTERS.index("deadlines_exceeded")
STEPS_INVALID: Final = COUNTERS + layout.COUNTERS.index("steps_invalid")
PUTS_DROPPED: Final = COUNTERS + layout.COUNTERS.index("puts_dropped")

_N_COUNTERS: Final = len(layout.COUNTERS)
_COUNTERS_AT: Final = layout.offset_of(layout.SESSION_PAGE, layout.COUNTERS[0])
_CLOCK_AT: Final = layout.offset_of(layout.DAEMON_PAGE, "clock")
_SLEEPING_AT: Final = layout.offset_of(layout.DAEMON_PAGE, "sleeping")
_FENCED_AT: Final = layout.offset_of(layout.SESSION_VIEW, "fenced")
_FILLS_AT: Final = layout.offset_of(layout.SESSION_VIEW, "fills")
_HEAD_AT: Final = layout.offset_of(layout.SESSION_VIEW, "ring_head")
_RENEWALS_AT: Final = layout.offset_of(layout.SESSION_PAGE, "renewals")
_BEGUN_AT: Final = layout.offset_of(layout.SESSION_PAGE, "step_begun")
_ENDED_AT: Final = layout.offset_of(layout.SESSION_PAGE, "step_ended")
_TAIL_AT: Final = layout.offset_of(layout.SESSION_PAGE, "ring_tail")
_AWAITING_AT: Final = layout.offset_of(layout.SESSION_PAGE, "awaiting")
_PUT_TAIL_AT: Final = layout.offset_of(layout.SESSION_PAGE, "put_tail")
_PUTS_DONE_AT: Final = layout.offset_of(layout.SESSION_VIEW, "puts_done")
_RESULTS_AT: Final = layout.offset_of(layout.SESSION_VIEW, "put_results")
_PREFETCHES_AT: Final = tuple(
    layout.offset_of(layout.SESSION_VIEW, f"prefetch_{name}") for name in ("fills", "used", "unused", "dropped")
)
_PUT_LOG2 = np.uint64((2 * layout.STAGING_BLOCKS).bit_length() - 1)

_STEP_MASK = np.uint64(0xFFFFFFFF)

assert COUNTERS + _N_COUNTERS <= PUT_TAIL < STAGING_STRIDE < TABLES
assert CHUNK_PAGES < PAGES_MASK


class Mapped(NamedTuple):
    """A cache segment mapped in this process."""

    first_slot: int
    address: int
    bytes: int


def make_block(pages: tuple[int, int, int], ring_log2: int, geometry: layout.SessionGeometry) -> Block:
    """A block without tables and segments. ``pages`` are the addresses of daemon page, session view and session
    segment.
    """
    chunks = -(-geometry.stamps_count >> CHUNK_UNITS_LOG2)
    block = np.zeros(BASES + chunks + 1, np.uint64)
    block[ENABLED] = 1
    block[DAEMON_PAGE : PAGE + 1] = pages
    block[RING] = pages[2] + geometry.ring_offset
    block[RING_LOG2] = ring_log2
    block[STAMPS] = pages[2] + geometry.stamps_offset
    block[LAST_CHUNK] = chunks
    block[PUT_RING] = pages[2] + geometry.put_ring_offset
    block[STAGING] = pages[2] + geometry.staging_offset
    block[STAGING_STRIDE] = geometry.staging_bytes
    return block


def set_table(block: Block, number: int, directory: int, records: int, *, kv: bool) -> None:
    """Put a directory (its address) under a table number; numbers are given in order."""
    at = TABLES + TABLE_CELLS * number
    block[at : at + 3] = directory, records, KV_LOOKUPS if kv else WEIGHT_LOOKUPS
    block[N_TABLES] = number + 1


def set_bases(block: Block, segments: Sequence[Mapped]) -> None:
    """Make exactly these segments reachable; between steps only. Their bounds were checked against the stamps."""
    block[BASES:] = 0
    for segment in segments:
        pages = segment.bytes // layout.CACHE_PAGE_BYTES
        first_chunk = segment.first_slot >> CHUNK_UNITS_LOG2
        for chunk in range(-(-pages // CHUNK_PAGES)):
            mapped = min(pages - chunk * CHUNK_PAGES, CHUNK_PAGES)
            block[BASES + first_chunk + chunk] = segment.address + chunk * layout.SEGMENT_MIN_BYTES | mapped


@compiled
def copy_clock(block: Block) -> None:
    """Stamp from now on with the daemon's clock as it is. A record that was filled within a long step and used in it
    would else bear an older stamp than its fill, and seem unused.
    """
    # SYNC: clock (read). Relaxed: a stamp that is a tick old is as good.
    block[CLOCK] = np.uint64(load_u32(block[DAEMON_PAGE] + np.uint64(_CLOCK_AT)))


@compiled
def announce_renewal(block: Block) -> None:
    """Say, before :func:`begin_step`, that the step to begin goes on with the last one, and is none to be counted."""
    at = block[PAGE] + np.uint64(_RENEWALS_AT)
    # Relaxed: a daemon that sees the step first counts one too many until the next that is one.
    store_u32(at, load_u32(at) + np.uint32(1))


@compiled
def begin_step(block: Block) -> bool:
    """Enter a step; True if the daemon sleeps and its doorbell must be rung."""
    copy_clock(block)
    ring.begin_produce(block[TAIL : TAIL + 3], block[VIEW] + np.uint64(_HEAD_AT), block[RING_LOG2])
    step = (block[STEP] + np.uint64(1)) & _STEP_MASK
    block[STEP] = step
    # SYNC: step-begun (publish). Full fence: either the daemon sees this step before it reuses a slot, or the look-ups
    # below see that the slot's entry is gone. SYNC: sleeping (read) rests on the same fence.
    store_u32(block[PAGE] + np.uint64(_BEGUN_AT), np.uint32(step))
    fence()
    if load_u32(block[VIEW] + np.uint64(_FENCED_AT)) != np.uint32(0):
        block[ENABLED] = np.uint64(0)
    return bool(load_u32(block[DAEMON_PAGE] + np.uint64(_SLEEPING_AT)) != np.uint32(0))


@compiled
def end_step(block: Block) -> bool:
    """Leave the step; True if everything read from slots in it was right (or nothing was read, ENABLED being 0)."""
    block[RING_DROPPED] = block[DROPPED]
    for i in range(_N_COUNTERS):
        store_u64(block[PAGE] + np.uint64(_COUNTERS_AT + 8 * i), block[COUNTERS + i])
    ring.end_produce(block[TAIL : TAIL + 3], block[PAGE] + np.uint64(_TAIL_AT))
    # SYNC: step-ended (publish). Release: slot reads and counters lie before it.
    store_release_u32(block[PAGE] + np.uint64(_ENDED_AT), np.uint32(block[STEP]))
    # SYNC: fenced (read). Acquire fence: a slot byte read after its refill is followed by a flag that is set.
    fence_acquire()
    if block[ENABLED] == np.uint64(0) or load_u32(block[VIEW] + np.uint64(_FENCED_AT)) == np.uint32(0):
        return True
    block[ENABLED] = np.uint64(0)
    return False


@compiled
def is_fenced(block: Block) -> bool:
    """The daemon took this session's slots away. After a hang-up without it they stay as they are: it died."""
    return bool(load_u32(block[VIEW] + np.uint64(_FENCED_AT)) != np.uint32(0))


@compiled
def load_prefetches(block: Block, counts: NDArray[np.uint64]) -> None:
    """What became of this attachment's prefetches, into ``counts`` [4, 2]: fills, used, unused and dropped, of weights
    and of KV. The daemon's word; each number is of some moment.
    """
    for i in range(4):
        for kind in range(2):
            counts[i, kind] = load_u64(block[VIEW] + np.uint64(_PREFETCHES_AT[i] + 8 * kind))


@compiled
def announce_wait(block: Block, ticks: int) -> bool:
    """Say until which clock this session waits, outside a step; True if the doorbell must be rung."""
    until = (np.uint64(load_u32(block[DAEMON_PAGE] + np.uint64(_CLOCK_AT))) + np.uint64(ticks)) & _STEP_MASK
    # SYNC: awaiting (publish). Full fence: the daemon sees the flag, or fills_count below sees its newest count.
    store_u32(block[PAGE] + np.uint64(_AWAITING_AT), np.uint32(max(until, np.uint64(1))))
    fence()
    return bool(load_u32(block[DAEMON_PAGE] + np.uint64(_SLEEPING_AT)) != np.uint32(0))


@compiled
def end_wait(block: Block) -> None:
    """The session waits no longer."""
    # SYNC: awaiting (publish). Late is harmless: it costs the daemon one wake-up call.
    store_u32(block[PAGE] + np.uint64(_AWAITING_AT), np.uint32(0))


@compiled
def fills_count(block: Block) -> int:
    """The count that moves with each sweep that filled something; the value to sleep on."""
    # SYNC: fills (read). Acquire: entries are looked at after the count.
    return np.int64(load_acquire_u32(block[VIEW] + np.uint64(_FILLS_AT)))  # type: ignore[return-value]


def fills_address(block: Block) -> int:
    """Address of the futex word of :func:`fills_count`."""
    return int(block[VIEW]) + _FILLS_AT


@compiled
def announce_put(block: Block, staging: int, kv_block: int) -> bool:
    """Announce that a staging block holds a KV block, in a step or between two; True if the doorbell must be rung.

    The caller has at most as many puts under way as there are staging blocks, so the ring is never full.
    """
    ring.begin_produce(block[PUT_TAIL : PUT_TAIL + 3], block[VIEW] + np.uint64(_PUTS_DONE_AT), _PUT_LOG2)
    payload = ring.put_payload(np.uint64(staging), np.uint64(kv_block))
    ring.produce(block[PUT_TAIL : PUT_TAIL + 3], block[PUT_RING], _PUT_LOG2, payload)
    # SYNC: ring-tail (publish), of the put ring: the entry is visible before the tail that vouches for it.
    ring.end_produce(block[PUT_TAIL : PUT_TAIL + 3], block[PAGE] + np.uint64(_PUT_TAIL_AT))
    # SYNC: sleeping (read). Full fence: the daemon sees the entry before it sleeps, or its sleep is seen here.
    fence()
    return bool(load_u32(block[DAEMON_PAGE] + np.uint64(_SLEEPING_AT)) != np.uint32(0))


@compiled
def puts_done(block: Block) -> int:
    """How many puts of this attachment the daemon has settled, in the order of their announcement."""
    # SYNC: puts-done (read). Acquire: results are read after the count that says they are there.
    done = load_acquire_u64(block[VIEW] + np.uint64(_PUTS_DONE_AT))
    return np.int64(min(done, block[PUT_TAIL]))  # type: ignore[return-value]


def puts_done_address(block: Block) -> int:
    """Address of the futex word of :func:`puts_done`: the low half of the count."""
    return int(block[VIEW]) + _PUTS_DONE_AT


@compiled
def put_result(block: Block, staging: int) -> int:
    """What became of the newest settled put from a staging block: a PUT_ code of the layout."""
    return np.int64(load_u32(block[VIEW] + np.uint64(_RESULTS_AT + 4 * staging)))  # type: ignore[return-value]
