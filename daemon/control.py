"""gRPC methods of the control plane, and the two private servers that speak them.

Which methods exist depends on the server: administrators' is :class:`AdminMethods`; the readers' is its base, where an
admin method is only a refusal. What chooses between them is :mod:`strataflux.daemon.front`, since gRPC cannot see a
Unix peer's credentials. Errors of ours become gRPC statuses here and nowhere else.
"""

# ruff: noqa: ARG002, N802 – gRPC names the methods, and passes both arguments whether they are of use or not

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from strataflux.daemon.access import ADMIN, READER
from strataflux.daemon.attach import AttachServer
from strataflux.daemon.config import Config
from strataflux.daemon.errors import RuntimeFolderError
from strataflux.daemon.health import Health
from strataflux.daemon.interface import Reader, ServedStore
from strataflux.daemon.rpc_counter import RpcCounter
from strataflux.proto import control_pb2, control_pb2_grpc, layout
from strataflux.proto.store_format import canonical_json

__all__ = ["ERROR_METADATA", "SERVICE_NAME", "AdminMethods", "ControlPlane", "ReaderMethods", "Service"]

ERROR_METADATA: Final = "strataflux-error-bin"
SERVICE_NAME: Final = "strataflux.control.v1.Control"

_OPTIONS: Final = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 * 1024))
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
    stores: Sequence[ServedStore]
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
        )

    async def ListStores(
        self, request: control_pb2.ListStoresRequest, context: _Context
    ) -> control_pb2.ListStoresResponse:
        """The served stores, in the order of their indices."""
        rows = self._stats().stores
        clients = self._service.attach.clients
        stores = []
        for index, store in enumerate(self._service.stores):
            manifest = store.manifest
            stores.append(
                control_pb2.Store(
                    digest=manifest.identity_digest,
                    identity_json=canonical_json(manifest.identity).decode(),
                    generation=manifest.generation,
                    records=manifest.record_count,
                    bytes=manifest.records_bytes,
                    preload=store.preload,
                    share=self._service.config().stores[index].share,
                    sessions=sum(index in client.stores for client in clients),
                    path=str(manifest.folder) if self.role == ADMIN else "",
                    stats=rows[index] if index < len(rows) else None,
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
        digests = [store.manifest.identity_digest for store in self._service.stores]
        sessions = [
            control_pb2.Session(
                session=client.session_id,
                client=client.client,
                uid=client.peer.uid,
                pid=client.peer.pid,
                stores=[digests[index] for index in client.stores],
                stats=rows.get(client.index),
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
            await _abort(
                context,
                grpc.StatusCode.INVALID_ARGUMENT,
                "interval_seconds",
                f"{request.interval_seconds:g}",
                f"{shortest:g} … {longest:g}",
                "ask for another interval",
            )
        while not self._stopping.is_set():
            yield self._stats()
            try:
                await asyncio.wait_for(self._stopping.wait(), request.interval_seconds)
            except TimeoutError:
                continue

    async def GetConfig(
        self, request: control_pb2.GetConfigRequest, context: _Context
    ) -> control_pb2.GetConfigResponse:
        """Administrators only."""
        await self._deny(context, "GetConfig")

    async def Drain(self, request: control_pb2.DrainRequest, context: _Context) -> control_pb2.DrainResponse:
        """Administrators only."""
        await self._deny(context, "Drain")

    def _stats(self) -> control_pb2.Stats:
        message: control_pb2.Stats = _message(
            control_pb2.Stats, self._service.reader.snapshot(), at_seconds=time.monotonic()
        )
        return message

    async def _deny(self, context: _Context, method: str) -> NoReturn:
        expected = f"root or the service's own user (uid {os.geteuid()})"
        code = grpc.StatusCode.PERMISSION_DENIED
        await _abort(context, code, method, "a caller who may only read", expected, "call it as that user")


class AdminMethods(ReaderMethods):
    """What root and the service's own user may ask."""

    role = ADMIN

    async def GetConfig(
        self, request: control_pb2.GetConfigRequest, context: _Context
    ) -> control_pb2.GetConfigResponse:
        """The settings in force, defaults included."""
        settings = dataclasses.asdict(self._service.config())
        return control_pb2.GetConfigResponse(config_json=json.dumps(settings, default=str))

    async def Drain(self, request: control_pb2.DrainRequest, context: _Context) -> control_pb2.DrainResponse:
        """Stop as the first SIGTERM does."""
        return control_pb2.DrainResponse(begun=self._service.begin_drain())


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
            server = grpc.aio.server(interceptors=(self.rpcs,), options=_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS)
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


async def _abort(
    context: _Context, code: grpc.StatusCode, subject: str, found: str, expected: str, remedy: str
) -> NoReturn:
    detail = control_pb2.ErrorDetail(subject=subject, found=found, expected=expected, remedy=remedy)
    text = f"{subject}: found {found}; expected {expected}; {remedy}"
    await context.abort(code, text, trailing_metadata=((ERROR_METADATA, detail.SerializeToString()),))
    raise AssertionError("abort returned")
