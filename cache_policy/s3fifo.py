"""S3-FIFO: a small queue on probation, a main queue, and ghosts of what the small one let go.

New keys enter the small queue (a tenth of the class); one used at least twice there moves on to the main queue, any
other leaves and is remembered; a remembered key that comes back enters the main queue at once. The main queue gives a
slot with uses left another round. Source: Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023.

States and invariants: a resident slot stands in one of two lists of its class (list ``2 * cls`` small, ``2 * cls + 1``
main; ``cls`` of a node holds that list number); ``counts`` has one number a list. A ghost holds the count of
small-queue evictions when it left; it is alive while fewer than the class's slots have left since.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy.base import NO_SLOT, wide
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

_SMALL_SHARE = 10
"""The small queue is one part in ten, the paper's choice."""
_MAX_USES = 3

_NODE = np.dtype(
    [("next", "i4"), ("prev", "i4"), ("key", "u8"), ("position", "u4"), ("cls", "i2"), ("uses", "u1"), ("", "u1")],
    align=True,
)
_GHOST = np.dtype([("key", "u8"), ("left", "i8")], align=True)
assert (_NODE.itemsize, _GHOST.itemsize) == (24, 16)


class State(NamedTuple):
    """Two queues a class; see the module for the invariants."""

    nodes: NDArray[np.void]  # [n_slots + 2 * n_classes] of _NODE, anchors last
    counts: NDArray[np.int64]  # [2 * n_classes] resident slots of each queue
    ghosts: NDArray[np.void]  # [power of two] of _GHOST
    departures: NDArray[np.int64]  # [1] evictions from small queues so far


def make_state(n_slots: int, n_classes: int, n_keys_hint: int) -> State:  # noqa: ARG001 - as many ghosts as slots
    """As :meth:`base.Policy.make_state`; 24 bytes a slot and 16 a ghost, two ghosts a slot."""
    return State(
        make_nodes(_NODE, n_slots, 2 * n_classes),
        np.zeros(2 * n_classes, np.int64),
        make_ghosts(_GHOST, 2 * n_slots),
        np.zeros(1, np.int64),
    )


@borrowing
def insert(s: State, slot: int, cls: int, key: int, clock: int, _score: int) -> None:
    """As :meth:`base.Policy.insert`: into the main queue if remembered, else into the small one."""
    at = lookup(s.ghosts, key)
    known = at >= 0 and s.departures[0] - s.ghosts[at].left <= s.counts[2 * cls] + s.counts[2 * cls + 1]
    forget(s.ghosts, key)
    node = s.nodes[slot]
    node.key = key
    node.position = clock
    node.uses = 0
    _enqueue(s, slot, 2 * cls + known)


@borrowing
def candidate(s: State, cls: int) -> int:
    """As :meth:`base.Policy.candidate`: moves slots on until one is found that is to leave."""
    small, main = 2 * cls, 2 * cls + 1
    while s.counts[small] + s.counts[main]:
        from_small = s.counts[small] * _SMALL_SHARE >= s.counts[small] + s.counts[main] or s.counts[main] == 0
        queue = small if from_small else main
        slot = wide(s.nodes[_anchor(s, queue)].prev)
        uses = s.nodes[slot].uses
        if uses <= from_small:
            return slot
        s.nodes[slot].uses = 0 if from_small else uses - 1
        _dequeue(s, slot)
        _enqueue(s, slot, main)
    return NO_SLOT


@borrowing
def tail_clock(s: State, cls: int) -> int:
    """As :meth:`base.Policy.tail_clock`: when the candidate was last used."""
    slot = candidate(s, cls)
    return wide(s.nodes[slot].position) if slot >= 0 else NO_SLOT


@borrowing
def touch(s: State, slot: int, clock: int, _score: int) -> None:
    """As :meth:`base.Policy.touch`: counts up to three uses."""
    s.nodes[slot].position = clock
    s.nodes[slot].uses = min(s.nodes[slot].uses + 1, _MAX_USES)


@borrowing
def remove(s: State, slot: int, evicted: bool) -> None:
    """As :meth:`base.Policy.remove`: what the small queue evicts is remembered."""
    if evicted and s.nodes[slot].cls % 2 == 0:
        s.departures[0] += 1
        at = _oldest_way(s, wide(s.nodes[slot].key))
        s.ghosts[at].key = s.nodes[slot].key + np.uint64(1)
        s.ghosts[at].left = s.departures[0]
    _dequeue(s, slot)
    s.nodes[slot].cls = ABSENT


@borrowing
def admit(_s: State, _key: int, _cls: int, _score: int, _clock: int) -> bool:
    """As :meth:`base.Policy.admit`: always; the small queue is the filter."""
    return True


@borrowing
def requested(_s: State, _key: int, _score: int, _clock: int) -> None:
    """As :meth:`base.Policy.requested`: nothing to remember."""


@borrowing
def check_integrity(s: State) -> int:
    """As :meth:`base.Policy.check_integrity`."""
    return check_lists(s.nodes, len(s.nodes) - len(s.counts), s.counts)


@borrowing
def _oldest_way(s: State, key: int) -> int:
    oldest = first_way(s.ghosts, key)
    for at in range(oldest, oldest + WAYS):
        if s.ghosts[at].key == 0:
            return at
        if s.ghosts[at].left < s.ghosts[oldest].left:
            oldest = at
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
