"""A restart finds its cache as warm as it left it, however it ended; and a daemon runs the policy that it was given."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from strataflux.cache_policy.miss import Skip
from strataflux.cache_policy.policies import DEFAULT
from strataflux.client.session import Session
from strataflux.proto import control_pb2
from tests.system.conftest import COUNT, Daemon, SmallStore, Start
from tests.system.test_daemon import attach, read
from tests.unit.daemon.core.test_engines import until

pytestmark = pytest.mark.system

WANTED = np.arange(0, COUNT, 17, dtype=np.int64)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


def launch(start: Start, store: SmallStore, state: Path, *arguments: str) -> Daemon:
    daemon = start("--store", store.path, *arguments, wrapper=["env", f"STATE_DIRECTORY={state}"])
    daemon.expect(b"READY=1")
    return daemon


def stats_of(daemon: Daemon) -> control_pb2.Stats:
    stats: control_pb2.Stats = daemon.control().GetStats(control_pb2.GetStatsRequest())
    return stats


def make_warm(daemon: Daemon, store: SmallStore) -> None:
    """Have the wanted records read, by missing them."""
    addresses, scores = np.zeros(WANTED.size, np.uint64), np.zeros(WANTED.size, np.uint8)

    def all_there() -> bool:
        with session.step():
            return session.lookup(0, WANTED, scores, addresses) == WANTED.size

    with Session.attach(
        [store.manifest], selections_per_step=2 * WANTED.size, runtime_dir=daemon.folder, miss=Skip()
    ) as session:
        until(all_there)


def is_warm(daemon: Daemon) -> bool:
    return stats_of(daemon).caches[0].valid_bytes >= WANTED.size * 512


def test_a_stop_and_a_start(start: Start, store: SmallStore, state: Path) -> None:
    daemon = launch(start, store, state)
    assert stats_of(daemon).warmed == 0
    make_warm(daemon, store)
    assert daemon.stop(signal.SIGTERM) == 0
    assert (state / "hot.set").is_file()
    daemon = launch(start, store, state)
    until(lambda: is_warm(daemon))
    stats = stats_of(daemon)
    assert (stats.warmed, stats.requests.taken) == (WANTED.size, 0)
    with attach(daemon.folder, store) as session:
        read(session, store, 1)


def test_a_kill_and_a_start(start: Start, store: SmallStore, state: Path) -> None:
    """What was saved last is what counts; the killed one had begun to write, too."""
    daemon = launch(start, store, state)
    make_warm(daemon, store)
    assert daemon.stop(signal.SIGTERM) == 0
    daemon = launch(start, store, state)
    assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    (state / "hot.set.new").write_bytes(os.urandom(100))
    daemon = launch(start, store, state)
    until(lambda: is_warm(daemon))
    assert daemon.stop(signal.SIGTERM) == 0
    assert not (state / "hot.set.new").exists()


def test_a_damaged_file_is_told_and_ignored(start: Start, store: SmallStore, state: Path) -> None:
    (state / "hot.set").write_bytes(os.urandom(4096))
    daemon = launch(start, store, state)
    assert "hot.set is damaged" in daemon.log.read_text()
    make_warm(daemon, store)
    assert stats_of(daemon).warmed == 0
    assert daemon.stop(signal.SIGTERM) == 0
    daemon = launch(start, store, state)
    until(lambda: is_warm(daemon))


def test_the_policy_of_the_configuration_runs_and_is_told(start: Start, store: SmallStore, tmp_path: Path) -> None:
    config = tmp_path / "stratafluxd.toml"
    config.write_text(f'[cache]\npolicy = "{DEFAULT}"\n')
    daemon = start("--config", str(config), "--store", store.path, "--weight-cache", "1MiB")
    daemon.expect(b"READY=1")
    assert daemon.control().GetInfo(control_pb2.GetInfoRequest()).policy == DEFAULT
    with attach(daemon.folder, store) as session:
        for seed in range(30):
            read(session, store, seed)
    stats = stats_of(daemon)
    assert stats.fills.evictions > 500
    assert stats.fills.corrupt == 0
    assert daemon.stop(signal.SIGTERM) == 0
