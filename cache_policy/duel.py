"""Whether least recently used would keep more: its hit rate, told from times of last use, and a choice by it.

An exact LRU cache of ``n`` records holds the ``n`` keys used last, so whether it would have had a key follows from the
key's last use alone: it came after the *boundary*, the time after which just ``n`` keys were used last. Keys are
counted by the time of their last use in bins of 1/32 tick; a use moves its key from one bin to the newest, and the
boundary follows where more are kept than fit (of the bin that it falls into, a share). No list, and no second cache.
Large caches count one key in 2**k, drawn by its hash, and as many times less room.

Each request that is counted also says what the cache in fact had. Over about the last ``_MEMORY`` of them LRU has to be
ahead by more than ``_MARGIN`` a request, and by twice what chance would give, to be chosen. How the other would do
meanwhile cannot be told; so it gets its chance again after as many, and after twice as many each time that it soon
falls behind again.

A duel is ``SIZE`` numbers (i64) from index ``at`` on. The form is ours.
"""

from typing import Any

from strataflux.proto.compiled import borrowing

__all__ = ["SIZE", "UNKNOWN", "asked", "check_duel", "make_duel", "recency_leads", "sampled"]

UNKNOWN = -1
"""The age of a key that nothing is known of."""

_BIN = 8  # units of time in a bin, 1/32 tick
_BINS = 4096  # LRU is taken to forget what was not used in 128 ticks
_COUNTED = 2048  # room of the LRU that is counted, at most; more where the hash cannot tell as few keys
_HASH_BITS = 16
_WHOLE = 1024  # a hit
_MARGIN = 1
_MEMORY = 1 << 14
_LONGEST_TERM = 8 * _MEMORY
_UNIT = 1 << 6  # of sums of parts of a hit
_BEHIND = -256 * _WHOLE * _UNIT  # hits that LRU is behind at most, or a change would go unseen for long
_SURE = 2  # the square of how many deviations; half, since sums fade
_DOUBT = 96 * _WHOLE * _WHOLE  # squares that are there from the start: LRU is not chosen for a few hits

_MASK, _SHIFT = 0, 1  # of the hash of keys that are counted; log2 of one in how many
_LEFT = 2  # requests until the other gets its chance again; 0 = it has it
_AHEAD, _SQUARES = 3, 4  # fading sums: by how much LRU is ahead, and its squares
_NEWEST, _BOUNDARY, _KEPT = 5, 6, 7  # bins, counted from time 0; keys from the boundary's bin on
_TERM, _SINCE = 8, 9  # requests that LRU was chosen for last; those that the other has had since
_FIRST = 10
SIZE = _FIRST + _BINS
"""Numbers in a duel."""


def make_duel(numbers: Any, at: int, n_slots: int) -> None:
    """The zeros from ``at`` on become a duel in a cache of ``n_slots``."""
    shift = min(max(n_slots // _COUNTED, 1).bit_length() - 1, _HASH_BITS)
    numbers[at + _MASK], numbers[at + _SHIFT] = (1 << shift) - 1, shift
    numbers[at + _SINCE] = _MEMORY


@borrowing
def sampled(numbers: Any, at: int, tag: int) -> bool:
    """Whether the uses of the key with the hash ``tag`` are counted."""
    # The upper bits: the lower ones choose a ghost's place.
    return not (tag >> _HASH_BITS) & numbers[at + _MASK]


@borrowing
def recency_leads(numbers: Any, at: int) -> bool:
    """Whether LRU is chosen."""
    return numbers[at + _LEFT] > 0  # type: ignore[no-any-return]


@borrowing
def asked(numbers: Any, at: int, now: int, age: int, hit: int, resident: int, moves: bool, counts: bool) -> bool:
    """A sampled key is asked for; whether the choice changes with that.

    Args:
        numbers: the duel's among them.
        at: where it begins.
        now: the time, in 1/256 tick.
        age: since the key's last use, or ``UNKNOWN``.
        hit: 1 if the cache had it, else 0.
        resident: slots that are taken now: what LRU would have to itself.
        moves: whether ``now`` becomes the time of the key's last use.
        counts: whether the request says anything of the two: not if the key's fill is still to come.
    """
    room = resident >> numbers[at + _SHIFT]
    _pass_time(numbers, at, now // _BIN)
    found = _use(numbers, at, (now - age) // _BIN if age >= 0 else -1, room, moves)
    if numbers[at + _LEFT]:
        numbers[at + _LEFT] -= 1
        return numbers[at + _LEFT] == 0  # type: ignore[no-any-return]
    return counts and _compare(numbers, at, found - hit * _WHOLE - _MARGIN)


@borrowing
def check_duel(numbers: Any, at: int) -> bool:
    """Whether the keys that LRU would keep are as many as stand in the bins from the boundary on, all in the ring."""
    n, kept = numbers, 0
    for each in range(n[at + _BOUNDARY], n[at + _NEWEST] + 1):
        kept += n[at + _FIRST + each % _BINS]
    return 0 <= n[at + _NEWEST] - n[at + _BOUNDARY] < _BINS and kept == n[at + _KEPT]  # type: ignore[no-any-return]


@borrowing
def _pass_time(numbers: Any, at: int, newest: int) -> None:
    """Bins up to ``newest`` begin, empty; those that the ring has no more room for are given up."""
    first, n = at + _FIRST, numbers
    if newest - n[at + _NEWEST] >= _BINS:  # none stays, whichever stand where theirs would be
        n[at + _KEPT], n[at + _BOUNDARY] = 0, newest - _BINS + 1
    for each in range(max(n[at + _NEWEST] + 1, newest - _BINS + 1), newest + 1):
        if each - n[at + _BOUNDARY] >= _BINS:
            n[at + _KEPT] -= n[first + each % _BINS]
            n[at + _BOUNDARY] += 1
        n[first + each % _BINS] = 0
    n[at + _NEWEST] = max(n[at + _NEWEST], newest)  # a use may be told late


@borrowing
def _use(numbers: Any, at: int, used: int, room: int, moves: bool) -> int:
    """How much of the key last used in the bin ``used`` LRU would have, in 1/_WHOLE; then it is used now."""
    first, n = at + _FIRST, numbers
    boundary = n[at + _BOUNDARY]
    kept = used >= boundary
    share = _WHOLE if kept else 0
    if used == boundary:
        here = n[first + used % _BINS]
        share = min(max((room - n[at + _KEPT] + here) * _WHOLE // max(here, 1), 0), _WHOLE)
    if moves:
        if kept:
            n[first + used % _BINS] -= 1
        else:
            n[at + _KEPT] += 1
        n[first + n[at + _NEWEST] % _BINS] += 1
        while n[at + _BOUNDARY] < n[at + _NEWEST] and n[at + _KEPT] - n[first + n[at + _BOUNDARY] % _BINS] >= room:
            n[at + _KEPT] -= n[first + n[at + _BOUNDARY] % _BINS]
            n[at + _BOUNDARY] += 1
    return share


@borrowing
def _compare(numbers: Any, at: int, ahead: int) -> bool:
    n = numbers
    n[at + _SINCE] += 1
    n[at + _AHEAD] = max(n[at + _AHEAD] + ahead * _UNIT - n[at + _AHEAD] // _MEMORY, _BEHIND)
    n[at + _SQUARES] += ahead * ahead - n[at + _SQUARES] // _MEMORY
    total = n[at + _AHEAD] // _UNIT
    if total <= 0 or total * total <= _SURE * (n[at + _SQUARES] + _DOUBT):
        return False
    n[at + _AHEAD] = n[at + _SQUARES] = 0
    n[at + _TERM] = _MEMORY if n[at + _SINCE] >= _MEMORY else min(2 * n[at + _TERM], _LONGEST_TERM)
    n[at + _LEFT], n[at + _SINCE] = n[at + _TERM], 0
    return True
