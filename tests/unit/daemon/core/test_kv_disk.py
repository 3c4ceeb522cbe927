"""KV blocks on a disk that stumbles, fills up, has no files without names, or is slow to read."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strataflux.daemon.engines.board import Board, open_board
from strataflux.daemon.kv import KvSettings
from strataflux.daemon.reader_settings import ReaderSettings
from strataflux.daemon.reader_thread import ReaderThread
from strataflux.daemon.state import BLOCK_FAILED, BLOCK_GRANTED
from strataflux.daemon.store import open_served
from strataflux.proto import layout
from strataflux.proto.store_format import SectionSpec
from strataflux.proto.store_writer import StoreWriter
from tests.fakes.board_worker import SHORT, BoardWorker, Fault, Job
from tests.unit.daemon.core.test_kv import CACHE, WATCHDOG_SECONDS, Kv, block_bytes, record_of, until


class Disk:
    """A reader whose disk follows a script for writes and is right for reads, which wait while they are held."""

    def __init__(self, folder: Path) -> None:
        self.worker: BoardWorker
        self.writes: list[Fault] = []
        self.held = threading.Event()
        """A read has come and waits."""
        self.go = threading.Event()
        self.go.set()
        with StoreWriter(folder / "store", {}, [SectionSpec("s", "weight_channel", 0, "qkv", 64, 256)]) as writer:
            writer.write(0, 0, np.zeros((64, 256), np.uint8))
            writer.publish()
        kv = KvSettings(folder / "kv", cache_bytes=CACHE, places=1, file_bytes=64 << 20, free_bytes=0)
        settings = ReaderSettings(weight_bytes=1 << 20, engine="threads", queue_depth=8, kv=kv)
        self.reader = ReaderThread(settings, [open_served(folder / "store", direct_io="off")], self._engine)
        self.reader.start()

    def _engine(self, tier: Any, _settings: ReaderSettings) -> Board:
        board = open_board(len(tier.core.windows), tier.doorbell)
        self.worker = BoardWorker(board, self._fault)
        self.worker.start()
        return board

    def _fault(self, job: Job) -> Fault:
        if not job.write and not self.go.is_set():
            self.held.set()
            self.go.wait()
        return self.writes.pop(0) if job.write and self.writes else Fault()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    yield made
    made.go.set()
    made.reader.check_integrity()
    made.reader.stop()


@pytest.mark.parametrize(
    "faults",
    [
        [Fault("eintr"), Fault("eagain")],
        [Fault(SHORT, 512), Fault(SHORT, 4096)],
        [Fault("einval")],  # direct writes are refused: the file goes on without
    ],
)
def test_a_write_that_stumbles_ends_whole(disk: Disk, faults: list[Fault]) -> None:
    kv = Kv(disk.reader)
    disk.reader.grant_blocks(kv.index, 1)
    disk.writes = list(faults)
    data = block_bytes(30)
    assert kv.put(0, 0, data) == layout.PUT_ACCEPTED
    until(lambda: kv.in_file(0), "never written")
    assert not disk.writes
    kv.request(list(range(192)))
    until(lambda: all(kv.entry(oid) for oid in range(192)), "never read back")
    for oid in range(192):
        assert kv.record(oid) == record_of(data, oid)
    assert int(kv.place.row["failed"]) == 0
    kv.close_fds()


def test_a_full_disk_stops_puts_and_nothing_else(disk: Disk) -> None:
    kv = Kv(disk.reader)
    disk.reader.grant_blocks(kv.index, 3)
    good = block_bytes(31)
    assert kv.put(0, 0, good) == layout.PUT_ACCEPTED
    until(lambda: kv.in_file(0), "never written")
    disk.writes = [Fault("enospc")]
    assert kv.put(1, 1, block_bytes(32)) == layout.PUT_ACCEPTED
    until(lambda: kv.states()[1] == BLOCK_FAILED, "the failure was never noticed")
    stats = disk.reader.snapshot()
    assert stats.reads.errors == 0  # it was none of these
    assert [(row.op, row.count) for row in stats.io_errors if row.errno == "ENOSPC"] == [("write", 1)]
    assert kv.put(2, 2, block_bytes(33)) == layout.PUT_REFUSED_SPACE
    kv.request([0, 1])  # what was written before is read as ever
    until(lambda: bool(kv.entry(0) and kv.entry(1)), "never read")
    assert kv.record(0) == record_of(good, 0)
    invalid = int(kv.core.sessions[kv.index]["invalid"])
    kv.request([192])  # of the block that was lost
    until(lambda: int(kv.core.sessions[kv.index]["invalid"]) == invalid + 1, "not counted")
    # Space comes back with blocks that are given back.
    until(disk.reader.release_blocks(kv.index, [[1, 2]]), "never settled")
    disk.reader.grant_blocks(kv.index, 1)
    granted = next(number for number, state in enumerate(kv.states()) if state == BLOCK_GRANTED)
    assert kv.put(3, granted, block_bytes(34)) == layout.PUT_ACCEPTED
    kv.close_fds()


def test_a_write_error_loses_its_block_alone(disk: Disk) -> None:
    kv = Kv(disk.reader)
    disk.reader.grant_blocks(kv.index, 2)
    disk.writes = [Fault("eio")]
    assert kv.put(0, 0, block_bytes(35)) == layout.PUT_ACCEPTED
    until(lambda: kv.states()[0] == BLOCK_FAILED, "the failure was never noticed")
    assert kv.put(1, 1, block_bytes(36)) == layout.PUT_ACCEPTED
    until(lambda: kv.in_file(1), "never written")
    assert (int(kv.place.row["failed"]), int(kv.place.row["written"])) == (1, 1)
    kv.close_fds()


def test_a_block_given_back_while_it_is_read_is_free_when_the_read_has_ended(disk: Disk) -> None:
    kv = Kv(disk.reader)
    disk.reader.grant_blocks(kv.index, 12)
    assert kv.put(0, 0, block_bytes(37)) == layout.PUT_ACCEPTED
    until(lambda: kv.in_file(0), "never written")
    disk.go.clear()
    kv.request([0, 100])
    assert disk.held.wait(WATCHDOG_SECONDS)
    settled = disk.reader.release_blocks(kv.index, [[0, 1]])
    assert kv.states()[0] == 0
    assert not settled()
    assert not kv.place._free_blocks  # its id is nobody's while its old bytes are on their way
    disk.go.set()
    until(settled, "never settled")
    assert settled()
    assert (kv.entry(0), kv.entry(100), kv.place._free_blocks) == (0, 0, [0])
    other = block_bytes(38)
    disk.reader.grant_blocks(kv.index, 1)
    assert kv.put(1, 0, other) == layout.PUT_ACCEPTED
    kv.request([0, 100])
    until(lambda: bool(kv.entry(0) and kv.entry(100)), "never read")
    assert (kv.record(0), kv.record(100)) == (record_of(other, 0), record_of(other, 100))
    kv.close_fds()


def test_a_session_that_leaves_while_its_records_are_read_holds_its_place_until_then(disk: Disk) -> None:
    kv = Kv(disk.reader)
    disk.reader.grant_blocks(kv.index, 1)
    assert kv.put(0, 0, block_bytes(39)) == layout.PUT_ACCEPTED
    until(lambda: kv.in_file(0), "never written")
    disk.go.clear()
    kv.request([0])
    assert disk.held.wait(WATCHDOG_SECONDS)
    kv.close_fds()
    disk.reader.close_session(kv.index)
    disk.reader.echo()
    assert disk.reader._tier.closing == [kv.place]
    disk.go.set()
    until(lambda: not disk.reader._tier.closing, "the place was never freed")
    Kv(disk.reader).close_fds()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL])
def test_a_file_system_without_nameless_files_has_one_whose_name_is_gone(
    disk: Disk, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = os.open

    def refusing(path: Any, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, os.strerror(code))
        return right(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    kv = Kv(disk.reader)
    assert os.fstat(kv.place._descriptors[0]).st_nlink == 0
    assert os.listdir(kv.place.settings.folder) == []
    disk.reader.grant_blocks(kv.index, 1)
    data = block_bytes(40)
    assert kv.put(0, 0, data) == layout.PUT_ACCEPTED
    until(lambda: kv.in_file(0), "never written")
    kv.request([7])
    until(lambda: bool(kv.entry(7)), "never read")
    assert kv.record(7) == record_of(data, 7)
    kv.close_fds()
