"""Changes of what is served: all or nothing, sessions told, and remembered where it was an administrator who asked."""

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from strataflux.daemon.admission import Admission
from strataflux.daemon.catalog import Catalog
from strataflux.daemon.config import AttachConfig, Config, StoreConfig
from strataflux.daemon.control_stores import StoreMethods
from strataflux.daemon.errors import AlreadyServed, ConfigError, NotServed, Refusal
from strataflux.daemon.served import accesses_of
from strataflux.daemon.store_folder import StoreFolder
from strataflux.proto import control_pb2
from strataflux.proto.errors import StoreMissing
from strataflux.proto.messages import Reattach, Refuse, StoreRef, Welcome
from tests.unit.daemon.conftest import CACHE_BYTES, Bench, FakeStore, fake_store


class Kit:
    """A catalogue over a real attach server. ``disk`` is what a folder holds, by its path."""

    def __init__(self, bench: Bench, tmp_path: Path) -> None:
        self.bench = bench
        self.folder = StoreFolder(tmp_path / "imports", 0)
        self.folder.path.mkdir()
        first = bench.stores[0]
        self.disk = {first.manifest.folder: first}
        self.config = Config(stores=(StoreConfig(first.manifest.folder),))
        self.catalog = Catalog[FakeStore](self._open, self.folder)
        self.changes: list[list[int]] = []

    def _open(self, config: Config) -> list[FakeStore]:
        try:
            return [self.disk[settings.path] for settings in config.stores]
        except KeyError as error:
            raise StoreMissing(error.args[0], "nothing", "a store", "prepare one") from error

    def begin(self) -> None:
        self.catalog.open_all(self.config)
        self.catalog.begin(self.bench.reader, self.bench.server, lambda: self.config, self._changed)

    def _changed(self) -> None:
        served = self.catalog.served
        self.changes.append(sorted(served))
        stores = {index: entry.store for index, entry in served.items()}
        self.bench.server.admission = Admission(stores, accesses_of(served), AttachConfig(), CACHE_BYTES)

    def make(self, name: str) -> StoreConfig:
        path = self.folder.path / name
        self.disk[path] = fake_store(path, weights=name)
        return StoreConfig(path)

    def names(self) -> list[str]:
        return sorted(entry.config.path.name for entry in self.catalog.served.values())


@pytest.fixture
def kit(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kit:
    kit = Kit(bench, tmp_path)
    kit.begin()
    monkeypatch.setattr("strataflux.daemon.catalog.open_store", lambda folder, digest: kit.disk[folder].manifest)
    return kit


async def test_what_is_added_can_be_attached_and_is_remembered(kit: Kit) -> None:
    settings = replace(kit.make("b"), share="uid")
    digest = await kit.catalog.add(settings, added=True)
    assert digest == kit.disk[settings.path].manifest.identity_digest
    ref = StoreRef(digest, kit.disk[settings.path].manifest.identity)
    assert isinstance(await kit.bench.client().ask(kit.bench.hello(stores=[ref])), Welcome)
    again = Catalog[FakeStore](kit._open, kit.folder)
    again.open_all(kit.config)
    assert [(entry.config, entry.added) for entry in again.served.values()][1] == (settings, True)


async def test_a_store_is_served_once(kit: Kit) -> None:
    await kit.catalog.add(kit.make("b"), added=True)
    twin = kit.folder.path / "twin"
    kit.disk[twin] = replace(kit.disk[kit.folder.path / "b"])
    with pytest.raises(AlreadyServed, match="twin"):
        await kit.catalog.add(StoreConfig(twin), added=True)
    assert kit.disk[twin].closed
    assert kit.names() == ["b", "store"]


async def test_what_the_reader_refuses_changes_nothing(kit: Kit) -> None:
    kit.bench.reader.failure = Refusal("too_large", "records", "5", "4", "restart")
    with pytest.raises(Refusal):
        await kit.catalog.add(kit.make("b"), added=True)
    assert (kit.changes, kit.names(), list(kit.folder.load_added())) == ([], ["store"], [])


async def test_sessions_of_a_store_that_goes_are_told_and_newcomers_refused(kit: Kit) -> None:
    bench = kit.bench
    await kit.catalog.add(kit.make("b"), added=True)
    staying, leaving = bench.client(), bench.client()
    ref = StoreRef(kit.disk[kit.folder.path / "b"].manifest.identity_digest, {"weights": "b"})
    assert isinstance(await staying.ask(bench.hello()), Welcome)
    assert isinstance(await leaving.ask(bench.hello(stores=[ref])), Welcome)
    assert await kit.catalog.remove(kit.catalog.served[kit.catalog.find("b")], "it is old") == 1
    heard = await leaving.hear()
    assert isinstance(heard, Reattach)
    assert heard.reason == "it is old"
    assert bench.reader.calls[-1] == "remove(1)"
    assert len(bench.reader.open) == 1
    answer = await bench.client().ask(bench.hello(stores=[ref]))
    assert isinstance(answer, Refuse)
    assert answer.code == "identity"
    assert list(kit.folder.load_added()) == []


async def test_a_session_in_the_making_is_waited_for(kit: Kit) -> None:
    """It was admitted before the store went: the reader may not let go of the store under it."""
    bench = kit.bench
    bench.reader.gate.clear()
    client = bench.client()
    client.say(bench.hello())
    async with asyncio.timeout(60):
        while not bench.server.holds(0):
            await asyncio.sleep(0)
    removing = asyncio.create_task(kit.catalog.remove(kit.catalog.served[0], "gone"))
    while kit.catalog.served:
        await asyncio.sleep(0)
    assert "remove(0)" not in bench.reader.calls
    bench.reader.gate.set()
    assert await removing == 1
    assert isinstance(await client.hear(), Welcome)
    assert isinstance(await client.hear(), Reattach)
    assert bench.reader.calls[-1] == "remove(0)"


async def test_a_store_that_took_the_index_of_a_removed_one_stays(kit: Kit) -> None:
    """Two administrators remove one store, and a third adds another in between."""
    await kit.catalog.add(kit.make("b"), added=True)
    entry = kit.catalog.served[1]
    await kit.catalog.remove(entry, "the first")
    kit.catalog.served = {**kit.catalog.served, 1: replace(entry, config=kit.make("c"))}
    with pytest.raises(NotServed):
        await kit.catalog.remove(entry, "the second")
    assert kit.names() == ["c", "store"]


async def test_a_configuration_is_followed(kit: Kit) -> None:
    b, c = kit.make("b"), kit.make("c")
    await kit.catalog.add(kit.make("added"), added=True)
    await kit.catalog.add_all([b, c, *kit.config.stores])
    assert await kit.catalog.follow([b, c, *kit.config.stores]) == []
    assert kit.names() == ["added", "b", "c", "store"]
    kit.disk[b.path] = replace(kit.disk[b.path], manifest=replace(kit.disk[b.path].manifest, generation=2))
    waiting = await kit.catalog.follow([replace(b, share="uid")])
    assert waiting == [f"settings of {b.path}"]
    assert kit.names() == ["added", "b"]
    assert "replace(2)" in kit.bench.reader.calls
    assert [path.path.name for path in kit.folder.load_added()] == ["added"]


async def test_a_configuration_with_a_store_that_is_not_there_changes_nothing(kit: Kit) -> None:
    with pytest.raises(StoreMissing):
        await kit.catalog.add_all([kit.make("b"), StoreConfig(kit.folder.path / "missing")])
    assert kit.names() == ["store"]
    assert kit.bench.reader.calls[-1] == "remove(1)"


async def test_a_store_of_the_configuration_that_was_removed_meanwhile_does_not_stop_a_reload(kit: Kit) -> None:
    b = kit.make("b")
    await kit.catalog.add_all([*kit.config.stores, b])
    await kit.catalog.remove(kit.catalog.served[kit.catalog.find("b")], "not wanted")
    assert await kit.catalog.follow([*kit.config.stores, b]) == []


async def test_files_that_cannot_be_opened_roll_a_reload_back(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as for want of descriptors: no error of ours."""
    b, c = kit.make("b"), kit.make("c")
    opened = kit.catalog._open_stores

    def scarce(config: Config) -> list[FakeStore]:
        if config.stores == (c,):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return list(opened(config))

    monkeypatch.setattr(kit.catalog, "_open_stores", scarce)
    with pytest.raises(OSError, match="open files"):
        await kit.catalog.add_all([*kit.config.stores, b, c])
    assert kit.names() == ["store"]


async def test_one_store_that_is_damaged_keeps_no_other_from_its_new_generation(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = kit.make("b")
    await kit.catalog.add_all([b])

    def look(folder: Path, digest: str) -> object:
        if folder != b.path:
            raise StoreMissing(folder, "nothing", "a store", "put it back")
        return replace(kit.disk[b.path].manifest, generation=2)

    monkeypatch.setattr("strataflux.daemon.catalog.open_store", look)
    with pytest.raises(StoreMissing):
        await kit.catalog.follow([*kit.config.stores, b])
    assert "replace(1)" in kit.bench.reader.calls
    assert kit.names() == ["b", "store"]


def test_an_added_store_that_is_damaged_does_not_stop_the_start(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    kit.folder.save_added([kit.make("b"), StoreConfig(kit.folder.path / "lost")])
    again = Catalog[FakeStore](kit._open, kit.folder)
    assert len(again.open_all(kit.config)) == 2
    assert list(again.absent) == ["lost"]
    assert "cannot be served" in caplog.text


async def test_what_is_absent_is_remembered_looked_for_and_forgotten_when_told(kit: Kit) -> None:
    lost, gone = StoreConfig(kit.folder.path / "lost"), StoreConfig(kit.folder.path / "gone")
    kit.folder.save_added([lost, gone])
    kit.begin()
    await kit.catalog.add(kit.make("b"), added=True)
    assert {settings.path.name for settings in kit.folder.load_added()} == {"b", "lost", "gone"}
    await kit.catalog.forget("gone")
    assert await kit.catalog.follow(kit.config.stores) == []
    assert list(kit.catalog.absent) == ["lost"]
    kit.make("lost")
    assert await kit.catalog.follow(kit.config.stores) == []
    assert (kit.names(), kit.catalog.absent) == (["b", "lost", "store"], {})


async def test_files_of_what_is_absent_go_when_that_is_asked_for(kit: Kit) -> None:
    names = ("damaged", "nowhere")
    kit.folder.save_added([StoreConfig(kit.folder.path / name) for name in names])
    (kit.folder.path / "damaged").mkdir()
    kit.begin()
    for name in names:
        await StoreMethods(kit.catalog).remove(control_pb2.RemoveStoreRequest(store=name, delete_files=True))
    assert not (kit.folder.path / "damaged").exists()
    assert list(kit.folder.load_added()) == []


@pytest.mark.parametrize("name", [lambda d: d, lambda d: d[:6], lambda d: "store"])
def test_stores_are_found_by_digest_and_by_name(kit: Kit, name: Callable[[str], str]) -> None:
    assert kit.catalog.find(name(kit.bench.stores[0].manifest.identity_digest)) == 0


@pytest.mark.parametrize("name", ["", "nothing", "/store"])
def test_stores_that_are_not_there(kit: Kit, name: str) -> None:
    with pytest.raises(NotServed):
        kit.catalog.find(name)


async def test_what_a_full_disk_does_not_let_be_remembered_is_not_done(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.folder.save_added([StoreConfig(kit.folder.path / "lost")])
    kit.begin()

    def full(stores: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(kit.folder, "save_added", full)
    with pytest.raises(OSError, match="No space"):
        await kit.catalog.add(kit.make("b"), added=True)
    assert kit.names() == ["store"]
    assert kit.bench.reader.calls[-1] == "remove(1)"
    with pytest.raises(OSError, match="No space"):
        await kit.catalog.forget("lost")
    kit.make("lost")
    with pytest.raises(OSError, match="No space"):
        await kit.catalog.add(StoreConfig(kit.folder.path / "lost"), added=True)
    assert list(kit.catalog.absent) == ["lost"]


@pytest.mark.parametrize("absent", [False, True])
async def test_a_store_can_be_deleted_because_the_disk_is_full(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, absent: bool
) -> None:
    settings = kit.make("b")
    settings.path.mkdir()
    if absent:
        del kit.disk[settings.path]
        kit.folder.save_added([settings])
        kit.begin()
    else:
        await kit.catalog.add(settings, added=True)
    save = kit.folder.save_added

    def full(stores: Sequence[StoreConfig]) -> None:
        if any(path.is_dir() for path in kit.folder.path.iterdir()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(stores)

    monkeypatch.setattr(kit.folder, "save_added", full)
    await StoreMethods(kit.catalog).remove(control_pb2.RemoveStoreRequest(store="b", delete_files=True))
    assert [path.name for path in kit.folder.path.iterdir()] == ["added.json"]
    assert (list(kit.folder.load_added()), kit.names(), kit.catalog.absent) == ([], ["store"], {})


async def test_files_behind_a_link_are_not_said_to_be_deleted(kit: Kit, tmp_path: Path) -> None:
    (kit.folder.path / "lost").symlink_to(tmp_path)
    kit.folder.save_added([StoreConfig(kit.folder.path / "lost")])
    kit.begin()
    with pytest.raises(ConfigError, match="by hand"):
        await StoreMethods(kit.catalog).remove(control_pb2.RemoveStoreRequest(store="lost", delete_files=True))
    assert list(kit.catalog.absent) == ["lost"]


async def test_what_was_absent_and_has_come_meanwhile_is_not_said_to_be_forgotten(kit: Kit) -> None:
    kit.folder.save_added([StoreConfig(kit.folder.path / "lost")])
    kit.begin()
    kit.make("lost")
    await kit.catalog.follow(kit.config.stores)
    with pytest.raises(NotServed, match="just now"):
        await kit.catalog.forget("lost")
    assert kit.names() == ["lost", "store"]


class SlowDisk:
    """Deletes files when it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.let = threading.Event(), threading.Event()
        self._delete = shutil.rmtree
        monkeypatch.setattr("strataflux.daemon.catalog.shutil.rmtree", self.rmtree)

    def rmtree(self, path: Path) -> None:
        self.asked.set()
        assert self.let.wait(60)
        self._delete(path)


@pytest.mark.parametrize("absent", [False, True])
async def test_files_of_a_store_that_comes_while_its_namesakes_are_deleted_stay(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, absent: bool
) -> None:
    if absent:
        kit.folder.save_added([StoreConfig(kit.folder.path / "b")])
        kit.begin()
        settings = kit.make("b")
    else:
        settings = kit.make("b")
        await kit.catalog.add(settings, added=True)
    settings.path.mkdir()
    (settings.path / "old").touch()
    disk, methods = SlowDisk(monkeypatch), StoreMethods(kit.catalog)
    going = asyncio.create_task(methods.remove(control_pb2.RemoveStoreRequest(store="b", delete_files=True)))
    assert await asyncio.to_thread(disk.asked.wait, 60)
    settings.path.mkdir()  # as an import does
    (settings.path / "new").touch()
    await kit.catalog.add(settings, added=True)
    disk.let.set()
    await going
    assert [path.name for path in settings.path.iterdir()] == ["new"]
    assert sorted(path.name for path in kit.folder.path.iterdir()) == ["added.json", "b"]
    assert kit.names() == ["b", "store"]


async def test_what_was_imported_and_somebody_else_has_served_stays(kit: Kit) -> None:
    """The import's own attempt to serve it comes second, and fails."""
    settings = kit.make("b")
    settings.path.mkdir()
    await kit.catalog.add(settings, added=True)
    await kit.catalog.discard(settings.path)
    assert settings.path.exists()
    await kit.catalog.remove(kit.catalog.served[kit.catalog.find("b")], "not wanted")
    await kit.catalog.discard(settings.path)
    assert not settings.path.exists()


async def test_one_change_at_a_time(kit: Kit) -> None:
    """The second waits for the first, and finds what it left."""
    go_on, waits = threading.Event(), threading.Event()
    add = kit.bench.reader.add_store

    def slowly(fresh: FakeStore) -> int:
        waits.set()
        assert go_on.wait(60)
        return add(fresh)

    kit.bench.reader.add_store = slowly  # type: ignore[method-assign]
    settings = kit.make("b")
    first = asyncio.create_task(kit.catalog.add(settings, added=True))
    second = asyncio.create_task(kit.catalog.add(settings, added=True))
    assert await asyncio.to_thread(waits.wait, 60)
    go_on.set()
    await first
    with pytest.raises(AlreadyServed):
        await second
