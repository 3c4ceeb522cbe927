"""Around every method: who may call it, how long it takes at most, and what its errors become."""

# ruff: noqa: N802 – gRPC names the methods

import asyncio
import errno
import inspect
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from strataflux.daemon import errors, rpc_guard
from strataflux.daemon.access import ADMIN, READER
from strataflux.daemon.rpc_errors import BY_CODE, BY_TYPE, ERROR_METADATA, status_of
from strataflux.daemon.rpc_guard import METHODS, Method, RpcGuard
from strataflux.proto import control_pb2, control_pb2_grpc
from strataflux.proto import errors as contracts
from strataflux.proto.messages import REFUSALS

SERVICE = "strataflux.control.v1.Control"
EVERY = control_pb2.DESCRIPTOR.services_by_name["Control"].methods_by_name


def test_every_method_has_its_bound_and_role() -> None:
    assert METHODS.keys() == set(EVERY)
    assert all(method.seconds > 0 for method in METHODS.values())
    assert {name for name, method in METHODS.items() if not method.admin} == {
        *("GetInfo", "ListStores", "ListSessions", "GetStats", "WatchStats")
    }


def test_every_error_has_its_status() -> None:
    assert BY_CODE.keys() >= REFUSALS
    four = ("subject", "found", "expected", "remedy")
    for kind in BY_TYPE:
        assert status_of(kind(*four)) is BY_TYPE[kind]
    for code, status in BY_CODE.items():
        assert status_of(errors.Refusal(code, *four)) is status
    assert status_of(OSError(errno.ENOSPC, "full")) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert status_of(OSError(errno.EIO, "broken")) is grpc.StatusCode.INTERNAL
    assert status_of(ValueError("a fault of ours")) is grpc.StatusCode.INTERNAL
    leaves = [kind for kind in vars(contracts).values() if inspect.isclass(kind) and kind.__name__.startswith("Store")]
    assert {kind for kind in leaves if kind is not contracts.StoreError} <= BY_TYPE.keys()


class Methods(control_pb2_grpc.ControlServicer):
    """Methods that do what the test wants."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.gone = asyncio.Event()

    async def GetInfo(self, request: Any, context: Any) -> Any:
        self.called.append("GetInfo")
        raise RuntimeError("a fault of ours")

    async def GetStats(self, request: Any, context: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            self.gone.set()

    async def WatchStats(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield control_pb2.Stats()
        await asyncio.Event().wait()

    async def ImportStore(self, request_iterator: Any, context: Any) -> Any:
        self.called.append("ImportStore")
        raise contracts.StoreCorrupt("store", "damage", "none", "another")

    async def Drain(self, request: Any, context: Any) -> Any:
        self.called.append("Drain")
        return control_pb2.DrainResponse(begun=True)


class Served:
    def __init__(self, methods: Methods, channel: grpc.aio.Channel) -> None:
        self.methods = methods
        self.channel = channel
        self.stub = control_pb2_grpc.ControlStub(channel)

    async def refused(self, call: Any) -> tuple[grpc.StatusCode, control_pb2.ErrorDetail]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        metadata = dict(cast(Iterable[tuple[str, bytes]], caught.value.trailing_metadata()))
        return caught.value.code(), control_pb2.ErrorDetail.FromString(metadata[ERROR_METADATA])


@pytest.fixture(params=[ADMIN, READER])
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    methods = Methods()
    server = grpc.aio.server(interceptors=(RpcGuard(SERVICE, request.param),))
    control_pb2_grpc.add_ControlServicer_to_server(methods, server)
    server.add_insecure_port(f"unix:{tmp_path / 's.sock'}")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 's.sock'}") as channel:
        yield Served(methods, channel)
    await server.stop(None)


async def test_administrators_methods_are_theirs(served: Served, request: pytest.FixtureRequest) -> None:
    role = request.node.callspec.params["served"]
    if role == ADMIN:
        assert (await served.stub.Drain(control_pb2.DrainRequest())).begun
        code, detail = await served.refused(served.stub.ImportStore(iter([control_pb2.ImportStoreRequest()])))
        assert (code, detail.found, detail.remedy) == (grpc.StatusCode.DATA_LOSS, "damage", "another")
        return
    for call in (
        served.stub.Drain(control_pb2.DrainRequest()),
        served.stub.ImportStore(iter([control_pb2.ImportStoreRequest()])),
    ):
        code, detail = await served.refused(call)
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert detail.found == "a caller who may only read"
    assert served.methods.called == []


async def test_a_method_that_does_not_end_is_ended(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GetStats", "WatchStats"):
        monkeypatch.setitem(rpc_guard.METHODS, name, Method(0.05))
    code, detail = await served.refused(served.stub.GetStats(control_pb2.GetStatsRequest()))
    assert (code, detail.subject) == (grpc.StatusCode.DEADLINE_EXCEEDED, "GetStats")
    assert "0.05 s" in detail.expected
    assert served.methods.gone.is_set()
    stream = served.stub.WatchStats(control_pb2.WatchStatsRequest())
    assert isinstance(await stream.read(), control_pb2.Stats)
    code, detail = await served.refused(stream.read())
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_callers_nearer_deadline_holds(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.GetStats(control_pb2.GetStatsRequest(), timeout=0.05)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(60):
        await served.methods.gone.wait()


async def test_a_fault_of_ours_is_typed_and_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    code, detail = await served.refused(served.stub.GetInfo(control_pb2.GetInfoRequest()))
    assert (code, detail.found) == (grpc.StatusCode.INTERNAL, "RuntimeError: a fault of ours")
    assert "GetInfo failed" in caplog.text


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_nothing_is_reflected(served: Served, version: str) -> None:
    """To nobody: the schema is in docs/CONTROL.md and the package."""
    name = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    call = served.channel.stream_stream(name, None, None)(iter([b""]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def rows(text: str, columns: int) -> list[list[str]]:
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line] for line in lines if len(line) == columns]


def test_the_documentation_says_the_same() -> None:
    text = (Path(__file__).parents[3] / "docs/CONTROL.md").read_text()
    roles = {True: "admin", False: "reader"}
    told = [row[:3] for row in rows(text, 4)[1:]]
    assert told == [[name, roles[method.admin], f"{method.seconds:g}"] for name, method in METHODS.items()]
    errors_told = dict(rows(text, 2)[1:])
    by_type = {kind.__name__: status.name for kind, status in BY_TYPE.items()}
    by_code = {f"Refusal `{code}`": status.name for code, status in BY_CODE.items()}
    assert {name.split(" (")[0]: status for name, status in errors_told.items()}.items() >= (by_type | by_code).items()
