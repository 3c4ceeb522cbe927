"""SIGHUP: a repaired store is served in the place of the damaged one, and a bad file changes nothing."""

import os
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from strataflux.cache_policy.miss import Wait
from strataflux.client.cli.main import main
from strataflux.client.session import Session
from strataflux.proto import control_pb2
from tests.system.conftest import SmallStore, Start
from tests.system.test_daemon import WAIT_SECONDS, read

pytestmark = pytest.mark.system


def damage(store: SmallStore, oid: int) -> None:
    section = store.manifest.sections[0]
    with store.manifest.records_path.open("r+b") as file:
        file.seek(section.offset + oid * section.stride)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def test_repair_reload_and_every_record_is_right_again(start: Start, store: SmallStore, tmp_path: Path) -> None:
    shutil.copytree(store.path, tmp_path / "copy")
    damage(store, 5)
    config = tmp_path / "daemon.toml"
    config.write_text(f'[[store]]\npath = "{store.path}"\n')
    daemon = start("--config", str(config))
    daemon.expect(b"READY=1")
    oid, score, address = np.array([5], np.int64), np.zeros(1, np.uint8), np.zeros(1, np.uint64)
    again = threading.Event()
    with Session.attach(
        [store.manifest],
        selections_per_step=512,
        runtime_dir=daemon.folder,
        miss=Wait(WAIT_SECONDS),
        on_event=lambda event: again.set() if event.kind == "attached" else None,
    ) as session:
        read(session, store, 1)
        with session.step():
            session.lookup_waiting(0, oid, score, address, 0.2)
        with pytest.raises(SystemExit) as left:
            main(["store", "repair", store.path, "--from", str(tmp_path / "copy")])
        assert left.value.code == 0
        daemon.process.send_signal(signal.SIGHUP)
        daemon.expect(b"RELOADING=1")
        daemon.expect(b"READY=1")
        (served,) = daemon.control().ListStores(control_pb2.ListStoresRequest()).stores
        assert (served.generation, served.stats.quarantined) == (2, 0)
        assert again.wait(WAIT_SECONDS)
        for seed in range(4):
            read(session, store, seed)
        with session.step():
            assert session.lookup_waiting(0, oid, score, address, WAIT_SECONDS) == 1
    config.write_text("[reader]\ndepth = 3\n")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.expect(b"RELOADING=1")
    daemon.expect(b"READY=1")
    info = daemon.control().GetInfo(control_pb2.GetInfoRequest())
    assert info.state == "ready"
    assert "reader.depth" in info.degraded["config"]
    assert daemon.stop(signal.SIGTERM) == 0
