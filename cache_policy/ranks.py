"""Slots of each class in 64 levels of value, with the lowest level found in O(1).

A policy whose values drift keeps a slot in the list of the level it had when last looked at, and looks again when that
matters: a slot whose value rose is moved up when it is about to be evicted, one whose value fell when a hand passes it.

The nodes are those of :mod:`lists` with one more field, ``level`` (u1); the anchor of a level is node
``n_slots + cls * LEVELS + level``. ``filled[cls]`` has the bit of each level that may hold a slot: a bit is set when a
slot comes and cleared when the level is next found empty, so that taking a slot out touches no counter.
"""

from typing import Any

import numpy as np

from strataflux.cache_policy.base import INTACT, LOST_SLOT, NO_SLOT, WRONG_CLASS, WRONG_VALUE, wide
from strataflux.cache_policy.lists import ABSENT, link_head, unlink
from strataflux.proto.compiled import borrowing

__all__ = ["LEVELS", "check_ranks", "lowest", "move", "put"]

LEVELS = 64


@borrowing
def put(nodes: Any, filled: Any, slot: int, level: int) -> None:
    """Link the unlinked ``slot`` (its ``cls`` is set) at the head of ``level``."""
    cls = wide(nodes[slot].cls)
    nodes[slot].level = level
    link_head(nodes, len(nodes) - LEVELS * (len(filled) - cls) + level, slot)
    filled[cls] |= np.uint64(1) << np.uint64(level)


@borrowing
def move(nodes: Any, filled: Any, slot: int, level: int) -> None:
    """Move the linked ``slot`` to the head of ``level``."""
    unlink(nodes, slot)
    put(nodes, filled, slot, level)


@borrowing
def lowest(nodes: Any, filled: Any, cls: int) -> int:
    """The slot that has been longest in the lowest level of ``cls``, or ``NO_SLOT``."""
    first = len(nodes) - LEVELS * (len(filled) - cls)
    while filled[cls]:
        bit = filled[cls] & (~filled[cls] + np.uint64(1))
        # A power of two as a float has its exponent in the top bits.
        level = (np.float64(bit).view(np.int64) >> 52) - 1023
        slot = wide(nodes[first + level].prev)
        if slot != first + level:
            return slot
        filled[cls] ^= bit
    return NO_SLOT


@borrowing
def check_ranks(nodes: Any, filled: Any, counts: Any) -> int:
    """Walk every level: links and classes as :func:`lists.check_lists`; WRONG_VALUE: a level that its slots deny."""
    n_slots = len(nodes) - LEVELS * len(filled)
    for cls in range(len(filled)):
        listed = 0
        for level in range(LEVELS):
            anchor = n_slots + cls * LEVELS + level
            at = wide(nodes[anchor].next)
            if at != anchor and not (filled[cls] >> np.uint64(level)) & np.uint64(1):
                return WRONG_VALUE
            while at != anchor and listed <= counts[cls]:
                if nodes[at].cls != cls or nodes[nodes[at].next].prev != at:
                    return WRONG_CLASS
                if nodes[at].level != level:
                    return WRONG_VALUE
                listed += 1
                at = wide(nodes[at].next)
        if listed != counts[cls]:
            return LOST_SLOT
    resident = 0
    for slot in range(n_slots):
        resident += nodes[slot].cls != ABSENT
    return INTACT if resident == counts.sum() else LOST_SLOT
