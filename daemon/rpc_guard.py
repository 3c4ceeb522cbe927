"""What stands around every method of the control plane: who may call it, how long it may take, what its errors become.

A call has the deadline of its caller or that of :data:`METHODS`, whichever is nearer. Methods of other services (health
checks) have the bounds of reading ones.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from strataflux.daemon.access import ADMIN
from strataflux.daemon.errors import DaemonError
from strataflux.daemon.rpc_errors import abort, explain
from strataflux.proto.errors import ContractError

__all__ = ["METHODS", "Method", "RpcGuard"]

_LOG: Final = logging.getLogger(__name__)

_Unary = Callable[[Any, Any], Awaitable[Any]]
_Streaming = Callable[[Any, Any], AsyncIterator[Any]]


@dataclass(frozen=True)
class Method:
    """A method's bound, and whether only administrators may call it."""

    seconds: float
    admin: bool = False


METHODS: Final = {
    "GetInfo": Method(10),
    "ListStores": Method(10),
    "ListSessions": Method(10),
    "GetStats": Method(10),
    "WatchStats": Method(3600),
    "GetConfig": Method(10, admin=True),
    "Drain": Method(10, admin=True),
    "AddStore": Method(300, admin=True),
    "RemoveStore": Method(300, admin=True),
    "ImportStore": Method(86_400, admin=True),
}
_OTHER_UNARY: Final = Method(10)
_OTHER_STREAM: Final = Method(3600)


class RpcGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Wraps all methods of one server. ``role`` is that of everybody who reaches it."""

    def __init__(self, service: str, role: str) -> None:
        # fixed after construction
        self._prefix = f"/{service}/"
        self._role = role

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """As gRPC asks: the handler, guarded."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        name = handler_call_details.method
        bounds = _OTHER_STREAM if handler.response_streaming else _OTHER_UNARY
        if name.startswith(self._prefix):
            name = name.removeprefix(self._prefix)
            bounds = METHODS[name]
        codecs = (handler.request_deserializer, handler.response_serializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(self._streaming(name, bounds, handler.unary_stream), *codecs)
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(self._unary(name, bounds, handler.stream_unary), *codecs)
        return grpc.unary_unary_rpc_method_handler(self._unary(name, bounds, handler.unary_unary), *codecs)

    def _unary(self, name: str, bounds: Method, method: _Unary) -> _Unary:
        async def guarded(request: Any, context: Any) -> Any:
            await self._admit(context, name, bounds)
            try:
                async with asyncio.timeout(bounds.seconds):
                    return await method(request, context)
            except Exception as error:
                await _end(context, name, bounds, error)

        return guarded

    def _streaming(self, name: str, bounds: Method, method: _Streaming) -> _Streaming:
        async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._admit(context, name, bounds)
            answers = method(request, context)
            try:
                async with asyncio.timeout(bounds.seconds):
                    async for answer in answers:
                        yield answer
            except Exception as error:
                await _end(context, name, bounds, error)

        return guarded

    async def _admit(self, context: Any, name: str, bounds: Method) -> None:
        if bounds.admin and self._role != ADMIN:
            code, expected = grpc.StatusCode.PERMISSION_DENIED, f"root or the service's own user (uid {os.geteuid()})"
            await abort(context, code, name, "a caller who may only read", expected, "call it as that user")


async def _end(context: Any, name: str, bounds: Method, error: Exception) -> None:
    """End a call for what its method raised."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, TimeoutError):
        found, limit = "no end of it so far", f"at most {bounds.seconds:g} s"
        await abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, name, found, limit, "see the log; call again")
    if not isinstance(error, DaemonError | ContractError | OSError):
        _LOG.error("control: %s failed", name, exc_info=error)
    await explain(context, name, error)
