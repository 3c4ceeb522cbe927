"""Rings of u64 entries in shared memory: one Producer, one Consumer, no atomics beyond an 8-byte store.

The request ring and the put ring are the same structure with different payloads (FORMAT.md, "Rings"):

    entry = lap:8 | payload:56            lap = 1 + (position >> log2 capacity) mod 255, never 0

An entry becomes visible with the one store that writes it: its lap tells the consumer that the cell belongs to this
round, so there is no separate tail to publish per entry, which a GPU could not do without atomics on host memory.

States of a cell at ``position``: STALE (lap of an earlier round, or 0) → READY (this round's lap) → taken (consumer's
head passed it). A position below the published tail that is still STALE is a HOLE: the consumer skips and counts it, so
a producer that died between reserving and storing stalls nobody.

Invariants: head ≤ tail ≤ head + capacity at step ends; a producer stores only below ``limit = head + capacity`` read at
its step's begin, so it never overwrites a cell the consumer has not taken.

Pairs: ``RequestRing.producer``/``Producer.close`` and ``RequestRing.consumer``/``Consumer.close``: a second request for
the same right fails until the first is given back.
"""

import numpy as np
from numpy.typing import NDArray

from strataflux.proto import layout
from strataflux.proto.atomics import (
    U64,
    load_acquire_u64,
    load_u64,
    store_release_u64,
)
from strataflux.proto.compiled import compiled
from strataflux.proto.errors import RingRightTaken

__all__ = [
    "DROPPED",
    "EMPTY",
    "HOLE",
    "LIMIT",
    "READY",
    "TAIL",
    "Consumer",
    "Producer",
    "Ring",
    "begin_produce",
    "check_integrity",
    "consume",
    "end_produce",
    "lap_of",
    "load_tail",
    "produce",
    "publish_head",
    "put_payload",
    "request_payload",
]

EMPTY, READY, HOLE = 0, 1, 2

TAIL, LIMIT, DROPPED = 0, 1, 2
"""Cells of a producer's private state (u64 [3])."""

_U8 = np.uint64(8)
_LAP_SHIFT = np.uint64(layout.LAP_SHIFT)
_PAYLOAD_MASK = np.uint64((1 << layout.LAP_SHIFT) - 1)


@compiled
def lap_of(position: U64, log2: U64) -> U64:
    """Lap (1…255) of a position in a ring of ``1 << log2`` cells."""
    return np.uint64(1) + (np.uint64(position) >> np.uint64(log2)) % np.uint64(layout.LAPS)


@compiled
def request_payload(score: U64, table: U64, oid: U64) -> U64:
    """Payload of the request ring: ``score:8 | table:8 | oid:40``."""
    return (
        np.uint64(score) << np.uint64(layout.SCORE_SHIFT)
        | np.uint64(table) << np.uint64(layout.TABLE_SHIFT)
        | np.uint64(oid)
    )


@compiled
def put_payload(staging: U64, block: U64) -> U64:
    """Payload of the put ring: ``staging:8 | block:48``."""
    return np.uint64(staging) << np.uint64(layout.PUT_STAGING_SHIFT) | np.uint64(block)


@compiled
def begin_produce(state: NDArray[np.uint64], head_address: U64, log2: U64) -> None:
    """First act of a step: learn how far the consumer got, and so how far this step may write."""
    # SYNC: ring-head (read). Acquire: a cell below head is free only once the consumer is done reading it.
    state[LIMIT] = load_acquire_u64(head_address) + (np.uint64(1) << np.uint64(log2))


@compiled
def produce(state: NDArray[np.uint64], ring: U64, log2: U64, payload: U64) -> bool:
    """Write one entry at the next position; False (and one more in DROPPED) where the ring is full."""
    position = state[TAIL]
    if position >= state[LIMIT]:
        state[DROPPED] += np.uint64(1)
        return False
    cell = np.uint64(ring) + (position & ((np.uint64(1) << np.uint64(log2)) - np.uint64(1))) * _U8
    # SYNC: ring-entry (publish). Release: what the entry announces (a staged block) is written before it is seen.
    store_release_u64(cell, lap_of(position, log2) << _LAP_SHIFT | np.uint64(payload))
    state[TAIL] = position + np.uint64(1)
    return True


@compiled
def end_produce(state: NDArray[np.uint64], tail_address: U64) -> None:
    """Last act of a step, before ``step_ended``: every position below the tail is stored or lost for good."""
    # SYNC: ring-tail (publish). Release: entries are visible before the tail that vouches for them.
    store_release_u64(tail_address, state[TAIL])


@compiled
def consume(ring: U64, log2: U64, position: U64, tail: U64) -> tuple[int, U64]:
    """(EMPTY | READY | HOLE, payload) of the cell at ``position``; ``tail`` was loaded (acquire) before this call."""
    capacity_mask = (np.uint64(1) << np.uint64(log2)) - np.uint64(1)
    at = np.uint64(position)
    # SYNC: ring-entry (read). Acquire: the announced bytes are read after the entry that announces them.
    entry = load_acquire_u64(np.uint64(ring) + (at & capacity_mask) * _U8)
    if entry >> _LAP_SHIFT == lap_of(at, log2):
        return READY, entry & _PAYLOAD_MASK
    # Below the tail an entry is never late: the tail was published after it (SYNC: ring-tail), so this is a hole.
    return (HOLE if at < np.uint64(tail) else EMPTY), np.uint64(0)


@compiled
def load_tail(tail_address: U64, head: U64, log2: U64) -> U64:
    """The published tail, clamped to what a right producer could have reached (a client's word is never trusted)."""
    # SYNC: ring-tail (read). Acquire: entries below the tail are looked at after it.
    tail = load_acquire_u64(tail_address)
    limit = np.uint64(head) + (np.uint64(1) << np.uint64(log2))
    return min(max(tail, np.uint64(head)), limit)


@compiled
def publish_head(head_address: U64, head: U64) -> None:
    """Give every cell below ``head`` back to the producer."""
    # SYNC: ring-head (publish). Release: the cells were read before they are given back.
    store_release_u64(head_address, head)


@compiled
def _load_head(head_address: U64) -> U64:
    return load_u64(head_address)


def check_integrity(head: int, tail: int, log2: int) -> None:
    """Assert the ring's invariant between two positions read at a step's end."""
    assert head <= tail <= head + (1 << log2), (head, tail, log2)


class Producer:
    """The right to write a ring (host side). Not thread-safe: one thread writes a ring."""

    def __init__(self, ring: "Ring") -> None:
        self._ring = ring
        self.state = np.zeros(3, dtype=np.uint64)

    def begin(self) -> None:
        """Start a step: entries may be written until the ring is full as seen now."""
        begin_produce(self.state, self._ring.head_address, self._ring.log2)

    def push(self, payload: int) -> bool:
        """Write one payload (< 2^56); False where the ring is full, counted in :attr:`dropped`."""
        return bool(produce(self.state, self._ring.address, self._ring.log2, np.uint64(payload)))

    def end(self) -> None:
        """Publish the tail."""
        end_produce(self.state, self._ring.tail_address)

    @property
    def dropped(self) -> int:
        """Entries lost to a full ring since construction."""
        return int(self.state[DROPPED])

    def close(self) -> None:
        """Give the right back."""
        self._ring._producer_taken = False


class Consumer:
    """The right to read a ring (host side; the reader thread uses the compiled functions directly)."""

    def __init__(self, ring: "Ring") -> None:
        self._ring = ring
        self.head = int(_load_head(ring.head_address))
        self.holes = 0

    def take(self, at_most: int) -> list[int]:
        """Up to ``at_most`` payloads in order; publishes the new head. Empty means nothing is there now."""
        taken: list[int] = []
        tail = load_tail(self._ring.tail_address, self.head, self._ring.log2)
        while len(taken) < at_most:
            status, payload = consume(self._ring.address, self._ring.log2, self.head, tail)
            if status == EMPTY:
                break
            self.holes += status == HOLE
            if status == READY:
                taken.append(int(payload))
            self.head += 1
        publish_head(self._ring.head_address, self.head)
        return taken

    def close(self) -> None:
        """Give the right back."""
        self._ring._consumer_taken = False


class Ring:
    """A ring at known addresses (u64): its cells, the tail its producer publishes and the head its consumer does."""

    def __init__(self, address: int, log2: int, tail_address: int, head_address: int) -> None:
        # fixed after construction
        self.address = np.uint64(address)
        self.log2 = log2
        self.tail_address = np.uint64(tail_address)
        self.head_address = np.uint64(head_address)
        # guarded by whoever holds the ring object (hand rights out before threads start)
        self._producer_taken = False
        self._consumer_taken = False

    def producer(self) -> Producer:
        """Hand out the right to write.

        Raises:
            RingRightTaken: it is handed out already and was not given back.
        """
        if self._producer_taken:
            raise RingRightTaken("ring producer", "one already handed out", "at most one", "close() it first")
        self._producer_taken = True
        return Producer(self)

    def consumer(self) -> Consumer:
        """Hand out the right to read.

        Raises:
            RingRightTaken: it is handed out already and was not given back.
        """
        if self._consumer_taken:
            raise RingRightTaken("ring consumer", "one already handed out", "at most one", "close() it first")
        self._consumer_taken = True
        return Consumer(self)
