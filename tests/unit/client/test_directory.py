"""The compiled look-up against a slow model of FORMAT.md, and its bounds."""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strataflux.client import attach_block as ab
from strataflux.client import directory
from strataflux.client.attach_block import Mapped
from strataflux.client.errors import MisuseError
from strataflux.proto import layout
from strataflux.proto.segment import Segment, create

RING_LOG2 = 8
CHUNK = 1 << ab.CHUNK_UNITS_LOG2
STAMPS = 4 * CHUNK
SEGMENTS = [
    Mapped(0, 1 << 40, layout.SEGMENT_MIN_BYTES),
    Mapped(2 * CHUNK, 1 << 41, 3 * layout.CACHE_PAGE_BYTES),
    Mapped(3 * CHUNK, 1 << 42, layout.SEGMENT_MIN_BYTES),
]
"""A whole chunk, a hole, a chunk of which three pages are mapped, and the last chunk of the range."""
RECORDS = 400


class Side:
    """The memory of one attachment, made by hand."""

    def __init__(self) -> None:
        geometry = layout.session_geometry(RING_LOG2, STAMPS, 0)
        self.segments = [
            create("page", 4096, reserve=False),
            create("view", 4096, reserve=False),
            create("session", geometry.total_bytes, reserve=False),
        ]
        page, view, session = self.segments
        self.block = ab.make_block((page.address, view.address, session.address), RING_LOG2, geometry)
        self.words = np.zeros(RECORDS, np.uint32)
        ab.set_table(self.block, 0, 8, 1, kv=False)  # never looked up here: any load from it would crash
        ab.set_table(self.block, 1, self.words.ctypes.data, RECORDS, kv=True)
        ab.set_bases(self.block, SEGMENTS)
        self.ring = self._array(session, geometry.ring_offset, geometry.ring_capacity, ctypes.c_uint64)
        self.stamps = self._array(session, geometry.stamps_offset, STAMPS, ctypes.c_uint32)
        self.clock = page.view(layout.DAEMON_PAGE)["clock"]

    @staticmethod
    def _array(segment: Segment, offset: int, count: int, kind: Any) -> NDArray[np.unsignedinteger]:
        return np.ctypeslib.as_array((kind * count).from_address(segment.address + offset))

    def look(self, oids: list[int], scores: list[int]) -> tuple[int, list[int]]:
        """One step with one look-up in table 1."""
        addresses = np.full(len(oids), 7, np.uint64)
        ab.begin_step(self.block)
        hits = directory.look_up(self.block, 1, np.array(oids, np.int64), np.array(scores, np.uint8), addresses, False)
        assert ab.end_step(self.block)
        return hits, addresses.tolist()

    def close(self) -> None:
        """Drop the memory."""
        del self.ring, self.stamps, self.clock
        for segment in self.segments:
            segment.close()


@pytest.fixture
def side() -> Iterator[Side]:
    made = Side()
    yield made
    made.close()


def address_of(slot: int) -> int:
    """The model: where a slot lies, 0 where nothing is mapped."""
    for segment in SEGMENTS:
        offset = (slot - segment.first_slot) * layout.SLOT_UNIT_BYTES
        if 0 <= offset < segment.bytes:
            return segment.address + offset
    return 0


def edges() -> st.SearchStrategy[int]:
    """Directory entries, those at the edges of what is mapped above all."""
    limits = [0, 1, CHUNK, 2 * CHUNK, 2 * CHUNK + 3 * layout.UNITS_PER_PAGE, 3 * CHUNK, STAMPS, (1 << 32) - 1]
    near = st.sampled_from(limits).flatmap(lambda at: st.integers(max(at - 2, 0), min(at + 2, (1 << 32) - 1)))
    return st.one_of(st.just(0), near, st.integers(0, 3 * CHUNK), st.integers(0, (1 << 32) - 1))


@settings(max_examples=80, deadline=None)
@given(
    entries=st.lists(edges(), min_size=RECORDS, max_size=RECORDS),
    oids=st.lists(st.integers(0, RECORDS - 1), max_size=300),
    clock=st.integers(1, (1 << 32) - 1),
)
def test_it_does_what_the_model_does(entries: list[int], oids: list[int], clock: int) -> None:
    side = Side()
    side.words[:] = entries
    side.clock[0] = clock
    scores = [oid % 256 for oid in oids]
    hits, addresses = side.look(oids, scores)

    expected = [address_of(entries[oid] - 1) for oid in oids]
    assert addresses == expected
    assert hits == sum(1 for address in expected if address)
    stamped = {entries[oid] - 1 for oid, address in zip(oids, expected, strict=True) if address}
    assert set(np.flatnonzero(side.stamps).tolist()) == stamped
    assert {int(side.stamps[slot]) for slot in stamped} <= {clock}
    absent = [oid for oid in oids if entries[oid] == layout.ENTRY_ABSENT]
    pushed = absent[: 1 << RING_LOG2]
    lap, table = 1 << layout.LAP_SHIFT, 1 << layout.TABLE_SHIFT
    wanted = [lap | oid % 256 << layout.SCORE_SHIFT | table | oid for oid in pushed]
    assert side.ring[: len(pushed)].tolist() == wanted
    assert not side.ring[len(pushed) :].any()
    assert int(side.block[ab.DROPPED]) == len(absent) - len(pushed)
    quarantined = sum(entries[oid] == layout.ENTRY_QUARANTINED for oid in oids)
    assert int(side.block[ab.RUBBISH]) == len(oids) - hits - len(absent) - quarantined
    assert side.block[ab.KV_LOOKUPS : ab.KV_LOOKUPS + 2].tolist() == [len(oids), hits]
    assert side.block[ab.WEIGHT_LOOKUPS] == 0
    side.close()


@settings(max_examples=50, deadline=None)
@given(
    entries=st.lists(edges(), min_size=RECORDS, max_size=RECORDS),
    oids=st.lists(st.integers(0, RECORDS - 1), max_size=200),
)
def test_what_is_present_is_found_and_nothing_is_asked_for(entries: list[int], oids: list[int]) -> None:
    side = Side()
    side.words[:] = entries
    side.clock[0] = 9
    found = np.full(len(oids), 7, np.uint64)
    ab.begin_step(side.block)
    count = directory.find_present(side.block, 1, np.array(oids, np.int64), found)
    assert ab.end_step(side.block)

    expected = [address_of(entries[oid] - 1) for oid in oids]
    assert found.tolist() == expected
    assert count == sum(1 for address in expected if address)
    assert (side.block[[ab.TAIL, ab.KV_LOOKUPS, ab.RUBBISH]] == 0).all()
    assert not side.ring.any()
    assert not side.stamps.any()
    side.close()


def test_nothing_is_present_after_a_fence_and_a_bad_id_is_refused(side: Side) -> None:
    side.words[:2] = 1, 0
    ab.begin_step(side.block)
    ids, found = np.array([0, 1], np.int64), np.full(2, 7, np.uint64)
    assert directory.find_present(side.block, 1, ids, found) == 1
    side.block[ab.ENABLED] = 0
    assert directory.find_present(side.block, 1, ids, found) == 0
    assert not found.any()
    assert directory.find_present(side.block, 1, ids + RECORDS, found) == directory.FAULT_OID
    with pytest.raises(MisuseError, match="is this the store"):
        directory.checked(directory.FAULT_OID, side.block, 1, ids + RECORDS)


@settings(max_examples=50, deadline=None)
@given(
    oids=st.lists(st.integers(0, RECORDS - 1), max_size=200),
    bad=st.one_of(st.integers(RECORDS, (1 << 63) - 1), st.integers(-(1 << 63), -1)),
    data=st.data(),
)
def test_one_bad_id_anywhere_stops_all(oids: list[int], bad: int, data: st.DataObject) -> None:
    side = Side()
    place = data.draw(st.integers(0, len(oids)))
    ids = np.array([*oids[:place], bad, *oids[place:]], np.int64)
    addresses = np.full(ids.size, 7, np.uint64)
    ab.begin_step(side.block)
    fault = directory.look_up(side.block, 1, ids, np.zeros(ids.size, np.uint8), addresses, False)
    assert fault == directory.FAULT_OID
    assert (addresses == 7).all()
    assert side.block[ab.TAIL] == 0
    assert side.block[ab.KV_LOOKUPS] == 0
    with pytest.raises(MisuseError, match=f"{bad}; expected 0 … {RECORDS - 1}"):
        directory.raise_fault(fault, side.block, 1, ids)
    side.close()


def test_a_second_look_counts_only_what_it_requests(side: Side) -> None:
    side.words[:2] = 1, 0
    ab.begin_step(side.block)
    ids, scores, addresses = np.array([0, 1], np.int64), np.zeros(2, np.uint8), np.zeros(2, np.uint64)
    directory.look_up(side.block, 1, ids, scores, addresses, False)
    directory.look_up(side.block, 1, ids, scores, addresses, True)
    assert side.block[ab.KV_LOOKUPS : ab.KV_LOOKUPS + 2].tolist() == [3, 1]
    assert side.block[ab.TAIL] == 2


def test_after_a_fence_everything_misses_and_nothing_is_asked(side: Side) -> None:
    side.words[:2] = 1, 0
    side.segments[1].view(layout.SESSION_VIEW)["fenced"] = 1
    assert side.look([0, 1], [0, 0]) == (0, [0, 0])
    assert not side.ring.any()
    assert not side.stamps.any()
    assert side.block[ab.DROPPED] == 2


def test_absent_counts_neither_present_nor_quarantined(side: Side) -> None:
    side.words[:4] = 0, 1, layout.ENTRY_QUARANTINED, 0
    assert directory.absent_count(side.block, 1, np.array([0, 1, 2, 3], np.int64)) == 2


def test_step_numbers_wrap(side: Side) -> None:
    page = side.segments[2].view(layout.SESSION_PAGE)
    side.block[ab.STEP] = (1 << 32) - 1
    side.look([], [])
    assert (int(page["step_begun"][0]), int(page["step_ended"][0])) == (0, 0)
    ab.begin_step(side.block)
    assert (int(page["step_begun"][0]), int(page["step_ended"][0])) == (1, 0)
    del page


@pytest.mark.parametrize(("clock", "ticks", "until"), [(5, 20, 25), ((1 << 32) - 1, 1, 1), ((1 << 32) - 1, 5, 4)])
def test_a_wait_never_says_it_does_not_wait(side: Side, clock: int, ticks: int, until: int) -> None:
    side.clock[0] = clock
    ab.announce_wait(side.block, ticks)
    page = side.segments[2].view(layout.SESSION_PAGE)
    assert int(page["awaiting"][0]) == until
    ab.end_wait(side.block)
    assert int(page["awaiting"][0]) == 0
    del page


def test_the_bench_measures_a_whole_run() -> None:
    from strataflux.client.bench.lookup import LookupSetup, bench_lookup

    result = bench_lookup(LookupSetup(records=10_000, batch=512, batches=4, rounds=2))
    assert result.lookups_per_second > 0
    assert result.ratio_to_gather == pytest.approx(result.lookups_per_second / result.gathers_per_second)
    assert 0.7 < result.hit_share < 0.9
    assert 0 <= result.dropped_share <= 1
