"""Requests: from the sessions' rings into a queue, fair between sessions and ordered by score within one. The reader
thread only.

Every entry a client wrote is bounded before it is used. A request that is not dropped is either answered already
(resident, filling, queued, quarantined: counted as such) or queued; one record is queued or filling at most once, which
its table's ``pending`` word remembers.

The queue has a *lane* for each session, and one for requests that belong to nobody any more. Lanes with requests take
turns (:mod:`strataflux.daemon.lanes`), one request a turn, so a session gets its share of the reads however many
requests others have waiting. Within a lane requests lie in 16 buckets by score, the most wanted first and first come
first served within one; who asks again for more moves up. What clients prefetch waits elsewhere
(:mod:`strataflux.daemon.prefetch`). A full queue drops from the lane that holds most the request with the lowest score.
Pairs: ``_push`` / ``pop`` or ``_drop_lowest``.
"""

import numpy as np

from strataflux.cache_policy.base import wide
from strataflux.daemon import prefetch, replacement
from strataflux.daemon.counting import forget_asker, kind_of
from strataflux.daemon.lanes import count_in, count_out, fullest, holds_more, next_lane, take_turn, undo_turn
from strataflux.daemon.puts import is_gone
from strataflux.daemon.rows import LANES, NOBODY
from strataflux.daemon.slots import pending_of, set_pending, was_resident
from strataflux.daemon.state import (
    MAX_QUEUED,
    NONE,
    PENDING_NONE,
    PENDING_PREFETCH,
    PENDING_QUEUED,
    SCORE_BUCKETS,
    Core,
)
from strataflux.proto import layout, ring
from strataflux.proto.atomics import load_u32
from strataflux.proto.compiled import borrowing

__all__ = ["drop", "drop_table", "forget_session", "pop", "push_again", "put_back", "release", "take_requests"]

_TAIL = layout.offset_of(layout.SESSION_PAGE, "ring_tail")
_HEAD = layout.offset_of(layout.SESSION_VIEW, "ring_head")
_PREFETCH = np.uint64(layout.PREFETCH)
_AT_MOST_A_TURN = 256
_KEY_SHIFT = 32


@borrowing
def take_requests(c: Core) -> int:
    """Take up to 256 entries of each session's ring; returns how many were taken.

    Sessions come in turn, a different one first each sweep, so that a busy ring cannot crowd out the others.
    """
    sessions = c.stamp_owner[layout.MAX_SESSIONS]
    taken = 0
    for turn in range(sessions):
        index = c.stamp_owner[(turn + c.rd[0].turns) % sessions]
        session = c.sessions[index]
        tail = ring.load_tail(session.page + _TAIL, session.head, session.ring_log2)
        # Looked at here, because a call copies the core's hundreds of words: most rings are empty most of the time.
        status, _ = ring.consume(session.ring, session.ring_log2, session.head, tail)
        if session.fenced == 0 and status != ring.EMPTY:
            taken += _take_from(c, index, wide(tail))
    return taken


@borrowing
def _take_from(c: Core, index: int, tail: int) -> int:
    session = c.sessions[index]
    log2 = session.ring_log2
    taken, prefetched = 0, 0
    while taken < _AT_MOST_A_TURN:
        status, payload = ring.consume(session.ring, log2, session.head, tail)
        if status == ring.EMPTY:
            break
        session.head += 1
        taken += 1
        if status != ring.READY:
            session.holes += 1
        elif payload & _PREFETCH:
            prefetched += _accept_prefetch(c, index, wide(payload))
        elif not _accept(c, index, wide(payload)):
            _push_into_full(c, index, wide(payload))
    if taken:
        ring.publish_head(session.view_page + _HEAD, session.head)
        session.taken += taken - prefetched
        c.tenants[c.lanes[index].tenant].requests += taken - prefetched
    return taken


@borrowing
def _accept(c: Core, index: int, payload: int) -> bool:
    """One entry, as a client wrote it: nothing in it is trusted. False if it is still to be queued, in a full queue.

    How stands apart: a function that is too long to become part of the loop above costs each request a copy of the
    core.
    """
    score = (payload >> layout.SCORE_SHIFT) & 0xFF
    number = (payload >> layout.TABLE_SHIFT) & 0xFF
    oid = payload & layout.OID_MASK
    session = c.sessions[index]
    table = wide(c.session_tables[index, number]) if number < session.tables else NONE
    if table == NONE or oid >= c.tables[table].records or is_gone(c, table, oid):
        session.invalid += 1
        return True
    counts = c.kinds[kind_of(c.tables[table])]
    entry = load_u32(c.tables[table].directory + 4 * oid)
    if entry == layout.ENTRY_QUARANTINED:
        counts.quarantine_hits += 1
    elif entry != layout.ENTRY_ABSENT:
        counts.resident_already += 1
    elif pending_of(c, table, oid) not in (PENDING_NONE, PENDING_PREFETCH):
        counts.duplicates += 1
        session.duplicates += 1
        place = pending_of(c, table, oid) - PENDING_QUEUED
        if place >= 0 and score > c.queue[place].score:
            _raise_score(c, index, place, score)
    else:
        if was_resident(c, table, oid):
            counts.evicted_again += 1
        else:
            counts.cold += 1
        kind = kind_of(c.tables[table])
        replacement.requested(c.policies[kind], table << layout.TABLE_SHIFT | oid, score, c.rd[0].clock)
        if c.rd[0].queued == MAX_QUEUED:
            return False
        _push(c, index, table, oid, score, 0)
    return True


@borrowing
def _accept_prefetch(c: Core, index: int, payload: int) -> int:
    """As :func:`_accept`, for what was not missed. 1 if it was one of the session's records, 0 if rubbish."""
    number = (payload >> layout.TABLE_SHIFT) & 0xFF
    oid = payload & layout.OID_MASK
    session = c.sessions[index]
    table = wide(c.session_tables[index, number]) if number < session.tables else NONE
    if table == NONE or oid >= c.tables[table].records or is_gone(c, table, oid):
        session.invalid += 1
        return 0
    prefetch.ask(c, index, table, oid)
    return 1


@borrowing
def _push_into_full(c: Core, index: int, payload: int) -> None:
    """An entry that was accepted finds the queue full: it takes another's place, or is dropped."""
    score = (payload >> layout.SCORE_SHIFT) & 0xFF
    table = wide(c.session_tables[index, (payload >> layout.TABLE_SHIFT) & 0xFF])
    _push_or_drop(c, index, table, payload & layout.OID_MASK, score, 0)


@borrowing
def push_again(c: Core, entry: int, retries: int) -> None:
    """Queue the record of a slot that was just abandoned once more, to be read alone (its read went wrong)."""
    slot = c.slots[entry]
    _push_or_drop(c, wide(slot.session), wide(slot.table), wide(slot.oid), wide(slot.score), retries)


@borrowing
def _lane_of(session: int) -> int:
    return session if session >= 0 else NOBODY


@borrowing
def _push_or_drop(c: Core, session: int, table: int, oid: int, score: int, retries: int) -> None:
    lane = _lane_of(session)
    if c.rd[0].queued == MAX_QUEUED and not _make_room(c, lane, score * SCORE_BUCKETS // 256):
        _count_drop(c, lane)
        return
    _push(c, session, table, oid, score, retries)


@borrowing
def _push(c: Core, session: int, table: int, oid: int, score: int, retries: int) -> None:
    """Queue a request in a queue that is not full."""
    rd = c.rd[0]
    place = rd.free_queued
    node = c.queue[place]
    rd.free_queued = wide(node.next)
    node.key = table << _KEY_SHIFT | oid
    node.asked_us = rd.now_us
    node.session = session
    node.score = score
    node.retries = retries
    _append(c, _lane_of(session), score * SCORE_BUCKETS // 256, place)
    set_pending(c, table, oid, PENDING_QUEUED + place)


@borrowing
def _raise_score(c: Core, index: int, place: int, score: int) -> None:
    """A record that is queued is asked for again, for more: if by the same session, it moves up to where it is wanted
    now.
    """
    if c.queue[place].session != index:
        return
    before, bucket = wide(c.queue[place].score) * SCORE_BUCKETS // 256, score * SCORE_BUCKETS // 256
    c.queue[place].score = score
    if before != bucket:
        _unlink(c, index, before, place)
        _append(c, index, bucket, place)


@borrowing
def _append(c: Core, lane: int, bucket: int, place: int) -> None:
    node, last = c.queue[place], c.buckets[lane, bucket, 1]
    node.next = NONE
    node.prev = NONE
    if c.buckets[lane, bucket, 0] == NONE:
        c.buckets[lane, bucket, 0] = place
    else:
        node.prev = last
        c.queue[last].next = place
    c.buckets[lane, bucket, 1] = place
    row = c.lanes[lane]
    count_in(row, c.tenants[row.tenant], c.rd[0])


@borrowing
def _unlink(c: Core, lane: int, bucket: int, place: int) -> None:
    node = c.queue[place]
    before, after = wide(node.prev), wide(node.next)
    if before == NONE:
        c.buckets[lane, bucket, 0] = after
    else:
        c.queue[before].next = after
    if after == NONE:
        c.buckets[lane, bucket, 1] = before
    else:
        c.queue[after].prev = before
    count_out(c.lanes[lane], c.tenants[c.lanes[lane].tenant], c.rd[0])


@borrowing
def pop(c: Core) -> int:
    """Take the most wanted request of the lane whose turn it is out of the queue; ``NONE`` if it is empty.

    The entry stays readable until :func:`release`; the record's ``pending`` word still says queued.
    """
    lane = next_lane(c)
    if lane == NONE:
        return NONE
    take_turn(c.lanes[lane], c.tenants[c.lanes[lane].tenant], c.rd[0])
    return _pop_best(c, lane)


@borrowing
def _pop_best(c: Core, lane: int) -> int:
    bucket = SCORE_BUCKETS - 1
    while c.buckets[lane, bucket, 0] == NONE:
        bucket -= 1
    return _pop_first(c, lane, bucket)


@borrowing
def _pop_first(c: Core, lane: int, bucket: int) -> int:
    place = wide(c.buckets[lane, bucket, 0])
    _unlink(c, lane, bucket, place)
    return place


@borrowing
def release(c: Core, place: int) -> None:
    """Give a popped queue entry's place back."""
    c.queue[place].next = c.rd[0].free_queued
    c.rd[0].free_queued = place


@borrowing
def put_back(c: Core, place: int) -> None:
    """Undo :func:`pop`: the request goes back to the front of its bucket."""
    bucket = wide(c.queue[place].score) * SCORE_BUCKETS // 256
    lane = _lane_of(wide(c.queue[place].session))
    head = c.buckets[lane, bucket, 0]
    c.queue[place].next = head
    c.queue[place].prev = NONE
    c.buckets[lane, bucket, 0] = place
    if head == NONE:
        c.buckets[lane, bucket, 1] = place
    else:
        c.queue[head].prev = place
    row = c.lanes[lane]
    count_in(row, c.tenants[row.tenant], c.rd[0])
    undo_turn(row, c.tenants[row.tenant])


@borrowing
def drop(c: Core, place: int) -> None:
    """A popped request will not be served: its record is asked for again at its next miss."""
    key = c.queue[place].key
    set_pending(c, key >> _KEY_SHIFT, key & 0xFFFFFFFF, PENDING_NONE)
    release(c, place)


@borrowing
def drop_table(c: Core, table: int) -> None:
    """A table goes away: forget the queued requests for it."""
    prefetch.purge_prefetches(c, table)
    for lane in range(LANES):
        for bucket in range(SCORE_BUCKETS):
            place = c.buckets[lane, bucket, 0]
            c.buckets[lane, bucket, 0] = NONE
            while place != NONE:
                after = wide(c.queue[place].next)
                count_out(c.lanes[lane], c.tenants[c.lanes[lane].tenant], c.rd[0])
                if c.queue[place].key >> _KEY_SHIFT == table:
                    drop(c, place)
                else:
                    _append(c, lane, bucket, place)
                place = after


@borrowing
def _make_room(c: Core, lane: int, bucket: int) -> bool:
    """Drop the oldest request of the lowest bucket of the lane that holds most. If none holds more than ``lane``, only
    one of its own that is wanted less than ``bucket``; False if there is none.
    """
    other = fullest(c)
    if holds_more(c, other, lane):
        return _drop_lowest(c, other, SCORE_BUCKETS)
    return _drop_lowest(c, lane, bucket)


@borrowing
def _drop_lowest(c: Core, lane: int, below: int) -> bool:
    for bucket in range(below):
        if c.buckets[lane, bucket, 0] != NONE:
            place = _pop_first(c, lane, bucket)
            _count_drop(c, lane)
            drop(c, place)
            return True
    return False


@borrowing
def _count_drop(c: Core, lane: int) -> None:
    c.rd[0].dropped_queue += 1
    c.tenants[c.lanes[lane].tenant].dropped += 1
    if lane != NOBODY:
        c.sessions[lane].dropped_queue += 1


@borrowing
def forget_session(c: Core, index: int) -> None:
    """A session is gone: its requests stay (somebody may want the records) but belong to nobody."""
    forget_asker(c, index)
    prefetch.forget_prefetches(c, index)
    while c.lanes[index].queued:
        place = _pop_best(c, index)
        c.queue[place].session = NONE
        _append(c, NOBODY, wide(c.queue[place].score) * SCORE_BUCKETS // 256, place)
    for window in range(c.rd[0].depth):
        entry = c.windows[window].chain if c.windows[window].state else NONE
        while entry != NONE:
            if c.slots[entry].session == index:
                c.slots[entry].session = NONE
            entry = wide(c.slots[entry].next)
