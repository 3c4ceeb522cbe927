"""Rings against a model: order, wrap, holes, a full ring, laps, and rights."""

import itertools
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strataflux.proto import layout, ring
from strataflux.proto.errors import RingRightTaken
from strataflux.proto.ring import Consumer, Producer, Ring

LOG2 = 3
CAPACITY = 1 << LOG2
FULL_TURN = layout.LAPS * CAPACITY
"""Positions after which laps repeat."""


class Side:
    """A ring in private memory that starts at ``position``, as if it had been used up to there."""

    def __init__(self, position: int = 0) -> None:
        self.cells = np.zeros(CAPACITY, np.uint64)
        self.words = np.zeros(2, np.uint64)
        address = self.words.ctypes.data
        self.ring = Ring(self.cells.ctypes.data, LOG2, address, address + 8)
        if position:
            self.words[:] = position
            laps = [self._lap(p) for p in range(position - CAPACITY, position)]
            for p, lap in zip(range(position - CAPACITY, position), laps, strict=True):
                self.cells[p % CAPACITY] = lap << layout.LAP_SHIFT
        self.producer: Producer = self.ring.producer()
        self.producer.state[ring.TAIL] = position
        self.consumer: Consumer = self.ring.consumer()

    @staticmethod
    def _lap(position: int) -> int:
        return 1 + (position >> LOG2) % layout.LAPS

    def step(self, payloads: list[int]) -> list[bool]:
        """One step of the producer."""
        self.producer.begin()
        stored = [self.producer.push(payload) for payload in payloads]
        self.producer.end()
        return stored


starts = st.sampled_from([0, CAPACITY, FULL_TURN - 5, FULL_TURN, 3 * FULL_TURN + 1, (1 << 40) - 3])
payloads = st.integers(0, (1 << 56) - 1)


@settings(deadline=None)
@given(start=starts, turns=st.lists(st.tuples(st.lists(payloads, max_size=12), st.integers(0, 12)), max_size=60))
def test_entries_come_out_in_order_and_a_full_ring_drops(start: int, turns: list[tuple[list[int], int]]) -> None:
    side = Side(start)
    model: deque[int] = deque()
    dropped = 0
    for offered, take in turns:
        room = CAPACITY - len(model)
        assert side.step(offered) == [n < room for n in range(len(offered))]
        model.extend(offered[:room])
        dropped += max(len(offered) - room, 0)
        taken = side.consumer.take(take)
        assert taken == [model.popleft() for _ in range(min(take, len(model)))]
        ring.check_integrity(side.consumer.head, int(side.words[0]), LOG2)
    assert side.producer.dropped == dropped
    assert side.consumer.holes == 0


@settings(deadline=None)
@given(start=starts, lost=st.sets(st.integers(0, CAPACITY - 1)), count=st.integers(0, CAPACITY))
def test_holes_below_the_tail_are_skipped_and_counted(start: int, lost: set[int], count: int) -> None:
    side = Side(start)
    before = side.cells.copy()
    side.step(list(range(count)))
    gone = {n for n in lost if n < count}
    for n in gone:  # reserved by a producer that died before its store
        side.cells[(start + n) % CAPACITY] = before[(start + n) % CAPACITY]
    assert side.consumer.take(CAPACITY) == [n for n in range(count) if n not in gone]
    assert side.consumer.holes == len(gone)
    assert int(side.words[1]) == start + count


def test_an_entry_is_seen_before_the_tail_is_published_and_a_missing_one_is_waited_for() -> None:
    side = Side()
    side.producer.begin()
    side.producer.push(11)
    assert side.consumer.take(5) == [11]
    assert side.consumer.take(5) == []
    assert side.consumer.holes == 0
    side.producer.push(12)
    side.producer.end()
    assert side.consumer.take(5) == [12]


def test_every_lap_differs_from_the_one_before_and_is_never_zero() -> None:
    laps = [
        int(ring.lap_of(np.uint64(p), np.uint64(LOG2))) for p in range(0, (2 * layout.LAPS + 2) * CAPACITY, CAPACITY)
    ]
    assert min(laps) == 1
    assert max(laps) == layout.LAPS
    assert all(a != b for a, b in itertools.pairwise(laps))


def test_hundreds_of_rounds_reuse_every_lap() -> None:
    side = Side()
    for turn in range(3 * layout.LAPS):
        wanted = list(range(turn, turn + CAPACITY))
        side.step(wanted)
        assert side.consumer.take(CAPACITY) == wanted
    assert side.consumer.holes == 0


@given(tail=st.integers(0, (1 << 64) - 1), head=st.integers(0, 1 << 62))
def test_a_tail_is_clamped_to_what_a_right_producer_can_reach(tail: int, head: int) -> None:
    side = Side()
    side.words[0] = tail
    loaded = int(ring.load_tail(side.ring.tail_address, np.uint64(head), np.uint64(LOG2)))
    assert loaded == min(max(tail, head), head + CAPACITY)


@given(garbage=st.lists(st.integers(0, (1 << 64) - 1), min_size=CAPACITY, max_size=CAPACITY))
def test_garbage_in_cells_and_tail_cannot_stall_or_loop(garbage: list[int]) -> None:
    side = Side()
    side.cells[:] = garbage
    side.words[0] = (1 << 64) - 1
    taken = side.consumer.take(1000)
    assert len(taken) + side.consumer.holes == int(side.words[1])
    assert int(side.words[1]) >= CAPACITY


@given(st.integers(0, 255), st.integers(0, 254), st.integers(0, layout.MAX_OID))
def test_request_payload_bits(score: int, table: int, oid: int) -> None:
    payload = int(ring.request_payload(np.uint64(score), np.uint64(table), np.uint64(oid)))
    assert payload == score << 48 | table << 40 | oid
    assert payload < 1 << 56


@given(st.integers(0, 3), st.integers(0, layout.MAX_OID))
def test_put_payload_bits(staging: int, block: int) -> None:
    assert int(ring.put_payload(np.uint64(staging), np.uint64(block))) == staging << 48 | block


def test_get_producer_twice_fails() -> None:
    side = Side()
    with pytest.raises(RingRightTaken, match="ring producer"):
        side.ring.producer()
    side.producer.close()
    side.ring.producer()


def test_get_consumer_twice_fails() -> None:
    side = Side()
    with pytest.raises(RingRightTaken, match="ring consumer"):
        side.ring.consumer()
    side.consumer.close()
    side.ring.consumer()
