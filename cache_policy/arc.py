"""ARC: recency and frequency in two lists whose split follows the ghosts that come back.

``T1`` holds slots seen once since they came, ``T2`` those seen again; a returning ghost of ``T1`` raises the target
size of ``T1``, one of ``T2`` lowers it. Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement
Cache", FAST 2003. Two liberties: ghosts live in a set-associative table, each for as many departures from its list as
the class has slots (the original trims the two ghost lists exactly), and the step of the target is the original's, in
whole slots.

States and invariants: a resident slot stands in list ``2 * cls`` (T1) or ``2 * cls + 1`` (T2), which ``cls`` of its
node holds; ``counts`` has one number a list; ``targets[cls]`` lies in 0 … resident slots ever held by the class.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy.base import NO_SLOT, WRONG_VALUE, wide
from strataflux.cache_policy.ghosts import WAYS, first_way, forget, lookup, make_ghosts
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
    [("next", "i4"), ("prev", "i4"), ("key", "u8"), ("position", "u4"), ("cls", "i2"), ("", "u2")], align=True
)
_GHOST = np.dtype([("key", "u8"), ("left", "u4"), ("queue", "i2"), ("", "u2")], align=True)
assert (_NODE.itemsize, _GHOST.itemsize) == (24, 16)


class State(NamedTuple):
    """Two lists a class and their ghosts; see the module for the invariants."""

    nodes: NDArray[np.void]  # [n_slots + 2 * n_classes] of _NODE, anchors last
    counts: NDArray[np.int64]  # [2 * n_classes] resident slots of each list
    departures: NDArray[np.int64]  # [2 * n_classes] evictions from each list so far
    returned: NDArray[np.int64]  # [2 * n_classes] ghosts of each list that came back, for the step of the target
    targets: NDArray[np.int64]  # [n_classes] wanted size of T1
    from_t2: NDArray[np.bool_]  # [n_classes] the latest request of the class came back from T2's ghosts
    ghosts: NDArray[np.void]  # [power of two] of _GHOST


def make_state(n_slots: int, n_classes: int, n_keys_hint: int) -> State:  # noqa: ARG001 - as many ghosts as slots
    """As :meth:`base.Policy.make_state`; 24 bytes a slot and 16 a ghost, two ghosts a slot."""
    return State(
        make_nodes(_NODE, n_slots, 2 * n_classes),
        np.zeros(2 * n_classes, np.int64),
        np.zeros(2 * n_classes, np.int64),
        np.zeros(2 * n_classes, np.int64),
        np.zeros(n_classes, np.int64),
        np.zeros(n_classes, np.bool_),
        make_ghosts(_GHOST, 2 * n_slots),
    )


@borrowing
def requested(s: State, key: int, _score: int, _clock: int) -> None:
    """As :meth:`base.Policy.requested`: a living ghost moves the target of its class."""
    at = lookup(s.ghosts, key)
    if at < 0:
        return
    queue = wide(s.ghosts[at].queue)
    cls = queue // 2
    size = s.counts[2 * cls] + s.counts[2 * cls + 1]
    s.from_t2[cls] = False
    if (s.departures[queue] - wide(s.ghosts[at].left)) & 0xFFFFFFFF > size:
        s.ghosts[at].key = 0
        return
    s.returned[queue] += 1
    other = s.returned[queue ^ 1]
    step = max(1, other // s.returned[queue])
    s.from_t2[cls] = queue % 2 == 1
    wanted = s.targets[cls] - step if s.from_t2[cls] else s.targets[cls] + step
    s.targets[cls] = min(max(wanted, 0), size)


@borrowing
def insert(s: State, slot: int, cls: int, key: int, clock: int, _score: int) -> None:
    """As :meth:`base.Policy.insert`: a returning ghost enters T2, any other key T1."""
    known = lookup(s.ghosts, key) >= 0
    forget(s.ghosts, key)
    s.nodes[slot].key = key
    s.nodes[slot].position = clock
    _enqueue(s, slot, 2 * cls + known)


@borrowing
def candidate(s: State, cls: int) -> int:
    """As :meth:`base.Policy.candidate`: the tail of T1 while it exceeds its target, else the tail of T2."""
    t1, t2 = 2 * cls, 2 * cls + 1
    if s.counts[t1] + s.counts[t2] == 0:
        return NO_SLOT
    over = s.counts[t1] > s.targets[cls] or (s.from_t2[cls] and s.counts[t1] == s.targets[cls])
    queue = t1 if (s.counts[t1] and over) or s.counts[t2] == 0 else t2
    return wide(s.nodes[_anchor(s, queue)].prev)


@borrowing
def tail_clock(s: State, cls: int) -> int:
    """As :meth:`base.Policy.tail_clock`: when the candidate was last used."""
    slot = candidate(s, cls)
    return wide(s.nodes[slot].position) if slot >= 0 else NO_SLOT


@borrowing
def touch(s: State, slot: int, clock: int, _score: int) -> None:
    """As :meth:`base.Policy.touch`: to the head of T2."""
    queue = wide(s.nodes[slot].cls) | 1
    s.nodes[slot].position = clock
    _dequeue(s, slot)
    _enqueue(s, slot, queue)


@borrowing
def remove(s: State, slot: int, evicted: bool) -> None:
    """As :meth:`base.Policy.remove`: an evicted slot leaves a ghost."""
    if evicted:
        queue = wide(s.nodes[slot].cls)
        s.departures[queue] += 1
        at = _oldest_way(s, wide(s.nodes[slot].key))
        s.ghosts[at].key = s.nodes[slot].key + np.uint64(1)
        s.ghosts[at].left = s.departures[queue]
        s.ghosts[at].queue = queue
    _dequeue(s, slot)
    s.nodes[slot].cls = ABSENT


@borrowing
def admit(_s: State, _key: int, _cls: int, _score: int, _clock: int) -> bool:
    """As :meth:`base.Policy.admit`: always."""
    return True


@borrowing
def check_integrity(s: State) -> int:
    """As :meth:`base.Policy.check_integrity`; WRONG_VALUE: a target outside the cache."""
    n_slots = len(s.nodes) - len(s.counts)
    for cls in range(len(s.targets)):
        if not 0 <= s.targets[cls] <= n_slots:
            return WRONG_VALUE
    return check_lists(s.nodes, n_slots, s.counts)


@borrowing
def _oldest_way(s: State, key: int) -> int:
    """A free entry for ``key``, else that of its set which is furthest behind the departures of its own list."""
    oldest, longest = first_way(s.ghosts, key), -1
    for at in range(oldest, oldest + WAYS):
        if s.ghosts[at].key == 0:
            return at
        age = (s.departures[s.ghosts[at].queue] - wide(s.ghosts[at].left)) & 0xFFFFFFFF
        if age > longest:
            oldest, longest = at, age
    return oldest


@borrowing
def _enqueue(s: State, slot: int, queue: int) -> None:
    s.nodes[slot].cls = queue
    s.counts[queue] += 1
    link_head(s.nodes, _anchor(s, queue), slot)


@borrowing
def _dequeue(s: State, slot: int) -> None:
    s.counts[s.nodes[slot].cls] -= 1
    unlink(s.nodes, slot)


@borrowing
def _anchor(s: State, queue: int) -> int:
    return len(s.nodes) - len(s.counts) + queue
