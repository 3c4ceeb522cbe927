"""A session's life against a fake daemon: steps, hits and misses, and everything that can happen to its daemon."""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from strataflux.cache_policy.miss import MissPolicy, Skip, Wait
from strataflux.client.errors import DaemonUnavailableError, MisuseError, RefusedError
from strataflux.client.keeper import Event
from strataflux.client.session import ATTACHED, DETACHED, REATTACHING, Session
from strataflux.proto import layout, messages
from strataflux.proto.store_format import StoreManifest
from tests.fakes.daemon import FakeDaemon
from tests.fakes.session import record_bytes
from tests.fakes.store import make_store
from tests.fakes.watch import WATCHDOG_SECONDS, Watch


class Client:
    """A session with buffers, and what it was told."""

    def __init__(self, folder: Path, manifest: StoreManifest, miss: MissPolicy) -> None:
        self.manifest = manifest
        self.watch = Watch()
        self.session = Session.attach(
            [manifest],
            selections_per_step=64,
            runtime_dir=folder,
            miss=miss,
            on_event=self.watch.tell,
            pause=self.watch.pause,
        )

    def look(self, *oids: int) -> tuple[int, list[int]]:
        """Hits and addresses of a look-up inside a step that is open."""
        ids = np.array(oids, np.int64)
        addresses = np.full(ids.size, 7, np.uint64)
        hits = self.session.lookup(0, ids, np.full(ids.size, 9, np.uint8), addresses)
        return hits, addresses.tolist()

    def read(self, *oids: int) -> list[bytes | None]:
        """A step that reads records in place: their bytes, None for absent ones."""
        with self.session.step() as step:
            _, addresses = self.look(*oids)
            size = self.manifest.sections[0].record_bytes
            found = [read_bytes(a, size) if a else None for a in addresses]
            assert step.end()
        return found


def read_bytes(address: int, size: int) -> bytes:
    """What a compiled kernel would read in place."""
    return ctypes.string_at(address, size)


@pytest.fixture
def manifest(tmp_path: Path) -> StoreManifest:
    return make_store(tmp_path / "store", records=300, record_bytes=480)


@pytest.fixture
def daemon(tmp_path: Path, manifest: StoreManifest) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path, [manifest]) as fake:
        yield fake


Connect = Callable[..., Client]


@pytest.fixture
def connect(tmp_path: Path, manifest: StoreManifest) -> Iterator[Connect]:
    clients: list[Client] = []

    def make(miss: MissPolicy = Skip()) -> Client:  # noqa: B008
        clients.append(Client(tmp_path, manifest, miss))
        return clients[-1]

    yield make
    for client in clients:
        client.watch.let_go()
        client.session.close()


@pytest.fixture
def client(daemon: FakeDaemon, connect: Connect) -> Client:
    return connect()


def test_a_miss_is_requested_and_then_hits(client: Client, daemon: FakeDaemon, manifest: StoreManifest) -> None:
    assert client.read(5, 6) == [None, None]
    assert [(r.table, r.oid, r.score) for r in daemon.take_requests()] == [(0, 5, 9), (0, 6, 9)]
    daemon.publish(0, 5, 6)
    assert client.read(6, 5) == [record_bytes(manifest, 6), record_bytes(manifest, 5)]
    assert daemon.take_requests() == []
    stats = client.session.stats()
    assert (stats.lookups, stats.hits, stats.dropped, stats.rubbish, stats.state) == (4, 2, 0, 0, ATTACHED)
    assert (stats.generation, stats.engine, stats.direct_io) == (1, "fake", "buffered")


def test_a_hit_is_stamped_with_the_clock_of_its_look_up(client: Client, daemon: FakeDaemon) -> None:
    (first, second) = daemon.publish(0, 1, 2)
    daemon.set_clock(41)
    with client.session.step():
        daemon.set_clock(42)
        client.look(2)
    assert daemon.stamp(0, second) == 42
    assert daemon.stamp(0, first) == 0


def test_step_words_counters_and_doorbell(client: Client, daemon: FakeDaemon) -> None:
    daemon.publish(0, 1)
    with client.session.step():
        assert (daemon.word(0, "step_begun"), daemon.word(0, "step_ended")) == (1, 0)
        client.look(1, 2, 3)
    names = ("step_begun", "step_ended", "ring_tail", "weight_lookups", "weight_hits", "ring_dropped", "kv_lookups")
    assert [daemon.word(0, name) for name in names] == [1, 1, 2, 3, 1, 0, 0]
    assert daemon.call(lambda: daemon.doorbells) >= 1


def test_quarantined_and_rubbish_entries_miss_without_a_request(client: Client, daemon: FakeDaemon) -> None:
    beyond = layout.SEGMENT_MIN_BYTES // layout.SLOT_UNIT_BYTES
    daemon.write_entry(0, 1, layout.ENTRY_QUARANTINED)
    daemon.write_entry(0, 2, beyond + 1)
    daemon.write_entry(0, 3, layout.ENTRY_QUARANTINED - 1)
    assert client.read(1, 2, 3) == [None, None, None]
    assert daemon.take_requests() == []
    assert client.session.stats().rubbish == 2


def test_a_full_ring_drops_and_counts(client: Client, daemon: FakeDaemon) -> None:
    capacity = 1 << daemon.ring_log2
    with client.session.step():
        client.look(*range(280))
    assert len(daemon.take_requests()) == capacity
    assert client.session.stats().dropped == 280 - capacity
    client.read(1)
    assert [r.oid for r in daemon.take_requests()] == [1]


def test_misuse_is_told_before_anything_happens(client: Client) -> None:
    session = client.session
    with pytest.raises(MisuseError, match="no open step"):
        client.look(1)
    with session.step():
        for oids in ([300], [-1], [1, 1 << 40]):
            with pytest.raises(MisuseError, match=r"0 … 299"):
                client.look(*oids)
        with pytest.raises(MisuseError, match="table"):
            session.lookup(1, np.zeros(1, np.int64), np.zeros(1, np.uint8), np.zeros(1, np.uint64))
        with pytest.raises(MisuseError, match="different lengths"):
            session.lookup(0, np.zeros(2, np.int64), np.zeros(2, np.uint8), np.zeros(1, np.uint64))
        with pytest.raises(MisuseError, match="open already"), session.step():
            pass
        with pytest.raises(MisuseError, match="step that is open"):
            session.close()
    assert session.stats().lookups == 0
    session.close()
    session.close()
    with pytest.raises(MisuseError, match="closed"), session.step():
        pass
    assert session.state == DETACHED


def test_a_dead_daemon_leaves_what_was_resident(client: Client, daemon: FakeDaemon, manifest: StoreManifest) -> None:
    daemon.publish(0, 5)
    daemon.die()
    client.watch.until("hung_up")
    assert client.session.state == REATTACHING
    for _ in range(300):
        assert client.read(5, 6) == [record_bytes(manifest, 5), None]
    stats = client.session.stats()
    assert (stats.hits, stats.dropped) == (300, 300 - (1 << daemon.ring_log2))


def test_death_within_a_step_is_not_noticed_by_it(client: Client, daemon: FakeDaemon, manifest: StoreManifest) -> None:
    daemon.publish(0, 5)
    with client.session.step() as step:
        daemon.die()
        client.watch.until("hung_up")
        hits, (address,) = client.look(5)
        assert hits == 1
        assert read_bytes(address, 480) == record_bytes(manifest, 5)
        assert step.end()


def test_it_attaches_again_between_two_steps(client: Client, daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.publish(0, 5)
    daemon.die()
    client.watch.until("hung_up")
    with client.session.step() as step, FakeDaemon(tmp_path, [client.manifest], generation=2) as second:
        client.watch.let_go()
        client.watch.until("attached")
        assert client.look(5)[0] == 1  # still the old memory: addresses hold to the step's end
        assert step.end()
        assert client.session.stats().generation == 2
        assert client.read(5) == [None]
        second.publish(0, 5)
        assert client.read(5) == [record_bytes(client.manifest, 5)]
        stats = client.session.stats()
        assert (stats.state, stats.lookups, stats.hits) == (ATTACHED, 3, 2)


def test_an_attachment_that_ends_before_the_step_does_is_not_taken_for_a_living_one(
    client: Client, daemon: FakeDaemon, tmp_path: Path
) -> None:
    daemon.die()
    client.watch.until("hung_up")
    with client.session.step():
        with FakeDaemon(tmp_path, [client.manifest], generation=2):
            client.watch.let_go(attempts=1)
            client.watch.until("attached")
        client.watch.until("hung_up", times=2)
    assert client.session.state == REATTACHING
    assert client.read(5) == [None]


@pytest.mark.parametrize("kind", ["hung_up", "attached", "draining"])
def test_it_may_be_closed_from_its_own_events(daemon: FakeDaemon, connect: Connect, kind: str) -> None:
    client = connect()
    closed = threading.Event()

    def close_on(event: Event) -> None:
        if event.kind == kind:
            client.session.close()
            closed.set()

    client.watch.also = close_on
    client.watch.let_go()
    daemon.tell(messages.Draining())
    daemon.hang_up()
    assert closed.wait(WATCHDOG_SECONDS)
    assert client.session.state == DETACHED


def test_pauses_between_attempts_double_up_to_two_seconds(client: Client, daemon: FakeDaemon) -> None:
    daemon.die()
    client.watch.let_go(attempts=8)
    client.watch.until("refused", times=8)
    assert client.watch.pauses[:8] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_a_fence_makes_the_step_invalid_once_and_then_all_miss(client: Client, daemon: FakeDaemon) -> None:
    daemon.publish(0, 5)
    with client.session.step() as step:
        assert client.look(5)[0] == 1
        daemon.fence()
        assert client.look(5)[0] == 1  # the flag is looked at when the step ends
        assert not step.end()
        assert not step.end()
    client.watch.until("fenced")
    assert client.read(5) == [None]
    assert client.session.stats().steps_invalid == 1
    client.watch.let_go()
    client.watch.until("attached")
    assert client.read(5) == [record_bytes(client.manifest, 5)]


def test_a_fence_before_a_step_harms_nothing(client: Client, daemon: FakeDaemon) -> None:
    daemon.publish(0, 5)
    daemon.fence()
    assert client.read(5) == [None]
    assert client.session.stats().steps_invalid == 0


def test_the_daemon_may_ask_for_another_attachment(client: Client, daemon: FakeDaemon) -> None:
    daemon.publish(0, 5)
    daemon.tell(messages.Reattach("store generation 2"))
    assert client.watch.until("reattach") == Event("reattach", "store generation 2")
    client.watch.let_go()
    client.watch.until("attached")
    assert client.read(5) == [record_bytes(client.manifest, 5)]


def test_a_retiring_segment_is_unmapped_between_steps(client: Client, daemon: FakeDaemon) -> None:
    daemon.publish(0, 5)
    with client.session.step():
        daemon.retire(0)
        client.watch.until("segment_retiring")
        (address,) = client.look(5)[1]
        assert read_bytes(address, 480) == record_bytes(client.manifest, 5)
        assert daemon.call(lambda: daemon.sessions[0].received) == []
    assert client.read(5) == [None]
    assert client.session.stats().rubbish == 1
    received = client.watch.wait_for(lambda: daemon.call(lambda: list(daemon.sessions[0].received)))
    assert received == [messages.SegmentDropped(0)]


def test_an_added_segment_is_used(client: Client, daemon: FakeDaemon) -> None:
    daemon.add_segment(layout.SEGMENT_MIN_BYTES // layout.SLOT_UNIT_BYTES)
    client.watch.until("segments_added")
    daemon.publish(0, 8)
    assert client.read(8) == [record_bytes(client.manifest, 8)]


def test_draining_goes_on_with_what_is_there(client: Client, daemon: FakeDaemon) -> None:
    daemon.publish(0, 5)
    daemon.tell(messages.Draining())
    client.watch.until("draining")
    assert client.read(5, 6) == [record_bytes(client.manifest, 5), None]
    assert client.session.state == ATTACHED


def test_waiting_brings_everything(daemon: FakeDaemon, connect: Connect) -> None:
    daemon.fill_when_awaited = True
    client = connect(Wait(30.0))
    daemon.publish(0, 1)
    assert client.read(1, 2, 3) == [record_bytes(client.manifest, oid) for oid in (1, 2, 3)]
    stats = client.session.stats()
    assert (stats.waits, stats.deadlines_exceeded, stats.lookups, stats.hits) == (1, 0, 3, 1)
    assert stats.wait_nanoseconds > 0
    assert (daemon.word(0, "step_begun"), daemon.word(0, "renewals")) == (2, 1)
    assert daemon.word(0, "awaiting") == 0


def test_waiting_ends_at_the_deadline(daemon: FakeDaemon, connect: Connect) -> None:
    daemon.drop_requests = True
    client = connect(Wait(0.001))
    daemon.publish(0, 1)
    assert client.read(1, 2) == [record_bytes(client.manifest, 1), None]
    stats = client.session.stats()
    assert (stats.waits, stats.deadlines_exceeded) == (1, 1)
    assert stats.wait_nanoseconds >= 1_000_000


def test_nobody_waits_for_a_quarantined_record_or_a_dead_daemon(daemon: FakeDaemon, connect: Connect) -> None:
    client = connect(Wait(60.0))
    daemon.write_entry(0, 1, layout.ENTRY_QUARANTINED)
    assert client.read(1) == [None]
    daemon.die()
    client.watch.until("hung_up")
    assert client.read(2) == [None]
    assert client.session.stats().waits == 0


def test_a_daemon_that_dies_ends_the_wait(daemon: FakeDaemon, connect: Connect) -> None:
    client = connect(Wait(60.0))
    with client.session.step() as step:
        daemon.call(lambda: setattr(daemon, "die_when_awaited", True))
        assert client.look(2)[0] == 0
        assert step.end()
    assert client.session.stats().waits == 1


def test_refusals_carry_both_numbers(tmp_path: Path, manifest: StoreManifest) -> None:
    with (
        FakeDaemon(tmp_path, [manifest], layout_version=layout.LAYOUT_VERSION + 1),
        pytest.raises(RefusedError, match="layout version 2; expected layout version 3"),
    ):
        Session.attach([manifest], selections_per_step=1, runtime_dir=tmp_path)
    with (
        FakeDaemon(tmp_path, [manifest], capacity_bytes=1000),
        pytest.raises(RefusedError, match="2000 bytes; expected at most 1000"),
    ):
        Session.attach([manifest], selections_per_step=1, largest_set_bytes=2000, runtime_dir=tmp_path)
    other = make_store(tmp_path / "other", records=3, record_bytes=480, name="other")
    with FakeDaemon(tmp_path, [other]), pytest.raises(RefusedError, match="identity"):
        Session.attach([manifest], selections_per_step=1, runtime_dir=tmp_path)


def test_nobody_there(tmp_path: Path, manifest: StoreManifest) -> None:
    with pytest.raises(DaemonUnavailableError, match=r"attach\.sock: found No such file.*start stratafluxd"):
        Session.attach([manifest], selections_per_step=1, runtime_dir=tmp_path)


def test_a_forked_child_has_no_session(client: Client, daemon: FakeDaemon, manifest: StoreManifest) -> None:
    daemon.publish(0, 5)
    with client.session.step():
        child = os.fork()
        if child == 0:
            os._exit(_child_status(client))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    assert client.read(5) == [record_bytes(manifest, 5)]


def _child_status(client: Client) -> int:
    """0 where everything is as it should be in the child."""
    if client.session.state != DETACHED:
        return 1
    try:
        client.look(5)
        return 2
    except MisuseError:
        pass
    try:
        with client.session.step():
            return 3
    except MisuseError:
        return 0


def test_closing_leaves_the_daemon(client: Client, daemon: FakeDaemon) -> None:
    assert len(daemon.sessions) == 1
    client.session.close()
    assert client.watch.wait_for(lambda: not daemon.call(lambda: daemon.sessions))
