"""A session's KV side against a fake daemon: ids, puts, results, and what happens when the daemon goes away."""

import ctypes
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from strataflux.cache_policy.miss import Wait
from strataflux.client import kv_puts
from strataflux.client.errors import DaemonUnavailableError, MisuseError, RefusedError
from strataflux.client.keeper import Event
from strataflux.client.kv_puts import KvPuts, Settled
from strataflux.client.session import Session
from strataflux.proto import layout, messages
from strataflux.proto.errors import MessageError
from strataflux.proto.messages import KvGeometry, TableInfo
from tests.fakes.daemon import FakeDaemon

GEOMETRY = KvGeometry("kv_group", 128, 4, 64, 96, 6)
FOREVER = float("inf")
WATCHDOG_SECONDS = 60.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path, [], ring_log2=10) as fake:
        yield fake


@pytest.fixture
def session(daemon: FakeDaemon) -> Iterator[Session]:
    with attach(daemon) as made:
        yield made


def attach(daemon: FakeDaemon, **options: Any) -> Session:
    return Session.attach([], selections_per_step=100, runtime_dir=daemon.path.parent, kv=GEOMETRY, **options)


def side(session: Session) -> KvPuts:
    assert session.kv is not None
    return session.kv


def payload(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, 64 * 96, np.uint8)


def look_up(session: Session, oids: NDArray[np.int64]) -> NDArray[np.uint64]:
    addresses = np.zeros(oids.size, np.uint64)
    session.lookup(side(session).table, oids, np.ones(oids.size, np.uint8), addresses)
    return addresses


def test_a_block_is_put_and_its_records_found(daemon: FakeDaemon, session: Session) -> None:
    kv = side(session)
    first, second = kv.reserve(2)
    assert kv.put(first, payload(1))
    assert kv.put(second, payload(2))
    assert kv.wait_settled(FOREVER)
    assert kv.settled() == [Settled(first, layout.PUT_ACCEPTED), Settled(second, layout.PUT_ACCEPTED)]
    assert kv.settled() == []
    oids = np.array([second * 64 + 63, first * 64, first * 64 + 17])
    with session.step() as step:
        found = [np.array(record(address)) for address in look_up(session, oids)]
    assert step.end()
    for mine, (seed, index) in zip(found, ((2, 63), (1, 0), (1, 17)), strict=True):
        assert np.array_equal(mine, payload(seed)[index * 96 : (index + 1) * 96])
    stats = session.stats()
    assert (stats.kv_lookups, stats.kv_hits, stats.lookups) == (3, 3, 3)


def record(address: np.uint64) -> list[int]:
    return list(ctypes.string_at(int(address), 96))


def test_puts_work_inside_a_step_and_between_two(daemon: FakeDaemon, session: Session) -> None:
    kv = side(session)
    first, second = kv.reserve(2)
    with session.step():
        assert kv.put(first, payload(1))
    assert kv.put(second, payload(2))
    assert kv.wait_settled(FOREVER)
    assert daemon.sessions[0].kv is not None
    assert set(daemon.sessions[0].kv.blocks) == {first, second}


def test_no_more_than_four_puts_are_under_way(daemon: FakeDaemon, session: Session) -> None:
    kv = side(session)
    daemon.hold_puts = True
    ids = kv.reserve(5)
    assert [kv.put(block, payload(block)) for block in ids] == [True] * 4 + [False]
    # Ten rounds of the ring of eight cells, through all staging blocks.
    daemon.take_puts()
    assert kv.put(ids[4], payload(ids[4]))
    daemon.take_puts()
    assert [settled.block for settled in kv.settled()] == ids
    for _ in range(10):
        kv.release(ids)
        ids = kv.reserve(4)
        assert all(kv.put(block, payload(block)) for block in ids)
        assert daemon.take_puts() == 4
        assert [settled.accepted for settled in kv.settled()] == [True] * 4
    held = daemon.sessions[0].kv
    assert held is not None
    assert all(held.blocks[block] == payload(block).tobytes() for block in ids)


def test_waiting_for_staging_ends_when_some_is_free(daemon: FakeDaemon, session: Session) -> None:
    kv = side(session)
    daemon.hold_puts = True
    ids = kv.reserve(5)
    for block in ids[:4]:
        kv.put(block, payload(block))
    assert not kv.put_waiting(ids[4], payload(0), time.monotonic())
    daemon.hold_puts = False
    daemon.take_puts()
    assert kv.put_waiting(ids[4], payload(0), FOREVER)
    assert kv.wait_settled(FOREVER)


@pytest.mark.parametrize("settling", [False, True], ids=["for staging", "until settled"])
def test_a_wait_is_woken(daemon: FakeDaemon, session: Session, settling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_puts, "_NAP_SECONDS", 1e6)
    kv = side(session)
    daemon.hold_puts = True
    ids = kv.reserve(5)
    assert all(kv.put(block, payload(block)) for block in ids[:4])
    ended = list[bool]()

    def wait() -> None:
        ended.append(kv.wait_settled(FOREVER) if settling else kv.put_waiting(ids[4], payload(4), FOREVER))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while not daemon.word(0, "awaiting"):
        assert waiting.is_alive()
    daemon.take_puts()
    waiting.join(WATCHDOG_SECONDS)
    assert ended == [True]
    assert daemon.word(0, "awaiting") == 0
    daemon.take_puts()


@pytest.mark.parametrize("result", [layout.PUT_REFUSED_QUOTA, layout.PUT_REFUSED_SPACE])
def test_refusals_are_told(daemon: FakeDaemon, session: Session, result: int) -> None:
    kv = side(session)
    daemon.put_result = result
    (block,) = kv.reserve(1)
    assert kv.put(block, payload(1))
    assert kv.wait_settled(FOREVER)
    assert kv.settled() == [Settled(block, result)]


def test_a_block_put_twice_and_one_never_granted(session: Session) -> None:
    kv = side(session)
    (block,) = kv.reserve(1)
    for number in (block, block, 5):
        assert kv.put(number, payload(1))
    assert kv.wait_settled(FOREVER)
    expected = [layout.PUT_ACCEPTED, layout.PUT_REFUSED_DUPLICATE, layout.PUT_REFUSED_INVALID]
    assert [settled.result for settled in kv.settled()] == expected


def test_a_put_of_the_wrong_length(session: Session) -> None:
    with pytest.raises(MisuseError, match="6144 bytes"):
        side(session).put(0, np.zeros(6143, np.uint8))


def test_the_quota_is_named_and_what_is_released_is_free_again(session: Session) -> None:
    kv = side(session)
    ids = kv.reserve(4)
    with pytest.raises(RefusedError, match="3 blocks"):
        kv.reserve(3)
    kv.release(ids[1:3])
    assert len(kv.reserve(4)) == 4
    kv.release([])


def test_waiting_finds_what_the_daemon_reads_meanwhile(daemon: FakeDaemon) -> None:
    daemon.cache_puts = False
    daemon.fill_when_awaited = True
    with attach(daemon, miss=Wait(60.0), largest_set_bytes=4096) as session:
        kv = side(session)
        (block,) = kv.reserve(1)
        kv.put(block, payload(3))
        assert kv.wait_settled(FOREVER)
        with session.step():
            assert look_up(session, block * 64 + np.arange(4)).all()
        assert (session.stats().kv_hits, session.stats().waits) == (0, 1)


def test_a_daemon_that_dies_takes_nothing_more_and_nobody_waits(daemon: FakeDaemon) -> None:
    noticed = threading.Event()

    def told(event: Event) -> None:
        if event.kind == "hung_up":
            noticed.set()

    with attach(daemon, on_event=told) as session:
        kv = side(session)
        (block, other) = kv.reserve(2)
        kv.put(block, payload(1))
        assert kv.wait_settled(FOREVER)
        daemon.die()
        noticed.wait()  # until then staging memory still takes puts
        with pytest.raises(DaemonUnavailableError):
            kv.reserve(1)
        assert not kv.put_waiting(other, payload(2), FOREVER)
        with session.step() as step:
            assert look_up(session, np.array([block * 64])).all()
        assert step.end()
        kv.count_dropped()
        assert session.stats().puts_dropped == 1


def test_another_attachment_starts_with_other_ids(daemon: FakeDaemon) -> None:
    attached = threading.Event()

    def told(event: Event) -> None:
        if event.kind == "attached":
            attached.set()

    with attach(daemon, on_event=told, pause=lambda _: None) as session:
        kv = side(session)
        first, second = kv.reserve(2)
        kv.put(first, payload(1))
        assert kv.wait_settled(FOREVER)  # accepted, and not told of before the attachment ends
        daemon.hold_puts = True
        kv.put(second, payload(2))
        daemon.hang_up()
        attached.wait()
        assert kv.settled() == [Settled(first, layout.PUT_NONE), Settled(second, layout.PUT_NONE)]
        assert kv.epoch == 1
        daemon.hold_puts = False
        (block,) = kv.reserve(1)
        assert kv.put(block, payload(2))
        assert kv.wait_settled(FOREVER)
        assert kv.settled() == [Settled(block, layout.PUT_ACCEPTED)]


def test_after_close_nothing_is_touched(daemon: FakeDaemon) -> None:
    session = attach(daemon)
    kv = side(session)
    (block,) = kv.reserve(1)
    session.close()
    assert not kv.put(block, payload(1))
    assert kv.settled() == []
    with pytest.raises(DaemonUnavailableError):
        kv.reserve(1)


def test_a_session_without_kv_has_no_such_side(daemon: FakeDaemon) -> None:
    with Session.attach([], selections_per_step=1, runtime_dir=daemon.path.parent) as session:
        assert session.kv is None


@pytest.mark.parametrize(
    "table",
    [
        TableInfo(0, "weight", "", 0, 384),
        TableInfo(0, "kv_group", "", 0, 383),
        TableInfo(1, "kv_group", "", 0, 384),
        TableInfo(0, "kv_group", "0" * 64, 0, 384),
    ],
)
def test_a_welcome_with_another_kv_table_is_not_believed(daemon: FakeDaemon, table: TableInfo) -> None:
    def tamper(welcome: messages.Welcome, _: list[int]) -> messages.Message:
        welcome.tables[0] = table
        return welcome

    daemon.tamper = tamper
    with pytest.raises(MessageError, match="KV table"):
        attach(daemon)
