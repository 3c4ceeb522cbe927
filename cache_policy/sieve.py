"""SIEVE: a queue in order of insertion, one bit for "used since looked at", and a hand that never moves a slot.

The hand walks from the tail towards the head: it clears the bit of a slot that was used and stops at one that was not,
the victim. New slots enter at the head. Source: Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024.

States and invariants: as :mod:`lru`; in addition ``hands[cls]`` names a resident slot of the class or its anchor
(the hand then starts at the tail).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy.base import NO_SLOT, WRONG_VALUE, wide
from strataflux.cache_policy.lists import ABSENT, check_lists, link_head, make_nodes, unlink
from strataflux.proto.compiled import borrowing

__all__ = [
    "State",
    "admit",
    "candidate",
    "check_integrity",
    "insert",
    "make_state",
    "remove",
    "requested",
    "tail_clock",
    "touch",
]

_NODE = np.dtype(
    [("next", "i4"), ("prev", "i4"), ("position", "u4"), ("cls", "i2"), ("used", "u1"), ("", "u1")], align=True
)
assert _NODE.itemsize == 16


class State(NamedTuple):
    """One queue a class; see the module for the invariants."""

    nodes: NDArray[np.void]  # [n_slots + n_classes] of _NODE, anchors last
    counts: NDArray[np.int64]  # [n_classes] resident slots of each class
    hands: NDArray[np.int64]  # [n_classes] node the hand looks at next


def make_state(n_slots: int, n_classes: int, n_keys_hint: int) -> State:  # noqa: ARG001 - remembers no absent key
    """As :meth:`base.Policy.make_state`; 16 bytes a slot."""
    anchors = np.arange(n_slots, n_slots + n_classes, dtype=np.int64)
    return State(make_nodes(_NODE, n_slots, n_classes), np.zeros(n_classes, np.int64), anchors)


@borrowing
def insert(s: State, slot: int, cls: int, _key: int, clock: int, _score: int) -> None:
    """As :meth:`base.Policy.insert`: at the head, not used yet."""
    node = s.nodes[slot]
    node.cls = cls
    node.position = clock
    node.used = 0
    s.counts[cls] += 1
    link_head(s.nodes, _anchor(s, cls), slot)


@borrowing
def candidate(s: State, cls: int) -> int:
    """As :meth:`base.Policy.candidate`: moves the hand to the first slot not used since the hand last passed it."""
    if s.counts[cls] == 0:
        return NO_SLOT
    anchor = _anchor(s, cls)
    at = wide(s.hands[cls])
    while at == anchor or s.nodes[at].used:
        s.nodes[at].used = 0
        at = wide(s.nodes[at].prev)
    s.hands[cls] = at
    return at


@borrowing
def tail_clock(s: State, cls: int) -> int:
    """As :meth:`base.Policy.tail_clock`: when the hand's next victim was last used."""
    slot = candidate(s, cls)
    return wide(s.nodes[slot].position) if slot >= 0 else NO_SLOT


@borrowing
def touch(s: State, slot: int, clock: int, _score: int) -> None:
    """As :meth:`base.Policy.touch`: sets its bit."""
    s.nodes[slot].position = clock
    s.nodes[slot].used = 1


@borrowing
def remove(s: State, slot: int, _evicted: bool) -> None:
    """As :meth:`base.Policy.remove`: a hand on it moves on towards the head."""
    cls = wide(s.nodes[slot].cls)
    if s.hands[cls] == slot:
        s.hands[cls] = s.nodes[slot].prev
    s.counts[cls] -= 1
    s.nodes[slot].cls = ABSENT
    unlink(s.nodes, slot)


@borrowing
def admit(_s: State, _key: int, _cls: int, _score: int, _clock: int) -> bool:
    """As :meth:`base.Policy.admit`: always."""
    return True


@borrowing
def requested(_s: State, _key: int, _score: int, _clock: int) -> None:
    """As :meth:`base.Policy.requested`: nothing to remember."""


@borrowing
def check_integrity(s: State) -> int:
    """As :meth:`base.Policy.check_integrity`; WRONG_VALUE: a hand outside its class."""
    for cls in range(len(s.counts)):
        hand = s.hands[cls]
        if hand != _anchor(s, cls) and s.nodes[hand].cls != cls:
            return WRONG_VALUE
    return check_lists(s.nodes, len(s.nodes) - len(s.counts), s.counts)


@borrowing
def _anchor(s: Any, cls: int) -> int:
    return len(s.nodes) - len(s.counts) + cls
