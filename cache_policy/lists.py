"""Doubly linked lists of slots inside one array, shared by the policies.

An array of nodes is a structured array with at least the fields ``next`` and ``prev`` (i4) and ``cls`` (i2,
-1 = the slot is absent). Slots are nodes 0 … n_slots - 1; each list has one *anchor*, a node behind them,
which closes the list to a ring: ``anchor.next`` is the head, ``anchor.prev`` the tail, and an empty list's
anchor names itself. So no link is ever "none" and linking takes no branch. Node and links share a cache line.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy.base import BROKEN_LINK, INTACT, LOST_SLOT, WRONG_CLASS, WRONG_COUNT
from strataflux.proto.compiled import borrowing

__all__ = ["ABSENT", "check_lists", "link_head", "make_nodes", "unlink"]

ABSENT = -1
"""``cls`` of a slot that is in no list."""


def make_nodes(dtype: np.dtype[np.void], n_slots: int, n_lists: int) -> NDArray[np.void]:
    """``n_slots`` absent slots and ``n_lists`` anchors of empty lists; zero in every other field."""
    nodes = np.zeros(n_slots + n_lists, dtype)
    nodes["next"] = nodes["prev"] = np.arange(n_slots + n_lists)
    nodes["cls"] = ABSENT
    return nodes


@borrowing
def link_head(nodes: Any, anchor: int, slot: int) -> None:
    """Put the unlinked ``slot`` at the head of the list closed by ``anchor``."""
    first = nodes[anchor].next
    nodes[slot].next = first
    nodes[slot].prev = anchor
    nodes[first].prev = slot
    nodes[anchor].next = slot


@borrowing
def unlink(nodes: Any, slot: int) -> None:
    """Take the linked ``slot`` out of its list; its own links are left stale."""
    before = nodes[slot].prev
    after = nodes[slot].next
    nodes[before].next = after
    nodes[after].prev = before


@borrowing
def check_lists(nodes: Any, n_slots: int, counts: Any) -> int:
    """Walk the list of every class (anchor ``n_slots + cls``) against ``counts`` (i8[n_classes]); a code of
    ``base``.
    """
    listed = 0
    for cls in range(len(counts)):
        code = _check_list(nodes, n_slots + cls, cls, counts[cls])
        if code != INTACT:
            return code
        listed += counts[cls]
    resident = 0
    for slot in range(n_slots):
        resident += nodes[slot].cls != ABSENT
    return INTACT if resident == listed else LOST_SLOT


@borrowing
def _check_list(nodes: Any, anchor: int, cls: int, count: int) -> int:
    at = anchor
    for _ in range(count + 1):
        after = nodes[at].next
        if nodes[after].prev != at:
            return BROKEN_LINK
        at = after
        if at == anchor:
            break
        if nodes[at].cls != cls:
            return WRONG_CLASS
        count -= 1
    return INTACT if at == anchor and count == 0 else WRONG_COUNT
