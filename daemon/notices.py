"""Tell sessions about cache segments that come and go, and wait until they let go of those that go.

A session that does not confirm in time is hung up on: it may keep its old map for as long as it likes, but nothing in
it is named by a directory any more. Event loop only.
"""

import asyncio
import os
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from strataflux.daemon.interface import AddedSegment
from strataflux.proto import messages

__all__ = ["Holder", "SegmentNotices"]

_CONFIRM_SECONDS: Final = 5.0


class Holder(Protocol):
    """A connection, as far as segments go. ``stores`` is None until its session is admitted."""

    segments: set[int]

    @property
    def opening(self) -> bool:
        """Its session is in the making: which segments it will hold is not known yet."""

    @property
    def held_stores(self) -> tuple[int, ...]:
        """Indices of its stores."""

    def send(self, message: messages.Message, descriptors: list[int] | None = None) -> bool:
        """Send, or end the connection."""

    def close(self, cause: str) -> None:
        """End the connection."""


class SegmentNotices:
    """Which sessions hold which segments. ``holders`` lists the connections of now."""

    def __init__(self, holders: Callable[[], Iterable[Holder]]) -> None:
        # fixed after construction
        self._holders = holders
        # event loop only
        self._retiring: set[int] = set()
        self._late: dict[int, list[AddedSegment]] = {}
        self._changed = asyncio.Event()

    def attached(self, holder: Holder) -> None:
        """A session was welcomed: tell it what happened while it was made."""
        self._changed.set()
        for added in self._late.pop(id(holder), []):
            self._add(holder, added)
            os.close(added.descriptor)
        for first_slot in sorted(self._retiring & holder.segments):
            holder.send(messages.SegmentRetiring(first_slot))

    def dropped(self, holder: Holder, first_slot: int) -> bool:
        """A session says that it let go; False if nobody asked it to."""
        if first_slot not in self._retiring or first_slot not in holder.segments:
            return False
        holder.segments.discard(first_slot)
        self._changed.set()
        return True

    def left(self, holder: Holder) -> None:
        """A connection is over."""
        holder.segments.clear()
        for added in self._late.pop(id(holder), []):
            os.close(added.descriptor)
        self._changed.set()

    def announce(self, added: AddedSegment) -> None:
        """Give a new segment to every session that uses one of its stores. The caller closes its descriptor."""
        for holder in list(self._holders()):
            if holder.opening:
                copy = AddedSegment(added.info, added.stores, os.dup(added.descriptor))
                self._late.setdefault(id(holder), []).append(copy)
            else:
                self._add(holder, added)

    async def retire(self, first_slot: int, seconds: float = _CONFIRM_SECONDS) -> int:
        """Have a segment unmapped by all; how many sessions were hung up on because they did not."""
        self._retiring.add(first_slot)
        waiting = list(self._holders())
        for holder in waiting:
            if first_slot in holder.segments:
                holder.send(messages.SegmentRetiring(first_slot))
        try:
            async with asyncio.timeout(seconds):
                while any(holder.opening or first_slot in holder.segments for holder in waiting):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        late = [holder for holder in waiting if first_slot in holder.segments]
        for holder in late:
            holder.close("segment")
        self._retiring.discard(first_slot)
        return len(late)

    def _add(self, holder: Holder, added: AddedSegment) -> None:
        if added.info.first_slot in holder.segments or not set(added.stores) & set(holder.held_stores):
            return
        holder.segments.add(added.info.first_slot)
        holder.send(messages.SegmentsAdded([added.info]), [added.descriptor])
