"""Least frequently used with ageing and admission: counts that halve with a fixed half-life, of absent keys too.

Each use adds 1 to a key's count; counts lose half in ``_HALF_LIFE`` requests a slot. The victim has the lowest count
(in half-octaves), and a missed key is admitted if its count is not below the victim's. Counts of keys that are not
resident are kept in ghosts, about eight a slot.

States and invariants: as :mod:`lists` and :mod:`ranks`; ``counts[cls]`` is the number of resident slots of the class.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy.base import NO_SLOT, wide
from strataflux.cache_policy.ghosts import WAYS, first_way, lookup, make_ghosts
from strataflux.cache_policy.lists import ABSENT, make_nodes, unlink
from strataflux.cache_policy.ranks import LEVELS, check_ranks, lowest, move, put
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

_HALF_LIFE = 10
"""Requests a slot, the sample that TinyLFU halves its counters after."""
_GHOSTS_PER_SLOT = 8
_REINSERTIONS = 32
_HAND_SLOTS = 4
_ZERO_LEVEL = 32  # level of a count of 1; two levels an octave

_NODE = np.dtype(
    [
        ("next", "i4"),
        ("prev", "i4"),
        ("key", "u8"),
        ("count", "f8"),
        ("last", "i8"),
        ("position", "u4"),
        ("cls", "i2"),
        ("level", "u1"),
        ("", "u1"),
    ],
    align=True,
)
_GHOST = np.dtype([("key", "u8"), ("count", "f8"), ("last", "i8")], align=True)
assert (_NODE.itemsize, _GHOST.itemsize) == (40, 24)

_NOW, _HAND, _LIFE = 0, 1, 2


class State(NamedTuple):
    """Nodes, levels and ghosts; see the module for the invariants."""

    nodes: NDArray[np.void]  # [n_slots + n_classes * LEVELS] of _NODE, anchors last
    counts: NDArray[np.int64]  # [n_classes] resident slots of each class
    filled: NDArray[np.uint64]  # [n_classes] levels that may hold a slot
    ghosts: NDArray[np.void]  # [power of two] of _GHOST
    turn: NDArray[np.int64]  # [3]: requests so far, slot the hand looks at next, requests of a half-life


def make_state(n_slots: int, n_classes: int, n_keys_hint: int) -> State:
    """As :meth:`base.Policy.make_state`; 40 bytes a slot and 24 a ghost."""
    return State(
        make_nodes(_NODE, n_slots, n_classes * LEVELS),
        np.zeros(n_classes, np.int64),
        np.zeros(n_classes, np.uint64),
        make_ghosts(_GHOST, max(n_slots, min(n_keys_hint, _GHOSTS_PER_SLOT * n_slots))),
        np.array([0, 0, _HALF_LIFE * n_slots], np.int64),
    )


@borrowing
def requested(s: State, key: int, _score: int, _clock: int) -> None:
    """As :meth:`base.Policy.requested`: counts it, and lets the hand look at some slots."""
    _turn_hand(s)
    s.turn[_NOW] += 1
    at = lookup(s.ghosts, key)
    if at < 0:
        at = _least_way(s, key)
        s.ghosts[at].key = key + 1
        s.ghosts[at].count = 0
        s.ghosts[at].last = s.turn[_NOW]
    _count(s, s.ghosts[at])


@borrowing
def insert(s: State, slot: int, cls: int, key: int, clock: int, _score: int) -> None:
    """As :meth:`base.Policy.insert`: with the count its ghost kept."""
    node = s.nodes[slot]
    node.key = key
    node.cls = cls
    node.position = clock
    node.count = 1
    node.last = s.turn[_NOW]
    at = lookup(s.ghosts, key)
    if at >= 0:
        node.count = s.ghosts[at].count
        node.last = s.ghosts[at].last
        s.ghosts[at].key = 0
    s.counts[cls] += 1
    put(s.nodes, s.filled, slot, _level(s, node))


@borrowing
def candidate(s: State, cls: int) -> int:
    """As :meth:`base.Policy.candidate`: the lowest count, as far as the levels know."""
    slot = lowest(s.nodes, s.filled, cls)
    for _ in range(_REINSERTIONS):
        if slot < 0:
            return NO_SLOT
        level = _level(s, s.nodes[slot])
        if level <= s.nodes[slot].level:
            return slot
        move(s.nodes, s.filled, slot, level)
        slot = lowest(s.nodes, s.filled, cls)
    return slot


@borrowing
def tail_clock(s: State, cls: int) -> int:
    """As :meth:`base.Policy.tail_clock`: when the candidate was last used."""
    slot = candidate(s, cls)
    return wide(s.nodes[slot].position) if slot >= 0 else NO_SLOT


@borrowing
def touch(s: State, slot: int, clock: int, _score: int) -> None:
    """As :meth:`base.Policy.touch`: counts it; its level is looked at when it comes up for eviction."""
    s.turn[_NOW] += 1
    _count(s, s.nodes[slot])
    s.nodes[slot].position = clock


@borrowing
def remove(s: State, slot: int, evicted: bool) -> None:
    """As :meth:`base.Policy.remove`: an evicted slot's count goes to a ghost."""
    node = s.nodes[slot]
    s.counts[node.cls] -= 1
    node.cls = ABSENT
    unlink(s.nodes, slot)
    if evicted:
        at = _least_way(s, wide(node.key))
        s.ghosts[at].key = node.key + np.uint64(1)
        s.ghosts[at].count = node.count
        s.ghosts[at].last = node.last


@borrowing
def admit(s: State, key: int, cls: int, _score: int, _clock: int) -> bool:
    """As :meth:`base.Policy.admit`: if its count is not below the candidate's."""
    slot = candidate(s, cls)
    at = lookup(s.ghosts, key)
    return slot < 0 or at < 0 or _aged(s, s.ghosts[at]) >= _aged(s, s.nodes[slot])


@borrowing
def check_integrity(s: State) -> int:
    """As :meth:`base.Policy.check_integrity`."""
    return check_ranks(s.nodes, s.filled, s.counts)


@borrowing
def _turn_hand(s: State) -> None:
    n_slots = len(s.nodes) - LEVELS * len(s.filled)
    for _ in range(_HAND_SLOTS):
        slot = s.turn[_HAND]
        s.turn[_HAND] = slot + 1 if slot + 1 < n_slots else 0
        node = s.nodes[slot]
        if node.cls != ABSENT:
            level = _level(s, node)
            if level < node.level:
                move(s.nodes, s.filled, slot, level)


@borrowing
def _aged(s: State, entry: Any) -> float:
    return entry.count * 2.0 ** ((entry.last - s.turn[_NOW]) / s.turn[_LIFE])  # type: ignore[no-any-return]


@borrowing
def _count(s: State, entry: Any) -> None:
    entry.count = _aged(s, entry) + 1
    entry.last = s.turn[_NOW]


@borrowing
def _level(s: State, entry: Any) -> int:
    level = int(2 * np.log2(_aged(s, entry) + 1e-9)) + _ZERO_LEVEL
    return min(max(level, 0), LEVELS - 1)


@borrowing
def _least_way(s: State, key: int) -> int:
    """A free entry for ``key``, else that with the lowest count of its set."""
    least = first_way(s.ghosts, key)
    for at in range(least, least + WAYS):
        if s.ghosts[at].key == 0:
            return at
        if _aged(s, s.ghosts[at]) < _aged(s, s.ghosts[least]):
            least = at
    return least
