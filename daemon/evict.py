"""Eviction: room for what was missed and, beside that, for what is prefetched. The reader thread only.

The policy names the candidate; here its stamps are looked at, so that what was used since the policy heard of it stays.
Misses have a reserve, kept free ahead of need. Prefetches take what is free beyond half of it, and have more made free
as they ask (``room``), but never by evicting what a step that runs now has used.
"""

from strataflux.cache_policy import budget
from strataflux.cache_policy.base import later_by, wide
from strataflux.cache_policy.lru import REINSERTIONS
from strataflux.daemon import replacement
from strataflux.daemon.cache import drain_page, retire
from strataflux.daemon.rows import EVICTED_CAPACITY
from strataflux.daemon.state import USED, Core
from strataflux.daemon.uses import newest_use, tell_use
from strataflux.proto import layout
from strataflux.proto.compiled import borrowing

__all__ = ["ask_page", "evict_ahead", "evict_one", "has_room", "is_worth", "reserve_of", "shrink_room", "want_room"]

_EVICTIONS_A_SWEEP = 256
_RESERVE_SHARE = 16
_ROOM_SHARE = 8
_TABLE_SHIFT = layout.TABLE_SHIFT


@borrowing
def reserve_of(c: Core, cls: int) -> int:
    """Slots of a class that are kept free for misses."""
    return max(wide(c.classes[cls].slots) // _RESERVE_SHARE, 1)


@borrowing
def evict_one(c: Core, cls: int, at_any_cost: bool) -> bool:
    """Retire the class's best victim; False if it has none that may go.

    A candidate that a session stamped since the policy heard of it is told as a use, and the next one is asked for; at
    most ``REINSERTIONS`` times, then the candidate is taken: ``at_any_cost`` also if a running step has used it. A
    pinned fill that nobody used yet counts as just used.
    """
    clock, kind = c.rd[0].clock, c.classes[cls].kind
    for attempt in range(REINSERTIONS + 1):
        entry = replacement.entry_at(c, kind, replacement.candidate(c.policies[kind], cls))
        if entry < 0:
            return False
        slot = c.slots[entry]
        stamp = newest_use(c, entry)
        if slot.marks & USED == 0 and slot.pinned != 0 and later_by(wide(slot.pinned), clock) > 0:
            if attempt == REINSERTIONS:
                return False
            # Not a use: what is known of the slot stays, so that its first use is found.
            replacement.touch(c.policies[kind], replacement.place_of(c, entry), clock, 0)
        elif stamp == wide(slot.seen) or attempt == REINSERTIONS:
            if not at_any_cost and later_by(stamp, _running_since(c)) >= 0:
                return False
            retire(c, entry, EVICTED_CAPACITY)
            return True
        else:
            tell_use(c, entry, stamp)
    return False


@borrowing
def _running_since(c: Core) -> int:
    """A clock before the stamps of all steps that run now; one in the future if none does."""
    oldest = c.rd[0].clock + 1
    for place in range(c.stamp_owner[layout.MAX_SESSIONS]):
        session = c.sessions[c.stamp_owner[place]]
        # A step stamps with the clock it copied, a tick at most before it was seen inside.
        if session.inside and later_by(oldest, session.since - 1) > 0:
            oldest = session.since - 1
    return wide(oldest & 0xFFFFFFFF)


@borrowing
def evict_ahead(c: Core) -> None:
    """Keep 1/16 of every class free or about to be, so that a burst of misses finds room, and what prefetches asked for
    beside that.

    Nothing is evicted while the class may still take an unused page, nor while a quarter of it waits for grace.
    """
    for cls in range(c.rd[0].n_classes):
        group = c.classes[cls]
        if group.slots == 0 or c.pages.pools[c.pages.classes[cls].budget].unused > 0:
            continue
        reserve = reserve_of(c, cls)
        at_any_cost = c.rd[0].unseen == 0  # prefetched records took of the reserve, and nobody is to pay for them
        for _ in range(_EVICTIONS_A_SWEEP):
            if group.free + group.retired >= reserve or not evict_one(c, cls, at_any_cost):
                break
        for _ in range(_EVICTIONS_A_SWEEP):
            if group.free + group.retired >= reserve + group.room or not evict_one(c, cls, False):
                break


@borrowing
def has_room(c: Core, cls: int, kept: int) -> bool:
    """Whether a class can take a record that nobody missed and still keep so many slots free."""
    return bool(c.pages.pools[c.pages.classes[cls].budget].unused > 0 or c.classes[cls].free > kept)


@borrowing
def want_room(c: Core, cls: int) -> None:
    """A class had no room for a prefetch: a little later it will have a slot more."""
    group = c.classes[cls]
    group.room = min(wide(group.room) + 1, wide(group.slots) // _ROOM_SHARE)


@borrowing
def shrink_room(c: Core) -> None:
    """Once in a while: room for prefetches that is not asked for any more goes, by and by."""
    for cls in range(c.rd[0].n_classes):
        c.classes[cls].room -= (wide(c.classes[cls].room) + _ROOM_SHARE - 1) // _ROOM_SHARE


@borrowing
def is_worth(c: Core, cls: int, table: int, oid: int, score: int) -> bool:
    """Whether a missed record may take a slot: always while there are more than the reserve, else if the policy says
    so.
    """
    group = c.classes[cls]
    full = c.pages.pools[c.pages.classes[cls].budget].unused == 0 and group.slots > 0
    if not full or group.free + group.retired > reserve_of(c, cls):
        return True
    return replacement.admit(c.policies[group.kind], table << _TABLE_SHIFT | oid, cls, score, c.rd[0].clock)


@borrowing
def ask_page(c: Core, cls: int) -> None:
    """A class starves: ask the budget whether a colder class should give it a page, and drain that page."""
    for other in range(c.rd[0].n_classes):
        c.tails[other] = replacement.tail_clock(c.policies[c.classes[other].kind], other)
    page = budget.pick_drain(c.pages, cls, c.tails, c.rd[0].clock)
    if page != budget.NO_PAGE:
        drain_page(c, page, EVICTED_CAPACITY)
