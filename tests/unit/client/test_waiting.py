"""What a budget of waiting is spent on, against a fake daemon: the highest scores, within a share of a step."""

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from strataflux.cache_policy.miss import Budget
from strataflux.client.session import Session
from strataflux.client.waiting import Allowance
from strataflux.proto.store_format import StoreManifest
from tests.fakes.daemon import FakeDaemon
from tests.fakes.session import record_bytes
from tests.fakes.store import make_store

OIDS = np.array([1, 2, 3], np.int64)
SCORES = np.array([200, 90, 210], np.uint8)
"""The second is below the first price."""
MILLISECOND = 1_000_000


class Clock:
    """The real one, put forward or back."""

    def __init__(self) -> None:
        self.ahead = 0

    def __call__(self) -> int:
        return time.monotonic_ns() + self.ahead


@pytest.fixture
def manifest(tmp_path: Path) -> StoreManifest:
    return make_store(tmp_path / "store", records=300, record_bytes=480)


@pytest.fixture
def daemon(tmp_path: Path, manifest: StoreManifest) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path, [manifest]) as fake:
        yield fake


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def session(tmp_path: Path, daemon: FakeDaemon, manifest: StoreManifest, clock: Clock) -> Iterator[Session]:
    with Session.attach([manifest], selections_per_step=64, runtime_dir=tmp_path, miss=Budget(0.5)) as opened:
        opened._allowance = Allowance(0.5, clock)
        yield opened


def long_step(session: Session, clock: Clock, milliseconds: int) -> None:
    """A step that took so long, by its clock."""
    with session.step():
        clock.ahead += milliseconds * MILLISECOND
    clock.ahead = 0


def test_the_first_step_has_nothing_to_spend(session: Session, daemon: FakeDaemon) -> None:
    daemon.fill_when_awaited = True
    with session.step():
        assert session.lookup(0, OIDS, SCORES, np.zeros(3, np.uint64)) == 0
    assert session.stats().waits == 0


def test_the_highest_scores_are_waited_for(
    session: Session, daemon: FakeDaemon, clock: Clock, manifest: StoreManifest
) -> None:
    (slot,) = daemon.publish(0, 7)
    long_step(session, clock, 60_000)
    daemon.fill_when_awaited = True
    oids, scores = np.append(OIDS, 7), np.append(SCORES, 1).astype(np.uint8)
    addresses = np.zeros(4, np.uint64)
    with session.step() as step:
        assert session.lookup(0, oids, scores, addresses) == 3
        found = [ctypes.string_at(int(one), 480) if one else None for one in addresses]
        assert step.end()
    assert found == [record_bytes(manifest, 1), None, record_bytes(manifest, 3), record_bytes(manifest, 7)]
    assert daemon.stamp(0, slot) > 0
    stats = session.stats()
    # What was waited for stays the miss it was.
    assert (stats.lookups, stats.hits, stats.waits, stats.deadlines_exceeded) == (4, 1, 1, 0)


def test_what_never_comes_is_given_up_within_the_budget(session: Session, daemon: FakeDaemon, clock: Clock) -> None:
    long_step(session, clock, 20)
    with session.step():
        assert session.lookup(0, OIDS, SCORES, np.zeros(3, np.uint64)) == 0
        assert session.lookup(0, OIDS, SCORES, np.zeros(3, np.uint64)) == 0
    stats = session.stats()
    # The second look-up found nothing left to spend.
    assert (stats.waits, stats.deadlines_exceeded) == (1, 1)
    assert stats.wait_nanoseconds >= 10 * MILLISECOND
    # Both missed all, and the wait asked for two once more.
    assert (stats.lookups, stats.hits) == (8, 0)


def test_the_price_follows_what_can_be_paid(session: Session, daemon: FakeDaemon, clock: Clock) -> None:
    allowance = session._allowance
    assert allowance is not None
    first = allowance.price
    long_step(session, clock, 1000)
    long_step(session, clock, 1000)
    assert allowance.price < first
    cheap, everything = allowance.price, np.full(3, 255, np.uint8)
    long_step(session, clock, 1)
    with session.step():
        allowance._spent = allowance.left
        session.lookup(0, OIDS, everything, np.zeros(3, np.uint64))
    assert allowance.price > cheap
    assert session.stats().waits == 0


def test_nobody_waits_for_a_daemon_that_is_gone(session: Session, daemon: FakeDaemon, clock: Clock) -> None:
    long_step(session, clock, 60_000)
    daemon.die()
    with session.step():
        while session.state == "attached":
            pass
        assert session.lookup(0, OIDS, SCORES, np.zeros(3, np.uint64)) == 0
    assert session.stats().waits == 0


def test_waits_that_became_too_long_are_tried_again(session: Session, daemon: FakeDaemon, clock: Clock) -> None:
    """A time when waits took longer than all that a step may wait passes, and nobody learns that without a wait."""
    allowance = session._allowance
    assert allowance is not None
    allowance._usual_nanoseconds = 100.0 * MILLISECOND
    daemon.fill_when_awaited = True
    for _ in range(100):
        with session.step():
            session.lookup(0, OIDS, np.full(3, 255, np.uint8), np.zeros(3, np.uint64))
            clock.ahead += 20 * MILLISECOND
        clock.ahead = 0
    stats = session.stats()
    assert (stats.waits, stats.deadlines_exceeded) == (1, 0)
