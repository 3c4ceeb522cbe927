"""The catalogue of served stores, and its changes while the service runs: added, removed, followed to a new generation.

One change at a time. ``served`` is replaced as a whole, never altered, so any thread may walk the one it got. A store
that is removed is refused to new sessions first; those it has are told to attach again, which drops its records and
fences them, and only when the last has gone the reader lets go of it. Event loop only, but for
:meth:`Catalog.open_all`.
"""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Generic, TypeVar

from strataflux.daemon.attach import AttachServer
from strataflux.daemon.config import Config, StoreConfig
from strataflux.daemon.errors import AlreadyServed, ConfigError, DaemonError, NotServed
from strataflux.daemon.interface import Reader, ServedStore
from strataflux.daemon.served import Served
from strataflux.daemon.store_folder import StoreFolder
from strataflux.proto.errors import ContractError
from strataflux.proto.store_format import open_store

__all__ = ["Catalog"]

_LOG: Final = logging.getLogger(__name__)
_POLL_SECONDS: Final = 0.005

S = TypeVar("S", bound=ServedStore)


class Catalog(Generic[S]):
    """Pairs: :meth:`add` / :meth:`remove`. ``open_all``, then ``begin``, then everything else."""

    def __init__(self, open_stores: Callable[[Config], Sequence[S]], folder: StoreFolder | None) -> None:
        # fixed after construction
        self._open_stores = open_stores
        self.folder = folder
        # fixed after begin
        self._reader: Reader
        self._attach: AttachServer
        self._config: Callable[[], Config]
        self._changed: Callable[[], None]
        # event loop only; read by any thread
        self.served: dict[int, Served[S]] = {}
        self.absent: dict[str, StoreConfig] = {}
        """Added stores that could not be opened, by their folders' names: tried again by each reload."""
        self._lock = asyncio.Lock()

    def open_all(self, config: Config) -> list[S]:
        """Open the stores of the configuration, all or none, and those that were added before, as far as they can be.

        Raises:
            ConfigError, StoreError, DirectIoUnavailable: of the configuration's first that cannot be served.
        """
        added: tuple[StoreConfig, ...] = ()
        if self.folder is not None:
            self.folder.sweep()
            added = self.folder.load_added()
        stores = list(self._open_stores(config))
        entries = [Served(store, settings) for store, settings in zip(stores, config.stores, strict=True)]
        paths = {settings.path for settings in config.stores}
        for settings in added:
            if settings.path in paths:
                continue
            try:
                (store,) = self._open_stores(replace(config, stores=(settings,)))
            except (DaemonError, ContractError, OSError) as error:
                _LOG.error("%s was added and cannot be served: %s", settings.path, error)
                self.absent[settings.path.name] = settings
                continue
            entries.append(Served(store, settings, added=True))
        self.served = dict(enumerate(entries))
        return [entry.store for entry in entries]

    def begin(
        self, reader: Reader, attach: AttachServer, config: Callable[[], Config], changed: Callable[[], None]
    ) -> None:
        """Changes are possible from now on; ``changed`` is called after each, before anybody is told."""
        self._reader, self._attach, self._config, self._changed = reader, attach, config, changed

    def find(self, name: str) -> int:
        """Index of the store of that digest, unique beginning of a digest, or folder's name.

        Raises:
            NotServed: none, or more than one.
        """
        found = [
            index
            for index, entry in self.served.items()
            if entry.config.path.name == name or (name and entry.store.manifest.identity_digest.startswith(name))
        ]
        if len(found) != 1:
            raise NotServed(
                "store", f"{len(found)} that {name[:100]!a} names", "one", "give its digest as `strataflux stores` does"
            )
        return found[0]

    def refuse_served(self, digest: str, path: Path) -> None:
        """Whether a store could be added.

        Raises:
            AlreadyServed: it is, from this folder or another.
        """
        for entry in self.served.values():
            if entry.store.manifest.identity_digest == digest or entry.config.path == path:
                served = f"store {entry.store.manifest.identity_digest[:12]}… in {entry.config.path}"
                raise AlreadyServed(path, served, "a store that is not served yet", "remove that one first")

    async def add(self, settings: StoreConfig, *, added: bool) -> str:
        """Serve one more store, whose identity digest is returned.

        Raises:
            AlreadyServed: it is. StoreError, DirectIoUnavailable, Refusal: it cannot be served. OSError: it cannot be
                remembered. Nothing was changed.
        """
        async with self._lock:
            absent = self.absent.copy()
            digest = await self._add(settings, added=added)
            if added:
                try:
                    await self._save()
                except OSError:  # a restart would not serve it, and whoever asked is told that it is not
                    await self._remove(self._index_of(settings.path), "it could not be remembered")
                    self.absent = absent
                    raise
            return digest

    async def remove(self, entry: Served[S], reason: str, *, delete: bool = False) -> int:
        """Serve a store no more, and delete its files if told to; how many sessions were told to attach again.

        Raises:
            NotServed: it is not served any more, whoever has its index by now. OSError: it is served no more, but that
                cannot be remembered, or its files cannot be deleted.
        """
        async with self._lock:
            index = next((index for index, other in self.served.items() if other is entry), None)
            if index is None:
                raise NotServed(
                    entry.config.path, "one that was just removed", "a served store", "nothing is left to do"
                )
            told = await self._remove(index, reason)
            doomed = await self._leave(entry.config.path if delete else None, save=entry.added)
        await _delete(doomed)
        return told

    async def forget(self, name: str, *, delete: bool = False) -> None:
        """An added store that could not be opened need not be looked for any more.

        Raises:
            NotServed: it was opened or forgotten meanwhile. OSError: that cannot be remembered, and it is looked for
                still; or what is left of its files cannot be deleted.
        """
        async with self._lock:
            before = self.absent.copy()
            settings = self.absent.pop(name, None)
            if settings is None:
                raise NotServed(name, "one that came or went just now", "an absent store", "see `strataflux stores`")
            try:
                doomed = await self._leave(settings.path if delete else None, save=True)
            except OSError:
                self.absent = before
                raise
        await _delete(doomed)

    async def discard(self, path: Path) -> None:
        """Delete what was imported and cannot be served, unless somebody else has it served by now.

        Raises:
            OSError: it cannot be deleted.
        """
        doomed = None
        async with self._lock:
            if all(entry.config.path != path for entry in self.served.values()):
                doomed = await self._hide(path)
        await _delete(doomed)

    async def add_all(self, wanted: Sequence[StoreConfig]) -> None:
        """Serve those stores of a configuration that was read again which are not served yet, all or none.

        Raises:
            DaemonError, ContractError, OSError: of the first that cannot be served.
        """
        async with self._lock:
            held = {entry.config.path for entry in self.served.values()}
            come: list[Path] = []
            try:
                for settings in wanted:
                    if settings.path not in held:
                        await self._add(settings, added=False)
                        come.append(settings.path)
            except (DaemonError, ContractError, OSError):
                for path in come:
                    await self._remove(self._index_of(path), "the configuration was not taken")
                raise

    async def follow(self, wanted: Sequence[StoreConfig]) -> list[str]:
        """Let go of what the configuration names no more, take newer generations of the rest, and look for what was
        absent; what of its settings waits for a restart.

        Raises:
            DaemonError, ContractError, OSError: of the first whose files are not as they should be; it is served as it
                was, and the others are up to date.
        """
        async with self._lock:
            paths, failed = {settings.path for settings in wanted}, None
            for index, entry in self.served.items():
                if not entry.added and entry.config.path not in paths:
                    await self._remove(index, "the configuration names the store no more")
            for index in self.served:
                try:
                    await self._renew(index)
                except (DaemonError, ContractError, OSError) as error:
                    failed = failed or error
            await self._look_for_absent()
            if failed is not None:
                raise failed
            named = {entry.config.path: entry.config for entry in self.served.values()}
            # An administrator may have removed one since it was added.
            return [f"settings of {one.path}" for one in wanted if named.get(one.path, one) != one]

    def _index_of(self, path: Path) -> int:
        return next(index for index, entry in self.served.items() if entry.config.path == path)

    async def _add(self, settings: StoreConfig, *, added: bool) -> str:
        (store,) = await asyncio.to_thread(self._open_stores, replace(self._config(), stores=(settings,)))
        digest = store.manifest.identity_digest
        try:
            self.refuse_served(digest, settings.path)
        except AlreadyServed:
            store.close()
            raise
        index = await asyncio.to_thread(self._reader.add_store, store)
        self.served = {**self.served, index: Served(store, settings, added)}
        self.absent.pop(settings.path.name, None)
        self._changed()
        _LOG.info("%s is served as %s", settings.path, digest[:12])
        return digest

    async def _remove(self, index: int, reason: str) -> int:
        entry = self.served[index]
        self.served = {number: other for number, other in self.served.items() if number != index}
        self._changed()
        told = 0
        # Sessions that are being made hold it as well: they are told when they are there.
        while self._attach.holds(index):
            told += self._attach.reattach(index, reason)
            await asyncio.sleep(_POLL_SECONDS)
        await asyncio.to_thread(self._reader.remove_store, index)
        _LOG.info("%s is served no more (%s); %d sessions attach again", entry.config.path, reason, told)
        return told

    async def _renew(self, index: int) -> None:
        """Take a newer generation of a store."""
        entry = self.served[index]
        manifest = entry.store.manifest
        found = await asyncio.to_thread(open_store, manifest.folder, manifest.identity_digest)
        if found.generation == manifest.generation:
            return
        (fresh,) = await asyncio.to_thread(self._open_stores, replace(self._config(), stores=(entry.config,)))
        await asyncio.to_thread(self._reader.replace_store, index, fresh)
        told = self._attach.reattach(index, f"generation {found.generation} of a store")
        _LOG.info("generation %d of %s is served; %d sessions attach again", found.generation, manifest.folder, told)

    async def _look_for_absent(self) -> None:
        for settings in list(self.absent.values()):
            try:
                await self._add(settings, added=True)
            except (DaemonError, ContractError, OSError) as error:
                _LOG.warning("%s was added and still cannot be served: %s", settings.path, error)

    def _folder(self) -> StoreFolder:
        if self.folder is None:
            raise ConfigError("imports.folder", "none", "a folder", "set imports.folder")
        return self.folder

    async def _hide(self, path: Path) -> Path | None:
        """While nobody else changes anything: afterwards its name may be another store's. None: nothing is there."""
        with contextlib.suppress(FileNotFoundError):
            return await asyncio.to_thread(self._folder().hide, path)
        return None

    async def _save(self) -> None:
        folder = self._folder()
        stores = [*(entry.config for entry in self.served.values() if entry.added), *self.absent.values()]
        await asyncio.to_thread(folder.save_added, stores)

    async def _leave(self, unwanted: Path | None, *, save: bool) -> Path | None:
        """Remember that a store is gone. What is left to delete of its files, if they are ``unwanted``."""
        try:
            if save:
                await self._save()
        except OSError:
            if unwanted is None:
                raise
            await _delete(await self._hide(unwanted))  # on a full disk there is room for the list afterwards
            await self._save()
            return None
        return await self._hide(unwanted) if unwanted is not None else None


async def _delete(hidden: Path | None) -> None:
    """Takes as long as it takes, and nobody waits for it but who asked."""
    if hidden is not None:
        await asyncio.to_thread(shutil.rmtree, hidden)
