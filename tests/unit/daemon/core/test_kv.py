"""KV blocks through a real reader: put, shown, evicted, read back from buffer and file, released, closed."""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from strataflux.client import futex
from strataflux.daemon import kv as kv_module
from strataflux.daemon.errors import Refusal
from strataflux.daemon.interface import SessionRequest
from strataflux.daemon.kv import KvSettings
from strataflux.daemon.reader_settings import ReaderSettings
from strataflux.daemon.reader_thread import ReaderThread
from strataflux.daemon.store import open_served
from strataflux.proto import layout, ring
from strataflux.proto.messages import KvGeometry
from strataflux.proto.store_format import SectionSpec
from strataflux.proto.store_writer import StoreWriter

WATCHDOG_SECONDS = 60.0
GEOMETRY = KvGeometry("kv_group", 128, 4, 32 * 6, 200, 12)  # 6 heads of all layers, 32 groups each, 200 bytes a group
BLOCK_BYTES = GEOMETRY.groups_per_block * GEOMETRY.record_bytes
CACHE = 4 << 20


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition that another thread brings about; a watchdog, not a time limit, ends a hang."""
    given_up = threading.Event()
    watchdog = threading.Timer(WATCHDOG_SECONDS, given_up.set)
    watchdog.start()
    try:
        while not condition():
            assert not given_up.is_set(), what
            os.sched_yield()
    finally:
        watchdog.cancel()


class Kv:
    """A session with KV and its client's half, on the reader's own maps."""

    def __init__(self, reader: ReaderThread, geometry: KvGeometry = GEOMETRY) -> None:
        self.reader = reader
        self.opened = reader.open_session(SessionRequest(0, 0, os.getpid(), (0,), 10, geometry))
        self.index = self.opened.index
        tier: Any = reader._tier
        self.place = tier.rows[self.index].place
        page, view = tier.rows[self.index].page, tier.rows[self.index].view
        self.core = tier.core
        self.shape = layout.session_geometry(10, self.opened.stamps_count, self.opened.staging_block_bytes)
        self.page, self.view, self.doorbell = page, view, tier.doorbell
        tail, done = self._at(layout.SESSION_PAGE, "put_tail"), self._seen("puts_done")
        self.puts = ring.Ring(page.address + self.shape.put_ring_offset, 3, page.address + tail, done).producer()
        tail, head = self._at(layout.SESSION_PAGE, "ring_tail"), self._seen("ring_head")
        self.requests = ring.Ring(page.address + self.shape.ring_offset, 10, page.address + tail, head).producer()

    @staticmethod
    def _at(dtype: np.dtype[np.void], name: str) -> int:
        return layout.offset_of(dtype, name)

    def _seen(self, name: str) -> int:
        return int(self.view.address) + self._at(layout.SESSION_VIEW, name)

    def close_fds(self) -> None:
        for descriptor in self.opened.descriptors:
            os.close(descriptor)
        self.opened.descriptors = []

    def put(self, staging: int, block: int, data: NDArray[np.uint8]) -> int:
        """Stage and announce a block, wait for the answer; returns it."""
        view: Any = self.view.view(layout.SESSION_VIEW)[0]
        before = int(view["puts_done"])
        at = self.page.address + self.shape.staging_offset + staging * self.shape.staging_bytes
        ctypes.memmove(at, data.ctypes.data, data.size)
        self.puts.begin()
        assert self.puts.push(ring.put_payload(staging, block))
        self.puts.end()
        os.eventfd_write(self.doorbell, 1)
        until(lambda: int(view["puts_done"]) > before, "the put was never answered")
        return int(view["put_results"][min(staging, 3)])

    def entry(self, oid: int) -> int:
        return int(ctypes.c_uint32.from_address(self.place.directory.address + 4 * oid).value)

    def record(self, oid: int) -> bytes:
        slot = self.entry(oid) - 1
        page = slot // layout.UNITS_PER_PAGE
        at = int(self.core.page_address[page]) + slot % layout.UNITS_PER_PAGE * layout.SLOT_UNIT_BYTES
        return ctypes.string_at(at, GEOMETRY.record_bytes)

    def request(self, oids: list[int]) -> None:
        self.requests.begin()
        for oid in oids:
            assert self.requests.push(ring.request_payload(1, 1, oid))
        self.requests.end()
        os.eventfd_write(self.doorbell, 1)

    def states(self) -> list[int]:
        return [int(state) for state in self.place._blocks]

    def in_file(self, block: int) -> bool:
        return self.states()[block] == 8


@pytest.fixture(params=["uring", "threads"])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ReaderThread]:
    with StoreWriter(tmp_path / "store", {}, [SectionSpec("s", "weight_channel", 0, "qkv", 64, 256)]) as writer:
        writer.write(0, 0, np.zeros((64, 256), np.uint8))
        writer.publish()
    kv = KvSettings(tmp_path / "kv", cache_bytes=CACHE, places=1, file_bytes=64 << 20, free_bytes=0)
    settings = ReaderSettings(weight_bytes=1 << 20, engine=request.param, queue_depth=8, kv=kv)
    thread = ReaderThread(settings, [open_served(tmp_path / "store", direct_io="off")])
    thread.start()
    yield thread
    thread.check_integrity()
    thread.stop()


@pytest.fixture
def kv(reader: ReaderThread) -> Iterator[Kv]:
    session = Kv(reader)
    yield session
    session.close_fds()
    reader.close_session(session.index)


def block_bytes(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)


def record_of(data: NDArray[np.uint8], index: int) -> bytes:
    return data[index * GEOMETRY.record_bytes :][: GEOMETRY.record_bytes].tobytes()


def test_session_learns_its_table_and_memory(kv: Kv) -> None:
    table = kv.opened.tables[1]
    assert (table.number, table.kind, table.records) == (1, "kv_group", 12 * GEOMETRY.groups_per_block)
    assert kv.opened.staging_block_bytes == BLOCK_BYTES
    assert len(kv.opened.descriptors) == 4 + 2 + len(kv.opened.segments)


def test_newest_groups_of_all_heads_are_resident_after_a_put(reader: ReaderThread, kv: Kv) -> None:
    assert reader.grant_blocks(kv.index, 2) == [[0, 2]]
    data = block_bytes(1)
    # A first page of slots must exist before "free slots" do: one requested record brings it.
    assert kv.put(0, 0, data) == layout.PUT_ACCEPTED
    kv.request([0])
    until(lambda: kv.entry(0) != 0, "the record never came")
    other = block_bytes(2)
    assert kv.put(1, 1, other) == layout.PUT_ACCEPTED
    shown = [i for i in range(GEOMETRY.groups_per_block) if kv.entry(GEOMETRY.groups_per_block + i) != 0]
    assert shown
    newest = sorted({i % 32 for i in shown})
    assert newest == list(range(newest[0], 32)), "groups are shown from the newest on"
    for index in shown:
        assert kv.record(GEOMETRY.groups_per_block + index) == record_of(other, index)


def test_prefetched_records_are_told_apart_by_kind(reader: ReaderThread, kv: Kv) -> None:
    reader.grant_blocks(kv.index, 2)
    data = block_bytes(3)
    assert kv.put(0, 0, data) == layout.PUT_ACCEPTED
    until(lambda: kv.in_file(0), "the block was never written")
    absent = [oid for oid in range(0, 100, 7) if kv.entry(oid) == 0]
    nothing_there = GEOMETRY.groups_per_block  # of a block that was not put
    kv.request([layout.PREFETCH | oid for oid in (*absent, nothing_there)])
    until(lambda: all(kv.entry(oid) for oid in absent), "the records never came")
    assert [kv.record(oid) for oid in absent] == [record_of(data, oid) for oid in absent]
    view: Any = kv.view.view(layout.SESSION_VIEW)[0]
    assert view["prefetch_fills"].tolist() == [0, len(absent)]
    assert reader.snapshot().kinds[1].prefetched == len(absent)
    assert int(kv.core.sessions[kv.index]["invalid"]) == 1


def test_records_come_back_from_buffer_or_file(reader: ReaderThread, kv: Kv) -> None:
    reader.grant_blocks(kv.index, 6)
    blocks = [block_bytes(10 + n) for n in range(6)]
    for number, data in enumerate(blocks):
        assert kv.put(number % 4, number, data) == layout.PUT_ACCEPTED
        oids = [number * GEOMETRY.groups_per_block + i for i in range(0, 192, 3)]
        kv.request(oids)  # at once: some are still in the write buffer
        until(lambda oids=oids: all(kv.entry(oid) for oid in oids), "records never came")  # type: ignore[misc]
        for oid in oids:
            assert kv.record(oid) == record_of(data, oid % 192)
    until(lambda: all(kv.in_file(n) for n in range(6)), "blocks were never written")
    assert kv.place.row["written"] == 6
    rest = [n * 192 + i for n in range(6) for i in range(1, 192, 3)]
    for first in range(0, len(rest), 256):
        kv.request(rest[first : first + 256])
        until(lambda f=first: all(kv.entry(oid) for oid in rest[f : f + 256]), "never read")  # type: ignore[misc]
        for oid in rest[first : first + 256]:
            assert kv.record(oid) == record_of(blocks[oid // 192], oid % 192)


def test_refused_puts_say_why(reader: ReaderThread, kv: Kv) -> None:
    reader.grant_blocks(kv.index, 1)
    data = block_bytes(3)
    assert kv.put(0, 0, data) == layout.PUT_ACCEPTED
    assert kv.put(0, 0, data) == layout.PUT_REFUSED_DUPLICATE
    assert kv.put(1, 1, data) == layout.PUT_REFUSED_QUOTA
    assert kv.put(2, 99, data) == layout.PUT_REFUSED_INVALID
    assert kv.place.row["refused"] == 3
    assert kv.place.row["puts"] == 1


def test_whoever_waits_for_a_put_is_woken(reader: ReaderThread, kv: Kv) -> None:
    reader.grant_blocks(kv.index, 1)
    page: Any = kv.page.view(layout.SESSION_PAGE)[0]
    page["awaiting"] = 1
    sleeping = threading.Thread(target=futex.wait, args=(kv._seen("puts_done"), 0, 10**15), daemon=True)
    sleeping.start()
    assert kv.put(0, 0, block_bytes(6)) == layout.PUT_ACCEPTED
    sleeping.join(WATCHDOG_SECONDS)
    assert not sleeping.is_alive()


def test_requests_for_blocks_that_were_not_put_are_rubbish(kv: Kv) -> None:
    invalid = int(kv.core.sessions[kv.index]["invalid"])
    kv.request([5])
    until(lambda: int(kv.core.sessions[kv.index]["invalid"]) == invalid + 1, "not counted")
    assert kv.entry(5) == 0


def test_released_blocks_are_absent_and_can_be_granted_again(reader: ReaderThread, kv: Kv) -> None:
    reader.grant_blocks(kv.index, 12)
    with pytest.raises(Refusal, match="are free"):
        reader.grant_blocks(kv.index, 1)
    old, new = block_bytes(4), block_bytes(5)
    kv.put(0, 3, old)
    kv.request([3 * 192])
    until(lambda: kv.entry(3 * 192) != 0, "never came")
    until(reader.release_blocks(kv.index, [[3, 1]]), "never settled")
    assert all(kv.entry(3 * 192 + i) == 0 for i in range(192))
    assert reader.grant_blocks(kv.index, 1) == [[3, 1]]
    assert kv.put(1, 3, new) == layout.PUT_ACCEPTED
    kv.request([3 * 192 + 1])
    until(lambda: kv.entry(3 * 192 + 1) != 0, "never came")
    assert kv.record(3 * 192 + 1) == record_of(new, 1)


@pytest.mark.parametrize("ranges", [[[0, 13]], [[0, 1], [0, 1]], [[4]], [[5, 1]]])
def test_release_of_what_is_not_ours_is_refused(reader: ReaderThread, kv: Kv, ranges: list[list[int]]) -> None:
    reader.grant_blocks(kv.index, 2)
    with pytest.raises(Refusal):
        reader.release_blocks(kv.index, ranges)


def test_a_release_outlived_by_its_session_leaves_the_next_one_alone(reader: ReaderThread) -> None:
    first = Kv(reader)
    reader.grant_blocks(first.index, 2)
    settled = reader.release_blocks(first.index, [[0, 1]])
    first.close_fds()
    reader.close_session(first.index)
    until(lambda: not reader._tier.closing, "the place was never freed")
    second = Kv(reader)
    assert second.index == first.index
    assert reader.grant_blocks(second.index, 2) == [[0, 2]]
    before = second.states(), list(second.place._free_blocks)
    with pytest.raises(Refusal, match="ended"):
        settled()
    assert (second.states(), second.place._free_blocks) == before
    second.close_fds()
    reader.close_session(second.index)


def test_a_session_leaves_nothing_and_the_place_is_free_again(reader: ReaderThread) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    for round_number in range(3):
        kv = Kv(reader)
        kv.close_fds()
        reader.grant_blocks(kv.index, 4)
        for number in range(4):
            kv.put(number, number, block_bytes(20 + number + round_number))
        kv.request(list(range(100)))
        reader.close_session(kv.index)  # reads and writes may be in flight
        until(lambda: not reader._tier.closing, "the place was never freed")
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert os.listdir(reader.settings.kv.folder if reader.settings.kv else "") == []


def test_one_place_is_one_session(reader: ReaderThread, kv: Kv) -> None:
    with pytest.raises(Refusal, match=r"kv\.sessions") as caught:
        Kv(reader)
    assert caught.value.code == "busy"


def test_geometries_that_cannot_be_held_are_refused(reader: ReaderThread) -> None:
    for geometry, word in (
        (KvGeometry("kv_group", 128, 4, 32 * 4096, 256, 4), "write buffers"),
        (KvGeometry("kv_group", 128, 16, 8, 32 * 1024, 4), "record_bytes"),
        (KvGeometry("kv_group", 128, 4, 32 * 6, 200, 1 << 20), "max_blocks"),
    ):
        with pytest.raises(Refusal, match=word):
            Kv(reader, geometry)
    Kv(reader).close_fds()


def test_a_disk_without_the_space_grants_nothing(reader: ReaderThread, kv: Kv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_module, "free_bytes", lambda _descriptor: 4096)
    with pytest.raises(Refusal, match="bytes free"):
        reader.grant_blocks(kv.index, 1)
