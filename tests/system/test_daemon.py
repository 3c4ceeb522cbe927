"""``stratafluxd`` as a process: start, serve, end, and what a start that is refused leaves behind (nothing)."""

import ctypes
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from strataflux.cache_policy.miss import Wait
from strataflux.client.session import Session
from strataflux.proto import control_pb2
from tests.system.conftest import COUNT, RECORD_BYTES, SmallStore, Start, make_store

pytestmark = pytest.mark.system

WAIT_SECONDS = 60.0


def attach(folder: Path, store: SmallStore) -> Session:
    return Session.attach(
        [store.manifest],
        selections_per_step=512,
        largest_set_bytes=256 * RECORD_BYTES,
        runtime_dir=folder,
        miss=Wait(WAIT_SECONDS),
    )


def read(session: Session, store: SmallStore, seed: int) -> None:
    """Look 256 records up, waiting for what is missing, and compare each with what was written."""
    oids = np.sort(np.random.default_rng(seed).choice(COUNT, 256, replace=False)).astype(np.int64)
    addresses = np.zeros(256, np.uint64)
    with session.step():
        assert session.lookup(0, oids, np.zeros(256, np.uint8), addresses) == 256
        for oid, address in zip(oids, addresses, strict=True):
            assert ctypes.string_at(int(address), RECORD_BYTES) == store.records[oid].tobytes()


def test_life(start: Start, store: SmallStore) -> None:
    daemon = start("--store", store.path)
    daemon.expect(b"READY=1")
    assert sorted(p.name for p in daemon.folder.iterdir()) == ["attach.sock", "control.sock", "lock", "private"]
    for name in ("attach.sock", "control.sock"):
        assert stat.S_IMODE((daemon.folder / name).stat().st_mode) == 0o660
    with attach(daemon.folder, store) as session:
        for seed in range(8):
            read(session, store, seed)
        (listed,) = daemon.control().ListSessions(control_pb2.ListSessionsRequest()).sessions
        assert (listed.pid, listed.uid) == (os.getpid(), os.getuid())
        stats = daemon.control().GetStats(control_pb2.GetStatsRequest())
        assert stats.fills.fills >= 256
        assert stats.fills.corrupt == 0
        assert stats.lookups.weight_hits > 0
        assert daemon.stop(signal.SIGTERM) == 0
        daemon.expect(b"STOPPING=1")
    assert not daemon.folder.exists()


def test_an_interrupt_ends_it_as_well(start: Start, store: SmallStore) -> None:
    daemon = start("--store", store.path)
    daemon.expect(b"READY=1")
    assert daemon.stop(signal.SIGINT) == 0
    assert not daemon.folder.exists()


def test_the_threads_engine_serves_the_same_bytes(start: Start, store: SmallStore) -> None:
    daemon = start("--store", store.path, "--engine", "threads", "--direct-io", "off")
    daemon.expect(b"READY=1")
    info = daemon.control().GetInfo(control_pb2.GetInfoRequest())
    assert (info.engine, info.direct_io, info.state, info.role) == ("threads", "buffered", "ready", "admin")
    with attach(daemon.folder, store) as session:
        read(session, store, 1)
    assert daemon.stop(signal.SIGTERM) == 0


def test_sockets_of_a_service_manager_are_used_and_left_to_it(start: Start, store: SmallStore, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o750)
    listeners = []
    for name, kind in (("attach.sock", socket.SOCK_SEQPACKET), ("control.sock", socket.SOCK_STREAM)):
        listeners.append(socket.socket(socket.AF_UNIX, kind))
        listeners[-1].bind(str(folder / name))
        listeners[-1].listen()
    first, second = (listener.fileno() for listener in listeners)
    as_manager = f'export LISTEN_FDS=2 LISTEN_PID=$$; exec "$@" 3<&{first} 4<&{second}'
    wrapper = ["bash", "-c", as_manager, "bash"]
    daemon = start("--store", store.path, wrapper=wrapper, pass_fds=(first, second))
    daemon.expect(b"READY=1")
    with attach(folder, store) as session:
        read(session, store, 4)
    assert daemon.control().GetInfo(control_pb2.GetInfoRequest()).pid == daemon.process.pid
    assert daemon.stop(signal.SIGTERM) == 0
    assert sorted(p.name for p in folder.iterdir()) == ["attach.sock", "control.sock"]
    for listener in listeners:
        listener.close()


def test_drain_by_a_call_ends_the_process(start: Start, store: SmallStore) -> None:
    daemon = start("--store", store.path)
    daemon.expect(b"READY=1")
    assert daemon.control().Drain(control_pb2.DrainRequest()).begun
    assert daemon.process.wait(WAIT_SECONDS) == 0
    assert not daemon.folder.exists()


def test_a_second_daemon_is_refused_and_the_first_goes_on(start: Start, store: SmallStore) -> None:
    first = start("--store", store.path)
    first.expect(b"READY=1")
    second = start("--store", store.path)
    assert second.process.wait(WAIT_SECONDS) == 2
    assert f"process {first.process.pid}" in second.log.read_text()
    with attach(first.folder, store) as session:
        read(session, store, 2)


def test_a_killed_daemon_is_replaced(start: Start, store: SmallStore) -> None:
    first = start("--store", store.path)
    first.expect(b"READY=1")
    assert first.stop(signal.SIGKILL) == -signal.SIGKILL
    assert (first.folder / "attach.sock").exists()
    second = start("--store", store.path)
    second.expect(b"READY=1")
    with attach(second.folder, store) as session:
        read(session, store, 3)
    assert second.stop(signal.SIGTERM) == 0
    assert not second.folder.exists() or list(second.folder.iterdir()) == []


_CLIENT = """
import os, signal, sys
from pathlib import Path
from strataflux.client.session import Session
from strataflux.proto.store_format import open_store
session = Session.attach([open_store(Path(sys.argv[2]))], selections_per_step=16, runtime_dir=Path(sys.argv[1]))
with session.step():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_client_that_is_killed_in_a_step_leaves_no_session(start: Start, store: SmallStore) -> None:
    daemon = start("--store", store.path)
    daemon.expect(b"READY=1")
    arguments = [sys.executable, "-c", _CLIENT, str(daemon.folder), store.path]
    done = subprocess.run(arguments, check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    control = daemon.control()
    for stats in control.WatchStats(control_pb2.WatchStatsRequest(interval_seconds=0.1), timeout=WAIT_SECONDS):
        if not stats.sessions:
            break
    assert list(control.ListSessions(control_pb2.ListSessionsRequest()).sessions) == []
    # Its step held every slot; now others evict and fill freely.
    with attach(daemon.folder, store) as session:
        for seed in range(20):
            read(session, store, seed)


# --- starts that are refused ------------------------------------------------------------------------------------------


def refused(start: Start, *arguments: str) -> str:
    """Start a daemon that has to refuse; what it says."""
    daemon = start(*arguments)
    assert daemon.process.wait(WAIT_SECONDS * 10) == 2
    assert not daemon.folder.exists()
    text = daemon.log.read_text()
    for part in ("stratafluxd: error:", "found:", "expected:", "remedy:"):
        assert part in text
    return text


def test_bad_configuration(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[reader]\ndepth = 3\n")
    assert f"{path}:reader.depth" in refused(start, "--config", str(path))


def test_missing_store(start: Start, tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in refused(start, "--store", str(tmp_path / "nowhere"))


def test_truncated_store(start: Start, store: SmallStore) -> None:
    size = store.manifest.records_path.stat().st_size
    os.truncate(store.manifest.records_path, size - 1)
    text = refused(start, "--store", store.path)
    assert f"{size - 1} bytes" in text
    assert f"{size} bytes" in text


def test_flipped_bit_in_a_manifest(start: Start, store: SmallStore) -> None:
    path = store.manifest.folder / "manifest.json"
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"llama")] ^= 1
    path.write_bytes(raw)
    assert str(path) in refused(start, "--store", store.path)


def test_one_bad_store_among_good_ones(start: Start, store: SmallStore, tmp_path: Path) -> None:
    bad = make_store(tmp_path / "bad", seed=1)
    bad.manifest.checksums_path.unlink()
    refused(start, "--store", store.path, "--store", bad.path)


def test_nothing_to_serve(start: Start, tmp_path: Path) -> None:
    (tmp_path / "none.toml").write_text("[kv]\nsessions = 0\n")
    assert "add a [[store]]" in refused(start, "--config", str(tmp_path / "none.toml"))


def test_cache_larger_than_memory(start: Start, store: SmallStore) -> None:
    text = refused(start, "--store", store.path, "--weight-cache", "64GiB", "--kv-cache", "64GiB")
    assert "137438953472 bytes" in text
    assert "--weight-cache" in text


def test_a_flipped_bit_in_a_record_is_a_miss(start: Start, store: SmallStore) -> None:
    section = store.manifest.sections[0]
    with store.manifest.records_path.open("r+b") as file:
        file.seek(section.offset + 5 * section.stride)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    daemon = start("--store", store.path)
    daemon.expect(b"READY=1")
    addresses, oids = np.zeros(2, np.uint64), np.array([4, 5], np.int64)
    with attach(daemon.folder, store) as session, session.step():
        while session.lookup_waiting(0, oids, np.zeros(2, np.uint8), addresses, 0.2) < 1:
            pass
    for stats in daemon.control().WatchStats(control_pb2.WatchStatsRequest(interval_seconds=0.1), timeout=WAIT_SECONDS):
        if stats.stores[0].quarantined:
            break
    else:
        raise AssertionError("the record was not quarantined")
    assert addresses[0] != 0
    assert addresses[1] == 0
    assert daemon.stop(signal.SIGTERM) == 0
