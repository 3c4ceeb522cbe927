"""Methods of the control plane that change which stores are served; for administrators."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from strataflux.daemon.catalog import Catalog
from strataflux.daemon.config import StoreConfig, resolve_config
from strataflux.daemon.errors import ConfigError, DaemonError, Refusal
from strataflux.daemon.import_store import Announced, Incoming
from strataflux.daemon.store_folder import StoreFolder
from strataflux.proto import control_pb2
from strataflux.proto.errors import ContractError
from strataflux.proto.store_format import StoreManifest

__all__ = ["StoreMethods"]

_IDLE_SECONDS: Final = 30.0


class StoreMethods:
    """What the gRPC methods of these names do. Pairs: an import / its end, one at a time."""

    def __init__(self, catalog: Catalog[Any]) -> None:
        # fixed after construction
        self._catalog = catalog
        # event loop only
        self._importing = False

    async def add(self, request: control_pb2.AddStoreRequest) -> control_pb2.AddStoreResponse:
        """Serve a store of the folder of imports.

        Raises:
            DaemonError, ContractError: by cause.
        """
        path = self._folder().existing(request.name)
        digest = await asyncio.shield(self._catalog.add(_settings(path, request.settings), added=True))
        return control_pb2.AddStoreResponse(digest=digest)

    async def remove(self, request: control_pb2.RemoveStoreRequest) -> control_pb2.RemoveStoreResponse:
        """Serve a store no more.

        Raises:
            NotServed, ConfigError: by cause; nothing was changed. OSError: its files cannot be deleted; it is served no
                more.
        """
        if (absent := self._catalog.absent.get(request.store)) is not None:
            self._require_ours(absent.path, request.delete_files)
            await asyncio.shield(self._catalog.forget(request.store, delete=request.delete_files))
            return control_pb2.RemoveStoreResponse()
        entry = self._catalog.served[self._catalog.find(request.store)]
        self._require_ours(entry.config.path, request.delete_files)
        reason = "an administrator removed the store"
        told = await asyncio.shield(self._catalog.remove(entry, reason, delete=request.delete_files))
        return control_pb2.RemoveStoreResponse(digest=entry.store.manifest.identity_digest, sessions=told)

    async def receive(self, parts: AsyncIterator[Any]) -> control_pb2.ImportStoreResponse:
        """Import a store and serve it.

        Raises:
            DaemonError, ContractError, OSError: by cause; nothing of it is left.
        """
        if self._importing:
            raise Refusal("limit", "imports", "one that is going on", "one at a time", "try again when it has ended")
        self._importing = True
        try:
            return await self._receive(parts)
        finally:
            self._importing = False

    async def _receive(self, parts: AsyncIterator[Any]) -> control_pb2.ImportStoreResponse:
        folder = self._folder()
        begin = (await self._next(parts) or control_pb2.ImportStoreRequest()).begin
        settings = _settings(folder.path_of(begin.name), begin.settings)
        announced = Announced(begin.name, begin.manifest_bytes, begin.checksums_bytes, begin.records_bytes)
        manifest: list[StoreManifest] = []

        def check(found: StoreManifest) -> None:
            self._catalog.refuse_served(found.identity_digest, settings.path)
            manifest.append(found)

        async with Incoming(folder, announced, check) as incoming:
            while (part := await self._next(parts)) is not None:
                if part.WhichOneof("part") != "data":
                    raise ConfigError("part", "another begin", "data", "send one store a call")
                await incoming.write(part.data)
            path = await incoming.finish()
        try:
            digest = await asyncio.shield(self._catalog.add(settings, added=True))
        except (DaemonError, ContractError, OSError):
            await asyncio.shield(self._catalog.discard(path))
            raise
        return control_pb2.ImportStoreResponse(digest=digest, records=manifest[0].record_count)

    async def _next(self, parts: AsyncIterator[Any]) -> Any:
        """The next message; None at the end.

        Raises:
            Refusal: it does not come.
        """
        try:
            async with asyncio.timeout(_IDLE_SECONDS):
                return await anext(parts, None)
        except TimeoutError as error:
            limit = f"the next bytes within {_IDLE_SECONDS:g} s"
            raise Refusal("limit", "import", "a sender that says nothing", limit, "import it again") from error

    def _require_ours(self, path: Path, delete: bool) -> None:
        if delete and not self._folder().holds(path):
            raise ConfigError(
                "delete_files",
                str(path),
                f"a store in {self._folder().path}",
                "remove its files by hand, when it is served no more",
            )

    def _folder(self) -> StoreFolder:
        if self._catalog.folder is None:
            raise Refusal(
                "unsupported", "imports", "no folder for them", "one", "set imports.folder and restart stratafluxd"
            )
        return self._catalog.folder


def _settings(path: Path, asked: control_pb2.StoreSettings) -> StoreConfig:
    """What the request asks for, as the configuration would have it.

    Raises:
        ConfigError: a share that is none.
    """
    table: dict[str, Any] = {"path": str(path), "preload": asked.preload, "share": asked.share or "all"}
    if asked.HasField("allow"):
        table["allow_uids"], table["allow_groups"] = list(asked.allow.uids), list(asked.allow.groups)
    return resolve_config({"store": [table]}, "request").stores[0]
