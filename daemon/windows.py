"""Windows: reads in flight. The reader thread only.

A *window* is one read: an aligned piece of a store's file that covers one record, or several neighbours. It lands in
the window's own part of the bounce pool. Pairs: :func:`open_window` / :func:`close_window`; in between :func:`join` and
:func:`send`. States: FREE ── open_window, send ──► IN FLIGHT ── close_window ──► FREE; a short read is sent again.
"""

from typing import Any

import numpy as np

from strataflux.cache_policy.base import wide
from strataflux.daemon import engines
from strataflux.daemon.counting import bucket_of
from strataflux.daemon.state import AHEAD, DEPTH_BUCKETS, NONE, PREFETCHED, Core
from strataflux.proto.compiled import borrowing

__all__ = ["close_window", "extent_of", "join", "open_window", "section_of", "send"]

_DEPTHS = np.array(DEPTH_BUCKETS, np.int64)


@borrowing
def section_of(c: Core, table: int, oid: int) -> int:
    """The section that holds a record, by bisection over its table's sections."""
    low = c.tables[table].first_section
    high = low + c.tables[table].sections
    while high - low > 1:
        middle = (low + high) // 2
        if c.sections[middle].first <= oid:
            low = middle
        else:
            high = middle
    return wide(low)


@borrowing
def open_window(c: Core, entry: int) -> int:
    """A free window around one record."""
    window = c.rd[0].free_window
    w = c.windows[window]
    c.rd[0].free_window = w.next_free
    c.rd[0].in_flight += 1
    table = wide(c.slots[entry].table)
    offset, length = extent_of(c, entry)
    w.state = 1
    w.table = table
    w.offset = offset - offset % c.tables[table].alignment
    w.needed = offset + length - w.offset
    w.length = _aligned(w.needed, c.tables[table].alignment)
    w.done = 0
    w.chain = entry
    w.count = 1
    w.submitted_us = c.rd[0].now_us
    w.ahead = (c.slots[entry].session == AHEAD) | (c.slots[entry].marks & PREFETCHED != 0)
    return wide(window)


@borrowing
def join(c: Core, window: int, entry: int) -> bool:
    """Put a record into a window that is not sent yet, if it is a neighbour and the bounce buffer is large enough."""
    w = c.windows[window]
    table = wide(c.slots[entry].table)
    offset, length = extent_of(c, entry)
    needed = offset + length - w.offset
    near = offset - offset % c.tables[table].alignment <= w.offset + w.length
    if w.table != table or offset < w.offset or not near:
        return False
    if _aligned(needed, c.tables[table].alignment) > c.rd[0].window_bytes:
        return False
    w.needed = max(w.needed, needed)
    w.length = _aligned(w.needed, c.tables[table].alignment)
    c.slots[entry].next = w.chain
    w.chain = entry
    w.count += 1
    c.rd[0].merged += 1
    return True


@borrowing
def extent_of(c: Core, entry: int) -> tuple[int, int]:
    """(offset in the file, bytes) of a slot's record."""
    slot = c.slots[entry]
    s = c.sections[section_of(c, wide(slot.table), wide(slot.oid))]
    index = wide(slot.oid) - s.first
    block = index // s.block
    return s.offset + block * s.block_stride + (index - block * s.block) * s.stride, s.bytes


@borrowing
def _aligned(length: int, alignment: int) -> int:
    return (length + alignment - 1) // alignment * alignment


@borrowing
def send(c: Core, e: Any, window: int) -> None:
    """Hand a window (or what a short read left of it) to the engine."""
    if window == NONE:
        return
    w = c.windows[window]
    table = c.tables[w.table]
    w.direct = table.direct
    engines.submit(e, window, table.descriptor, w.buffer + w.done, w.length - w.done, w.offset + w.done, False)
    c.rd[0].reads += 1
    c.rd[0].depth_sum += c.rd[0].in_flight
    c.depths[bucket_of(_DEPTHS, c.rd[0].in_flight)] += 1


@borrowing
def close_window(c: Core, window: int) -> None:
    """Nothing of the window is needed any more."""
    c.windows[window].state = 0
    c.windows[window].next_free = c.rd[0].free_window
    c.rd[0].free_window = window
    c.rd[0].in_flight -= 1
