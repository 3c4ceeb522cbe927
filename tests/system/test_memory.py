"""Under memory pressure a real daemon gives segments back to the machine while a client decodes on, and grows again."""

import asyncio
import ctypes
import os
from pathlib import Path

import numpy as np
import pytest

from strataflux.cache_policy.miss import Wait
from strataflux.client.session import Session
from strataflux.daemon import assembly
from strataflux.daemon.config import Config, resolve_config
from strataflux.daemon.pressure import MemoryState
from strataflux.daemon.reader_thread import ReaderThread
from strataflux.daemon.server import Server
from strataflux.proto.messages import SegmentDropped, send
from tests.system.conftest import COUNT, RECORD_BYTES, SmallStore
from tests.unit.daemon.conftest import until

pytestmark = pytest.mark.system

MIB = 1 << 20
PLENTY, SHORT = MemoryState(4096 * MIB), MemoryState(10 * MIB)


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    """Machine code is made before any watchdog of a test runs."""
    assembly.compile_everything(Config())


class Machine:
    """A daemon in this process whose free memory the test says."""

    def __init__(self, folder: Path, store: SmallStore) -> None:
        self.state = PLENTY
        table = {
            "runtime_dir": str(folder),
            "store": [{"path": store.path, "preload": True}],
            "cache": {"weight_bytes": "48MiB", "kv_bytes": "1MiB"},
            "reader": {"direct_io": "off"},
            "memory": {"calm_seconds": 0},
        }
        self.server = Server(
            resolve_config(table, "test"), {}, assembly.open_stores, assembly.make_reader, lambda: self.state
        )
        self.task = asyncio.create_task(self.server.run())

    @property
    def reader(self) -> ReaderThread:
        reader = self.server._reader
        assert isinstance(reader, ReaderThread)
        return reader

    async def segments(self, count: int) -> None:
        """Tick until the cache has ``count`` segments."""

        def there() -> bool:
            self.server.on_tick()
            keeper = self.server._memory
            idle = keeper._work is None or keeper._work.done()
            return idle and len(self.reader._tier.segments) == count and not self.reader._tier.retiring

        await until(there)

    async def stop(self) -> None:
        self.server.begin_drain()
        await self.task


def read(session: Session, store: SmallStore, seed: int) -> None:
    oids = np.sort(np.random.default_rng(seed).choice(COUNT, 512, replace=False)).astype(np.int64)
    addresses = np.zeros(512, np.uint64)
    with session.step() as step:
        assert session.lookup(0, oids, np.zeros(512, np.uint8), addresses) == 512
        for oid, address in zip(oids, addresses, strict=True):
            assert ctypes.string_at(int(address), RECORD_BYTES) == store.records[oid].tobytes()
        assert step.end()


def mapped_bytes() -> int:
    """Cache memory in this process, mapped by the daemon and by the client; what nobody maps is free."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:strataflux-cache" in line:
            first, last = (int(word, 16) for word in line.split()[0].split("-"))
            total += last - first
    return total


async def attach(machine: Machine, store: SmallStore, folder: Path) -> Session:
    await until(lambda: machine.server.health.ready or machine.task.done())
    return await asyncio.to_thread(
        lambda: Session.attach(
            [store.manifest], selections_per_step=2048, largest_set_bytes=MIB, runtime_dir=folder, miss=Wait(60)
        )
    )


async def test_the_cache_shrinks_to_its_floor_and_comes_back_while_a_client_decodes(
    tmp_path: Path, store: SmallStore
) -> None:
    machine = Machine(tmp_path / "run", store)
    session = await attach(machine, store, tmp_path / "run")
    seeds = iter(range(10_000))

    async def decode() -> None:
        while not done.is_set():
            await asyncio.to_thread(read, session, store, next(seeds))

    done = asyncio.Event()
    decoding = asyncio.create_task(decode())
    await machine.segments(3)
    assert mapped_bytes() == 2 * 48 * MIB
    machine.state = SHORT
    await machine.segments(1)
    keeper = machine.server._memory
    assert (keeper.releases, keeper.released_bytes, keeper.hung_up) == (2, 32 * MIB, 0)
    assert mapped_bytes() == 2 * 16 * MIB
    machine.server.on_tick()
    assert "memory" in machine.server.health.reasons
    assert machine.server.health.ready
    await asyncio.to_thread(machine.reader.check_integrity)
    machine.state = PLENTY
    await machine.segments(3)
    await until(lambda: len(session._attachment.segments) == 3)
    assert keeper.missing_bytes == 0
    machine.server.on_tick()
    assert "memory" not in machine.server.health.reasons
    before = next(seeds)
    await until(lambda: next(seeds) > before + 8 or decoding.done())
    done.set()
    await decoding
    assert session.state == "attached"
    await asyncio.to_thread(machine.reader.check_integrity)
    await asyncio.to_thread(session.close)
    await machine.stop()


async def test_a_client_that_does_not_let_go_is_hung_up_on_and_its_bytes_stay_until_then(
    tmp_path: Path, store: SmallStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path / "run", store)
    session = await attach(machine, store, tmp_path / "run")
    monkeypatch.setattr("strataflux.client.attach.Attachment.hide", lambda self, first_slot: None)
    first_slot = await asyncio.to_thread(machine.reader.begin_release)
    assert first_slot is not None
    while not await asyncio.to_thread(machine.reader.release_settled, first_slot):
        await asyncio.sleep(0)
    held = len(machine.reader._tier.segments) + len(machine.reader._tier.retiring)
    assert held == 3
    assert await machine.server._attach.notices.retire(first_slot, seconds=0.05) == 1
    assert machine.server._attach.counters.ended["segment"] == 1
    assert await asyncio.to_thread(machine.reader.finish_release, first_slot) == 16 * MIB
    await until(lambda: session.state == "attached" and session.stats().state == "attached")
    await asyncio.to_thread(read, session, store, 1)
    await asyncio.to_thread(session.close)
    await machine.stop()


async def test_a_confirmation_nobody_asked_for_ends_the_session(tmp_path: Path, store: SmallStore) -> None:
    machine = Machine(tmp_path / "run", store)
    session = await attach(machine, store, tmp_path / "run")
    send(session._attachment.connection, SegmentDropped(0))
    await until(lambda: machine.server._attach.counters.malformed == 1)
    await asyncio.to_thread(session.close)
    await machine.stop()
    assert not os.path.exists(tmp_path / "run")
