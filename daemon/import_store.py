"""Receive a store: into a temporary folder, verified record by record, then given its name. The event loop only.

Files are written by aiofiles, so that a slow disk holds up nobody else. Whatever goes wrong, and whoever hangs up,
nothing of it stays: the temporary folder is removed with the ``async with`` block, or by the next start if this one is
killed.
"""

import asyncio
import os
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import aiofiles

from strataflux.daemon.errors import ConfigError, Refusal
from strataflux.daemon.store_folder import StoreFolder
from strataflux.daemon.values import size_text
from strataflux.proto.errors import StoreCorrupt
from strataflux.proto.store_format import (
    CHECKSUMS_FILE,
    MANIFEST_FILE,
    MANIFEST_MAX_BYTES,
    RECORDS_FILE,
    StoreManifest,
    open_store,
    read_manifest,
)
from strataflux.proto.verify import verify_store

__all__ = ["CHUNK_MAX_BYTES", "Announced", "Incoming"]

CHUNK_MAX_BYTES: Final = 1 << 20
_SIZE_MAX_BYTES: Final = 1 << 50
_VERIFY_THREADS: Final = 2
_SHOWN: Final = 10
_TASKS: Final[set["asyncio.Task[None]"]] = set()
"""Event loop only."""


@dataclass(frozen=True)
class Announced:
    """What a sender says that it will send."""

    name: str
    manifest_bytes: int
    checksums_bytes: int
    records_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of all three files."""
        return self.manifest_bytes + self.checksums_bytes + self.records_bytes


class Incoming:
    """One import: ``async with Incoming(…) as incoming``, then :meth:`write` again and again, then :meth:`finish`."""

    def __init__(self, folder: StoreFolder, announced: Announced, check: Callable[[StoreManifest], None]) -> None:
        """Nothing is made yet. ``check`` looks at the manifest once it is there, and raises if it is not wanted."""
        # fixed after construction
        self._folder = folder
        self._announced = announced
        self._check = check
        self._temporary: Path
        self._descriptor = -1
        # event loop only
        self._files = [
            (MANIFEST_FILE, announced.manifest_bytes),
            (CHECKSUMS_FILE, announced.checksums_bytes),
            (RECORDS_FILE, announced.records_bytes),
        ]
        self._file: Any = None
        self._left = 0
        self._work: asyncio.Task[None] | None = None
        self._published: Path | None = None
        self._kept = False

    async def __aenter__(self) -> Self:
        """Make room.

        Raises:
            ConfigError: sizes or a name that cannot be. AlreadyServed: the name is taken. Refusal: too little disk.
        """
        self._check_sizes()
        self._temporary, self._descriptor = self._folder.begin_temporary(self._announced.name)
        try:
            self._check_disk(self._announced.total_bytes)
        except BaseException:
            await _to_the_end(self._remove())
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _to_the_end(self._remove())

    async def write(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            ConfigError: a chunk that is too large, or more than was announced. Refusal: the disk fills up.
            StoreError: a manifest that is none. OSError: as write(2).
        """
        await self._run(self._write(data))

    async def finish(self) -> Path:
        """Verify everything and give the store its name; where it lies now.

        Raises:
            ConfigError: less was sent than announced. StoreError: damage. AlreadyServed: the name is taken meanwhile.
        """
        if self._files or self._file is not None:
            missing = self._left + sum(size for _, size in self._files)
            raise ConfigError("data", f"{missing} bytes less", "all that was announced", "send the whole store")
        await asyncio.to_thread(self._verify)
        await self._run(self._publish())
        assert self._published is not None
        self._kept = True
        return self._published

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Let ``work`` come to its end, also when whoever waits for it is cancelled: threads cannot be."""
        self._work = _kept(work)
        await asyncio.shield(self._work)

    async def _write(self, data: bytes) -> None:
        if len(data) > CHUNK_MAX_BYTES:
            raise ConfigError("data", f"{len(data)} bytes", f"at most {CHUNK_MAX_BYTES}", "send smaller pieces")
        self._check_disk(len(data))
        view = memoryview(data)
        while view:
            if self._file is None:
                await self._open_next(len(view))
            part = view[: self._left]
            await self._file.write(part)
            self._left -= len(part)
            view = view[len(part) :]
            if not self._left:
                await self._close_file()

    async def _publish(self) -> None:
        self._published = await asyncio.to_thread(self._folder.publish, self._temporary, self._announced.name)

    def _check_sizes(self) -> None:
        sizes = {
            "manifest_bytes": (self._announced.manifest_bytes, MANIFEST_MAX_BYTES),
            "checksums_bytes": (self._announced.checksums_bytes, _SIZE_MAX_BYTES),
            "records_bytes": (self._announced.records_bytes, _SIZE_MAX_BYTES),
        }
        for name, (found, limit) in sizes.items():
            if not 0 < found <= limit:
                raise ConfigError(name, str(found), f"1 … {limit}", "announce the sizes of the store's files")

    def _check_disk(self, coming: int) -> None:
        system = os.statvfs(self._temporary)
        free = system.f_bavail * system.f_frsize
        if free - coming < self._folder.free_bytes:
            raise Refusal(
                "quota",
                self._folder.path,
                f"{size_text(free)} free",
                f"{coming} bytes and {size_text(self._folder.free_bytes)} to spare (imports.free_bytes)",
                "make room, or set imports.folder to a larger file system",
            )

    async def _open_next(self, coming: int) -> None:
        if not self._files:
            found = f"{coming} bytes beyond the announced"
            raise ConfigError("data", found, f"{self._announced.total_bytes} in all", "announce the right sizes")
        name, self._left = self._files.pop(0)
        self._file = await aiofiles.open(self._temporary / name, "xb", buffering=0)

    async def _close_file(self) -> None:
        await asyncio.to_thread(os.fsync, self._file.fileno())
        await self._file.close()
        self._file = None
        if len(self._files) == 2:
            manifest = await asyncio.to_thread(read_manifest, self._temporary)
            self._check(manifest)

    def _verify(self) -> None:
        manifest = open_store(self._temporary)
        bad = verify_store(manifest, _VERIFY_THREADS, _ignore, _ignore)
        if bad:
            some = ", ".join(map(str, bad[:_SHOWN])) + ", …" * (len(bad) > _SHOWN)
            raise StoreCorrupt(
                self._announced.name,
                f"{len(bad)} records whose bytes are not what their checksums say ({some})",
                "a store without damage",
                "check the source with strataflux store verify, and import it again",
            )

    async def _remove(self) -> None:
        if self._work is not None:
            await asyncio.gather(self._work, return_exceptions=True)
        if self._file is not None:
            await self._file.close()
            self._file = None
        # Renamed by now if all went well.
        await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)
        if self._published is not None and not self._kept:
            await asyncio.to_thread(shutil.rmtree, self._published)
        os.close(self._descriptor)


def _kept(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """A task that lives to its end, whoever forgets it."""
    task = asyncio.get_running_loop().create_task(work)
    _TASKS.add(task)
    task.add_done_callback(_TASKS.discard)
    return task


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for ``work``, which goes on if the waiting is cancelled: gRPC cancels a call that was hung up repeatedly."""
    await asyncio.shield(_kept(work))


def _ignore(_count: int) -> None:
    """No throttle, and nobody to tell: the sender waits for the end."""
