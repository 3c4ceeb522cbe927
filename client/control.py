"""Ask a daemon for its numbers, over its control socket."""

from pathlib import Path
from types import TracebackType
from typing import Final, Self

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
        """All numbers of the data path now.

        Raises:
            DaemonUnavailableError: nobody answers.
        """
        try:
            answer: control_pb2.Stats = self._stub.GetStats(control_pb2.GetStatsRequest(), timeout=_CALL_SECONDS)
        except grpc.RpcError as error:
            found = f"{error.code().name}: {error.details()}"
            raise DaemonUnavailableError(
                self._path, found, "a stratafluxd that answers", "see the log of the service"
            ) from error
        return answer

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
