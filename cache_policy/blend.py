"""Frequency and recency blended by what was learnt: evict the slot least likely to be asked for in the next step.

The estimate is that of :mod:`reuse`, over the past of each resident slot and of about eight times as many keys that
are not resident (ghosts). A missed key is admitted if it is as likely to be used as the slot it would replace.

Slots stand in the levels of :mod:`ranks`. An estimate falls as a slot ages and rises with use, so: ``candidate`` looks
again at the slot it is about to name and moves it up if it was used since (at most ``_REINSERTIONS`` times), and
every miss looks at ``_HAND_SLOTS`` slots in turn and moves those down that fell. A hit therefore touches one node
and no list.

Each request also offers one sample to the model. Caches too large to learn from every request learn from one in
2**k: the tables have 1,920 entries, and more samples than ``_LEARNT`` a turn-over of the cache change nothing.

States and invariants: as :mod:`lists` and :mod:`ranks`; ``counts[cls]`` is the number of resident slots of the class.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy import reuse
from strataflux.cache_policy.base import NO_SLOT, wide
from strataflux.cache_policy.ghosts import WAYS, first_way, hash_key, make_ghosts
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

_REINSERTIONS = 32
_HAND_SLOTS = 16
_GHOSTS_PER_SLOT = 8
_LEARNT = 16384
_TICKS_A_TURNOVER = 16
_LEVELS_PER_UNIT, _ZERO_LEVEL = 6, 48  # levels per unit of log-odds, and the level of even odds

_NODE = np.dtype(
    [("next", "i4"), ("prev", "i4"), *reuse.FIELDS, ("position", "u4"), ("cls", "i2"), ("level", "u1"), ("", "u1")],
    align=True,
)
_GHOST = np.dtype([*reuse.FIELDS, ("", "u4")], align=True)
assert (_NODE.itemsize, _GHOST.itemsize) == (48, 32)

_HAND, _COUNTER, _LEARN_MASK = 0, 1, 2


class State(NamedTuple):
    """Nodes, levels, ghosts and the model; see the module for the invariants."""

    nodes: NDArray[np.void]  # [n_slots + n_classes * LEVELS] of _NODE, anchors last
    counts: NDArray[np.int64]  # [n_classes] resident slots of each class
    filled: NDArray[np.uint64]  # [n_classes] levels that may hold a slot
    ghosts: NDArray[np.void]  # [power of two] of _GHOST
    turn: NDArray[np.int64]  # slot the hand looks at next, requests so far, one request in mask + 1 is learnt from
    model: reuse.Model


def make_state(n_slots: int, n_classes: int, n_keys_hint: int) -> State:
    """As :meth:`base.Policy.make_state`; 48 bytes a slot and 32 a ghost."""
    mask = 0
    while (mask + 1) * _LEARNT < n_slots:
        mask = 2 * mask + 1
    return State(
        make_nodes(_NODE, n_slots, n_classes * LEVELS),
        np.zeros(n_classes, np.int64),
        np.zeros(n_classes, np.uint64),
        make_ghosts(_GHOST, max(n_slots, min(n_keys_hint, _GHOSTS_PER_SLOT * n_slots))),
        np.array([0, 0, mask], np.int64),
        reuse.make_model(max(n_slots // _TICKS_A_TURNOVER, 1)),
    )


@borrowing
def requested(s: State, key: int, _score: int, clock: int) -> None:
    """As :meth:`base.Policy.requested`: its ghost learns of the use, or begins."""
    _turn_hand(s)
    learn = _note(s, key, clock)
    at = _find(s, key)
    if at >= 0:
        reuse.used(s.model, s.ghosts[at], learn)
    else:
        reuse.begin(s.model, s.ghosts[_place(s, key)], key)


@borrowing
def insert(s: State, slot: int, cls: int, key: int, clock: int, _score: int) -> None:
    """As :meth:`base.Policy.insert`: with the past its ghost kept."""
    node = s.nodes[slot]
    node.cls = cls
    node.position = clock
    at = _find(s, key)
    if at >= 0:
        reuse.copy_past(node, s.ghosts[at])
        s.ghosts[at].last = 0
    else:
        reuse.begin(s.model, node, key)
    s.counts[cls] += 1
    put(s.nodes, s.filled, slot, _level(s, node))


@borrowing
def candidate(s: State, cls: int) -> int:
    """As :meth:`base.Policy.candidate`: the slot with the lowest estimate, as far as the levels know."""
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
    """As :meth:`base.Policy.touch`: its past grows; its level is looked at when it comes up for eviction."""
    node = s.nodes[slot]
    learn = _note(s, wide(node.key), clock)
    reuse.used(s.model, node, learn)
    node.position = clock


@borrowing
def remove(s: State, slot: int, evicted: bool) -> None:
    """As :meth:`base.Policy.remove`: an evicted slot's past goes to a ghost."""
    node = s.nodes[slot]
    s.counts[node.cls] -= 1
    node.cls = ABSENT
    unlink(s.nodes, slot)
    if evicted:
        reuse.copy_past(s.ghosts[_place(s, wide(node.key))], node)


@borrowing
def admit(s: State, key: int, cls: int, _score: int, _clock: int) -> bool:
    """As :meth:`base.Policy.admit`: if it is at least as likely to be used as the candidate."""
    slot = candidate(s, cls)
    at = _find(s, key)
    if slot < 0 or at < 0:
        return True
    return reuse.estimate(s.model, s.ghosts[at]) >= reuse.estimate(s.model, s.nodes[slot])


@borrowing
def check_integrity(s: State) -> int:
    """As :meth:`base.Policy.check_integrity`."""
    return check_ranks(s.nodes, s.filled, s.counts)


@borrowing
def _turn_hand(s: State) -> None:
    """Look at the next slots in turn; what has fallen moves down."""
    n_slots = len(s.nodes) - LEVELS * len(s.filled)
    slot = s.turn[_HAND]
    for _ in range(_HAND_SLOTS):
        node = s.nodes[slot]
        if node.cls != ABSENT:
            level = _level(s, node)
            if level < node.level:
                move(s.nodes, s.filled, slot, level)
        slot = slot + 1 if slot + 1 < n_slots else 0
    s.turn[_HAND] = slot


@borrowing
def _note(s: State, key: int, clock: int) -> bool:
    """``key`` is asked for; returns whether to learn from it, and if so has learnt from keys that were not."""
    reuse.advance(s.model, key, clock)
    s.turn[_COUNTER] += 1
    draw = hash_key(s.turn[_COUNTER])
    if draw & s.turn[_LEARN_MASK]:
        return False
    _learn_absences(s, draw)
    return True


@borrowing
def _learn_absences(s: State, draw: int) -> None:
    """One slot and one set of ghosts, drawn by a hash: a hand meets slots at one age."""
    n_slots = len(s.nodes) - LEVELS * len(s.filled)
    draw = hash_key(draw)
    slot = (draw * n_slots) >> 32
    if s.nodes[slot].cls != ABSENT:
        reuse.learn_absence(s.model, s.nodes[slot], n_slots / reuse.pace(s.model))
    sets = len(s.ghosts) // WAYS
    first = ((hash_key(draw) * sets) >> 32) * WAYS
    for at in range(first, first + WAYS):
        if s.ghosts[at].last:
            reuse.learn_absence(s.model, s.ghosts[at], sets / reuse.pace(s.model))


@borrowing
def _find(s: State, key: int) -> int:
    first = first_way(s.ghosts, key)
    for at in range(first, first + WAYS):
        if s.ghosts[at].key == np.uint64(key) and s.ghosts[at].last:
            return at
    return -1


@borrowing
def _place(s: State, key: int) -> int:
    """A free entry for ``key`` (``last`` is 0), else the one not used for longest."""
    first = first_way(s.ghosts, key)
    oldest = first
    for at in range(first, first + WAYS):
        if s.ghosts[at].last < s.ghosts[oldest].last:
            oldest = at
    return oldest


@borrowing
def _level(s: State, past: Any) -> int:
    level = int(_LEVELS_PER_UNIT * reuse.estimate(s.model, past)) + _ZERO_LEVEL
    return min(max(level, 0), LEVELS - 1)
