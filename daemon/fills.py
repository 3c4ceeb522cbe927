"""Fills: from the queue through device reads into published slots. The reader thread only.

What a read brought into its window (:mod:`strataflux.daemon.windows`) is copied and checksummed into the slots in one
pass, and only then published. What nobody missed is read by :mod:`strataflux.daemon.ahead`, and ends here, too.

Invariant: a FILLING slot is in the chain of exactly one window in flight; only bytes whose CRC was right are published.
"""

from typing import Any

import numpy as np

from strataflux.cache_policy.base import later_by, wide
from strataflux.daemon import engines
from strataflux.daemon.cache import abandon_fill, begin_fill, is_draining, publish, quarantine
from strataflux.daemon.counting import bucket_of, kind_of
from strataflux.daemon.evict import ask_page, evict_one, is_worth
from strataflux.daemon.prefetch import count_drop
from strataflux.daemon.puts import buffer_base, finish_write, is_gone
from strataflux.daemon.requests import drop, pop, push_again, put_back, release
from strataflux.daemon.rows import ERRNOS
from strataflux.daemon.slots import slot_address
from strataflux.daemon.state import AHEAD, FILL_BUCKETS_US, NONE, PREFETCHED, Core
from strataflux.daemon.uses import advise
from strataflux.daemon.windows import close_window, extent_of, join, open_window, section_of, send
from strataflux.proto import layout
from strataflux.proto.atomics import load_u32
from strataflux.proto.checksum import copy_crc32c
from strataflux.proto.compiled import borrowing

__all__ = ["finish_reads", "start_fills"]

_AWAITING = layout.offset_of(layout.SESSION_PAGE, "awaiting")
_PREFETCH_FILLS = layout.offset_of(layout.SESSION_VIEW, "prefetch_fills")
_EINTR, _EIO, _EAGAIN, _EINVAL = 4, 5, 11, 22
_KEY_SHIFT = 32
_OID = 0xFFFFFFFF
_PIN_AT_MOST = 60_000
_BUCKETS_US = np.array(FILL_BUCKETS_US, np.int64)
_RETRIES = 1


@borrowing
def start_fills(c: Core, e: Any) -> int:
    """Start reads for the most wanted records that find a window and a slot; returns how many records."""
    count = _pop_sorted(c, c.rd[0].depth - c.rd[0].in_flight)
    started = 0
    window, kept = NONE, 0
    for i in range(count):
        place = c.wanted[i]
        key, retries = c.queue[place].key, wide(c.queue[place].retries)
        if is_gone(c, key >> _KEY_SHIFT, key & _OID) or _is_rejected(c, place):
            drop(c, place)
            continue
        entry = _slot_for(c, place, key >> _KEY_SHIFT, key & _OID)
        if entry == NONE:
            c.wanted[kept] = place
            kept += 1
            continue
        buffered = buffer_base(c, key >> _KEY_SHIFT, key & _OID)
        if buffered != 0:
            _verify(c, buffered, entry)
            release(c, place)
            started += 1
            continue
        if retries or window == NONE or not join(c, window, entry):
            send(c, e, window)
            window = open_window(c, entry)
            if retries:
                send(c, e, window)
                window = NONE
        release(c, place)
        started += 1
    send(c, e, window)
    for i in range(kept - 1, -1, -1):
        _wait_or_drop(c, c.wanted[i])
    return started


@borrowing
def _is_rejected(c: Core, place: int) -> bool:
    """The policy would rather keep what the record would replace: it stays absent, and its next miss asks again. Nobody
    may wait for it, nor begin to, as a session that waits does after it has asked.
    """
    if c.rd[0].learns == 0:
        return False
    request = c.queue[place]
    table, oid = wide(request.key >> _KEY_SHIFT), wide(request.key & _OID)
    if is_worth(c, c.sections[section_of(c, table, oid)].cls, table, oid, wide(request.score)):
        return False
    session = wide(request.session)
    if session >= 0 and (c.sessions[session].waits or load_u32(c.sessions[session].page + _AWAITING) != 0):
        return False
    c.kinds[kind_of(c.tables[table])].rejected += 1
    return True


@borrowing
def _pop_sorted(c: Core, at_most: int) -> int:
    """Pop up to ``at_most`` requests, most wanted first, and order them by table and record so that neighbours meet."""
    count = 0
    while count < at_most:
        place = pop(c)
        if place == NONE:
            break
        key = c.queue[place].key
        at = count
        while at > 0 and c.queue[c.wanted[at - 1]].key > key:
            c.wanted[at] = c.wanted[at - 1]
            at -= 1
        c.wanted[at] = place
        count += 1
    return count


@borrowing
def _slot_for(c: Core, place: int, table: int, oid: int) -> int:
    """A FILLING slot for a queued record, or ``NONE``. At most a quarter of a class may be filling."""
    section = c.sections[section_of(c, table, oid)]
    cls = section.cls
    group = c.classes[cls]
    if group.slots and group.filling * 4 > max(group.slots, 4):
        return NONE
    entry = begin_fill(c, cls, table, oid)
    if entry != NONE:
        section.misses += 1
        node = c.queue[place]
        slot = c.slots[entry]
        slot.retries = node.retries
        slot.session = node.session
        slot.score = node.score
        slot.asked_us = node.asked_us & _OID
        slot.next = NONE
    return entry


@borrowing
def _wait_or_drop(c: Core, place: int) -> None:
    """No slot for a request now: it waits in the queue while eviction makes room, and is dropped when a quarter of
    its class already waits for grace, because then the sessions are what is slow.
    """
    key = c.queue[place].key
    cls = c.sections[section_of(c, key >> _KEY_SHIFT, key & _OID)].cls
    group = c.classes[cls]
    if group.free_head != NONE or c.pages.pools[c.pages.classes[cls].budget].unused:
        put_back(c, place)  # there is room: only so many may be filling at a time
        return
    c.rd[0].starved = 1
    if group.retired * 4 > group.slots:
        _drop_for_grace(c, place)
        return
    if not evict_one(c, cls, True):
        ask_page(c, cls)
        if group.retired + group.filling + c.pages.classes[cls].coming == 0:
            _drop_for_grace(c, place)
            return
    put_back(c, place)


@borrowing
def _drop_for_grace(c: Core, place: int) -> None:
    c.rd[0].dropped_grace += 1
    session = wide(c.queue[place].session)
    if session >= 0:
        c.sessions[session].dropped_grace += 1
    drop(c, place)


@borrowing
def finish_reads(c: Core, e: Any) -> int:
    """Take every completion there is; returns how many."""
    count = engines.reap(e, c.finished)
    for i in range(count):
        if c.finished[0, i] < c.rd[0].depth:
            _finish(c, e, c.finished[0, i], c.finished[1, i])
        else:
            finish_write(c, e, c.finished[0, i], c.finished[1, i])
    c.rd[0].completions += count
    return count


@borrowing
def _finish(c: Core, e: Any, window: int, result: int) -> None:
    """The three exits of a completion: error, short, done."""
    w = c.windows[window]
    if result < 0 or (result == 0 and w.done < w.needed):
        _read_failed(c, e, window, result)
        return
    if w.ahead:
        c.kinds[kind_of(c.tables[w.table])].ahead_bytes += result
    else:
        c.kinds[kind_of(c.tables[w.table])].read_bytes += result
    c.tables[w.table].read_bytes += result
    before = w.done
    w.done += result
    if w.done < w.needed:
        c.rd[0].short_reads += 1
        w.done -= w.done % c.tables[w.table].alignment
        if w.done == before:  # less than a whole unit: the file ends here, and would again
            _read_failed(c, e, window, 0)
            return
        send(c, e, window)
        return
    took = c.rd[0].now_us - w.submitted_us
    c.rd[0].read_us_sum += took
    c.read_us[bucket_of(_BUCKETS_US, took)] += 1
    entry = w.chain
    while entry != NONE:
        after = wide(c.slots[entry].next)
        _verify(c, w.buffer - w.offset, entry)
        entry = after
    close_window(c, window)


@borrowing
def _read_failed(c: Core, e: Any, window: int, result: int) -> None:
    """An error: go on without direct I/O if that was it, repeat an interruption, else give every record back."""
    w = c.windows[window]
    table = c.tables[w.table]
    if result == -_EINVAL and w.direct and table.buffered != NONE:
        if table.direct:
            table.descriptor = table.buffered
            table.direct = 0
            table.fallbacks += 1
        send(c, e, window)
        return
    if result == -_EAGAIN or result == -_EINTR:
        send(c, e, window)
        return
    c.errnos[0, min(-result, ERRNOS - 1)] += 1
    entry = w.chain
    while entry != NONE:
        after = wide(c.slots[entry].next)
        _give_up(c, entry)
        entry = after
    close_window(c, window)


@borrowing
def _verify(c: Core, base: int, entry: int) -> None:
    """Copy one record into its slot, compare its checksum, publish. ``base`` + file offset = address in the pool."""
    offset, length = extent_of(c, entry)
    table, oid = wide(c.slots[entry].table), wide(c.slots[entry].oid)
    found = copy_crc32c(slot_address(c, entry), base + offset, length)
    if np.uint32(found) != load_u32(c.tables[table].checksums + 4 * oid):
        c.kinds[kind_of(c.tables[table])].corrupt += 1
        c.tables[table].corrupt += 1
        _give_up(c, entry)
    elif is_draining(c, entry) or is_gone(c, table, oid):
        _abandon(c, entry)
    else:
        _count_fill(c, entry)
        publish(c, entry)


@borrowing
def _give_up(c: Core, entry: int) -> None:
    """A record could not be read: once more, alone, so that no neighbour can be at fault; then it is quarantined."""
    slot = c.slots[entry]
    table, oid, tried = wide(slot.table), wide(slot.oid), wide(slot.retries)
    _abandon(c, entry)
    if slot.marks & PREFETCHED:  # nobody missed it: whoever does will try again
        return
    if tried >= _RETRIES:
        quarantine(c, table, oid)
        return
    c.kinds[kind_of(c.tables[table])].retries += 1
    push_again(c, entry, tried + 1)


@borrowing
def _abandon(c: Core, entry: int) -> None:
    """Nothing was filled; whoever prefetched it is told."""
    slot = c.slots[entry]
    if slot.marks & PREFETCHED:
        count_drop(c, wide(slot.session), wide(slot.table))
    abandon_fill(c, entry)


@borrowing
def _count_fill(c: Core, entry: int) -> None:
    """Statistics of a fill, and the pin of one that a client is waiting for."""
    slot = c.slots[entry]
    took = (c.rd[0].now_us - wide(slot.asked_us)) & _OID
    kind = kind_of(c.tables[slot.table])
    c.fill_us[kind, bucket_of(_BUCKETS_US, took)] += 1
    c.kinds[kind].fill_us_sum += took
    session = wide(slot.session)
    if slot.marks & PREFETCHED:
        c.kinds[kind].fills_prefetch += 1
        slot.seen = c.rd[0].clock
        advise(c, entry, kind, _PREFETCH_FILLS)
    elif session == AHEAD:
        c.kinds[kind].fills_preload += 1
    else:
        c.kinds[kind].fills += 1
    if session >= 0:
        c.sessions[session].fills += 1
        c.tenants[c.lanes[session].tenant].fills += 1
        deadline = wide(load_u32(c.sessions[session].page + _AWAITING))
        left = later_by(deadline, c.rd[0].clock)
        if deadline and 0 < left <= _PIN_AT_MOST:
            slot.pinned = deadline
