"""Receiving a store: whole, verified and named, or nothing."""

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strataflux.daemon.errors import AlreadyServed, ConfigError, DaemonError, Refusal
from strataflux.daemon.import_store import CHUNK_MAX_BYTES, Announced, Incoming
from strataflux.daemon.store_folder import StoreFolder
from strataflux.proto.errors import ContractError, StoreCorrupt
from strataflux.proto.store_format import SectionSpec, StoreManifest, open_store
from strataflux.proto.store_writer import StoreWriter

COUNT = 300


@pytest.fixture
def source(tmp_path: Path) -> StoreManifest:
    records = np.random.default_rng(1).integers(0, 256, (COUNT, 500), dtype=np.uint8)
    sections = [SectionSpec("s", "weight_channel", 0, "qkv", COUNT, 500)]
    with StoreWriter(tmp_path / "source", {"weights": "a"}, sections) as writer:
        writer.write(0, 0, records)
        return writer.publish()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StoreFolder]:
    yield StoreFolder(tmp_path / "stores", 0)
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    open_files = [os.path.realpath(link) for link in links if os.path.islink(link)]
    assert [path for path in open_files if Path(path).is_relative_to(tmp_path.resolve() / "stores")] == []


def files_of(source: StoreManifest) -> list[bytes]:
    return [(source.folder / name).read_bytes() for name in ("manifest.json", "records.crc", "records.bin")]


def announced(files: list[bytes], **changes: int) -> Announced:
    return replace(Announced("new", *map(len, files)), **changes)  # type: ignore[arg-type]  # whatever replace thinks


def welcome(manifest: StoreManifest) -> None:
    """Any store is."""


async def receive(folder: StoreFolder, files: list[bytes], pieces: list[int], wanted: Announced | None = None) -> Path:
    """Send files in pieces of these lengths, again and again."""
    whole, at, turn = b"".join(files), 0, 0
    async with Incoming(folder, wanted or announced(files), welcome) as incoming:
        while at < len(whole):
            length = pieces[turn % len(pieces)]
            await incoming.write(whole[at : at + length])
            at, turn = at + length, turn + 1
        return await incoming.finish()


@pytest.mark.parametrize("pieces", [[CHUNK_MAX_BYTES], [1000, 1, 7], [4096]])
async def test_a_store_arrives_as_it_was_sent(folder: StoreFolder, source: StoreManifest, pieces: list[int]) -> None:
    path = await receive(folder, files_of(source), pieces)
    assert path == folder.path / "new"
    assert files_of(open_store(path)) == files_of(source)
    assert [entry.name for entry in folder.path.iterdir()] == ["new"]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_store_with_a_byte_that_is_not_its_own_never_arrives(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("import")
    sections = [SectionSpec("s", "weight_channel", 0, "qkv", 64, 64)]
    with StoreWriter(root / "source", {"weights": "a"}, sections) as writer:
        writer.write(0, 0, np.arange(4096, dtype=np.uint8).reshape(64, 64))
        files = files_of(writer.publish())
    which = data.draw(st.integers(0, 2))
    at = data.draw(st.integers(0, len(files[which]) - 1))
    spoiled = bytearray(files[which])
    spoiled[at] ^= data.draw(st.integers(1, 255))
    files[which] = bytes(spoiled)
    folder = StoreFolder(root / "stores", 0)
    try:
        asyncio.run(receive(folder, files, [2000]))
    except (ContractError, DaemonError):
        assert list(folder.path.iterdir()) == []
    else:  # white space in JSON may become another: the same manifest
        assert which == 0
        assert spoiled[at : at + 1].isspace()


async def test_damage_is_told_by_its_records(folder: StoreFolder, source: StoreManifest) -> None:
    files = files_of(source)
    spoiled = bytearray(files[2])
    for oid in (3, 200):
        spoiled[source.sections[0].offset + oid * source.sections[0].stride] ^= 1
    with pytest.raises(StoreCorrupt, match=r"2 records .*\(3, 200\)"):
        await receive(folder, [*files[:2], bytes(spoiled)], [5000])
    assert list(folder.path.iterdir()) == []


async def test_whoever_stops_in_the_middle_leaves_nothing(folder: StoreFolder, source: StoreManifest) -> None:
    files = files_of(source)
    whole = b"".join(files)
    for sent in (0, 10, len(files[0]), len(files[0]) + 8, len(whole) - 1):
        with pytest.raises(ConfigError, match=f"{len(whole) - sent} bytes less"):
            await receive(folder, [whole[:sent]], [5000], announced(files))
        sending = asyncio.create_task(send_and_hang(folder, whole[:sent], announced(files)))
        while not (folder.path.exists() and list(folder.path.iterdir())):
            await asyncio.sleep(0)
        for _ in range(20):  # gRPC cancels again and again
            sending.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await sending
        async with asyncio.timeout(60):
            while list(folder.path.iterdir()):
                await asyncio.sleep(0.001)


async def send_and_hang(folder: StoreFolder, data: bytes, wanted: Announced) -> None:
    async with Incoming(folder, wanted, welcome) as incoming:
        await incoming.write(data)
        await asyncio.Event().wait()


async def test_more_than_was_announced(folder: StoreFolder, source: StoreManifest) -> None:
    files = files_of(source)
    with pytest.raises(ConfigError, match="beyond the announced"):
        await receive(folder, [*files, b"x"], [CHUNK_MAX_BYTES], announced(files))
    with pytest.raises(ConfigError, match=f"at most {CHUNK_MAX_BYTES}"):
        await receive(folder, [bytes(CHUNK_MAX_BYTES + 1)], [CHUNK_MAX_BYTES + 1], announced(files))
    assert list(folder.path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "word"), [({"manifest_bytes": 0}, "manifest_bytes"), ({"manifest_bytes": 1 << 30}, "manifest_bytes")]
)
async def test_sizes_that_cannot_be(
    folder: StoreFolder, source: StoreManifest, changes: dict[str, int], word: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        await receive(folder, files_of(source), [1000], announced(files_of(source), **changes))
    assert caught.value.subject == word


async def test_a_manifest_that_is_not_wanted_ends_it_before_the_records(
    folder: StoreFolder, source: StoreManifest
) -> None:
    def refuse(manifest: StoreManifest) -> None:
        raise AlreadyServed(manifest.folder, "served", "another", "remove it")

    files = files_of(source)
    async with Incoming(folder, announced(files), refuse) as incoming:
        with pytest.raises(AlreadyServed):
            await incoming.write(files[0])
    assert list(folder.path.iterdir()) == []


async def test_room_is_left_on_the_disk(tmp_path: Path, source: StoreManifest, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [1 << 20]

    class System:
        f_frsize = 1

        @property
        def f_bavail(self) -> int:
            return free[0]

    files = files_of(source)
    floor = StoreFolder(tmp_path / "stores", (1 << 20) - sum(map(len, files)) + 1)
    monkeypatch.setattr("strataflux.daemon.import_store.os.statvfs", lambda path: System())
    with pytest.raises(Refusal, match=r"imports\.free_bytes"):
        await receive(floor, files, [1000])
    floor.free_bytes -= 1
    async with Incoming(floor, announced(files), welcome) as incoming:
        await incoming.write(files[0])
        free[0] = floor.free_bytes  # others filled it meanwhile
        with pytest.raises(Refusal, match=r"imports\.free_bytes"):
            await incoming.write(files[1])
    assert list(floor.path.iterdir()) == []


async def test_whoever_hangs_up_while_the_name_is_given_leaves_nothing(
    folder: StoreFolder, source: StoreManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, go_on = threading.Event(), threading.Event()
    publish = StoreFolder.publish

    def slowly(self: StoreFolder, temporary: Path, name: str) -> Path:
        path = publish(self, temporary, name)
        named.set()
        assert go_on.wait(60)
        return path

    monkeypatch.setattr(StoreFolder, "publish", slowly)
    sending = asyncio.create_task(receive(folder, files_of(source), [CHUNK_MAX_BYTES]))
    assert await asyncio.to_thread(named.wait, 60)
    sending.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await sending
    async with asyncio.timeout(60):
        while list(folder.path.iterdir()):
            await asyncio.sleep(0.001)
