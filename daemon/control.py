"""gRPC methods of the control plane, and the two private servers that speak them.

Which methods exist depends on the server: administrators' is :class:`AdminMethods`; the readers' is its base. What
chooses between them is :mod:`strataflux.daemon.front`, since gRPC cannot see a Unix peer's credentials; who may call
what, for how long, and what errors become is :mod:`strataflux.daemon.rpc_guard`'s.
"""

# ruff: noqa: ARG002, N802 – gRPC names the methods, and passes both arguments whether they are of use or not

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from strataflux.daemon.access import ADMIN, READER
from strataflux.daemon.attach import AttachServer
from strataflux.daemon.catalog import Catalog
from strataflux.daemon.config import Config
from strataflux.daemon.control_stores import StoreMethods
from strataflux.daemon.errors import ConfigError, RuntimeFolderError
from strataflux.daemon.health import Health
from strataflux.daemon.import_store import CHUNK_MAX_BYTES
from strataflux.daemon.interface import Reader
from strataflux.daemon.rpc_counter import RpcCounter
from strataflux.daemon.rpc_guard import RpcGuard
from strataflux.proto import control_pb2, control_pb2_grpc, layout
from strataflux.proto.store_format import canonical_json

__all__ = ["SERVICE_NAME", "AdminMethods", "ControlPlane", "ReaderMethods", "Service"]

SERVICE_NAME: Final = "strataflux.control.v1.Control"

_MESSAGE_BYTES: Final = {READER: 64 * 1024, ADMIN: CHUNK_MAX_BYTES + 64 * 1024}
_MAX_CALLS: Final = 64
_INTERVAL_SECONDS: Final = (0.1, 3600.0)

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class Service:
    """What the methods speak about."""

    version: str
    config: Callable[[], Config]
    """What is in force now."""
    reader: Reader
    catalog: Catalog[Any]
    attach: AttachServer
    health: Health
    begin_drain: Callable[[], bool]
    """Begin as the first SIGTERM does; False when that was done already."""


class ReaderMethods(control_pb2_grpc.ControlServicer):
    """What everybody in reach of the socket may ask."""

    role = READER

    def __init__(self, service: Service, stopping: asyncio.Event) -> None:
        # fixed after construction
        self._service = service
        self._stopping = stopping
        self._started = time.monotonic()

    async def GetInfo(self, request: control_pb2.GetInfoRequest, context: _Context) -> control_pb2.GetInfoResponse:
        """Who answers, and in which state."""
        service, reader = self._service, self._service.reader
        return control_pb2.GetInfoResponse(
            version=service.version,
            generation=reader.generation,
            pid=os.getpid(),
            state=service.health.state,
            degraded={**service.health.reasons, **service.health.obstacles},
            engine=reader.engine,
            direct_io=reader.direct_io,
            registered_buffers=reader.registered_buffers,
            setup_flags=reader.setup_flags,
            uptime_seconds=time.monotonic() - self._started,
            layout_version=layout.LAYOUT_VERSION,
            role=self.role,
            policy=reader.policy,
        )

    async def ListStores(
        self, request: control_pb2.ListStoresRequest, context: _Context
    ) -> control_pb2.ListStoresResponse:
        """The served stores, in the order of their indices."""
        rows = {row.index: row for row in self._stats().stores}
        clients = self._service.attach.clients
        stores = []
        for index, entry in sorted(self._service.catalog.served.items()):
            manifest = entry.store.manifest
            stores.append(
                control_pb2.Store(
                    digest=manifest.identity_digest,
                    identity_json=canonical_json(manifest.identity).decode(),
                    generation=manifest.generation,
                    records=manifest.record_count,
                    bytes=manifest.records_bytes,
                    preload=entry.store.preload,
                    share=entry.config.share,
                    sessions=sum(index in client.stores for client in clients),
                    path=str(manifest.folder) if self.role == ADMIN else "",
                    stats=rows.get(index),
                    sections=[
                        control_pb2.Section(layer=part.layer, set=part.set, records=part.count)
                        for part in manifest.sections
                    ],
                )
            )
        return control_pb2.ListStoresResponse(stores=stores)

    async def ListSessions(
        self, request: control_pb2.ListSessionsRequest, context: _Context
    ) -> control_pb2.ListSessionsResponse:
        """The sessions that live."""
        rows = {row.index: row for row in self._stats().sessions}
        served = self._service.catalog.served.items()
        digests = {index: entry.store.manifest.identity_digest for index, entry in served}
        sessions = [
            control_pb2.Session(
                session=client.session_id,
                client=client.client,
                uid=client.peer.uid,
                pid=client.peer.pid,
                stores=[digests.get(index, "") for index in client.stores],
                stats=rows.get(client.index),
                tenant=client.tenant,
            )
            for client in self._service.attach.clients
        ]
        return control_pb2.ListSessionsResponse(sessions=sessions)

    async def GetStats(self, request: control_pb2.GetStatsRequest, context: _Context) -> control_pb2.Stats:
        """All numbers at one moment."""
        return self._stats()

    async def WatchStats(
        self, request: control_pb2.WatchStatsRequest, context: _Context
    ) -> AsyncIterator[control_pb2.Stats]:
        """The same at an interval, until the client cancels or the service stops."""
        shortest, longest = _INTERVAL_SECONDS
        if not shortest <= request.interval_seconds <= longest:
            found, limit = f"{request.interval_seconds:g}", f"{shortest:g} … {longest:g}"
            raise ConfigError("interval_seconds", found, limit, "ask for another interval")
        while not self._stopping.is_set():
            yield self._stats()
            try:
                await asyncio.wait_for(self._stopping.wait(), request.interval_seconds)
            except TimeoutError:
                continue

    def _stats(self) -> control_pb2.Stats:
        message: control_pb2.Stats = _message(
            control_pb2.Stats, self._service.reader.snapshot(), at_seconds=time.monotonic()
        )
        return message


class AdminMethods(ReaderMethods):
    """What root and the service's own user may ask."""

    role = ADMIN

    def __init__(self, service: Service, stopping: asyncio.Event) -> None:
        super().__init__(service, stopping)
        # fixed after construction
        self._stores = StoreMethods(service.catalog)

    async def GetConfig(
        self, request: control_pb2.GetConfigRequest, context: _Context
    ) -> control_pb2.GetConfigResponse:
        """The settings in force, defaults included."""
        settings = dataclasses.asdict(self._service.config())
        return control_pb2.GetConfigResponse(config_json=json.dumps(settings, default=str))

    async def Drain(self, request: control_pb2.DrainRequest, context: _Context) -> control_pb2.DrainResponse:
        """Stop as the first SIGTERM does."""
        return control_pb2.DrainResponse(begun=self._service.begin_drain())

    async def AddStore(self, request: control_pb2.AddStoreRequest, context: _Context) -> control_pb2.AddStoreResponse:
        """Serve one more store."""
        return await self._stores.add(request)

    async def RemoveStore(
        self, request: control_pb2.RemoveStoreRequest, context: _Context
    ) -> control_pb2.RemoveStoreResponse:
        """Serve a store no more."""
        return await self._stores.remove(request)

    async def ImportStore(
        self, request_iterator: AsyncIterator[control_pb2.ImportStoreRequest], context: _Context
    ) -> control_pb2.ImportStoreResponse:
        """Receive a store and serve it."""
        return await self._stores.receive(request_iterator)


class ControlPlane:
    """The two servers. Pairs: ``start`` / ``close``. Event loop only."""

    def __init__(self, service: Service, folder: Path) -> None:
        # fixed after construction
        self.addresses = {READER: folder / "reader.sock", ADMIN: folder / "admin.sock"}
        self._service = service
        self._stopping = asyncio.Event()
        self.rpcs = RpcCounter(SERVICE_NAME)
        # event loop only
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._servers: list[grpc.aio.Server] = []

    async def start(self) -> None:
        """Serve both roles on their private sockets.

        Raises:
            RuntimeFolderError: a socket cannot be bound.
        """
        for methods in (ReaderMethods(self._service, self._stopping), AdminMethods(self._service, self._stopping)):
            guard = RpcGuard(SERVICE_NAME, methods.role)
            server = grpc.aio.server(
                interceptors=(self.rpcs, guard),
                options=(
                    ("grpc.so_reuseport", 0),
                    ("grpc.max_receive_message_length", _MESSAGE_BYTES[methods.role]),
                ),
                maximum_concurrent_rpcs=_MAX_CALLS,
            )
            control_pb2_grpc.add_ControlServicer_to_server(methods, server)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
            path = self.addresses[methods.role]
            try:
                server.add_insecure_port(f"unix:{path}")
            except RuntimeError as error:
                remedy = "choose a shorter --runtime-dir"
                raise RuntimeFolderError(path, f"no socket ({error})", "a socket to serve gRPC on", remedy) from error
            await server.start()
            self._servers.append(server)
        await self.show_health()

    async def show_health(self) -> None:
        """Answer health checks as the state is now: serving when ready, degraded or not."""
        status = health_pb2.HealthCheckResponse
        shown = status.SERVING if self._service.health.ready else status.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, shown)

    async def close(self) -> None:
        """End streams, let unary calls finish, then stop. Idempotent."""
        self._stopping.set()
        await self._health.enter_graceful_shutdown()
        for server in self._servers:
            await server.stop(grace=0.2)
        self._servers.clear()


def _message(kind: type[Any], value: Any, **more: Any) -> Any:
    """A dataclass as the message whose fields have its names, nested ones included."""
    body = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return kind(**body, **more)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
