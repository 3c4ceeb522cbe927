"""Least recently used: exact when every use is told at once, lazy when uses are stamps that clients leave
behind.

One list per class, the most recently moved slot at its head. Each slot keeps the clock of its last move, its
*position*. Clients of shared memory cannot call a policy; they stamp the slots they use (``last_used[slot] =
clock``). :func:`choose_victim` therefore takes the tail, looks whether a session stamped it after its
position, and if so moves it to the head with that stamp as its new position: a slot is only ever examined
when it is about to be evicted.

States and invariants: a slot with ``cls`` = -1 is absent and in no list; any other is resident and stands
exactly once in the list of its class; ``counts[cls]`` is that list's length; links of neighbours name each
other.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy.base import NO_SLOT, later_by, wide
from strataflux.cache_policy.lists import ABSENT, check_lists, link_head, make_nodes, unlink
from strataflux.proto.atomics import load_u32
from strataflux.proto.compiled import borrowing

__all__ = [
    "REINSERTIONS",
    "State",
    "admit",
    "candidate",
    "check_integrity",
    "choose_victim",
    "insert",
    "make_state",
    "newest_stamp",
    "remove",
    "requested",
    "tail_clock",
    "touch",
]

REINSERTIONS = 32
"""Tails moved back to the head for one eviction; beyond it the tail is taken, so an eviction's cost is
bounded.
"""

_NODE = np.dtype([("next", "i4"), ("prev", "i4"), ("position", "u4"), ("cls", "i2"), ("", "u2")], align=True)
assert _NODE.itemsize == 16


class State(NamedTuple):
    """LRU lists; see the module for the invariants."""

    nodes: NDArray[np.void]  # [n_slots + n_classes] of _NODE, anchors last
    counts: NDArray[np.int64]  # [n_classes] resident slots of each class


def make_state(n_slots: int, n_classes: int, n_keys_hint: int) -> State:  # noqa: ARG001 - remembers no absent key
    """As :meth:`base.Policy.make_state`; 16 bytes a slot."""
    return State(make_nodes(_NODE, n_slots, n_classes), np.zeros(n_classes, np.int64))


@borrowing
def insert(s: State, slot: int, cls: int, _key: int, clock: int, _score: int) -> None:
    """As :meth:`base.Policy.insert`: at the head of its class."""
    s.nodes[slot].cls = cls
    s.nodes[slot].position = clock
    s.counts[cls] += 1
    link_head(s.nodes, _anchor(s, cls), slot)


@borrowing
def candidate(s: State, cls: int) -> int:
    """As :meth:`base.Policy.candidate`: the tail."""
    tail = s.nodes[_anchor(s, cls)].prev
    return tail if s.counts[cls] else NO_SLOT


@borrowing
def tail_clock(s: State, cls: int) -> int:
    """As :meth:`base.Policy.tail_clock`: the tail's position."""
    tail = candidate(s, cls)
    return wide(s.nodes[tail].position) if tail >= 0 else NO_SLOT


@borrowing
def touch(s: State, slot: int, clock: int, _score: int) -> None:
    """As :meth:`base.Policy.touch`: to the head, with ``clock`` as its position."""
    s.nodes[slot].position = clock
    unlink(s.nodes, slot)
    link_head(s.nodes, _anchor(s, s.nodes[slot].cls), slot)


@borrowing
def remove(s: State, slot: int, _evicted: bool) -> None:
    """As :meth:`base.Policy.remove`."""
    s.counts[s.nodes[slot].cls] -= 1
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
    """As :meth:`base.Policy.check_integrity`."""
    return check_lists(s.nodes, len(s.nodes) - len(s.counts), s.counts)


@borrowing
def choose_victim(s: State, cls: int, clock: int, stamps: Any, stepped: Any, n_sessions: int) -> int:
    """The slot of ``cls`` to evict now, or ``NO_SLOT``; moves slots that were used since their position to
    the head.

    Args:
        s: the state.
        cls: the class that needs a slot.
        clock: the tier's clock now; stamps after it are ignored.
        stamps: u64[≥ n_sessions], address of each session's ``last_used`` (u32, one per slot; it must be
            mapped).
        stepped: u32[≥ n_sessions], the clock each session's last step began at. A session whose last step is
            not after a slot's position cannot have stamped it since and is not looked at.
        n_sessions: entries of the two arrays in use.

    The slot stays resident: the caller follows with ``remove``.
    """
    for _ in range(REINSERTIONS):
        slot = candidate(s, cls)
        if slot < 0:
            return NO_SLOT
        position = wide(s.nodes[slot].position)
        newest = newest_stamp(slot, position, clock, stamps, stepped, n_sessions)
        if newest == position:
            return slot
        touch(s, slot, newest, 0)
    return candidate(s, cls)


@borrowing
def newest_stamp(slot: int, position: int, clock: int, stamps: Any, stepped: Any, n_sessions: int) -> int:
    """The latest stamp on ``slot`` that lies after ``position`` and not after ``clock``; else ``position``.

    Arguments as :func:`choose_victim`.
    """
    newest = wide(position)
    for session in range(n_sessions):
        if later_by(stepped[session], position) <= 0:
            continue
        stamp = wide(load_u32(stamps[session] + np.uint64(4 * slot)))
        if later_by(stamp, newest) > 0 and later_by(clock, stamp) >= 0:
            newest = stamp
    return newest


@borrowing
def _anchor(s: State, cls: int) -> int:
    return len(s.nodes) - len(s.counts) + cls
