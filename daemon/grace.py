"""Grace: a retired slot is written again only after every step that might still read it has ended.

Epoch-based reclamation with the sessions' own step counters as epochs. Retired slots gather in the open batch.
:func:`close_batch` ends it: one full fence, then ``step_begun`` of every session is read. A session that began a step
after that fence sees the entries as absent (its own full fence lies between its ``step_begun`` and its look-ups), so
only sessions seen inside a step *hold* the batch, each until its ``step_ended`` reaches the ``step_begun`` seen.

    SYNC pairs (store → full fence → load on both sides; release and acquire alone would let both loads run early):
      reader: entry = 0        fence    load step_begun
      client: step_begun = n   fence    load entry

Batches are freed in the order they were closed. Invariant: every RETIRED slot is in the open chain or in exactly one
batch; a fenced or closed session holds nothing.
"""

import numpy as np

from strataflux.cache_policy.base import later_by, wide
from strataflux.daemon.cache import free
from strataflux.daemon.state import MAX_BATCHES, NONE, Core
from strataflux.proto import layout
from strataflux.proto.atomics import U64, fence, load_acquire_u32, load_u32, store_u32
from strataflux.proto.compiled import borrowing

__all__ = ["begin_session", "close_batch", "end_session", "fence_stuck", "observe_steps", "recycle"]

_BEGUN = layout.offset_of(layout.SESSION_PAGE, "step_begun")
_RENEWALS = layout.offset_of(layout.SESSION_PAGE, "renewals")
_ENDED = layout.offset_of(layout.SESSION_PAGE, "step_ended")
_FENCED = layout.offset_of(layout.SESSION_VIEW, "fenced")
_ONE = np.uint64(1)
_MOST_STEPS = 1 << 16
"""Between two looks; the words are a client's, who may write anything."""


@borrowing
def observe_steps(c: Core) -> bool:
    """Note which sessions are inside a step now; True if any is. Feeds recency (``stepped``) and the spin."""
    any_inside = False
    for place in range(c.stamp_owner[layout.MAX_SESSIONS]):
        session = c.sessions[c.stamp_owner[place]]
        begun, ended = wide(load_u32(session.page + _BEGUN)), wide(load_u32(session.page + _ENDED))
        inside = begun != ended
        if begun != session.begun:
            session.before_clock, session.step_clock = session.step_clock, c.rd[0].clock
        # Of two steps in flight the older one stamps, too.
        session.since = session.step_clock if later_by(begun, ended) < 2 else session.before_clock
        if begun != session.begun or inside:
            renewed = wide(load_u32(session.page + _RENEWALS))
            session.net_steps += _grown(begun, session.begun) - _grown(renewed, session.renewed)
            session.steps = max(session.steps, session.net_steps)
            session.begun, session.renewed = begun, renewed
            c.stepped[place] = c.rd[0].clock
        session.inside = inside
        any_inside |= inside and session.fenced == 0
    return any_inside


@borrowing
def _grown(now: int, before: int) -> int:
    return max(min(later_by(now, before), _MOST_STEPS), 0)


@borrowing
def close_batch(c: Core) -> bool:
    """Close the open batch, if it holds anything and a place is left; True if it did."""
    rd = c.rd[0]
    if rd.open_count == 0 or rd.batch_last - rd.batch_first == MAX_BATCHES:
        return False
    place = rd.batch_last % MAX_BATCHES
    batch = c.batches[place]
    holders = np.uint64(0)
    # SYNC: step-begun (read). Full fence: the entries' zeroes are visible before any step_begun is read.
    fence()
    for at in range(c.stamp_owner[layout.MAX_SESSIONS]):
        index = c.stamp_owner[at]
        session = c.sessions[index]
        begun = load_acquire_u32(session.page + _BEGUN)
        ended = load_acquire_u32(session.page + _ENDED)
        if session.fenced == 0 and later_by(wide(ended), wide(begun)) < 0:
            holders |= _ONE << np.uint64(index)
            c.batch_begun[place, index] = begun
    batch.holders = holders
    batch.chain = rd.open_chain
    batch.count = rd.open_count
    batch.closed_us = rd.now_us
    rd.open_chain = NONE
    rd.open_count = 0
    rd.batch_last += 1
    return True


@borrowing
def recycle(c: Core) -> int:
    """Free the slots of every batch that nobody holds any more; returns how many."""
    rd = c.rd[0]
    freed = 0
    while rd.batch_first < rd.batch_last:
        place = rd.batch_first % MAX_BATCHES
        batch = c.batches[place]
        if _still_held(c, place) != np.uint64(0):
            break
        entry = batch.chain
        while entry != NONE:
            after = wide(c.slots[entry].next)
            free(c, entry)
            entry = after
            freed += 1
        rd.batch_first += 1
    return freed


@borrowing
def _still_held(c: Core, place: int) -> U64:
    """Holders of a batch that have not ended their step, as a bit mask (also stored)."""
    held = c.batches[place].holders
    if held == np.uint64(0):
        return held
    for index in range(layout.MAX_SESSIONS):
        bit = _ONE << np.uint64(index)
        if held & bit == np.uint64(0):
            continue
        # SYNC: step-ended (read). Acquire: the session's last slot reads lie before its step_ended.
        ended = load_acquire_u32(c.sessions[index].page + _ENDED)
        if later_by(wide(ended), wide(c.batch_begun[place, index])) >= 0:
            held &= ~bit
    c.batches[place].holders = held
    return held


@borrowing
def fence_stuck(c: Core) -> int:
    """Fence the sessions that hold the oldest batch too long while fills wait for its slots; returns how many.

    A fenced session's step ends invalid (its client checks the flag after its last slot read), so its slots may be
    written again at once.
    """
    rd = c.rd[0]
    if rd.starved == 0 or rd.batch_first == rd.batch_last:
        return 0
    batch = c.batches[rd.batch_first % MAX_BATCHES]
    if rd.now_us - batch.closed_us < rd.grace_us:
        return 0
    fenced = 0
    for index in range(layout.MAX_SESSIONS):
        if batch.holders & (_ONE << np.uint64(index)) != np.uint64(0):
            c.sessions[index].fenced = 1
            store_u32(c.sessions[index].view_page + _FENCED, 1)
            _drop_holds(c, index)
            fenced += 1
    # SYNC: fenced (publish). Full fence: the flag is visible before the first byte of any refill.
    fence()
    rd.fences += fenced
    return fenced


@borrowing
def _drop_holds(c: Core, index: int) -> None:
    for position in range(c.rd[0].batch_first, c.rd[0].batch_last):
        c.batches[position % MAX_BATCHES].holders &= ~(_ONE << np.uint64(index))


@borrowing
def begin_session(c: Core, index: int, stamps: int) -> None:
    """Enter a session whose row is filled in: from now on batches ask for its steps."""
    place = c.stamp_owner[layout.MAX_SESSIONS]
    c.sessions[index].active = 1
    c.sessions[index].opened = c.rd[0].clock
    c.stamps[place] = stamps
    c.stepped[place] = c.rd[0].clock
    c.stamp_owner[place] = index
    c.stamp_owner[layout.MAX_SESSIONS] = place + 1


@borrowing
def end_session(c: Core, index: int) -> None:
    """Take a session out: its holds are gone and its memory is not looked at again.

    Its client may be alive inside a step (it sent rubbish, or was too slow), so it is fenced first.
    """
    c.sessions[index].active = 0
    store_u32(c.sessions[index].view_page + _FENCED, 1)
    # SYNC: fenced (publish). Full fence: the flag is visible before the first byte of any refill.
    fence()
    _drop_holds(c, index)
    last = c.stamp_owner[layout.MAX_SESSIONS] - 1
    for place in range(last + 1):
        if c.stamp_owner[place] == index:
            c.stamp_owner[place] = c.stamp_owner[last]
            c.stamps[place] = c.stamps[last]
            c.stepped[place] = c.stepped[last]
    c.stamp_owner[layout.MAX_SESSIONS] = last
