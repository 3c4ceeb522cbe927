"""Ask a daemon for its state and its numbers, over its control socket."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc

from strataflux.client.errors import DaemonUnavailableError
from strataflux.proto import control_pb2, control_pb2_grpc
from strataflux.proto.runtime import CONTROL_SOCKET

__all__ = ["Control"]

_CALL_SECONDS: Final = 30.0


class Control:
    """A connection to the control plane of the daemon in ``runtime_dir``. Pairs: construction / :meth:`close`."""

    def __init__(self, runtime_dir: Path) -> None:
        """Connect at the first call."""
        # fixed after construction
        self._path = runtime_dir / CONTROL_SOCKET
        self._channel = grpc.insecure_channel(f"unix:{self._path}")
        self._stub = control_pb2_grpc.ControlStub(self._channel)

    def stats(self) -> control_pb2.Stats:
        """All numbers of the data path now. Raises DaemonUnavailableError, as every question here."""
        answer: control_pb2.Stats = self._ask(self._stub.GetStats, control_pb2.GetStatsRequest())
        return answer

    def info(self) -> control_pb2.GetInfoResponse:
        """Who answers, and in which state."""
        answer: control_pb2.GetInfoResponse = self._ask(self._stub.GetInfo, control_pb2.GetInfoRequest())
        return answer

    def stores(self) -> list[control_pb2.Store]:
        """The stores that are served; their paths only for administrators."""
        return list(self._ask(self._stub.ListStores, control_pb2.ListStoresRequest()).stores)

    def sessions(self) -> list[control_pb2.Session]:
        """The sessions that live."""
        return list(self._ask(self._stub.ListSessions, control_pb2.ListSessionsRequest()).sessions)

    def _ask(self, method: Callable[..., Any], request: object) -> Any:
        """Call ``method``.

        Raises:
            DaemonUnavailableError: nobody answers.
        """
        try:
            return method(request, timeout=_CALL_SECONDS)
        except grpc.RpcError as error:
            found = f"{error.code().name}: {error.details()}"
            raise DaemonUnavailableError(
                self._path, found, "a stratafluxd that answers", "run strataflux doctor, or see the log of the service"
            ) from error

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
