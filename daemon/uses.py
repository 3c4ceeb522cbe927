"""Uses: what clients' stamps say of resident slots, told to the policy and to the counters. The reader thread only.

A use is a stamp later than what is known of its slot (``seen``). Whoever is about to evict a slot looks at it
(:func:`newest_use`). A policy that learns, as all but LRU do, is told by a *hand* that goes round all slots, some of
them each tick (:func:`turn_hand`); several uses between two looks are one. The hand also goes round while prefetched
records are resident that nobody has used yet, because whoever prefetches has to know soon whether it pays.
"""

from strataflux.cache_policy import budget
from strataflux.cache_policy.base import later_by, wide
from strataflux.cache_policy.lru import newest_stamp
from strataflux.daemon import replacement
from strataflux.daemon.counting import kind_of
from strataflux.daemon.slots import slot_number
from strataflux.daemon.state import PREFETCHED, USED, VALID, Core
from strataflux.proto import layout
from strataflux.proto.atomics import load_u64, store_u64
from strataflux.proto.compiled import borrowing

__all__ = ["advise", "newest_use", "note_leaving", "note_use", "tell_use", "turn_hand"]

_UNITS = layout.UNITS_PER_PAGE
_SLOTS_A_TICK = 2048
_PAGES_A_TICK = 256
_USED = layout.offset_of(layout.SESSION_VIEW, "prefetch_used")
_UNUSED = layout.offset_of(layout.SESSION_VIEW, "prefetch_unused")


@borrowing
def newest_use(c: Core, entry: int) -> int:
    """The clock of a slot's newest use, ``seen`` if there is none since; a first use is counted.

    The first is looked for since the slot was filled, that tick included: whoever waited comes at once, with the clock
    of a step that may have begun before.
    """
    slot, sessions = c.slots[entry], c.stamp_owner[layout.MAX_SESSIONS]
    seen = wide(slot.seen)
    since = seen if slot.marks & USED else (seen - 1) & 0xFFFFFFFF
    stamp = newest_stamp(slot_number(c, entry), since, c.rd[0].clock, c.stamps, c.stepped, sessions)
    if stamp != since:
        note_use(c, entry)
    return seen if later_by(seen, stamp) > 0 else stamp


@borrowing
def note_use(c: Core, entry: int) -> None:
    """A sign that a fill was worth it; the first counts."""
    slot = c.slots[entry]
    if slot.marks & USED:
        return
    slot.marks |= USED
    kind = kind_of(c.tables[slot.table])
    c.kinds[kind].fills_useful += 1
    if slot.marks & PREFETCHED:
        c.kinds[kind].prefetch_used += 1
        c.rd[0].unseen -= 1
        advise(c, entry, kind, _USED)


@borrowing
def note_leaving(c: Core, entry: int) -> None:
    """A slot is about to be retired: if nobody used it, that counts, too."""
    slot = c.slots[entry]
    if slot.marks & USED:
        return
    kind = kind_of(c.tables[slot.table])
    c.kinds[kind].fills_unused += 1
    if slot.marks & PREFETCHED:
        c.kinds[kind].prefetch_unused += 1
        c.rd[0].unseen -= 1
        advise(c, entry, kind, _UNUSED)


@borrowing
def advise(c: Core, entry: int, kind: int, word: int) -> None:
    """Count one more in a word of the view of whoever prefetched a slot's record, if that session still lives."""
    slot = c.slots[entry]
    asker = wide(slot.session)
    if asker < 0:
        return
    session = c.sessions[asker]
    # The row may be another's by now: the slot was filled (`seen`, as long as it is not used) before that one came.
    if session.active and later_by(wide(slot.seen), session.opened) >= 0:
        at = session.view_page + word + 8 * kind
        store_u64(at, wide(load_u64(at)) + 1)


@borrowing
def tell_use(c: Core, entry: int, clock: int) -> None:
    """The policy learns that a slot was used at ``clock``."""
    slot = c.slots[entry]
    slot.seen = clock
    kind = c.classes[slot.cls].kind
    replacement.touch(c.policies[kind], replacement.place_of(c, entry), clock, 0)


@borrowing
def turn_hand(c: Core) -> None:
    """Once a tick: look at the next slots, a page's all at once."""
    rd = c.rd[0]
    if c.stamp_owner[layout.MAX_SESSIONS] == 0 or (rd.learns == 0 and rd.unseen == 0):
        return
    left = _SLOTS_A_TICK
    for _ in range(min(rd.range_pages, _PAGES_A_TICK)):
        page = rd.hand_page
        rd.hand_page = page + 1 if page + 1 < rd.range_pages else 0
        if c.pages.pages[page].state == budget.OWNED:
            left -= _look_at(c, page)
        if left <= 0:
            break


@borrowing
def _look_at(c: Core, page: int) -> int:
    """Look at a page's slots; how many it has."""
    count = _UNITS // c.classes[c.pages.pages[page].owner].units
    for entry in range(page * _UNITS, page * _UNITS + count):
        if c.slots[entry].state == VALID:
            stamp = newest_use(c, entry)
            if c.rd[0].learns and stamp != wide(c.slots[entry].seen):
                tell_use(c, entry, stamp)
    return wide(count)
