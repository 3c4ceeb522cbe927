"""Give cache memory back to the machine, a whole segment at a time, and take it again. The reader thread only.

Life of a segment that is released: *serving* ── begin ──► *draining* (its pages leave the budget, its records their
directories) ── grace passes: settled ──► *retiring* (sessions unmap it) ── finish ──► gone. Its bytes stay charged to
the budget's memory until the end. A segment is never punched or shrunk: pages that a GPU registered would stay pinned
and silently stale. Growing makes a new segment in the place of the one that was released last, so a cache never
exceeds the budget it started with.
"""

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from strataflux.cache_policy import budget
from strataflux.cache_policy.base import wide
from strataflux.daemon.cache import drain_page
from strataflux.daemon.holdings import CacheSegment
from strataflux.daemon.interface import AddedSegment
from strataflux.daemon.rows import EVICTED_PRESSURE
from strataflux.daemon.state import Core
from strataflux.daemon.tier import Tier
from strataflux.proto import layout
from strataflux.proto.compiled import compiled
from strataflux.proto.segment import create

__all__ = ["SegmentPool", "drain_segment"]


@dataclass(frozen=True)
class _Place:
    """Where a released segment was: enough to make it again."""

    number: int
    domain: int
    pages: int


@compiled
def drain_segment(c: Core, segment: int) -> int:
    """Take a segment out of the budget and its records out of their directories; how many pages wait for grace."""
    budget.shrink(c.pages, segment)
    first = segment * c.pages.sizes[1]
    for page in range(first, first + c.pages.sizes[1]):
        if c.pages.pages[page].state == budget.DRAINING:
            drain_page(c, page, EVICTED_PRESSURE)
    return wide(budget.segment_pages(c.pages, segment))


class SegmentPool:
    """The segments of one tier. Pairs: :meth:`begin` / :meth:`finish`, and the release as a whole / :meth:`grow`."""

    def __init__(self, tier: Tier) -> None:
        # When memory is short there may be none left to compile, or even to load, what gives some back: now, then.
        dispatcher: Any = drain_segment
        dispatcher.compile((numba.typeof(tier.core), numba.int64))  # type: ignore[no-untyped-call]
        # reader thread only
        self._tier = tier
        self._released: list[_Place] = []

    def begin(self) -> int | None:
        """Start to release the last segment of the domain that has most; its first slot, or None where each domain is
        down to one.
        """
        by_domain: dict[int, list[CacheSegment]] = {}
        for segment in self._tier.segments:
            by_domain.setdefault(segment.domain, []).append(segment)
        most = max(by_domain.values(), key=len, default=[])
        if len(most) < 2:
            return None
        leaving = most[-1]
        self._tier.segments.remove(leaving)
        self._tier.retiring.append(leaving)
        drain_segment(self._tier.core, self._number(leaving))
        return leaving.info.first_slot

    def settled(self, first_slot: int) -> bool:
        """No slot of it is FILLING, VALID or within its grace: sessions may be told to unmap it."""
        return int(budget.segment_pages(self._tier.core.pages, self._number(self._leaving(first_slot)))) == 0

    def finish(self, first_slot: int) -> int:
        """Nobody maps it any more: drop its memory; returns its bytes."""
        leaving = self._leaving(first_slot)
        self._tier.retiring.remove(leaving)
        pages = leaving.segment.size // layout.CACHE_PAGE_BYTES
        self._tier.core.page_address[leaving.first_page : leaving.first_page + pages] = 0
        self._released.append(_Place(self._number(leaving), leaving.domain, pages))
        leaving.segment.close()
        return leaving.segment.size

    def grow(self) -> AddedSegment | None:
        """A new segment in the place of the one released last; None where nothing is missing.

        Raises:
            SegmentError: no memory for it.
        """
        if not self._released:
            return None
        place = self._released[-1]
        memory = create("strataflux-cache", place.pages * layout.CACHE_PAGE_BYTES, reserve=True)
        self._released.pop()
        core, first = self._tier.core, place.number * self._stride
        core.page_address[first : first + place.pages] = (
            memory.address + np.arange(place.pages) * layout.CACHE_PAGE_BYTES
        )
        budget.grow(core.pages, place.domain, place.number)
        budget.trim(core.pages, place.number, place.pages)
        added = CacheSegment(memory, first, place.domain)
        self._tier.segments.append(added)
        return AddedSegment(added.info, self._stores(place.domain), memory.read_only_descriptor())

    def missing_bytes(self) -> int:
        """How far the cache is below its budget; what drains still counts as there."""
        return sum(place.pages for place in self._released) * layout.CACHE_PAGE_BYTES

    @property
    def _stride(self) -> int:
        return int(self._tier.core.pages.sizes[1])

    def _number(self, segment: CacheSegment) -> int:
        return segment.first_page // self._stride

    def _leaving(self, first_slot: int) -> CacheSegment:
        return next(s for s in self._tier.retiring if s.info.first_slot == first_slot)

    def _stores(self, domain: int) -> tuple[int, ...]:
        return tuple(number for number, store in self._tier.stores.items() if store.domain == domain)
