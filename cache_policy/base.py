"""The contract of a replacement policy.

A policy orders the resident slots of a cache and names victims; it owns no bytes, reads no clock, does no I/O
and never allocates after ``make_state``. The tier that owns the slots calls it from one thread, from compiled
code without the GIL. Two policies given the same calls answer the same: none draws from a random source of
its own.

A policy is a *module* with the functions of :class:`Policy`. All but ``make_state`` are compiled; they share
one state, a NamedTuple of arrays. The words used throughout:

slot     dense index 0 … n_slots - 1 of a place in the cache. The tier maps byte offsets to it.
cls      small integer, a class of equal slot size. Victims are named within one class; the byte budget
         (:mod:`strataflux.cache_policy.budget`) moves pages between classes.
key      u64, ``table << 40 | oid``; below 2**63, so signed arithmetic is safe.
clock    u32, the tier's logical time. Compared modulo 2**32 as a signed difference (:func:`later_by`).
score    u8, the selection score of a request; 0 = unknown.

States of a slot, as a policy sees it::

    ABSENT ── insert ──► RESIDENT ── remove ──► ABSENT
                          │    ▲
                          └────┘ touch (its position or value changes)

Pairs: ``insert`` / ``remove``; ``candidate`` / ``remove(evicted=True)`` (``candidate`` alone changes no
slot's state). Calls out of order (``insert`` of a resident slot, ``touch`` of an absent one) are the tier's
bug: they are not checked on the hot path, ``check_integrity`` finds them.
"""

from typing import Any, Protocol

import numpy as np

from strataflux.proto.compiled import compiled

__all__ = [
    "BROKEN_LINK",
    "INTACT",
    "LOST_SLOT",
    "NO_SLOT",
    "WRONG_CLASS",
    "WRONG_COUNT",
    "WRONG_VALUE",
    "Policy",
    "later_by",
    "wide",
]

NO_SLOT = -1
"""What ``candidate`` and ``tail_clock`` answer for a class without a resident slot."""

# Codes of check_integrity, shared by all policies.
INTACT = 0
BROKEN_LINK = 1  # next and prev of neighbouring slots do not name each other
WRONG_CLASS = 2  # a slot stands in the list of a class it does not carry
WRONG_COUNT = 3  # a list is longer or shorter than its counter says
LOST_SLOT = 4  # a slot says resident and stands in no list, or the reverse
WRONG_VALUE = 5  # a policy's own numbers disagree (the policy's module says which)


@compiled
def wide(value: Any) -> int:
    """An integer of any width as i64: mixing u32 or u64 with signed values would otherwise leave the integers."""
    return np.int64(value)  # type: ignore[return-value]  # the i64 of compiled code


@compiled
def later_by(stamp: int, than: int) -> int:
    """How much later the u32 clock value ``stamp`` is, as a signed difference modulo 2**32 (negative:
    earlier).
    """
    return ((wide(stamp) - wide(than) + 0x80000000) & 0xFFFFFFFF) - 0x80000000


class Policy(Protocol):
    """A module of functions over one state; ``s`` is that state throughout. All run in O(1) amortised."""

    def make_state(self, n_slots: int, n_classes: int, n_keys_hint: int, /) -> Any:
        """All slots absent.

        Args:
            n_slots: slots there can ever be; fixed.
            n_classes: classes there can ever be; fixed.
            n_keys_hint: about how many distinct keys will be asked for; sizes what a policy remembers of keys
                that are not resident. A wrong hint costs hit rate, never correctness.
        """

    def insert(self, s: Any, slot: int, cls: int, key: int, clock: int, score: int, /) -> None:
        """An absent slot becomes resident with ``key``'s record in it."""

    def candidate(self, s: Any, cls: int, /) -> int:
        """The next victim of ``cls``, or :data:`NO_SLOT` if none of its slots is resident.

        May refresh the policy's own order; no slot enters or leaves. Good until the next call on this state.
        """

    def tail_clock(self, s: Any, cls: int, /) -> int:
        """The clock at which the candidate of ``cls`` last moved, or :data:`NO_SLOT`; compares ages across
        classes.
        """

    def touch(self, s: Any, slot: int, clock: int, score: int, /) -> None:
        """The tier learnt that the resident ``slot`` was used at ``clock``."""

    def remove(self, s: Any, slot: int, evicted: bool, /) -> None:
        """The resident ``slot`` becomes absent: ``evicted`` for room, or else invalidated and not to be
        remembered.
        """

    def admit(self, s: Any, key: int, cls: int, score: int, clock: int, /) -> bool:
        """Whether the absent ``key`` is worth a slot of the full class ``cls``; changes nothing that a slot
        can see.
        """

    def requested(self, s: Any, key: int, score: int, clock: int, /) -> None:
        """``key`` was asked for and is not resident. Comes before the ``admit`` of the same request."""

    def check_integrity(self, s: Any, /) -> int:
        """:data:`INTACT`, or the code of the first broken invariant found. O(n_slots); for tests and idle
        time.
        """
