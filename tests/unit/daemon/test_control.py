"""The control plane as a client sees it: through the front, as administrator and as reader."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from strataflux.daemon.catalog import Catalog
from strataflux.daemon.config import Config, StoreConfig
from strataflux.daemon.control import SERVICE_NAME, ControlPlane, Service
from strataflux.daemon.front import ControlFront
from strataflux.daemon.health import Health
from strataflux.daemon.rpc_errors import ERROR_METADATA
from strataflux.daemon.served import Served
from strataflux.proto import control_pb2, control_pb2_grpc
from tests.unit.daemon.conftest import Bench, FakeStore, until

NOBODY = 65_534


@dataclass
class Plane:
    path: Path
    control: ControlPlane
    front: ControlFront
    health: Health
    drains: list[str]

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"unix:{self.path}")


@pytest.fixture
async def plane(bench: Bench, tmp_path: Path) -> AsyncIterator[Plane]:
    # Not below tmp_path, which other users cannot enter.
    folder = tempfile.TemporaryDirectory(prefix="strataflux-test-")
    path, drains = Path(folder.name) / "control.sock", list[str]()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(str(path))
    listener.listen(16)
    health = Health()

    def begin_drain() -> bool:
        drains.append("drain")
        return len(drains) == 1

    config = Config(stores=(StoreConfig(bench.stores[0].manifest.folder),))
    catalog = Catalog[FakeStore](lambda _: [], None)
    catalog.served = {0: Served(bench.stores[0], config.stores[0])}
    service = Service("1.2.3", lambda: config, bench.reader, catalog, bench.server, health, begin_drain)
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    control = ControlPlane(service, private)
    front = ControlFront(listener, control.addresses)
    await control.start()
    await front.start()
    yield Plane(path, control, front, health, drains)
    await control.close()
    await front.close()
    folder.cleanup()


async def test_admin_sees_who_answers(plane: Plane) -> None:
    async with plane.channel() as channel:
        info = await control_pb2_grpc.ControlStub(channel).GetInfo(control_pb2.GetInfoRequest())
    assert (info.version, info.generation, info.engine, info.role) == ("1.2.3", 77, "threads", "admin")
    assert (info.state, info.pid) == ("starting", os.getpid())
    assert plane.front.connections["admin"] == 1


async def test_stores_and_sessions_are_listed(plane: Plane, bench: Bench) -> None:
    client = bench.client()
    await client.ask(bench.hello(client="decoder"))
    async with plane.channel() as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        (store,) = (await stub.ListStores(control_pb2.ListStoresRequest())).stores
        (session,) = (await stub.ListSessions(control_pb2.ListSessionsRequest())).sessions
        stats = await stub.GetStats(control_pb2.GetStatsRequest())
    manifest = bench.stores[0].manifest
    assert (store.digest, store.records, store.sessions) == (manifest.identity_digest, 10, 1)
    assert json.loads(store.identity_json) == manifest.identity
    assert store.path == str(manifest.folder)
    assert [(part.layer, part.set, part.records) for part in store.sections] == [(0, "qkv", 10)]
    assert (session.client, session.uid, session.pid) == ("decoder", os.getuid(), os.getpid())
    assert list(session.stores) == [manifest.identity_digest]
    assert (session.stats.lookups, session.stats.hits) == (10, 4)
    assert [row.index for row in stats.sessions] == [0]


async def test_watch_repeats_and_ends_with_the_service(plane: Plane) -> None:
    async with plane.channel() as channel:
        stream = control_pb2_grpc.ControlStub(channel).WatchStats(control_pb2.WatchStatsRequest(interval_seconds=0.1))
        first, second = await stream.read(), await stream.read()
        assert second.at_seconds > first.at_seconds
        closing = asyncio.create_task(plane.control.close())
        assert not isinstance(await stream.read(), control_pb2.Stats)  # the end of the stream
        await closing


async def test_bad_interval_has_its_bounds_in_a_typed_error(plane: Plane) -> None:
    async with plane.channel() as channel:
        stream = control_pb2_grpc.ControlStub(channel).WatchStats(control_pb2.WatchStatsRequest(interval_seconds=0))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    metadata = dict(cast(Iterable[tuple[str, bytes]], caught.value.trailing_metadata()))
    detail = control_pb2.ErrorDetail.FromString(metadata[ERROR_METADATA])
    assert (detail.subject, detail.found, detail.expected) == ("interval_seconds", "0", "0.1 … 3600")


async def test_calls_are_counted_by_method_and_code_and_only_known_ones(plane: Plane) -> None:
    async with plane.channel() as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        for _ in range(3):
            await stub.GetInfo(control_pb2.GetInfoRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.WatchStats(control_pb2.WatchStatsRequest(interval_seconds=0)).read()
        stream = stub.WatchStats(control_pb2.WatchStatsRequest(interval_seconds=0.1))
        await stream.read()
        stream.cancel()
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(f"/{SERVICE_NAME}/Rubbish", None, None)(b"")
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=""))
    calls, times = plane.control.rpcs.calls, plane.control.rpcs.times
    await until(lambda: calls.total() == 5)
    assert calls == {("GetInfo", "OK"): 3, ("WatchStats", "INVALID_ARGUMENT"): 1, ("WatchStats", "CANCELLED"): 1}
    assert sum(times["GetInfo"].counts) == 3
    assert times.keys() == {"GetInfo"}


async def test_admin_drains_once_and_reads_the_settings(plane: Plane) -> None:
    async with plane.channel() as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        assert (await stub.Drain(control_pb2.DrainRequest())).begun
        assert not (await stub.Drain(control_pb2.DrainRequest())).begun
        config = json.loads((await stub.GetConfig(control_pb2.GetConfigRequest())).config_json)
    assert len(plane.drains) == 2
    assert config["cache"]["weight_bytes"] == 128 << 20


async def test_health_follows_readiness(plane: Plane) -> None:
    status = health_pb2.HealthCheckResponse
    async with plane.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE_NAME):
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == status.NOT_SERVING
        plane.health.move_to("ready")
        await plane.control.show_health()
        for name in ("", SERVICE_NAME):
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == status.SERVING


_READER_PROGRAM = """
import os, sys
import grpc
from strataflux.proto import control_pb2 as p, control_pb2_grpc as g
os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
stub = g.ControlStub(grpc.insecure_channel("unix:" + sys.argv[1]))
info = stub.GetInfo(p.GetInfoRequest())
store = stub.ListStores(p.ListStoresRequest()).stores[0]
print(info.role, repr(store.path))
for call, request in ((stub.Drain, p.DrainRequest()), (stub.GetConfig, p.GetConfigRequest())):
    try:
        call(request)
        print("allowed")
    except grpc.RpcError as error:
        print(error.code().name, p.ErrorDetail.FromString(dict(error.trailing_metadata())["{key}"]).subject)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
async def test_another_user_reads_but_does_not_administer(plane: Plane) -> None:
    plane.path.parent.chmod(0o755)
    plane.path.chmod(0o666)
    program = _READER_PROGRAM.format(nobody=NOBODY, key=ERROR_METADATA)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(plane.path), stdout=subprocess.PIPE, env=dict(os.environ)
    )
    out, _ = await process.communicate()
    assert out.decode().splitlines() == ["reader ''", "PERMISSION_DENIED Drain", "PERMISSION_DENIED GetConfig"]
    assert plane.drains == []
    assert plane.front.connections["reader"] == 1


async def test_connections_beyond_the_bound_are_hung_up_on(plane: Plane) -> None:
    held = []
    for _ in range(16):
        held.append(await asyncio.open_unix_connection(str(plane.path)))
    await until(lambda: plane.front.connections["admin"] == 16)
    extra, writer = await asyncio.open_unix_connection(str(plane.path))
    assert await extra.read() == b""
    assert plane.front.connections["refused"] == 1
    held.pop()[1].close()
    writer.close()
    async with plane.channel() as channel:  # gRPC tries again until a place is free
        info = await control_pb2_grpc.ControlStub(channel).GetInfo(control_pb2.GetInfoRequest(), wait_for_ready=True)
    assert info.role == "admin"
    for _, open_writer in held:
        open_writer.close()


async def test_large_answers_pass_through_a_client_that_reads_slowly(plane: Plane, tmp_path: Path) -> None:
    """Bytes are forwarded unchanged, with no more than a chunk held."""
    blob = os.urandom(3 << 20)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(len(blob)))
        await writer.drain()
        writer.close()

    back, front_path = tmp_path / "back.sock", tmp_path / "front.sock"
    server = await asyncio.start_unix_server(echo, str(back), limit=1 << 16)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(str(front_path))
    listener.listen(4)
    front = ControlFront(listener, {"admin": back, "reader": back})
    await front.start()
    reader, writer = await asyncio.open_unix_connection(str(front_path))
    writer.write(blob)
    await writer.drain()
    assert await reader.readexactly(len(blob)) == blob
    assert await reader.read() == b""
    writer.close()
    await front.close()
    server.close()
