"""Slots and directories: allocate, publish, retire, recycle. The reader thread only.

The tier owns slots, bytes and directory entries; :mod:`strataflux.cache_policy` orders them and picks victims, which
:mod:`strataflux.daemon.evict` has retired. States of a slot stand in :mod:`strataflux.daemon.state`. Pairs:

* ``begin_fill`` / ``publish`` or ``abandon_fill``
* ``retire`` / ``free`` (in between lies the grace of :mod:`strataflux.daemon.grace`)

Invariants (:mod:`strataflux.daemon.integrity`): a directory entry names a slot iff that slot is VALID and
carries that record;
``pending`` names a slot iff that slot is FILLING; a class's free list holds exactly its FREE slots; a page's count of
slots in use equals its FILLING + VALID + RETIRED slots.
"""

from strataflux.cache_policy import budget
from strataflux.cache_policy.base import wide
from strataflux.daemon import replacement
from strataflux.daemon.counting import follow, hash_of, kind_of, unfollow
from strataflux.daemon.rows import EVICTED_CAPACITY
from strataflux.daemon.slots import set_pending, slot_number
from strataflux.daemon.state import (
    ABSENT,
    FILLING,
    FREE,
    NONE,
    PENDING_NONE,
    PENDING_SEEN,
    PREFETCHED,
    RETIRED,
    USED,
    VALID,
    Core,
)
from strataflux.daemon.uses import newest_use, note_leaving
from strataflux.proto import layout
from strataflux.proto.atomics import store_release_u32
from strataflux.proto.compiled import borrowing

__all__ = [
    "abandon_fill",
    "begin_fill",
    "drain_page",
    "free",
    "is_draining",
    "leave_page",
    "publish",
    "quarantine",
    "retire",
    "retire_unseen",
]

_UNITS = layout.UNITS_PER_PAGE
_TABLE_SHIFT = layout.TABLE_SHIFT


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
    slot.marks = 0
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
    slot.seen = clock
    c.rd[0].unseen += slot.marks & PREFETCHED != 0
    c.classes[slot.cls].filling -= 1
    place, key, cls = replacement.place_of(c, entry), table << _TABLE_SHIFT | oid, wide(slot.cls)
    replacement.insert(c.policies[c.classes[cls].kind], place, cls, key, clock, wide(slot.score))
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
    note_leaving(c, entry)
    if slot.prev != NONE:
        unfollow(c, entry)
    replacement.remove(c.policies[c.classes[slot.cls].kind], replacement.place_of(c, entry), cause == EVICTED_CAPACITY)
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
    if c.slots[entry].marks & USED == 0:
        newest_use(c, entry)
    retire(c, entry, cause)


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
