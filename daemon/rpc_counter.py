"""Calls of the control plane, counted by method and code, unary ones timed. Event loop only; read from any thread."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio

__all__ = ["RPC_BOUNDS_SECONDS", "RpcCounter", "RpcTimes"]

RPC_BOUNDS_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


@dataclass
class RpcTimes:
    """Durations of one method's calls: counts by bucket, one more than bounds, and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(RPC_BOUNDS_SECONDS) + 1))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one call."""
        self.counts[sum(seconds > bound for bound in RPC_BOUNDS_SECONDS)] += 1
        self.seconds += seconds


class RpcCounter(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Wraps the methods of one service; others, and names that do not exist, are not counted: labels stay bounded."""

    def __init__(self, service: str) -> None:
        # fixed after construction
        self._prefix = f"/{service}/"
        # event loop only
        self.calls: Counter[tuple[str, str]] = Counter()
        self.times: dict[str, RpcTimes] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """As gRPC asks: the handler, with a count around it."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return handler
        name = handler_call_details.method.removeprefix(self._prefix)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._streaming(name, handler.unary_stream), handler.request_deserializer, handler.response_serializer
            )
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(
                self._unary(name, handler.stream_unary), handler.request_deserializer, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(name, handler.unary_unary), handler.request_deserializer, handler.response_serializer
        )

    def _unary(self, name: str, method: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def counted(request: Any, context: Any) -> Any:
            begun = time.perf_counter()
            code = "CANCELLED"
            try:
                answer = await method(request, context)
                code = "OK"
            except Exception:
                code = _code(context)
                raise
            finally:
                self.calls[name, code] += 1
                self.times.setdefault(name, RpcTimes()).add(time.perf_counter() - begun)
            return answer

        return counted

    def _streaming(
        self, name: str, method: Callable[[Any, Any], AsyncIterator[Any]]
    ) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def counted(request: Any, context: Any) -> AsyncIterator[Any]:
            code = "CANCELLED"
            try:
                async for answer in method(request, context):
                    yield answer
                code = "OK"
            except Exception:
                code = _code(context)
                raise
            finally:
                self.calls[name, code] += 1

        return counted


def _code(context: Any) -> str:
    """The status that the method set before it raised; UNKNOWN is what gRPC tells when there is none."""
    found = context.code()
    return found.name if isinstance(found, grpc.StatusCode) and found is not grpc.StatusCode.OK else "UNKNOWN"
