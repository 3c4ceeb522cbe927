"""Disk space for KV blocks through a real reader and a file system that is slow or full: nobody else waits for it."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from strataflux.daemon import kv as kv_module
from strataflux.daemon.errors import Refusal
from strataflux.daemon.kv import KvSettings
from strataflux.daemon.kv_file import KvSpace
from strataflux.daemon.reader_settings import ReaderSettings
from strataflux.daemon.reader_thread import ReaderThread
from strataflux.daemon.store import open_served
from strataflux.proto import layout
from strataflux.proto.store_format import SectionSpec
from strataflux.proto.store_writer import StoreWriter
from tests.unit.daemon.core.test_kv import CACHE, WATCHDOG_SECONDS, Kv, block_bytes, until


class FileSystem:
    """Reserves space as the real one does, once it is let; or has none from some part on."""

    def __init__(self) -> None:
        self.asked, self.let = threading.Event(), threading.Event()
        self.let.set()
        self.parts_left = 1 << 30

    def reserve(self, descriptor: int, offset: int, size: int) -> None:
        self.asked.set()
        assert self.let.wait(WATCHDOG_SECONDS)
        if self.parts_left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.parts_left -= 1
        os.posix_fallocate(descriptor, offset, size)


@pytest.fixture
def file_system() -> FileSystem:
    return FileSystem()


@pytest.fixture
def reader(tmp_path: Path, file_system: FileSystem) -> Iterator[ReaderThread]:
    with StoreWriter(tmp_path / "store", {}, [SectionSpec("s", "weight_channel", 0, "qkv", 64, 256)]) as writer:
        writer.write(0, 0, np.zeros((64, 256), np.uint8))
        writer.publish()
    kv = KvSettings(tmp_path / "kv", CACHE, places=1, file_bytes=64 << 20, free_bytes=0, reserve=file_system.reserve)
    settings = ReaderSettings(weight_bytes=1 << 20, engine="threads", queue_depth=8, kv=kv)
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


def disk_bytes(kv: Kv) -> int:
    return 512 * os.fstat(kv.place._descriptors[0]).st_blocks


def test_a_file_system_that_takes_its_time_stops_nobody_else(
    reader: ReaderThread, kv: Kv, file_system: FileSystem
) -> None:
    reader.grant_blocks(kv.index, 2)
    file_system.asked.clear()
    file_system.let.clear()
    with ThreadPoolExecutor(1) as pool:
        granting = pool.submit(reader.grant_blocks, kv.index, 2)
        assert file_system.asked.wait(WATCHDOG_SECONDS)
        assert kv.put(0, 0, block_bytes(40)) == layout.PUT_ACCEPTED  # the reader goes on
        assert kv.put(1, 2, block_bytes(41)) == layout.PUT_REFUSED_QUOTA  # and those are not granted yet
        assert (kv.place.granted_bytes, kv.place.promised_bytes) == tuple(
            n * kv.place.row["block_stride"] for n in (4, 2)
        )
        file_system.let.set()
        assert granting.result() == [[2, 2]]
    assert kv.place.promised_bytes == 0
    assert kv.put(1, 2, block_bytes(41)) == layout.PUT_ACCEPTED


def test_what_others_have_yet_to_reserve_is_not_free(
    reader: ReaderThread, kv: Kv, file_system: FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    stride = int(kv.place.row["block_stride"])
    monkeypatch.setattr(kv_module, "free_bytes", lambda _descriptor: 3 * stride)
    file_system.let.clear()
    with ThreadPoolExecutor(1) as pool:
        granting = pool.submit(reader.grant_blocks, kv.index, 2)
        assert file_system.asked.wait(WATCHDOG_SECONDS)
        with pytest.raises(Refusal, match=f"{stride} bytes free"):
            reader.grant_blocks(kv.index, 2)
        file_system.let.set()
        assert granting.result() == [[0, 2]]


def test_a_disk_that_fills_up_meanwhile_keeps_nothing_of_a_grant(
    reader: ReaderThread, kv: Kv, file_system: FileSystem
) -> None:
    reader.grant_blocks(kv.index, 1)
    reader.grant_blocks(kv.index, 8)
    until(reader.release_blocks(kv.index, [[1, 1], [3, 1], [5, 1]]), "never settled")
    held = disk_bytes(kv)
    file_system.parts_left = 1
    with pytest.raises(Refusal, match=r"No space.*room for 3 blocks.*free disk space"):
        reader.grant_blocks(kv.index, 3)
    assert disk_bytes(kv) < held + kv.place.row["block_stride"]  # a file system may need some more to note holes
    file_system.parts_left = 3
    assert sorted(reader.grant_blocks(kv.index, 3)) == [[1, 1], [3, 1], [5, 1]]


def test_a_grant_outlived_by_its_session_leaves_the_next_one_alone(
    reader: ReaderThread, file_system: FileSystem
) -> None:
    first = Kv(reader)
    descriptors = len(os.listdir("/proc/self/fd"))
    file_system.let.clear()
    with ThreadPoolExecutor(1) as pool:
        granting = pool.submit(reader.grant_blocks, first.index, 2)
        assert file_system.asked.wait(WATCHDOG_SECONDS)
        first.close_fds()
        reader.close_session(first.index)
        until(lambda: not reader._tier.closing, "the place was never freed")
        second = Kv(reader)
        assert second.index == first.index
        before = second.states(), list(second.place._free_blocks)
        file_system.let.set()
        with pytest.raises(Refusal, match="ended"):
            granting.result()
    assert (second.states(), second.place._free_blocks, second.place.promised_bytes) == (*before, 0)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    second.close_fds()
    reader.close_session(second.index)


def test_a_release_waits_for_a_descriptor_and_loses_no_ids(
    reader: ReaderThread, kv: Kv, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.grant_blocks(kv.index, 2)
    space: Callable[[list[list[int]]], KvSpace] = kv.place.space
    asked = 0

    def none_left(ranges: list[list[int]]) -> KvSpace:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return space(ranges)

    monkeypatch.setattr(kv.place, "space", none_left)
    until(reader.release_blocks(kv.index, [[0, 2]]), "never settled")
    assert asked == 3
    assert kv.place.granted_bytes == 0
    assert reader.grant_blocks(kv.index, 2) == [[0, 2]]
