"""The service's life with a reader that reads nothing: order, signals, watchdog, and what a failed start leaves."""

import asyncio
import os
import signal
import socket
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strataflux.daemon.config import Config, resolve_config
from strataflux.daemon.errors import CacheTooLarge, ConfigError, ReaderFailed, SocketInUse
from strataflux.daemon.runtime_dir import RuntimeFolder
from strataflux.daemon.server import Server
from strataflux.proto.messages import Draining, Reattach, Welcome
from tests.unit.daemon.conftest import Bench, Client, FakeReader, FakeStore, fake_store, until


class Life:
    """A server under test and what it was given."""

    def __init__(self, tmp_path: Path, environment: dict[str, str] | None = None, **sections: Any) -> None:
        self.folder = tmp_path / "run"
        self.stores = [fake_store(tmp_path / "store", weights="a")]
        self.reader = FakeReader(self.stores)
        table = {"runtime_dir": str(self.folder), "store": [{"path": str(tmp_path / "store")}], **sections}
        self.config = resolve_config(table, "test")
        self.wanted: Config | Exception = self.config
        self.server = Server(
            self.config, environment or {}, self._open_stores, self._make_reader, read_config=self._read_config
        )

    def _open_stores(self, config: Config) -> list[FakeStore]:
        return self.stores

    def _read_config(self) -> Config:
        if isinstance(self.wanted, Exception):
            raise self.wanted
        return self.wanted

    def _make_reader(self, config: Config, stores: Sequence[FakeStore], idle_seconds: float) -> FakeReader:
        self.reader.calls.append(f"make({idle_seconds:g})")
        return self.reader

    async def run(self) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(self.server.run())
        await until(lambda: self.server.health.ready or task.done())
        return task


async def attach(life: Life) -> Client:
    client = Client(life.folder / "attach.sock")
    bench = Bench(life.folder, life.server._attach, life.reader, life.stores)
    assert isinstance(await client.ask(bench.hello()), Welcome)
    return client


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    life = Life(tmp_path)
    task = await life.run()
    client = await attach(life)
    os.kill(os.getpid(), number)
    await task
    assert isinstance(await client.hear(), Draining)
    assert await client.hear() is None
    assert life.reader.calls == ["make(1)", "start", "begin_drain", "stop"]
    assert not life.reader.open
    assert not life.folder.exists()
    client.close()


async def test_reads_in_flight_are_waited_for(tmp_path: Path) -> None:
    life = Life(tmp_path, life={"drain_seconds": 600})
    task = await life.run()
    life.reader.in_flight = True
    life.server.begin_drain()
    await until(lambda: "begin_drain" in life.reader.calls)
    assert not task.done()
    life.reader.in_flight = False
    await task


async def test_a_second_signal_ends_the_wait(tmp_path: Path) -> None:
    life = Life(tmp_path, life={"drain_seconds": 600})
    task = await life.run()
    life.reader.in_flight = True
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: "begin_drain" in life.reader.calls)
    os.kill(os.getpid(), signal.SIGTERM)
    await task
    assert "stop" in life.reader.calls


async def test_the_wait_is_bounded(tmp_path: Path) -> None:
    life = Life(tmp_path, life={"drain_seconds": 0})
    task = await life.run()
    life.reader.in_flight = True
    life.server.begin_drain()
    await task


async def test_a_reader_that_does_not_start_undoes_the_start(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.reader.failure = ReaderFailed("reader", "no engine", "one", "choose another")
    with pytest.raises(ReaderFailed):
        await life.server.run()
    assert not life.folder.exists()


async def test_a_live_daemon_stops_the_start_before_stores_are_opened(tmp_path: Path) -> None:
    other = RuntimeFolder.open(tmp_path / "run")
    life = Life(tmp_path)
    with pytest.raises(SocketInUse):
        await life.server.run()
    assert life.reader.calls == []
    other.close()
    life.reader.stop()


async def test_caches_that_do_not_fit_stop_the_start_first(tmp_path: Path) -> None:
    life = Life(tmp_path, cache={"weight_bytes": "64GiB", "kv_bytes": "64GiB"})
    with pytest.raises(CacheTooLarge):
        await life.server.run()
    assert not life.folder.exists()
    life.reader.stop()


Hear = Callable[[], Awaitable[bytes]]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[tuple[str, Hear]]:
    path = str(tmp_path / "notify")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.settimeout(60)
    listener.bind(path)

    async def hear() -> bytes:
        return await asyncio.to_thread(listener.recv, 1000)

    yield path, hear
    listener.close()


async def test_the_watchdog_hears_of_progress_only(tmp_path: Path, manager: tuple[str, Hear]) -> None:
    path, hear = manager
    life = Life(tmp_path, {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "4000000"})
    task = await life.run()
    assert (await hear()).startswith(b"READY=1\nSTATUS=1 stores, 0 sessions")
    assert await hear() == b"WATCHDOG=1"
    assert (await hear()).startswith(b"STATUS=1 stores")
    life.server.on_tick()  # the count stands still: nothing to say
    life.reader.count += 1
    life.server.on_tick()
    assert await hear() == b"WATCHDOG=1"
    client = await attach(life)
    life.server.on_tick()
    assert (await hear()).startswith(b"STATUS=1 stores, 1 sessions")
    life.server.begin_drain()
    assert (await hear()).startswith(b"STOPPING=1")
    await task
    assert life.reader.calls[0] == "make(1)"  # a quarter of the watchdog's time
    client.close()


async def test_buffered_reads_are_a_reason_to_be_degraded(tmp_path: Path) -> None:
    life = Life(tmp_path)
    task = await life.run()
    life.reader.direct_io = "mixed"
    life.server.on_tick()
    assert list(life.server.health.reasons) == ["buffered"]
    assert life.server.health.ready
    life.reader.direct_io = "direct"
    life.server.on_tick()
    assert not life.server.health.degraded
    life.server.begin_drain()
    await task


async def test_metrics_show_the_whole_service(tmp_path: Path) -> None:
    life = Life(tmp_path, metrics={"listen": "127.0.0.1:0"})
    task = await life.run()
    client = await attach(life)
    url = f"http://127.0.0.1:{life.server.metrics_port}/metrics"

    def scrape() -> str:
        with urllib.request.urlopen(url) as answer:
            text: str = answer.read().decode()
        return text

    text = await asyncio.to_thread(scrape)
    assert "\nstrataflux_clients 1.0\n" in text
    assert "\nstrataflux_ready 1.0\n" in text
    life.server.begin_drain()
    await task
    client.close()


async def test_readiness_follows_the_reader_and_the_devices(tmp_path: Path) -> None:
    life = Life(tmp_path, metrics={"listen": "127.0.0.1:0"}, health={"interval_seconds": 0.1})
    task = await life.run()
    assert life.server.is_ready()[0]
    life.reader.failure = ReaderFailed("reader thread", "not running", "running", "restart")
    prober = life.server._prober
    await until(lambda: prober.obstacle() is not None)
    life.server.on_tick()
    good, known = life.server.is_ready()
    assert (good, known["state"]) == (False, "unready")
    assert "not running" in known["obstacles"]["probe"]
    assert life.server.is_live()[0]
    life.reader.failure = None
    await until(lambda: prober.obstacle() is None)
    life.server.on_tick()
    assert life.server.is_ready()[0]
    life.server.begin_drain()
    await task


async def test_a_reload_takes_what_may_change_and_tells_its_manager(
    tmp_path: Path, manager: tuple[str, Hear], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strataflux.daemon.server.configure_logging", lambda config: None)
    path, hear = manager
    life = Life(tmp_path, {"NOTIFY_SOCKET": path})
    monkeypatch.setattr("strataflux.daemon.catalog.open_store", lambda folder, digest: life.stores[0].manifest)
    task = await life.run()
    assert (await hear()).startswith(b"READY=1")
    assert (await hear()).startswith(b"STATUS=")
    life.wanted = replace(
        life.config,
        attach=replace(life.config.attach, max_sessions=3),
        cache=replace(life.config.cache, weight_bytes=64 << 20),
    )
    os.kill(os.getpid(), signal.SIGHUP)
    assert (await hear()).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
    assert (await hear()).startswith(b"READY=1")
    assert life.server._attach.admission.settings.max_sessions == 3
    assert life.server.config.attach.max_sessions == 3
    assert life.server.config.cache == life.config.cache
    assert not task.done()
    life.server.begin_drain()
    await task


async def test_a_bad_file_leaves_what_is_in_force(tmp_path: Path) -> None:
    life = Life(tmp_path)
    task = await life.run()
    life.wanted = ConfigError("file:attach.max", "an unknown key", "a known one", "mend it")
    await life.server.reload()
    assert life.server.config == life.config
    assert "attach.max" in life.server.health.reasons["config"]
    assert life.server.health.ready
    assert life.server._reloads.results == {"ok": 0, "failed": 1}
    life.server.begin_drain()
    await task


async def test_a_file_that_names_nothing_to_serve_is_refused_by_a_reload_as_by_a_start(tmp_path: Path) -> None:
    life = Life(tmp_path, kv={"sessions": 0})
    task = await life.run()
    life.wanted = replace(life.config, stores=())
    await life.server.reload()
    assert "something to serve" in life.server.health.reasons["config"]
    assert len(life.server._catalog.served) == 1
    life.server.begin_drain()
    await task


async def test_a_new_generation_is_taken_and_its_sessions_attach_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strataflux.daemon.server.configure_logging", lambda config: None)
    life = Life(tmp_path)
    newer = replace(life.stores[0].manifest, generation=2)
    monkeypatch.setattr("strataflux.daemon.catalog.open_store", lambda folder, digest: newer)
    task = await life.run()
    client = await attach(life)
    life.stores = [FakeStore(newer)]
    await life.server.reload()
    assert "replace(0)" in life.reader.calls
    assert isinstance(await client.hear(), Reattach)
    assert await client.hear() is None
    assert life.server._attach.counters.ended["reattach"] == 1
    client.close()
    life.server.begin_drain()
    await task


async def test_without_listen_no_port_is_open(tmp_path: Path) -> None:
    life = Life(tmp_path)
    task = await life.run()
    assert life.server.metrics_port is None
    life.server.begin_drain()
    await task
