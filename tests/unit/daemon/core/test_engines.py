"""One suite for every engine: the same requests make the same records resident, with the file's bytes."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strataflux.daemon.engines.board import Board, open_board
from strataflux.daemon.engines.uring import UringEngine
from strataflux.daemon.errors import DirectIoUnavailable, EngineUnavailable, ReaderFailed, Refusal
from strataflux.daemon.reader_settings import EngineFactory, ReaderSettings, make_engine
from strataflux.daemon.reader_thread import ReaderThread
from strataflux.daemon.store import Store, open_served
from strataflux.daemon.tier import Tier
from strataflux.proto import layout
from tests.fakes.board_worker import BoardWorker
from tests.fakes.core_rig import Client, make_store, record_of, request

WATCHDOG_SECONDS = 60.0
SHAPES = [(300, 1), (50, 63), (50, 64), (50, 65), (40, 4095), (40, 4097), (3, 262_144), (77, 1000)]
TOTAL = sum(count for count, _ in SHAPES)
LAST = TOTAL - 1


def until(condition: Callable[[], object]) -> None:
    """Wait for what the reader does; an error after a minute."""
    deadline = time.monotonic() + WATCHDOG_SECONDS
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.001)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def python_worker(tier: Tier, settings: ReaderSettings) -> Board:
    """A board whose reads are done by a thread of Python."""
    board = open_board(settings.queue_depth, tier.doorbell)
    BoardWorker(board).start()
    return board


def factory_of(engine: str) -> EngineFactory:
    return python_worker if engine == "python" else make_engine


def start(stores: list[Store], factory: EngineFactory, engine: str = "threads") -> ReaderThread:
    """A reader with 4 MiB of cache; skips, saying why, where the kernel lacks what is asked for."""
    settings = ReaderSettings(4 << 20, engine=engine, queue_depth=16, threads=2, idle_seconds=0.1)
    reader = ReaderThread(settings, stores, factory)
    try:
        reader.start()
    except EngineUnavailable as error:
        pytest.skip(str(error))
    return reader


def attach(reader: ReaderThread) -> Client:
    return reader.execute(lambda: Client(reader._tier))


def served(folder: Path, direct_io: str) -> Store:
    try:
        return open_served(folder, direct_io=direct_io)
    except DirectIoUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(params=["uring", "threads", "python", "liburing"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["off", "require"])
def reader(request: pytest.FixtureRequest, engine: str, tmp_path: Path) -> Iterator[ReaderThread]:
    store = served(make_store(tmp_path / "store", SHAPES), request.param)
    reader = start([store], factory_of(engine), "threads" if engine == "python" else engine)
    yield reader
    reader.stop()


def test_every_record_is_served_as_it_is(reader: ReaderThread) -> None:
    client = attach(reader)
    oids = range(TOTAL)
    until(lambda: client.ask(oids) == TOTAL)
    assert client.read(oids) == [record_of(reader._tier, 0, oid) for oid in oids]
    reader.check_integrity()
    stats = reader.snapshot()
    assert (stats.fills.fills, stats.fills.corrupt, stats.reads.errors) == (TOTAL, 0, 0)
    assert stats.stores[0].resident_records == TOTAL


def test_last_record_of_the_file(reader: ReaderThread) -> None:
    client = attach(reader)
    until(lambda: client.ask([LAST]))
    assert client.read([LAST]) == [record_of(reader._tier, 0, LAST)]


def test_engine_and_mode_are_told(reader: ReaderThread, engine: str) -> None:
    assert reader.engine == ("threads" if engine == "python" else engine)
    assert reader.direct_io == ("direct" if reader._tier.stores[0].direct else "buffered")
    assert isinstance(reader._engine, UringEngine if engine == "uring" else Board)


def test_a_device_that_fails_at_open_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_store(tmp_path / "store", SHAPES)

    def fail(path: Path) -> tuple[int, int]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr("strataflux.daemon.store._open_direct", fail)
    before = open_descriptors()
    with pytest.raises(OSError, match=r"records"):
        open_served(folder, direct_io="prefer")
    assert open_descriptors() == before


def test_stop_leaves_nothing_open(tmp_path: Path, engine: str) -> None:
    """Also with reads in flight and sessions inside a step."""
    folder = make_store(tmp_path / "store", SHAPES)
    before = open_descriptors()
    reader = start([served(folder, "off")], factory_of(engine), "threads" if engine == "python" else engine)
    client = attach(reader)
    client.begin()
    client.look_up(range(TOTAL))
    reader.stop()
    reader.stop()
    assert open_descriptors() == before
    with pytest.raises(ReaderFailed, match="not running"):
        reader.execute(lambda: None)


@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_flipped_bit_on_disk_is_quarantined_and_never_served(tmp_path: Path, engine: str) -> None:
    store = served(make_store(tmp_path / "store", [(64, 1000)]), "off")
    path = store.manifest.records_path
    data = bytearray(path.read_bytes())
    data[store.manifest.sections[0].offset + 5 * 1024 + 999] ^= 1
    path.write_bytes(data)
    reader = start([store], make_engine, engine)
    client = attach(reader)
    until(lambda: client.ask(range(64)) == 63)
    until(lambda: reader.snapshot().stores[0].quarantined)
    assert client.read([4, 5, 6]) == [record_of(reader._tier, 0, 4), None, record_of(reader._tier, 0, 6)]
    fills = reader.snapshot().fills
    assert (fills.corrupt, fills.retries, fills.fills) == (2, 1, 63)
    reader.check_integrity()
    reader.stop()


@pytest.mark.parametrize("direct_io", ["off", "require"])
@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_file_cut_under_a_live_reader(tmp_path: Path, engine: str, direct_io: str) -> None:
    """What is gone is an error and a miss; what is left is served."""
    store = served(make_store(tmp_path / "store", [(64, 1000)]), direct_io)
    reader = start([store], make_engine, engine)
    os.truncate(store.manifest.records_path, store.manifest.sections[0].offset + 40 * 1024 + 900)
    client = attach(reader)
    until(lambda: client.ask(range(64)) == 40)
    until(lambda: reader.snapshot().stores[0].quarantined == 24)
    assert client.read(range(40)) == [record_of(reader._tier, 0, oid) for oid in range(40)]
    assert reader.snapshot().reads.errors >= 24
    reader.check_integrity()
    reader.stop()


def test_drain_takes_no_more_and_ends_what_is_in_flight(tmp_path: Path) -> None:
    boards: list[Board] = []

    def withheld(tier: Tier, settings: ReaderSettings) -> Board:
        boards.append(open_board(settings.queue_depth, tier.doorbell))
        return boards[0]

    reader = start([served(make_store(tmp_path / "store", [(64, 1000)]), "off")], withheld)
    client = attach(reader)
    client.ask([5, 20])
    until(lambda: reader.progress()[1])
    reader.begin_drain()
    client.ask([40])
    worker = BoardWorker(boards[0])
    until(lambda: len(worker.take() or worker.jobs) == 2)
    stopping = threading.Thread(target=reader.stop)
    stopping.start()
    until(lambda: reader._stopping)
    assert stopping.is_alive()
    assert reader._tier.core.rd[0]["in_flight"] == 2
    worker.complete(worker.jobs)
    stopping.join(WATCHDOG_SECONDS)
    assert not stopping.is_alive()
    assert len(worker.jobs) == 2


def test_engine_that_is_not_there_leaves_nothing_open(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store", [(4, 100)])
    before = open_descriptors()

    def forbidden(tier: Tier, settings: ReaderSettings) -> Board:
        raise EngineUnavailable("uring", "io_uring_setup: forbidden", "a kernel that allows it", "set threads")

    reader = ReaderThread(ReaderSettings(1 << 20), [served(folder, "off")], forbidden)
    with pytest.raises(EngineUnavailable, match="forbidden"):
        reader.start()
    reader.stop()
    assert open_descriptors() == before


def test_any_other_error_of_an_engine_stops_the_start(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store", [(4, 100)])
    before = open_descriptors()

    def broken(tier: Tier, settings: ReaderSettings) -> Board:
        raise OSError(24, "Too many open files")

    reader = ReaderThread(ReaderSettings(1 << 20), [served(folder, "off")], broken)
    with pytest.raises(ReaderFailed, match="Too many open files") as failure:
        reader.start()
    assert isinstance(failure.value.__cause__, OSError)
    assert open_descriptors() == before


def test_statistics_while_sessions_come_and_go(tmp_path: Path) -> None:
    """A scrape meets sessions at every moment of their life; each look-up counts once."""
    reader = start([served(make_store(tmp_path / "store", [(64, 1000)]), "off")], make_engine)
    stopped = threading.Event()
    seen: list[int] = []

    def scrape() -> None:
        while not stopped.is_set():
            seen.append(reader.snapshot().lookups.weight_lookups)

    scraping = threading.Thread(target=scrape)
    scraping.start()
    for _ in range(50):
        client = attach(reader)
        client.ask(range(8))
        reader.close_session(client.index)
    stopped.set()
    scraping.join(WATCHDOG_SECONDS)
    assert reader.snapshot().lookups.weight_lookups == 50 * 8
    assert seen == sorted(seen)
    reader.stop()


def test_table_of_sessions_has_an_end(tmp_path: Path) -> None:
    reader = start([served(make_store(tmp_path / "store", [(4, 100)]), "off")], make_engine)
    clients = [attach(reader) for _ in range(layout.MAX_SESSIONS)]
    with pytest.raises(Refusal, match="64 attached"):
        reader.open_session(request())
    reader.close_session(clients[10].index)
    assert attach(reader).index == clients[10].index
    reader.stop()
