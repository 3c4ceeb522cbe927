"""What is asked for ahead of look-ups: requests of their own kind, bounded, and what is told of them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from strataflux.client.errors import MisuseError
from strataflux.client.prefetches import PrefetchCounts
from strataflux.client.session import Session
from strataflux.proto import layout
from strataflux.proto.store_format import StoreManifest
from tests.fakes.daemon import FakeDaemon
from tests.fakes.store import make_store
from tests.fakes.watch import Watch

OIDS = np.array([4, 1, 3, 2], np.int64)
SCORES = np.array([9, 8, 7, 6], np.uint8)


@pytest.fixture
def manifest(tmp_path: Path) -> StoreManifest:
    return make_store(tmp_path / "store", records=2000, record_bytes=480)


@pytest.fixture
def daemon(tmp_path: Path, manifest: StoreManifest) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path, [manifest]) as fake:
        yield fake


@pytest.fixture
def session(tmp_path: Path, daemon: FakeDaemon, manifest: StoreManifest) -> Iterator[Session]:
    with Session.attach([manifest], selections_per_step=64, runtime_dir=tmp_path) as opened:
        yield opened


def test_the_first_absent_ones_are_asked_for(session: Session, daemon: FakeDaemon) -> None:
    daemon.publish(0, 1)
    with session.step():
        assert session.prefetch(0, OIDS, SCORES, 2) == 2
        session.lookup(0, OIDS[3:], SCORES[3:], np.zeros(1, np.uint64))
    asked = [(r.oid, r.score, r.prefetch) for r in daemon.take_requests()]
    assert asked == [(4, 9, True), (3, 7, True), (2, 6, False)]
    stats = session.stats()
    # A prefetch is no look-up.
    assert (stats.lookups, stats.hits) == (1, 0)
    assert stats.weight_prefetches == PrefetchCounts(asked=2)
    assert stats.kv_prefetches == PrefetchCounts()


def test_half_of_the_ring_is_for_misses(session: Session, daemon: FakeDaemon) -> None:
    capacity = 1 << layout.RING_LOG2_MIN
    oids = np.arange(capacity, dtype=np.int64)
    scores = np.zeros(capacity, np.uint8)
    with session.step():
        assert session.prefetch(0, oids, scores, capacity) == capacity // 2
        assert session.prefetch(0, oids, scores, capacity) == 0
        session.lookup(0, oids[: capacity // 2], scores[: capacity // 2], np.zeros(capacity // 2, np.uint64))
    assert session.stats().dropped == 0
    assert sum(r.prefetch for r in daemon.take_requests()) == capacity // 2


def test_what_became_of_them_is_the_daemons_word(session: Session, daemon: FakeDaemon) -> None:
    with session.step():
        session.prefetch(0, OIDS, SCORES, 4)
        daemon.sessions[0].count_prefetches({"fills": (3, 0), "used": (2, 0), "unused": (1, 0), "dropped": (1, 0)})
    found = session.stats().weight_prefetches
    assert found == PrefetchCounts(asked=4, fills=3, used=2, unused=1, dropped=1)
    assert found.useful == pytest.approx(2 / 3)
    assert PrefetchCounts(asked=4).useful is None


def test_counts_go_on_over_attachments_and_the_end(tmp_path: Path, daemon: FakeDaemon, manifest: StoreManifest) -> None:
    watch = Watch()
    session = Session.attach(
        [manifest], selections_per_step=64, runtime_dir=tmp_path, on_event=watch.tell, pause=watch.pause
    )
    with session.step():
        session.prefetch(0, OIDS, SCORES, 4)
        daemon.sessions[0].count_prefetches({"fills": (3, 0)})
    daemon.hang_up()
    watch.let_go()
    watch.until("attached")
    with session.step():
        session.prefetch(0, OIDS, SCORES, 1)
        daemon.sessions[0].count_prefetches({"fills": (1, 0)})
    session.close()
    assert session.stats().weight_prefetches == PrefetchCounts(asked=5, fills=4)


def test_what_cannot_be_asked_for_is_refused(session: Session) -> None:
    with pytest.raises(MisuseError, match="no open step"):
        session.prefetch(0, OIDS, SCORES, 1)
    with session.step():
        with pytest.raises(MisuseError, match="2000"):
            session.prefetch(0, np.array([2000]), SCORES[:1], 1)
        with pytest.raises(MisuseError, match="different lengths"):
            session.prefetch(0, OIDS, SCORES[:1], 1)


def test_a_daemon_that_naps_is_woken(session: Session, daemon: FakeDaemon) -> None:
    with session.step():
        before = daemon.call(lambda: daemon.doorbells)
        session.prefetch(0, OIDS, SCORES, 1)
        while daemon.call(lambda: daemon.doorbells) == before:
            pass


def test_a_long_step_lets_go_of_slots_and_learns_what_came_of_all_of_it(session: Session, daemon: FakeDaemon) -> None:
    daemon.publish(0, *OIDS.tolist())
    with session.step() as step:
        session.lookup(0, OIDS, SCORES, np.zeros(4, np.uint64))
        first = daemon.word(0, "step_begun")
        session.renew()
        assert (daemon.word(0, "step_ended"), daemon.word(0, "step_begun")) == (first, first + 1)
        assert daemon.word(0, "renewals") == 1
        daemon.fence()
        session.renew()
        session.renew()
        assert not step.end()
    assert session.stats().steps_invalid == 1
    with pytest.raises(MisuseError, match="no open step"):
        session.renew()


def test_a_fenced_session_asks_for_nothing(session: Session, daemon: FakeDaemon) -> None:
    daemon.fence()
    with session.step():
        assert session.prefetch(0, OIDS, SCORES, 4) == 0
