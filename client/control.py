"""Ask a daemon for its state and its numbers, and administer it, over its control socket.

Each call has a deadline a little beyond the daemon's own bound for it, so that of the two the daemon explains itself.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc

from strataflux.client.errors import DaemonUnavailableError, RefusedError
from strataflux.proto import control_pb2, control_pb2_grpc
from strataflux.proto.runtime import CONTROL_SOCKET
from strataflux.proto.store_format import MANIFEST_FILE, StoreManifest

__all__ = ["Control"]

_CALL_SECONDS: Final = 15.0
_CHANGE_SECONDS: Final = 305.0
_IMPORT_SECONDS: Final = 86_405.0
_ERROR_METADATA: Final = "strataflux-error-bin"
_CHUNK_BYTES: Final = 512 * 1024


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
            DaemonUnavailableError: nobody answers. RefusedError: it cannot say, such as while it stops. So all
                questions here.
        """
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

    def add_store(self, name: str, settings: control_pb2.StoreSettings) -> str:
        """Have a store of the daemon's folder of imports served, now and after a restart; its digest.

        Raises:
            RefusedError: it said why not. DaemonUnavailableError: nobody answers.
        """
        request = control_pb2.AddStoreRequest(name=name, settings=settings)
        return str(self._ask(self._stub.AddStore, request, _CHANGE_SECONDS).digest)

    def remove_store(self, store: str, delete_files: bool = False) -> control_pb2.RemoveStoreResponse:
        """Have a store served no more, by its digest, the beginning of it, or its folder's name. Raises as above."""
        request = control_pb2.RemoveStoreRequest(store=store, delete_files=delete_files)
        answer: control_pb2.RemoveStoreResponse = self._ask(self._stub.RemoveStore, request, _CHANGE_SECONDS)
        return answer

    def import_store(
        self,
        source: StoreManifest,
        name: str,
        settings: control_pb2.StoreSettings,
        advance: Callable[[int], object],
    ) -> control_pb2.ImportStoreResponse:
        """Send a store to the daemon, which verifies and serves it. Raises as add_store.

        Args:
            source: the store, as it lies where this process can read it.
            name: of its folder at the daemon's.
            settings: who may use it, and how.
            advance: told how many bytes were sent.
        """
        parts = _parts(source, name, settings, advance)
        answer: control_pb2.ImportStoreResponse = self._ask(self._stub.ImportStore, parts, _IMPORT_SECONDS)
        return answer

    def _ask(self, method: Callable[..., Any], request: object, seconds: float = _CALL_SECONDS) -> Any:
        """Call ``method``.

        Raises:
            RefusedError: the daemon said no, and why. DaemonUnavailableError: nobody answers, or not in time.
        """
        try:
            return method(request, timeout=seconds)
        except grpc.RpcError as error:
            known: dict[str, Any] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]
            if (raw := known.get(_ERROR_METADATA)) is not None:
                detail = control_pb2.ErrorDetail.FromString(raw)
                raise RefusedError(detail.subject, detail.found, detail.expected, detail.remedy) from error
            raise _unavailable(self._path, error.code(), error.details() or "") from error

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _unavailable(path: Path, code: grpc.StatusCode, details: str) -> DaemonUnavailableError:
    found, remedy = f"{code.name}: {details}", "see its log, and whether its process is stopped or overloaded"
    if code is grpc.StatusCode.UNAVAILABLE and (reason := details.rpartition(" error: ")[2]) != details:
        # gRPC names the socket three times before the system's own word.
        found, remedy = reason, "start stratafluxd, or pass its runtime folder"
    return DaemonUnavailableError(path, found, "a stratafluxd that answers", remedy)


def _parts(
    source: StoreManifest, name: str, settings: control_pb2.StoreSettings, advance: Callable[[int], object]
) -> Iterator[control_pb2.ImportStoreRequest]:
    """A store as the messages of an import."""
    files = (source.folder / MANIFEST_FILE, source.checksums_path, source.records_path)
    sizes = [path.stat().st_size for path in files]
    begin = control_pb2.ImportBegin(
        name=name, settings=settings, manifest_bytes=sizes[0], checksums_bytes=sizes[1], records_bytes=sizes[2]
    )
    yield control_pb2.ImportStoreRequest(begin=begin)
    for data in _chunks(files):
        yield control_pb2.ImportStoreRequest(data=data)
        advance(len(data))


def _chunks(files: Iterable[Path]) -> Iterator[bytes]:
    for path in files:
        with path.open("rb") as file:
            while data := file.read(_CHUNK_BYTES):
                yield data
