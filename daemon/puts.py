"""Puts: KV blocks from a client's staging memory into a write buffer, the cache and the session's file.

A *place* holds the KV of one session. Its write windows (:data:`WRITES_A_PLACE` buffers of one block) take a block
each, which goes through these states (``blocks``, one byte a block) by these calls::

    NONE ── grant ──► GRANTED ── take_puts: copied whole ──► BUFFERED + k ── finish_write ──► WRITTEN | FAILED
      ▲                                                                                             │
      └──────────────────── give_back: never while BUFFERED; its records are absent and past grace ─┘

From BUFFERED on its records may be asked for: until they are in the file they come from the write buffer, so a slot
that is evicted early loses nothing and no slot is ever dirty. A put whose buffer is not free waits in its ring; the
client's staging memory is the queue. Invariant: a write window is in use iff a block is being copied into it
(``window``) or is BUFFERED with its number.
"""

from typing import Any

import numpy as np

from strataflux.cache_policy import budget
from strataflux.cache_policy.base import wide
from strataflux.daemon import engines
from strataflux.daemon.cache import begin_fill, leave_page, publish, retire_unseen
from strataflux.daemon.counting import bucket_of, kind_of
from strataflux.daemon.rows import ERRNOS, EVICTED_CLEAR
from strataflux.daemon.slots import pending_of, slot_address, slot_entry
from strataflux.daemon.state import (
    BLOCK_BUFFERED,
    BLOCK_FAILED,
    BLOCK_GRANTED,
    BLOCK_WRITTEN,
    FILL_BUCKETS_US,
    NONE,
    WRITES_A_PLACE,
    Core,
)
from strataflux.daemon.system import futex_wake
from strataflux.proto import layout, ring
from strataflux.proto.atomics import (
    copy_bytes,
    fence,
    load_u8,
    load_u32,
    store_release_u32,
    store_release_u64,
    store_u8,
    store_u32,
)
from strataflux.proto.checksum import copy_crc32c
from strataflux.proto.compiled import borrowing

__all__ = [
    "abandon_pages",
    "block_quiet",
    "block_state",
    "buffer_base",
    "clear_block",
    "finish_write",
    "is_gone",
    "puts_waiting",
    "take_puts",
]

_PUT_TAIL = layout.offset_of(layout.SESSION_PAGE, "put_tail")
_PUTS_DONE = layout.offset_of(layout.SESSION_VIEW, "puts_done")
_AWAITING = layout.offset_of(layout.SESSION_PAGE, "awaiting")
_PUT_RESULTS = layout.offset_of(layout.SESSION_VIEW, "put_results")
_RING_LOG2 = (2 * layout.STAGING_BLOCKS).bit_length() - 1
_CHUNK_BYTES = 256 * 1024
_NEWEST_SHARE = 16
_NEWEST_GROUPS = 8
_BLOCK_MASK = (1 << layout.PUT_STAGING_SHIFT) - 1
_BUCKETS_US = np.array(FILL_BUCKETS_US, np.int64)
_EINTR, _EAGAIN, _EINVAL, _ENOSPC, _EDQUOT = 4, 11, 22, 28, 122


@borrowing
def block_state(c: Core, place: int, block: int) -> int:
    """State of a block that is in range."""
    return wide(load_u8(c.kv[place].blocks + block))


@borrowing
def is_gone(c: Core, table: int, oid: int) -> bool:
    """A KV record whose block was not put, or was given back, or could not be written: nothing to read."""
    place = c.tables[table].kv
    if place == NONE:
        return False
    state = block_state(c, place, oid // c.kv[place].records)
    return state < BLOCK_BUFFERED or state == BLOCK_FAILED


@borrowing
def buffer_base(c: Core, table: int, oid: int) -> int:
    """Where a KV record's block lies in memory, less its offset in the file; 0 if it must be read from there."""
    place = c.tables[table].kv
    if place == NONE:
        return 0
    block = oid // c.kv[place].records
    state = block_state(c, place, block)
    if not BLOCK_BUFFERED <= state < BLOCK_WRITTEN:
        return 0
    window = _window(c, place, state - BLOCK_BUFFERED)
    return wide(c.windows[window].buffer - c.windows[window].offset)


@borrowing
def _window(c: Core, place: int, number: int) -> int:
    return wide(c.rd[0].depth + place * WRITES_A_PLACE + number)


@borrowing
def take_puts(c: Core, e: Any) -> int:
    """Go on with the puts of every place, 256 KiB each; returns how many places had work."""
    worked = 0
    for place in range(len(c.kv)):
        kv = c.kv[place]
        if not kv.active or (kv.window == NONE and not _accept(c, place)):
            continue
        worked += 1
        _copy_some(c, place)
        if kv.copied == kv.records:
            _finish_copy(c, e, place)
    return worked


@borrowing
def puts_waiting(c: Core) -> bool:
    """Some session announced a put that could be taken now."""
    for place in range(len(c.kv)):
        kv = c.kv[place]
        if not kv.active or c.sessions[kv.session].fenced:
            continue
        tail = ring.load_tail(c.sessions[kv.session].page + _PUT_TAIL, kv.head, _RING_LOG2)
        if kv.window != NONE or (wide(tail) > kv.head and _free_window(c, place) != NONE):
            return True
    return False


@borrowing
def _free_window(c: Core, place: int) -> int:
    for number in range(WRITES_A_PLACE):
        if c.windows[_window(c, place, number)].state == 0:
            return _window(c, place, number)
    return NONE


@borrowing
def _accept(c: Core, place: int) -> bool:
    """Take the next announced put if a write buffer is free; False if there is nothing to copy now."""
    kv = c.kv[place]
    session = c.sessions[kv.session]
    if session.fenced:
        return False
    tail = ring.load_tail(session.page + _PUT_TAIL, kv.head, _RING_LOG2)
    status, payload = ring.consume(kv.put_ring, _RING_LOG2, kv.head, tail)
    if status == ring.EMPTY:
        return False
    staging, block = wide(payload) >> layout.PUT_STAGING_SHIFT, wide(payload) & _BLOCK_MASK
    refusal = _refusal(c, place, staging, block) if status == ring.READY else layout.PUT_REFUSED_INVALID
    if refusal != layout.PUT_NONE:
        kv.refused += 1
        _answer(c, place, staging, refusal)
        return False
    window = _free_window(c, place)
    if window == NONE:
        return False
    c.windows[window].state = 1
    c.windows[window].offset = block * kv.block_stride
    kv.window, kv.staged, kv.block, kv.copied = window, staging, block, 0
    return True


@borrowing
def _refusal(c: Core, place: int, staging: int, block: int) -> int:
    kv = c.kv[place]
    if staging >= layout.STAGING_BLOCKS or block >= kv.max_blocks:
        return layout.PUT_REFUSED_INVALID
    state = block_state(c, place, block)
    if state < BLOCK_GRANTED:
        return layout.PUT_REFUSED_QUOTA
    if state > BLOCK_GRANTED:
        return layout.PUT_REFUSED_DUPLICATE
    return layout.PUT_REFUSED_SPACE if kv.no_space else layout.PUT_NONE


@borrowing
def _answer(c: Core, place: int, staging: int, result: int) -> None:
    """Tell the client what became of its oldest put; the staging block is its own again."""
    kv = c.kv[place]
    view = c.sessions[kv.session].view_page
    if staging < layout.STAGING_BLOCKS:
        store_u32(view + _PUT_RESULTS + 4 * staging, result)
    kv.head += 1
    # SYNC: puts-done (publish). Release: the result and the last read of staging lie before the count.
    store_release_u64(view + _PUTS_DONE, kv.head)
    # SYNC: awaiting (read). Full fence: a client that went to sleep on the old count is seen waiting here.
    fence()
    if load_u32(c.sessions[kv.session].page + _AWAITING) != 0:
        futex_wake(view + _PUTS_DONE)


@borrowing
def _copy_some(c: Core, place: int) -> None:
    """Copy the next records out of staging, each with its checksum: what is checked later is what was copied now."""
    kv = c.kv[place]
    source = kv.staging + kv.staged * kv.staging_bytes + kv.copied * kv.bytes
    target = c.windows[kv.window].buffer + kv.copied * kv.stride
    checksums = c.tables[kv.table].checksums + 4 * kv.block * kv.records
    count = min(max(_CHUNK_BYTES // kv.bytes, 1), kv.records - kv.copied)
    for i in range(count):
        crc = copy_crc32c(target + i * kv.stride, source + i * kv.bytes, kv.bytes)
        store_u32(checksums + 4 * (kv.copied + i), crc)
    kv.copied += count


@borrowing
def _finish_copy(c: Core, e: Any, place: int) -> None:
    """The block is ours: release staging, show its newest groups, start its one write."""
    kv = c.kv[place]
    window = kv.window
    store_u8(kv.blocks + kv.block, BLOCK_BUFFERED + window - _window(c, place, 0))
    kv.puts += 1
    _answer(c, place, kv.staged, layout.PUT_ACCEPTED)
    _show_newest(c, place)
    w = c.windows[window]
    w.state, w.table, w.chain, w.done, w.length = 2, kv.table, kv.block, 0, kv.block_stride
    kv.window = NONE
    _send_write(c, e, window)


@borrowing
def _show_newest(c: Core, place: int) -> None:
    """Put the newest eighth of the block's groups, of all heads, into free slots, at most 1/16 of the class: what was
    just written is asked for soon, but a block must not flush the cache, nor copying hold up its write.
    """
    kv = c.kv[place]
    cls = c.sections[c.tables[kv.table].first_section].cls
    heads = kv.heads
    groups = kv.records // heads
    left = min(c.classes[cls].slots // _NEWEST_SHARE, c.classes[cls].free - 1)
    for group in range(groups - 1, groups - 1 - max(groups // _NEWEST_GROUPS, 1), -1):
        for head in range(heads):
            if left <= 0:
                return
            left -= 1
            index = head * groups + group
            _show(c, place, cls, kv.block * kv.records + index, index)


@borrowing
def _show(c: Core, place: int, cls: int, oid: int, index: int) -> None:
    kv = c.kv[place]
    if pending_of(c, kv.table, oid) != 0 or load_u32(c.tables[kv.table].directory + 4 * oid) != 0:
        return
    entry = begin_fill(c, cls, kv.table, oid)
    if entry != NONE:
        slot = c.slots[entry]
        slot.retries, slot.session, slot.score, slot.next = 0, NONE, 0, NONE
        copy_bytes(slot_address(c, entry), c.windows[kv.window].buffer + index * kv.stride, kv.bytes)
        c.kinds[kind_of(c.tables[kv.table])].fills_put += 1
        publish(c, entry)


@borrowing
def _send_write(c: Core, e: Any, window: int) -> None:
    w = c.windows[window]
    table = c.tables[w.table]
    w.direct = table.direct
    w.submitted_us = c.rd[0].now_us
    engines.submit(e, window, table.descriptor, w.buffer + w.done, w.length - w.done, w.offset + w.done, True)
    c.rd[0].in_flight_writes += 1


@borrowing
def finish_write(c: Core, e: Any, window: int, result: int) -> None:
    """The three exits of a write: error, short, done."""
    w = c.windows[window]
    table = c.tables[w.table]
    kv = c.kv[table.kv]
    c.rd[0].in_flight_writes -= 1
    if result < 0 or result == 0:
        if result == -_EINVAL and w.direct and table.buffered != NONE:
            table.descriptor, table.direct = table.buffered, 0
            table.fallbacks += 1
            _send_write(c, e, window)
        elif result == -_EAGAIN or result == -_EINTR:
            _send_write(c, e, window)
        else:
            kv.failed += 1
            kv.no_space |= result == -_ENOSPC or result == -_EDQUOT
            c.errnos[1, min(-result, ERRNOS - 1)] += 1
            _close_write(c, window, BLOCK_FAILED)
        return
    kv.write_bytes += result
    c.kinds[kind_of(c.tables[w.table])].write_bytes += result
    took = c.rd[0].now_us - w.submitted_us
    c.write_us[bucket_of(_BUCKETS_US, took)] += 1
    c.rd[0].write_us_sum += took
    w.done += result
    if w.done < w.length:
        c.rd[0].short_reads += 1
        w.done -= w.done % table.alignment
        _send_write(c, e, window)
        return
    kv.written += 1
    _close_write(c, window, BLOCK_WRITTEN)


@borrowing
def _close_write(c: Core, window: int, state: int) -> None:
    w = c.windows[window]
    store_u8(c.kv[c.tables[w.table].kv].blocks + w.chain, state)
    w.state = 0


@borrowing
def clear_block(c: Core, place: int, block: int) -> None:
    """Make the records of a block absent; those that are resident go into grace."""
    kv = c.kv[place]
    directory = c.tables[kv.table].directory
    for oid in range(block * kv.records, (block + 1) * kv.records):
        named = wide(load_u32(directory + 4 * oid))
        if named == layout.ENTRY_QUARANTINED:
            # SYNC: directory-entry (publish). No bytes go with this value.
            store_release_u32(directory + 4 * oid, layout.ENTRY_ABSENT)
        elif named != layout.ENTRY_ABSENT:
            retire_unseen(c, slot_entry(c, named - 1), EVICTED_CLEAR)


@borrowing
def block_quiet(c: Core, place: int, block: int) -> bool:
    """No record of the block is named, queued or being read."""
    kv = c.kv[place]
    for oid in range(block * kv.records, (block + 1) * kv.records):
        if load_u32(c.tables[kv.table].directory + 4 * oid) != 0 or pending_of(c, kv.table, oid) != 0:
            return False
    return True


@borrowing
def abandon_pages(c: Core, first: int, count: int) -> None:
    """FREE → ABSENT for all slots of pages whose memory is about to go; none of them holds anything."""
    for page in range(first, first + count):
        if c.pages.pages[page].state == budget.OWNED:
            leave_page(c, page)
