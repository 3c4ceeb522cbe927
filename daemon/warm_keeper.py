"""Warm start: the hot set is read once the reader runs, and written now and then and when the service stops."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from strataflux.daemon.config import Config
from strataflux.daemon.errors import DaemonError
from strataflux.daemon.interface import Reader

__all__ = ["WarmKeeper", "hot_set_path"]

_LOG: Final = logging.getLogger(__name__)
_INTERVAL_SECONDS: Final = 180.0


def hot_set_path(config: Config, environment: Mapping[str, str]) -> Path | None:
    """Where the hot set lies; None without a state folder, or if it is not wanted."""
    state = environment.get("STATE_DIRECTORY", "").split(":")[0]
    return Path(state, "hot.set") if state and config.cache.warm_start else None


class WarmKeeper:
    """The hot set of one daemon. Pairs: :meth:`load` / :meth:`finish`, then :meth:`close`. Event loop only.

    A file that is damaged, or cannot be read or written, is warned of and counted; the service does not need it.
    """

    def __init__(self, reader: Reader, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        # fixed after construction
        self._reader = reader
        self._path = path
        self._clock = clock
        # event loop only
        self._saved_at = clock()
        self._saving: asyncio.Task[None] | None = None
        self.counts: dict[tuple[str, str], int] = {}
        """Saves and loads so far, by operation and result."""

    async def load(self) -> int:
        """Have the reader read what was resident; how many records."""
        if self._path is None:
            return 0
        result, count = await asyncio.to_thread(self._load, self._path)
        self._count("load", result)
        return count

    def _load(self, path: Path) -> tuple[str, int]:
        from strataflux.daemon.hot_set import HotSetError, read_hot_set  # late: it brings compiled code

        try:
            count = self._reader.warm(read_hot_set(path))
        except FileNotFoundError:
            return "absent", 0
        except HotSetError as error:
            _LOG.warning("%s is damaged (%s): ignored, the cache starts cold", path, error)
            return "damaged", 0
        except OSError as error:
            _LOG.warning("%s cannot be read (%s): the cache starts cold", path, error.strerror)
            return "failed", 0
        _LOG.info("%d records that were resident are read again when nothing else is to be done", count)
        return "ok", count

    def on_tick(self) -> None:
        """Begin to save if it is time."""
        idle = self._saving is None or self._saving.done()
        if self._path is not None and idle and self._clock() - self._saved_at >= _INTERVAL_SECONDS:
            self._saving = asyncio.get_running_loop().create_task(self.save())

    async def save(self) -> None:
        """Write what is resident now."""
        if self._path is None:
            return
        self._saved_at = self._clock()
        self._count("save", await asyncio.to_thread(self._save, self._path))

    def _save(self, path: Path) -> str:
        from strataflux.daemon.hot_set import write_hot_set

        try:
            write_hot_set(path, self._reader.hot_records())
        except (OSError, DaemonError) as error:
            _LOG.warning("%s cannot be written (%s): a restart will start with what it held before", path, error)
            return "failed"
        return "ok"

    async def finish(self) -> None:
        """Write it for the last time, after a save that was begun."""
        await self.close()
        await self.save()

    async def close(self) -> None:
        """Wait for a save that was begun. Idempotent."""
        if self._saving is not None:
            await self._saving

    def _count(self, operation: str, result: str) -> None:
        self.counts[operation, result] = self.counts.get((operation, result), 0) + 1
