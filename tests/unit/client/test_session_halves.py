"""Look-ups that do not find all at once, against a fake daemon: in two halves, or with records that come meanwhile."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from strataflux.cache_policy.miss import MissPolicy, Skip, Wait
from strataflux.client import attach_block, directory
from strataflux.client.errors import MisuseError
from strataflux.client.session import Session
from strataflux.proto.store_format import StoreManifest
from tests.fakes.daemon import FakeDaemon
from tests.fakes.session import record_bytes
from tests.fakes.store import make_store

OIDS = np.array([1, 2, 3], np.int64)
SCORES = np.array([9, 8, 7], np.uint8)


@pytest.fixture
def manifest(tmp_path: Path) -> StoreManifest:
    return make_store(tmp_path / "store", records=300, record_bytes=480)


@pytest.fixture
def daemon(tmp_path: Path, manifest: StoreManifest) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path, [manifest]) as fake:
        yield fake


def attach(folder: Path, manifest: StoreManifest, miss: MissPolicy) -> Session:
    return Session.attach([manifest], selections_per_step=64, runtime_dir=folder, miss=miss)


def test_what_came_meanwhile_is_collected(tmp_path: Path, daemon: FakeDaemon, manifest: StoreManifest) -> None:
    daemon.publish(0, 1)
    addresses = np.zeros(3, np.uint64)
    with attach(tmp_path, manifest, Skip()) as session:
        with session.step():
            assert session.ask(0, OIDS, SCORES, addresses) == 1
            daemon.publish(0, 3)
            assert session.collect(0, OIDS, SCORES, addresses) == 2
            found = [ctypes.string_at(int(one), 480) if one else None for one in addresses]
        assert found == [record_bytes(manifest, 1), None, record_bytes(manifest, 3)]
        # Two misses when asked for, and one of them asked for again.
        assert [(r.oid, r.score) for r in daemon.take_requests()] == [(2, 8), (3, 7), (2, 8)]
        stats = session.stats()
        assert (stats.lookups, stats.hits) == (4, 1)


def test_only_collecting_waits(tmp_path: Path, daemon: FakeDaemon, manifest: StoreManifest) -> None:
    daemon.fill_when_awaited = True
    addresses = np.zeros(3, np.uint64)
    with attach(tmp_path, manifest, Wait(60.0)) as session:
        with session.step() as step:
            session.ask(0, OIDS, SCORES, addresses)
            assert session.stats().waits == 0
            assert session.collect(0, OIDS, SCORES, addresses) == 3
            found = [ctypes.string_at(int(one), 480) for one in addresses]
            assert step.end()
        assert found == [record_bytes(manifest, oid) for oid in OIDS.tolist()]
        assert session.stats().hits == 0


def test_both_halves_are_within_a_step(tmp_path: Path, daemon: FakeDaemon, manifest: StoreManifest) -> None:
    with attach(tmp_path, manifest, Skip()) as session:
        for half in (session.ask, session.collect):
            with pytest.raises(MisuseError, match="no open step"):
                half(0, OIDS, SCORES, np.zeros(3, np.uint64))


def test_what_comes_just_after_the_look_up_is_not_missed(
    tmp_path: Path, daemon: FakeDaemon, manifest: StoreManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that is filled between the look-up and the question whether to wait is there, and is returned."""
    count = directory.absent_count

    def late(block: attach_block.Block, table: int, oids: NDArray[np.int64]) -> int:
        daemon.publish(0, *OIDS.tolist())
        return count(block, table, oids)

    monkeypatch.setattr("strataflux.client.directory.absent_count", late)
    addresses = np.zeros(3, np.uint64)
    with attach(tmp_path, manifest, Wait(60.0)) as session:
        with session.step():
            assert session.lookup(0, OIDS, SCORES, addresses) == 3
            found = [ctypes.string_at(int(one), 480) for one in addresses]
        assert found == [record_bytes(manifest, oid) for oid in OIDS.tolist()]
        assert session.stats().waits == 0


def test_what_is_asked_for_early_wakes_a_daemon_that_naps(
    tmp_path: Path, daemon: FakeDaemon, manifest: StoreManifest
) -> None:
    with attach(tmp_path, manifest, Skip()) as session, session.step():
        before = daemon.call(lambda: daemon.doorbells)
        daemon.publish(0, *OIDS.tolist())
        assert session.ask(0, OIDS, SCORES, np.zeros(3, np.uint64)) == 3
        assert daemon.call(lambda: daemon.doorbells) == before
        session.ask(0, OIDS + 5, SCORES, np.zeros(3, np.uint64))
        while daemon.call(lambda: daemon.doorbells) == before:
            pass
