"""Reading ahead: what nobody missed, behind what was. The reader thread only.

In this order, each into free slots only: what clients prefetch, in windows that no miss could use, a quarter of which
stays for those that come; stores that are wanted whole; records that were resident before the daemon was started again.
The latter two take half of the windows at most.
"""

from typing import Any

from strataflux.cache_policy.base import wide
from strataflux.daemon.cache import begin_fill
from strataflux.daemon.evict import has_room, reserve_of, want_room
from strataflux.daemon.prefetch import KEY_SHIFT, drop_prefetch, take, waits
from strataflux.daemon.puts import buffer_base, is_gone
from strataflux.daemon.slots import pending_of, set_pending
from strataflux.daemon.state import AHEAD, NONE, PENDING_NONE, PREFETCHED, Core
from strataflux.daemon.windows import join, open_window, section_of, send
from strataflux.proto import layout
from strataflux.proto.atomics import load_u32
from strataflux.proto.compiled import borrowing

__all__ = ["read_ahead"]

_OID = 0xFFFFFFFF
_PREFETCHES_A_SWEEP = 64
_WARM_A_SWEEP = 64


@borrowing
def read_ahead(c: Core, e: Any) -> int:
    """Start reads for what is wanted before anybody misses it; returns how many records."""
    started = 0
    # Misses had their turn in this sweep: whatever of them is queued and left windows free waits for a slot.
    if c.rd[0].prefetches:
        started += _start_prefetches(c, e)
    started += _start_preload(c, e)
    return started + _start_warm(c, e)


@borrowing
def _start_prefetches(c: Core, e: Any) -> int:
    """Sessions take turns; neighbours that one asked for in a row are read as one."""
    rd, started, window = c.rd[0], 0, NONE
    for _ in range(_PREFETCHES_A_SWEEP):
        if rd.in_flight * 4 >= rd.depth * 3:
            break
        entry = _next_prefetch(c)
        if entry == NONE:
            break
        if window == NONE or not join(c, window, entry):
            send(c, e, window)
            window = open_window(c, entry)
        started += 1
    send(c, e, window)
    return started


@borrowing
def _next_prefetch(c: Core) -> int:
    """A FILLING slot for the next prefetch that finds room; ``NONE`` if there is none. Void ones are skipped."""
    sessions = c.stamp_owner[layout.MAX_SESSIONS]
    for _ in range(sessions):
        c.rd[0].prefetch_turn = (c.rd[0].prefetch_turn + 1) % sessions
        index = wide(c.stamp_owner[c.rd[0].prefetch_turn])
        session = c.sessions[index]
        while session.prefetches:
            key = wide(c.prefetches[index, session.first_prefetch].key)
            table, oid = key >> KEY_SHIFT, key & _OID
            if not waits(c, key):
                take(c, index)
            elif is_gone(c, table, oid) or buffer_base(c, table, oid) != 0:  # given back, or on its way to the file
                drop_prefetch(c, index, take(c, index))
            elif _may_fill(c, table, oid):
                take(c, index)
                return _begin(c, table, oid, index)
            else:
                break
    return NONE


@borrowing
def _may_fill(c: Core, table: int, oid: int) -> bool:
    """Whether there is room that no miss needs soon; where there is not, some will be made."""
    cls = c.sections[section_of(c, table, oid)].cls
    if not has_room(c, cls, reserve_of(c, cls) // 2):
        want_room(c, cls)
        return False
    return bool(c.classes[cls].filling * 8 <= max(c.classes[cls].slots, 8))


@borrowing
def _begin(c: Core, table: int, oid: int, session: int) -> int:
    """A slot that is FILLING with a prefetched record, for which there is room."""
    set_pending(c, table, oid, PENDING_NONE)
    entry = begin_fill(c, c.sections[section_of(c, table, oid)].cls, table, oid)
    if entry != NONE:
        _describe(c, entry, session)
        c.slots[entry].marks = PREFETCHED
    return entry


@borrowing
def _describe(c: Core, entry: int, session: int) -> None:
    slot = c.slots[entry]
    slot.retries, slot.session, slot.score, slot.next = 0, session, 0, NONE
    slot.asked_us = c.rd[0].now_us & _OID


@borrowing
def _start_preload(c: Core, e: Any) -> int:
    """Read ahead for stores that want it whole, with half the windows and only into slots that are free anyway."""
    started = 0
    for table in range(c.rd[0].n_tables):
        t = c.tables[table]
        while t.preload_next != NONE and c.rd[0].in_flight * 2 < c.rd[0].depth:
            oid = t.preload_next
            t.preload_next = oid + 1 if oid + 1 < t.records else NONE
            if load_u32(t.directory + 4 * oid) != 0 or pending_of(c, table, oid) != PENDING_NONE:
                continue
            cls = c.sections[section_of(c, table, oid)].cls
            entry = begin_fill(c, cls, table, oid)
            if entry == NONE:
                t.preload_next = NONE
                break
            _describe(c, entry, AHEAD)
            send(c, e, open_window(c, entry))
            started += 1
    return started


@borrowing
def _start_warm(c: Core, e: Any) -> int:
    """Read records again that were resident before the start, the most recently used first, while there is room."""
    started = 0
    for table in range(c.rd[0].n_tables):
        t = c.tables[table]
        for _ in range(min(t.warm_left, _WARM_A_SWEEP)):
            if c.rd[0].in_flight * 2 >= c.rd[0].depth:
                break
            oid = wide(load_u32(t.warm))
            t.warm += 4
            t.warm_left -= 1
            cls = c.sections[section_of(c, table, oid)].cls
            absent = load_u32(t.directory + 4 * oid) == 0 and pending_of(c, table, oid) == PENDING_NONE
            entry = begin_fill(c, cls, table, oid) if absent and has_room(c, cls, reserve_of(c, cls)) else NONE
            if entry != NONE:
                _describe(c, entry, AHEAD)
                send(c, e, open_window(c, entry))
                c.rd[0].warmed += 1
                started += 1
    return started
