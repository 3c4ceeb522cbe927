"""Prove the invariants of :mod:`strataflux.daemon.cache`, one walk over everything; for idle times and tests."""

from typing import Any

import numpy as np

from strataflux.cache_policy import budget
from strataflux.cache_policy.base import wide
from strataflux.daemon import replacement
from strataflux.daemon.slots import pending_of, slot_number
from strataflux.daemon.state import FILLING, FREE, NONE, PREFETCHED, RETIRED, USED, VALID, Core
from strataflux.proto import layout
from strataflux.proto.atomics import load_u32
from strataflux.proto.compiled import borrowing, compiled

__all__ = ["check_integrity"]

_UNITS = layout.UNITS_PER_PAGE
_UNSEEN = RETIRED + 1  # beside the counts of slots by state


@compiled
def check_integrity(c: Core) -> int:
    """0, or the code of the first broken invariant of the module: 1 page counts, 2 a free list, 3 a directory or
    pending entry, 4 a class's counters, 5 an entry that names no VALID slot, 6 a victim of the policy that is none, 7
    the count of prefetched records not used yet, 10 + code the budget, 20 + code a policy. Costs a walk of everything.
    """
    unseen = 0
    for cls in range(c.rd[0].n_classes):
        found = np.zeros(_UNSEEN + 1, np.int64)
        for page in range(c.rd[0].range_pages):
            if c.pages.pages[page].state >= budget.OWNED and c.pages.pages[page].owner == cls:
                code = _check_page(c, page, cls, found)
                if code:
                    return code
        group = c.classes[cls]
        if found[FREE] != group.free or found[FILLING] != group.filling or found[RETIRED] != group.retired:
            return 4
        entry, length = group.free_head, 0
        while entry != NONE and length <= group.free:
            if c.slots[entry].state != FREE or c.slots[entry].cls != cls:
                return 2
            entry, length = wide(c.slots[entry].next), length + 1
        if length != group.free:
            return 2
        victim = replacement.entry_at(c, group.kind, replacement.candidate(c.policies[group.kind], cls))
        if (victim < 0) != (found[VALID] == 0) or (victim >= 0 and c.slots[victim].state != VALID):
            return 6
        unseen += found[_UNSEEN]
    if unseen != c.rd[0].unseen:
        return 7
    for table in range(c.rd[0].n_tables):
        if _named(c, table) != c.tables[table].resident:
            return 5
    code = budget.check_integrity(c.pages)
    if code:
        return 10 + code
    for policy in c.policies:
        code = replacement.check_integrity(policy)
        if code:
            return 20 + code
    return 0


@borrowing
def _named(c: Core, table: int) -> int:
    """Entries of a directory that name a slot. Each VALID slot is named by its own, so more than these are stale."""
    named = 0
    for oid in range(c.tables[table].records):
        entry = load_u32(c.tables[table].directory + 4 * oid)
        named += (entry != layout.ENTRY_ABSENT) & (entry != layout.ENTRY_QUARANTINED)
    return named


@borrowing
def _check_page(c: Core, page: int, cls: int, found: Any) -> int:
    used = 0
    for entry in range(page * _UNITS, page * _UNITS + _UNITS // c.classes[cls].units):
        slot = c.slots[entry]
        found[slot.state] += 1
        found[_UNSEEN] += slot.state == VALID and slot.marks & (USED | PREFETCHED) == PREFETCHED
        used += slot.state > FREE
        if slot.state == VALID or slot.state == FILLING:
            named = load_u32(c.tables[slot.table].directory + 4 * wide(slot.oid))
            pending = pending_of(c, wide(slot.table), wide(slot.oid))
            if (slot.state == VALID) != (named == np.uint32(slot_number(c, entry) + 1)):
                return 3
            if (slot.state == FILLING) != (pending == entry + 1):
                return 3
    return 0 if used == c.pages.pages[page].used else 1
