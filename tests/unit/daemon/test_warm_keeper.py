"""When the hot set is read and written, and what is said when it cannot be."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from strataflux.daemon.config import CacheConfig, Config
from strataflux.daemon.errors import ReaderFailed
from strataflux.daemon.hot_set import read_hot_set
from strataflux.daemon.warm_keeper import WarmKeeper, hot_set_path
from tests.unit.daemon.conftest import FakeReader, fake_store


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def reader(tmp_path: Path) -> Any:
    reader = FakeReader([fake_store(tmp_path / "store", model="a")])
    yield reader
    reader.stop()


def test_it_lies_in_the_state_folder_if_there_is_one(tmp_path: Path) -> None:
    state = {"STATE_DIRECTORY": f"{tmp_path}:/elsewhere"}
    assert hot_set_path(Config(), state) == tmp_path / "hot.set"
    assert hot_set_path(Config(), {}) is None
    assert hot_set_path(Config(cache=CacheConfig(warm_start=False)), state) is None


def test_what_is_saved_is_loaded(reader: FakeReader, tmp_path: Path) -> None:
    async def life() -> None:
        path = tmp_path / "hot.set"
        first, second = WarmKeeper(reader, path), WarmKeeper(reader, path)
        assert await first.load() == 0
        await first.save()
        assert await second.load() == 2
        assert first.counts == {("load", "absent"): 1, ("save", "ok"): 1}
        assert second.counts == {("load", "ok"): 1}

    asyncio.run(life())
    assert reader.calls == ["warm"]


def test_it_is_saved_every_three_minutes(reader: FakeReader, tmp_path: Path) -> None:
    async def life() -> None:
        clock = Clock()
        keeper = WarmKeeper(reader, tmp_path / "hot.set", clock)
        for clock.now in (0, 100, 179, 180, 181, 200, 359, 360.5):
            keeper.on_tick()
            await keeper.close()
        assert keeper.counts == {("save", "ok"): 2}

    asyncio.run(life())
    assert [part.oids.tolist() for part in read_hot_set(tmp_path / "hot.set")] == [[7, 2]]


def test_a_damaged_file_is_ignored_and_told(
    reader: FakeReader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "hot.set").write_bytes(b"SFHOTSET" + bytes(100))
    keeper = WarmKeeper(reader, tmp_path / "hot.set")
    assert asyncio.run(keeper.load()) == 0
    assert keeper.counts == {("load", "damaged"): 1}
    assert "is damaged (magic b'SFHOTSET' and version 0" in caplog.text
    assert reader.calls == []


def test_two_saves_never_write_at_once(reader: FakeReader, tmp_path: Path) -> None:
    async def life() -> None:
        clock = Clock()
        keeper = WarmKeeper(reader, tmp_path / "hot.set", clock)
        clock.now = 1000
        keeper.on_tick()
        await keeper.finish()
        assert keeper.counts == {("save", "ok"): 2}

    asyncio.run(life())
    assert [part.oids.tolist() for part in read_hot_set(tmp_path / "hot.set")] == [[7, 2]]


@pytest.mark.parametrize("failure", ["folder", "reader"])
def test_what_cannot_be_written_is_told(
    reader: FakeReader, tmp_path: Path, caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    keeper = WarmKeeper(reader, tmp_path / ("gone/hot.set" if failure == "folder" else "hot.set"))
    if failure == "reader":
        reader.failure = ReaderFailed("reader thread", "stopping", "running", "attach to the next daemon")
    asyncio.run(keeper.save())
    assert keeper.counts == {("save", "failed"): 1}
    assert "a restart will start with what it held before" in caplog.text


def test_a_file_that_cannot_be_read_is_told(reader: FakeReader, tmp_path: Path) -> None:
    (tmp_path / "hot.set").mkdir()
    keeper = WarmKeeper(reader, tmp_path / "hot.set")
    assert asyncio.run(keeper.load()) == 0
    assert keeper.counts == {("load", "failed"): 1}


def test_without_a_folder_nothing_is_done(reader: FakeReader) -> None:
    async def life() -> None:
        clock = Clock()
        keeper = WarmKeeper(reader, None, clock)
        await keeper.load()
        clock.now = 1000
        keeper.on_tick()
        await keeper.save()
        await keeper.close()
        assert keeper.counts == {}

    asyncio.run(life())
