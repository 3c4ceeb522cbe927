"""Slots and directories: allocate, publish, evict, recycle. The reader thread only.

The tier owns slots, bytes and directory entries; :mod:`strataflux.cache_policy` orders them and picks victims. States
of a slot stand in :mod:`strataflux.daemon.state`. Pairs:

* ``begin_fill`` / ``publish`` or ``abandon_fill``
* ``retire`` / ``free`` (in between lies the grace of :mod:`strataflux.daemon.grace`)

Invariants (:mod:`strataflux.daemon.integrity`): a directory entry names a slot iff that slot is VALID and
carries that record;
``pending`` names a slot iff that slot is FILLING; a class's free list holds exactly its FREE slots; a page's count of
slots in use equals its FILLING + VALID + RETIRED slots.
"""

from strataflux.cache_policy import budget, lru
from strataflux.cache_policy.base import later_by, wide
from strataflux.daemon.counting import follow, hash_of, kind_of, unfollow
from strataflux.daemon.rows import EVICTED_CAPACITY
from strataflux.daemon.state import (
    ABSENT,
    FILLING,
    FREE,
    NONE,
    PENDING_NONE,
    PENDING_SEEN,
    RETIRED,
    VALID,
    Core,
)
from strataflux.proto import layout
from strataflux.proto.atomics import load_u32, store_release_u32, store_u32
from strataflux.proto.compiled import borrowing

__all__ = [
    "abandon_fill",
    "ask_page",
    "begin_fill",
    "drain_page",
    "evict_ahead",
    "evict_one",
    "free",
    "is_draining",
    "leave_page",
    "pending_of",
    "publish",
    "quarantine",
    "retire",
    "retire_unseen",
    "set_pending",
    "slot_address",
    "slot_entry",
    "slot_number",
    "was_resident",
]

_UNITS = layout.UNITS_PER_PAGE
_EVICTIONS_A_SWEEP = 256
_TABLE_SHIFT = layout.TABLE_SHIFT


@borrowing
def slot_number(c: Core, entry: int) -> int:
    """Directory's number (256-byte units) of a slot entry that belongs to a class."""
    page = entry // _UNITS
    return wide(page * _UNITS + (entry - page * _UNITS) * c.classes[c.slots[entry].cls].units)


@borrowing
def slot_address(c: Core, entry: int) -> int:
    """Address of a slot's bytes in this process."""
    page = entry // _UNITS
    inside = (entry - page * _UNITS) * c.classes[c.slots[entry].cls].units
    return wide(c.page_address[page] + inside * layout.SLOT_UNIT_BYTES)


@borrowing
def slot_entry(c: Core, number: int) -> int:
    """Entry of a slot number that a directory of ours names."""
    page = number // _UNITS
    first = page * _UNITS
    return wide(first + (number - first) // c.classes[c.pages.pages[page].owner].units)


@borrowing
def pending_of(c: Core, table: int, oid: int) -> int:
    """What the reader is doing about a record: PENDING_NONE, PENDING_QUEUED, or its filling slot's entry + 1."""
    return wide(load_u32(c.tables[table].pending + 4 * oid)) & ~PENDING_SEEN


@borrowing
def set_pending(c: Core, table: int, oid: int, value: int) -> None:
    """Change :func:`pending_of`; that a record was resident once is kept."""
    at = c.tables[table].pending + 4 * oid
    store_u32(at, (wide(load_u32(at)) & PENDING_SEEN) | value)


@borrowing
def was_resident(c: Core, table: int, oid: int) -> bool:
    """The record was published at least once since the daemon started."""
    return bool(wide(load_u32(c.tables[table].pending + 4 * oid)) & PENDING_SEEN)


@borrowing
def _link_free(c: Core, entry: int, cls: int) -> None:
    head = c.classes[cls].free_head
    c.slots[entry].next = head
    c.slots[entry].prev = NONE
    if head != NONE:
        c.slots[head].prev = entry
    c.classes[cls].free_head = entry
    c.classes[cls].free += 1
    c.slots[entry].state = FREE


@borrowing
def _unlink_free(c: Core, entry: int, cls: int) -> None:
    after, before = wide(c.slots[entry].next), wide(c.slots[entry].prev)
    if before == NONE:
        c.classes[cls].free_head = after
    else:
        c.slots[before].next = after
    if after != NONE:
        c.slots[after].prev = before
    c.classes[cls].free -= 1


@borrowing
def _own_page(c: Core, page: int, cls: int) -> None:
    """ABSENT → FREE for every slot of a page that the budget just gave to ``cls``."""
    per_page = _UNITS // c.classes[cls].units
    for entry in range(page * _UNITS + per_page - 1, page * _UNITS - 1, -1):
        c.slots[entry].cls = cls
        _link_free(c, entry, cls)
    c.classes[cls].slots += per_page


@borrowing
def begin_fill(c: Core, cls: int, table: int, oid: int) -> int:
    """A FREE slot of ``cls``, now FILLING with a record; ``NONE`` (nothing changed) if the class has none.

    A class without free slots first takes an unused page of its budget, then asks for one of a class whose
    records are colder; the latter arrives a few sweeps later.
    """
    if c.classes[cls].free_head == NONE:
        page = budget.want_page(c.pages, cls)
        if page == budget.NO_PAGE:
            return NONE
        _own_page(c, page, cls)
    entry = c.classes[cls].free_head
    _unlink_free(c, entry, cls)
    budget.take_slot(c.pages, entry // _UNITS)
    c.classes[cls].filling += 1
    slot = c.slots[entry]
    slot.state = FILLING
    slot.table = table
    slot.oid = oid
    slot.used = 0
    slot.pinned = 0
    set_pending(c, table, oid, entry + 1)
    return wide(entry)


@borrowing
def publish(c: Core, entry: int) -> None:
    """FILLING → VALID: the bytes are in place and verified; clients may read them from now on."""
    slot = c.slots[entry]
    table, oid = wide(slot.table), wide(slot.oid)
    clock = c.rd[0].clock
    slot.state = VALID
    slot.filled = clock
    c.classes[slot.cls].filling -= 1
    lru.insert(c.policy, entry, wide(slot.cls), table << _TABLE_SHIFT | oid, clock, wide(slot.score))
    slot.prev = NONE
    if hash_of(oid, table) < c.rd[0].sampled_hashes:
        follow(c, entry, slot_number(c, entry))
    set_pending(c, table, oid, PENDING_NONE | PENDING_SEEN)
    # SYNC: directory-entry (publish). Release: the record's bytes are visible before the entry that names them.
    store_release_u32(c.tables[table].directory + 4 * oid, slot_number(c, entry) + 1)
    c.tables[table].resident += 1
    c.tables[table].fills += 1
    c.rd[0].filled_now += 1


@borrowing
def abandon_fill(c: Core, entry: int) -> None:
    """FILLING → FREE: the read failed or was not good; nobody ever saw the slot."""
    slot = c.slots[entry]
    c.classes[slot.cls].filling -= 1
    set_pending(c, wide(slot.table), wide(slot.oid), PENDING_NONE)
    _give_back(c, entry)


@borrowing
def quarantine(c: Core, table: int, oid: int) -> None:
    """Mark a record as unreadable: clients miss it without asking again."""
    # SYNC: directory-entry (publish). No bytes go with this value.
    store_release_u32(c.tables[table].directory + 4 * oid, layout.ENTRY_QUARANTINED)
    c.tables[table].quarantined += 1


@borrowing
def retire(c: Core, entry: int, cause: int) -> None:
    """VALID → RETIRED for an EVICTED_* cause: take the directory entry back; the slot joins the open grace batch."""
    slot = c.slots[entry]
    kind = kind_of(c.tables[slot.table])
    c.evicted[kind, cause] += 1
    c.kinds[kind].fills_unused += slot.used == 0
    if slot.prev != NONE:
        unfollow(c, entry)
    lru.remove(c.policy, entry, True)
    # The fence that follows is the batch's: grace.close_batch. SYNC: directory-entry (publish).
    store_release_u32(c.tables[slot.table].directory + 4 * wide(slot.oid), layout.ENTRY_ABSENT)
    slot.state = RETIRED
    slot.next = c.rd[0].open_chain
    c.rd[0].open_chain = entry
    c.rd[0].open_count += 1
    c.classes[slot.cls].retired += 1
    c.tables[slot.table].resident -= 1


@borrowing
def retire_unseen(c: Core, entry: int, cause: int) -> None:
    """:func:`retire` for another reason than age: nobody has looked yet whether the slot was used."""
    if c.slots[entry].used == 0:
        since, sessions = _since(c, entry), c.stamp_owner[layout.MAX_SESSIONS]
        if lru.newest_stamp(slot_number(c, entry), since, c.rd[0].clock, c.stamps, c.stepped, sessions) != since:
            _note_use(c, entry)
    retire(c, entry, cause)


@borrowing
def _since(c: Core, entry: int) -> int:
    """Stamps later than this are news of a slot: its first use may lie in the tick of the fill itself."""
    if c.slots[entry].used == 0:
        return (wide(c.slots[entry].filled) - 1) & 0xFFFFFFFF
    return wide(c.policy.nodes[entry].position)


@borrowing
def free(c: Core, entry: int) -> None:
    """RETIRED → FREE: grace has passed, no client can still be reading the slot."""
    c.classes[c.slots[entry].cls].retired -= 1
    _give_back(c, entry)


@borrowing
def _give_back(c: Core, entry: int) -> None:
    cls = wide(c.slots[entry].cls)
    page = entry // _UNITS
    left = budget.give_slot(c.pages, page)
    if c.pages.pages[page].state != budget.DRAINING:
        _link_free(c, entry, cls)
        c.rd[0].starved = 0
        return
    c.slots[entry].state = ABSENT
    if left == 0:
        _move_page(c, page, cls)


@borrowing
def _move_page(c: Core, page: int, cls: int) -> None:
    """The last slot of a draining page is free: the page leaves its class for the one that needs it."""
    c.classes[cls].slots -= _UNITS // c.classes[cls].units
    owner = budget.page_drained(c.pages, page)
    c.rd[0].page_moves += 1
    if owner >= 0:
        _own_page(c, page, owner)


@borrowing
def evict_one(c: Core, cls: int) -> bool:
    """Retire the class's best victim; False if it has none that may go.

    Lazy LRU: a tail that a session stamped since its position moves to the head with that stamp; at most
    ``lru.REINSERTIONS`` times, then the tail is taken. A pinned fill that nobody used yet counts as just used. Its
    first use is looked for since it was filled, that tick included: whoever waited comes at once, with the clock of a
    step that may have begun before the slot was moved here, and a use that is missed keeps the slot to the deadline.
    """
    clock = c.rd[0].clock
    sessions = c.stamp_owner[layout.MAX_SESSIONS]
    for attempt in range(lru.REINSERTIONS + 1):
        entry = lru.candidate(c.policy, cls)
        if entry == NONE:
            return False
        slot = c.slots[entry]
        position = wide(c.policy.nodes[entry].position)
        since = _since(c, entry)
        stamp = lru.newest_stamp(slot_number(c, entry), since, clock, c.stamps, c.stepped, sessions)
        if stamp != since:
            _note_use(c, entry)
        if later_by(position, stamp) > 0:
            stamp = position
        pinned = slot.used == 0 and slot.pinned != 0 and later_by(wide(slot.pinned), clock) > 0
        if pinned:
            stamp = clock
        if attempt == lru.REINSERTIONS or (stamp == position and not pinned):
            if pinned:
                return False
            retire(c, entry, EVICTED_CAPACITY)
            return True
        lru.touch(c.policy, entry, stamp, 0)
    return False


@borrowing
def _note_use(c: Core, entry: int) -> None:
    """A sign that a fill was worth it; the first counts."""
    slot = c.slots[entry]
    if slot.used == 0:
        slot.used = 1
        c.kinds[kind_of(c.tables[slot.table])].fills_useful += 1


@borrowing
def evict_ahead(c: Core) -> None:
    """Keep 1/16 of every class free or about to be, so that a burst of misses finds room.

    Nothing is evicted while the class may still take an unused page, nor while a quarter of it waits for grace.
    """
    for cls in range(c.rd[0].n_classes):
        group = c.classes[cls]
        if group.slots == 0 or c.pages.pools[c.pages.classes[cls].budget].unused > 0:
            continue
        reserve = max(group.slots // 16, 1)
        for _ in range(_EVICTIONS_A_SWEEP):
            if group.free + group.retired >= reserve or not evict_one(c, cls):
                break


@borrowing
def ask_page(c: Core, cls: int) -> None:
    """A class starves: ask the budget whether a colder class should give it a page, and drain that page."""
    for other in range(c.rd[0].n_classes):
        c.tails[other] = lru.tail_clock(c.policy, other)
    page = budget.pick_drain(c.pages, cls, c.tails, c.rd[0].clock)
    if page != budget.NO_PAGE:
        drain_page(c, page, EVICTED_CAPACITY)


@borrowing
def is_draining(c: Core, entry: int) -> bool:
    """The slot's page is leaving its class: what is being read into it will not be published."""
    return bool(c.pages.pages[entry // _UNITS].state == budget.DRAINING)


@borrowing
def leave_page(c: Core, page: int) -> None:
    """FREE → ABSENT for every slot of a page that its class will not use again."""
    cls = wide(c.pages.pages[page].owner)
    per_page = _UNITS // c.classes[cls].units
    for entry in range(page * _UNITS, page * _UNITS + per_page):
        if c.slots[entry].state == FREE:
            _unlink_free(c, entry, cls)
            c.slots[entry].state = ABSENT
    c.classes[cls].slots -= per_page


@borrowing
def drain_page(c: Core, page: int, cause: int) -> None:
    """Retire what is VALID in a DRAINING page and take its FREE slots out of circulation, for an EVICTED_* cause."""
    cls = wide(c.pages.pages[page].owner)
    per_page = _UNITS // c.classes[cls].units
    for entry in range(page * _UNITS, page * _UNITS + per_page):
        if c.slots[entry].state == VALID:
            retire_unseen(c, entry, cause)
        elif c.slots[entry].state == FREE:
            _unlink_free(c, entry, cls)
            c.slots[entry].state = ABSENT
    if c.pages.pages[page].used == 0:
        _move_page(c, page, cls)
