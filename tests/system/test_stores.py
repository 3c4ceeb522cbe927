"""Stores that come and go under a daemon that runs, tenants, and the commands for both."""

import ctypes
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from strataflux.client.control import Control
from strataflux.client.errors import RefusedError
from strataflux.client.keeper import Event
from strataflux.client.session import Session
from strataflux.proto import control_pb2
from strataflux.proto.messages import KvGeometry
from tests.system.conftest import RECORD_BYTES, Daemon, SmallStore, Start, make_store
from tests.system.test_daemon import WAIT_SECONDS, attach, read
from tests.system.test_doctor import ask
from tests.system.test_reload import damage

pytestmark = pytest.mark.system


@pytest.fixture
def imports(tmp_path: Path) -> Path:
    return tmp_path / "imports"


def begin(start: Start, tmp_path: Path, imports: Path, more: str = "") -> Daemon:
    """A daemon with a folder of imports, and KV so that it may start without a store."""
    config = tmp_path / "daemon.toml"
    config.write_text(f'[imports]\nfolder = "{imports}"\n{more}')
    daemon = start("--config", str(config), "--direct-io", "off")
    daemon.expect(b"READY=1")
    return daemon


def where(daemon: Daemon) -> str:
    return f"--runtime-dir={daemon.folder}"


def test_a_store_is_imported_served_across_a_restart_and_removed(
    start: Start, tmp_path: Path, imports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_store(tmp_path / "source", seed=4)
    daemon = begin(start, tmp_path, imports)
    code, said = ask(
        capsys, "store", "import", source.path, "--name", "llama", "--allow-uid", os.getuid(), where(daemon)
    )
    assert (code, said["digest"], said["records"]) == (0, source.manifest.identity_digest, len(source.records))
    with attach(daemon.folder, source) as session:
        read(session, source, 1)
    assert daemon.stop(signal.SIGTERM) == 0
    daemon = begin(start, tmp_path, imports)
    again = threading.Event()

    def on_event(event: Event) -> None:
        if event.kind == "refused":
            again.set()

    with Session.attach(
        [source.manifest], selections_per_step=512, runtime_dir=daemon.folder, on_event=on_event
    ) as session:
        code, said = ask(capsys, "store", "remove", source.manifest.identity_digest[:8], "--delete", where(daemon))
        assert (code, said["sessions"], said["deleted"]) == (0, 1, True)
        assert again.wait(WAIT_SECONDS)
        with session.step() as step:  # it goes on, and finds nothing
            oid, addresses = np.array([1], np.int64), np.zeros(1, np.uint64)
            assert session.lookup(0, oid, np.zeros(1, np.uint8), addresses) == 0
            assert step.end()
    assert [path.name for path in imports.iterdir()] == ["added.json"]
    with pytest.raises(RefusedError, match="no store that you may use"):
        attach(daemon.folder, source)
    code, said = ask(capsys, "stores", where(daemon))
    assert said["stores"] == []
    code, said = ask(capsys, "store", "remove", "llama", where(daemon))
    assert (code, said["error"]["kind"]) == (2, "RefusedError")
    assert daemon.stop(signal.SIGTERM) == 0


def test_a_damaged_store_is_refused_and_so_is_one_too_many(
    start: Start, tmp_path: Path, imports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = make_store(tmp_path / "bad", seed=5), make_store(tmp_path / "good", seed=6)
    damage(bad, 7)
    daemon = begin(start, tmp_path, imports, f'[[store]]\npath = "{good.path}"\n')
    code, said = ask(capsys, "store", "import", bad.path, where(daemon))
    assert code == 2
    assert "1 records whose bytes are not what their checksums say (7)" in said["error"]["found"]
    code, said = ask(capsys, "store", "import", good.path, "--name", "twin", where(daemon))
    assert code == 2
    assert "remove that one first" in said["error"]["remedy"]
    assert list(imports.iterdir()) == []
    with attach(daemon.folder, good) as session:
        read(session, good, 2)
    assert daemon.stop(signal.SIGTERM) == 0


def messages(
    store: SmallStore, held: threading.Event, sent: threading.Event
) -> Iterator[control_pb2.ImportStoreRequest]:
    """The beginning of an import, whose end does not come before ``held``."""
    sizes: dict[str, Any] = {f"{name}_bytes": path.stat().st_size for name, path in files(store).items()}
    begin = control_pb2.ImportBegin(name="half", **sizes)
    yield control_pb2.ImportStoreRequest(begin=begin)
    yield control_pb2.ImportStoreRequest(data=files(store)["manifest"].read_bytes())
    sent.set()
    held.wait(WAIT_SECONDS)


def files(store: SmallStore) -> dict[str, Path]:
    manifest = store.manifest
    return {
        "manifest": manifest.folder / "manifest.json",
        "checksums": manifest.checksums_path,
        "records": manifest.records_path,
    }


def until_there(imports: Path, count: int) -> None:
    pause = threading.Event()
    for _ in range(int(WAIT_SECONDS / 0.01)):
        if imports.exists() and len(list(imports.iterdir())) == count:
            return
        pause.wait(0.01)
    raise AssertionError(f"{list(imports.iterdir())} and not {count}")


def test_an_import_that_is_cut_short_leaves_nothing(start: Start, tmp_path: Path, imports: Path) -> None:
    """By its sender, and by the death of the daemon."""
    source = make_store(tmp_path / "source", seed=7)
    daemon = begin(start, tmp_path, imports)
    for kill in (False, True):
        held, sent = threading.Event(), threading.Event()
        call = daemon.control().ImportStore.future(messages(source, held, sent))
        assert sent.wait(WAIT_SECONDS)
        until_there(imports, 1)
        if kill:
            daemon.stop(signal.SIGKILL)
        else:
            call.cancel()
            until_there(imports, 0)
        held.set()
        with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
            call.result()
    until_there(imports, 1)
    daemon = begin(start, tmp_path, imports)
    assert list(imports.iterdir()) == []
    assert daemon.stop(signal.SIGTERM) == 0


def test_the_disk_keeps_its_floor(
    start: Start, tmp_path: Path, imports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_store(tmp_path / "source", seed=8)
    daemon = begin(start, tmp_path, imports, 'free_bytes = "1000TiB"\n')
    code, said = ask(capsys, "store", "import", source.path, where(daemon))
    assert code == 2
    assert "imports.free_bytes" in said["error"]["expected"]
    assert list(imports.iterdir()) == []
    assert daemon.stop(signal.SIGTERM) == 0


def test_a_reload_follows_the_stores_of_the_file(start: Start, tmp_path: Path, imports: Path) -> None:
    first, second = make_store(tmp_path / "first", seed=9), make_store(tmp_path / "second", seed=10)
    daemon = begin(start, tmp_path, imports, f'[[store]]\npath = "{first.path}"\n')
    for served in ([first, second], [second], [second, first]):
        text = "".join(f'[[store]]\npath = "{store.path}"\n' for store in served)
        (tmp_path / "daemon.toml").write_text(f'[imports]\nfolder = "{imports}"\n{text}')
        daemon.process.send_signal(signal.SIGHUP)
        daemon.expect(b"RELOADING=1")
        daemon.expect(b"READY=1")
        listed = daemon.control().ListStores(control_pb2.ListStoresRequest()).stores
        assert {store.digest for store in listed} == {store.manifest.identity_digest for store in served}
        for store in served:
            with attach(daemon.folder, store) as session:
                read(session, store, 3)
    assert daemon.stop(signal.SIGTERM) == 0


TENANTS = """
[kv]
sessions = 2
file_bytes = "64MiB"
free_bytes = 0
[[tenant]]
name = "mine"
uids = [{uid}]
max_sessions = 2
kv_sessions = 1
kv_file_bytes = "128KiB"
"""


def test_a_tenant_has_what_it_may_and_no_more(
    start: Start, tmp_path: Path, imports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_store(tmp_path / "store", seed=11)
    settings = TENANTS.format(uid=os.getuid()) + f'[[store]]\npath = "{store.path}"\n'
    daemon = begin(start, tmp_path, imports, settings)
    geometry = KvGeometry("kv_group", 16, 4, 8, 512, 100)

    def with_kv() -> Session:
        return Session.attach([store.manifest], selections_per_step=64, runtime_dir=daemon.folder, kv=geometry)

    with with_kv() as session:
        assert session.kv is not None
        assert session.kv.reserve(10)
        with pytest.raises(RefusedError, match=r"tenant\.kv_file_bytes"):
            session.kv.reserve(30)
        with pytest.raises(RefusedError, match=r"tenant\.kv_sessions"):
            with_kv()
        with attach(daemon.folder, store) as second:
            read(second, store, 1)
            with pytest.raises(RefusedError, match=r"tenant\.max_sessions"):
                attach(daemon.folder, store)
            _, said = ask(capsys, "sessions", where(daemon))
            assert [row["tenant"] for row in said["sessions"]] == ["mine", "mine"]
            _, said = ask(capsys, "status", where(daemon))
        by_name: dict[str, Any] = {row["tenant"]: row for row in said["stats"]["tenants"]}
        assert set(by_name) == {"others", "mine"}
        assert by_name["mine"]["fills"] >= 256
        assert by_name["mine"]["kv_bytes"] == 10 * 4096
    (tmp_path / "daemon.toml").write_text(f'[kv]\nsessions = 2\n[[store]]\npath = "{store.path}"\n')
    daemon.process.send_signal(signal.SIGHUP)
    daemon.expect(b"RELOADING=1")
    daemon.expect(b"READY=1")
    sessions = [attach(daemon.folder, store) for _ in range(4)]
    for session in sessions:
        session.close()
    with Control(daemon.folder) as control:
        assert list(control.stats().tenants) == []
        assert json.loads(control.stores()[0].identity_json) == store.manifest.identity
    assert daemon.stop(signal.SIGTERM) == 0


def test_records_of_two_generations_of_imports_are_never_mixed_up(start: Start, tmp_path: Path, imports: Path) -> None:
    """A table number is used again; what was resident under it is not."""
    daemon = begin(start, tmp_path, imports)
    settings = control_pb2.StoreSettings()
    with Control(daemon.folder) as control:
        for seed in range(20, 24):
            store = make_store(tmp_path / f"s{seed}", seed=seed)
            control.import_store(store.manifest, "s", settings, lambda count: None)
            with attach(daemon.folder, store) as session:
                oids, addresses = np.arange(256, dtype=np.int64), np.zeros(256, np.uint64)
                with session.step():
                    assert session.lookup(0, oids, np.zeros(256, np.uint8), addresses) == 256
                    found = [ctypes.string_at(int(at), RECORD_BYTES) for at in addresses]
                assert found == [store.records[oid].tobytes() for oid in oids]
                assert control.remove_store("s", delete_files=True).sessions == 1
    assert daemon.stop(signal.SIGTERM) == 0
