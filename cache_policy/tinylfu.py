"""W-TinyLFU: a small recency window in front of a main cache that admits by estimated frequency.

New keys enter the window (1 %); what the window lets go enters the main cache only if a count-min sketch has seen it
more often than the main cache's own victim. The main cache is a segmented LRU: on probation, and protected (80 %)
after a use there. Counters are halved after ten times as many requests as there are slots. Source: Einziger, Friedman
and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM TOS 2017; the sizes are theirs.

States and invariants: a resident slot stands in one of three lists of its class (``3 * cls`` window, + 1 probation,
+ 2 protected), which ``cls`` of its node holds; ``counts`` has one number a list.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy.base import NO_SLOT, wide
from strataflux.cache_policy.ghosts import hash_key
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

_WINDOW_SHARE = 100
"""The window is one part in a hundred."""
_PROTECTED_TENTHS = 8
_SAMPLE_FACTOR = 10
"""Counters are halved after this many requests a slot."""
_DEPTH = 4
_MAX_COUNT = 15

_NODE = np.dtype(
    [("next", "i4"), ("prev", "i4"), ("key", "u8"), ("position", "u4"), ("cls", "i2"), ("", "u2")], align=True
)
assert _NODE.itemsize == 24


class State(NamedTuple):
    """Three queues a class and the sketch; see the module for the invariants."""

    nodes: NDArray[np.void]  # [n_slots + 3 * n_classes] of _NODE, anchors last
    counts: NDArray[np.int64]  # [3 * n_classes] resident slots of each queue
    sketch: NDArray[np.uint8]  # [power of two, _DEPTH] counters up to _MAX_COUNT
    recorded: NDArray[np.int64]  # [2]: requests since the counters were halved, and after how many they are


def make_state(n_slots: int, n_classes: int, n_keys_hint: int) -> State:
    """As :meth:`base.Policy.make_state`; 24 bytes a slot and 4 a key, of at most eight keys a slot."""
    width = 1
    while width < min(max(n_keys_hint, n_slots), 8 * n_slots):
        width *= 2
    return State(
        make_nodes(_NODE, n_slots, 3 * n_classes),
        np.zeros(3 * n_classes, np.int64),
        np.zeros((width, _DEPTH), np.uint8),
        np.array([0, _SAMPLE_FACTOR * n_slots], np.int64),
    )


@borrowing
def requested(s: State, key: int, _score: int, _clock: int) -> None:
    """As :meth:`base.Policy.requested`: counts it."""
    bits = hash_key(key)
    for row in range(_DEPTH):
        at = _column(s, bits, row)
        s.sketch[at, row] = min(s.sketch[at, row] + 1, _MAX_COUNT)
    s.recorded[0] += 1
    if s.recorded[0] >= s.recorded[1]:
        s.recorded[0] = 0
        for at in range(len(s.sketch)):
            for row in range(_DEPTH):
                s.sketch[at, row] >>= 1


@borrowing
def insert(s: State, slot: int, cls: int, key: int, clock: int, _score: int) -> None:
    """As :meth:`base.Policy.insert`: into the window."""
    s.nodes[slot].key = key
    s.nodes[slot].position = clock
    _enqueue(s, slot, 3 * cls)


@borrowing
def candidate(s: State, cls: int) -> int:
    """As :meth:`base.Policy.candidate`: the less frequent of the window's tail and the main cache's."""
    window, probation, protected = 3 * cls, 3 * cls + 1, 3 * cls + 2
    total = s.counts[window] + s.counts[probation] + s.counts[protected]
    if total == 0:
        return NO_SLOT
    # A cache that has just filled holds all in its window: pass the surplus on without a contest.
    while s.counts[window] * _WINDOW_SHARE > total + _WINDOW_SHARE:
        slot = _tail(s, window)
        _dequeue(s, slot)
        _enqueue(s, slot, probation)
    main = probation if s.counts[probation] else protected
    if s.counts[main] == 0:
        return _tail(s, window)
    if s.counts[window] * _WINDOW_SHARE <= total:
        return _tail(s, main)
    slot, victim = _tail(s, window), _tail(s, main)
    if _frequency(s, wide(s.nodes[slot].key)) <= _frequency(s, wide(s.nodes[victim].key)):
        return slot
    _dequeue(s, slot)
    _enqueue(s, slot, probation)
    return victim


@borrowing
def tail_clock(s: State, cls: int) -> int:
    """As :meth:`base.Policy.tail_clock`: when the candidate was last used."""
    slot = candidate(s, cls)
    return wide(s.nodes[slot].position) if slot >= 0 else NO_SLOT


@borrowing
def touch(s: State, slot: int, clock: int, score: int) -> None:
    """As :meth:`base.Policy.touch`: counted; to the head of its queue, from probation to protected."""
    requested(s, wide(s.nodes[slot].key), score, clock)
    s.nodes[slot].position = clock
    queue = wide(s.nodes[slot].cls)
    _dequeue(s, slot)
    if queue % 3 == 0:
        _enqueue(s, slot, queue)
        return
    protected = queue - queue % 3 + 2
    _enqueue(s, slot, protected)
    if s.counts[protected] * 10 > (s.counts[protected] + s.counts[protected - 1]) * _PROTECTED_TENTHS:
        demoted = _tail(s, protected)
        _dequeue(s, demoted)
        _enqueue(s, demoted, protected - 1)


@borrowing
def remove(s: State, slot: int, _evicted: bool) -> None:
    """As :meth:`base.Policy.remove`; the sketch keeps what it counted."""
    _dequeue(s, slot)
    s.nodes[slot].cls = ABSENT


@borrowing
def admit(_s: State, _key: int, _cls: int, _score: int, _clock: int) -> bool:
    """As :meth:`base.Policy.admit`: always, into the window; the contest comes when the window overflows."""
    return True


@borrowing
def check_integrity(s: State) -> int:
    """As :meth:`base.Policy.check_integrity`."""
    return check_lists(s.nodes, len(s.nodes) - len(s.counts), s.counts)


@borrowing
def _frequency(s: State, key: int) -> int:
    bits = hash_key(key)
    least = _MAX_COUNT
    for row in range(_DEPTH):
        least = min(least, wide(s.sketch[_column(s, bits, row), row]))
    return least


@borrowing
def _column(s: State, bits: int, row: int) -> int:
    # Four multipliers give four nearly independent columns from one hash.
    return ((bits * (2654435761 + 40503 * 2 * row)) >> 7) & (len(s.sketch) - 1)


@borrowing
def _tail(s: State, queue: int) -> int:
    return wide(s.nodes[_anchor(s, queue)].prev)


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
