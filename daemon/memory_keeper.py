"""Give cache back when the machine needs it, and take it again: the watermarks' decisions, carried out.

One segment at a time, each to its end, beside the service's other work. Event loop only; counters are read by any
thread.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Final

from strataflux.daemon.errors import DaemonError
from strataflux.daemon.interface import Reader
from strataflux.daemon.notices import SegmentNotices
from strataflux.daemon.pressure import GROW, RELEASE, MemoryState, Watermarks
from strataflux.proto import layout
from strataflux.proto.errors import SegmentError

__all__ = ["MemoryKeeper"]

_LOG: Final = logging.getLogger(__name__)
_POLL_SECONDS: Final = 0.005


class MemoryKeeper:
    """Pairs: ``on_tick`` again and again / :meth:`close`."""

    def __init__(
        self, reader: Reader, notices: SegmentNotices, watermarks: Watermarks, look: Callable[[], MemoryState]
    ) -> None:
        # fixed after construction
        self._reader = reader
        self._notices = notices
        self._look = look
        # event loop only
        self.watermarks = watermarks
        self.state = MemoryState(None)
        self.missing_bytes = 0
        self.releases = 0
        self.released_bytes = 0
        self.hung_up = 0
        """Sessions that did not let go of a segment in time."""
        self._work: asyncio.Task[None] | None = None

    def on_tick(self) -> None:
        """Look, and begin what the watermarks say unless something is going on already."""
        self.state = self._look()
        if self._work is not None and not self._work.done():
            return
        decision = self.watermarks.decide(self.state, self.missing_bytes, layout.SEGMENT_MIN_BYTES)
        work = {RELEASE: self.release, GROW: self.grow}.get(decision)
        if work is not None:
            self._work = asyncio.get_running_loop().create_task(self._guarded(work))

    async def release(self) -> None:
        """Give one segment back, through all of its states; does nothing where no more can go."""
        first_slot = await asyncio.to_thread(self._reader.begin_release)
        if first_slot is None:
            return
        while not await asyncio.to_thread(self._reader.release_settled, first_slot):
            await asyncio.sleep(_POLL_SECONDS)
        self.hung_up += await self._notices.retire(first_slot)
        size = await asyncio.to_thread(self._reader.finish_release, first_slot)
        self.releases += 1
        self.released_bytes += size
        self.missing_bytes = await asyncio.to_thread(self._reader.missing_bytes)
        _LOG.warning("memory is short: %d MiB of cache given back, %d missing", size >> 20, self.missing_bytes >> 20)

    async def grow(self) -> None:
        """Take one segment again and tell the sessions."""
        added = await asyncio.to_thread(self._reader.grow)
        if added is None:
            return
        self._notices.announce(added)
        os.close(added.descriptor)
        self.missing_bytes = await asyncio.to_thread(self._reader.missing_bytes)
        _LOG.info(
            "memory is free again: %d MiB of cache taken, %d missing", added.info.bytes >> 20, self.missing_bytes >> 20
        )

    async def close(self) -> None:
        """End what is going on. Idempotent."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except (DaemonError, SegmentError) as error:
            _LOG.warning("cache could not be given back or taken: %s", error)
