"""Stand-ins for what the reader and the stores are to the parts around them: real memory, no reading."""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strataflux.daemon.access import StoreAccess
from strataflux.daemon.admission import Admission
from strataflux.daemon.attach import AttachServer
from strataflux.daemon.config import AttachConfig, StoreConfig, TenantConfig
from strataflux.daemon.errors import DaemonError, Refusal
from strataflux.daemon.holdings import OpenSession
from strataflux.daemon.interface import AddedSegment, HotRecords, SessionRequest
from strataflux.daemon.quotas import Quotas
from strataflux.daemon.stats import SessionStats, Stats
from strataflux.proto import layout, messages, segment
from strataflux.proto.messages import Hello, Refuse, SegmentInfo, StoreRef, TableInfo
from strataflux.proto.store_format import SectionSpec, StoreManifest, identity_digest, plan_sections

CACHE_BYTES = 16 << 20
STAMPS = CACHE_BYTES // layout.SLOT_UNIT_BYTES
WATCHDOG_SECONDS = 60.0
ZEROS = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)


@dataclass
class FakeStore:
    manifest: StoreManifest
    preload: bool = False
    descriptor: int = ZEROS
    alignment: int = 1
    closed: bool = False

    def close(self) -> None:
        self.closed = True


def fake_store(folder: Path, **identity: Any) -> FakeStore:
    sections, size = plan_sections([SectionSpec("s", "weight_channel", 0, "qkv", 10, 512)])
    return FakeStore(StoreManifest(folder, identity, identity_digest(identity), 1, sections, 10, size, 0))


@dataclass
class FakeReader:
    """Sessions are real segments; nothing is ever filled. ``gate`` holds open_session up until it is set."""

    stores: list[FakeStore]
    generation: int = 77
    engine: str = "threads"
    direct_io: str = "direct"
    policy: str = "lru"
    registered_buffers: bool = False
    setup_flags: tuple[str, ...] = ()
    calls: list[str] = field(default_factory=list)
    open: dict[int, list[segment.Segment]] = field(default_factory=dict)
    handed: list[list[int]] = field(default_factory=list)
    count: int = 0
    in_flight: bool = False
    stats: Stats = field(default_factory=Stats)
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()
        self.page = segment.create("fake-page", layout.PAGE_HEADER_BYTES, reserve=True)
        self.cache = segment.create("fake-cache", CACHE_BYTES, reserve=False)
        self.directories = [segment.create("fake-directory", 4096, reserve=False) for _ in self.stores]
        self.doorbell = os.eventfd(0, os.EFD_CLOEXEC)

    def start(self) -> None:
        self.calls.append("start")
        if self.failure is not None:
            raise self.failure

    def open_session(self, request: SessionRequest) -> OpenSession:
        assert self.gate.wait(WATCHDOG_SECONDS)
        if self.failure is not None:
            raise self.failure
        view = segment.create("fake-view", layout.PAGE_HEADER_BYTES, reserve=True)
        size = layout.session_geometry(request.ring_log2, STAMPS, 0).total_bytes
        own = segment.create("fake-session", size, reserve=False)
        with self._lock:
            index = next(i for i in range(layout.MAX_SESSIONS) if i not in self.open)
            self.open[index] = [view, own]
        descriptors = [self.page.read_only_descriptor(), view.read_only_descriptor()]
        descriptors += [os.dup(own.descriptor), os.dup(self.doorbell)]
        descriptors += [self.directories[i].read_only_descriptor() for i in request.stores]
        descriptors.append(self.cache.read_only_descriptor())
        self.handed.append(list(descriptors))
        manifests = [self.stores[i].manifest for i in request.stores]
        tables = [
            TableInfo(n, "weight_channel", m.identity_digest, m.generation, m.record_count)
            for n, m in enumerate(manifests)
        ]
        segments = [SegmentInfo(0, CACHE_BYTES)]
        return OpenSession(index, 1000 + index, tables, segments, request.ring_log2, STAMPS, 0, descriptors)

    def close_session(self, index: int) -> None:
        with self._lock:
            for held in self.open.pop(index):
                held.close()

    def grant_blocks(self, index: int, count: int) -> list[list[int]]:
        raise Refusal("unsupported", "kv", f"session {index}", "one with KV", "say it in hello")

    def release_blocks(self, index: int, ranges: list[list[int]]) -> Callable[[], bool]:
        raise Refusal("unsupported", "kv", f"session {index}", "one with KV", "say it in hello")

    def snapshot(self) -> Stats:
        if self.stats.sessions or not self.open:
            return self.stats
        return Stats(sessions=tuple(SessionStats(index, lookups=10, hits=4) for index in sorted(self.open)))

    def begin_release(self) -> int | None:
        return None

    def release_settled(self, first_slot: int) -> bool:
        return True

    def finish_release(self, first_slot: int) -> int:
        return CACHE_BYTES

    def grow(self) -> AddedSegment | None:
        return None

    def missing_bytes(self) -> int:
        return 0

    def review_quarantine(self) -> int:
        return 0

    def set_tenants(self, tenants: Sequence[TenantConfig]) -> None:
        self.calls.append(f"tenants({', '.join(tenant.name for tenant in tenants)})")

    def add_store(self, fresh: Any) -> int:
        if self.failure is not None:
            raise self.failure
        self.stores.append(fresh)
        self.directories.append(segment.create("fake-directory", 4096, reserve=False))
        self.calls.append(f"add({len(self.stores) - 1})")
        return len(self.stores) - 1

    def remove_store(self, index: int) -> None:
        self.calls.append(f"remove({index})")

    def replace_store(self, index: int, fresh: Any) -> None:
        self.calls.append(f"replace({index})")
        self.stores[index].manifest = fresh.manifest

    def hot_records(self) -> list[HotRecords]:
        if self.failure is not None:
            raise self.failure
        digest = self.stores[0].manifest.identity_digest
        return [HotRecords(digest, 10, np.array([7, 2], np.uint32))]

    def warm(self, hot: Sequence[HotRecords]) -> int:
        self.calls.append("warm")
        return sum(part.oids.size for part in hot)

    def echo(self) -> None:
        if self.failure is not None:
            raise self.failure

    def progress(self) -> tuple[int, bool]:
        return self.count, self.in_flight

    def begin_drain(self) -> None:
        self.calls.append("begin_drain")

    def stop(self) -> None:
        if "stop" in self.calls:
            return
        self.calls.append("stop")
        for index in list(self.open):
            self.close_session(index)
        for held in (self.page, self.cache, *self.directories):
            held.close()
        os.close(self.doorbell)


class Client:
    """A raw client: one socket, messages as they are. Waits end with an error after a minute."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(WATCHDOG_SECONDS)
        self.socket.connect(str(path))
        self.descriptors: list[int] = []

    def say(self, message: messages.Message) -> None:
        messages.send(self.socket, message)

    async def hear(self) -> messages.Message | None:
        try:
            received = await asyncio.to_thread(messages.receive, self.socket)
        except ConnectionResetError:
            return None
        if received is None:
            return None
        self.descriptors += received[1]
        return received[0]

    async def ask(self, message: messages.Message) -> messages.Message | None:
        self.say(message)
        return await self.hear()

    def close(self) -> None:
        self.socket.close()
        for descriptor in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.descriptors.clear()


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until ``condition`` holds; an error after a minute."""
    async with asyncio.timeout(WATCHDOG_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


def refusal(answer: messages.Message | None, code: str) -> Refuse:
    assert isinstance(answer, Refuse), answer
    assert answer.code == code
    return answer


@dataclass
class Bench:
    """An attach server on a real socket, with its fake reader."""

    path: Path
    server: AttachServer
    reader: FakeReader
    stores: list[FakeStore]
    clients: list[Client] = field(default_factory=list)

    def client(self) -> Client:
        self.clients.append(Client(self.path))
        return self.clients[-1]

    def hello(self, **changes: Any) -> Hello:
        manifest = self.stores[0].manifest
        body: dict[str, Any] = {
            "layout": layout.LAYOUT_VERSION,
            "client": "test",
            "stores": [StoreRef(manifest.identity_digest, manifest.identity)],
            "selections_per_step": 1000,
            "largest_set_bytes": 1 << 20,
        }
        return Hello(**{**body, **changes})


MakeBench = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def make_bench(tmp_path: Path) -> AsyncIterator[MakeBench]:
    benches: list[Bench] = []

    async def make(
        settings: AttachConfig | None = None,
        store_settings: Mapping[str, Any] | None = None,
        stores: list[FakeStore] | None = None,
        folder: Path = tmp_path,
        tenants: Sequence[TenantConfig] = (),
    ) -> Bench:
        stores = stores or [fake_store(tmp_path / "store", weights="a", architecture="llama", layout=1)]
        reader = FakeReader(stores)
        settled = [StoreConfig(s.manifest.folder, **(store_settings or {})) for s in stores]
        accesses = {index: StoreAccess(config) for index, config in enumerate(settled)}
        path = folder / f"attach{len(benches)}.sock"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        listener.bind(str(path))
        listener.listen(64)
        quotas = Quotas(tenants)
        admission = Admission(dict(enumerate(stores)), accesses, settings or AttachConfig(), CACHE_BYTES, quotas)
        server = AttachServer(listener, reader, admission)
        server.start()
        benches.append(Bench(path, server, reader, stores))
        return benches[-1]

    yield make
    for bench in benches:
        for client in bench.clients:
            client.close()
        bench.reader.gate.set()
        await bench.server.close()
        with contextlib.suppress(DaemonError):
            bench.reader.stop()


@pytest.fixture
async def bench(make_bench: MakeBench) -> Bench:
    return await make_bench()
