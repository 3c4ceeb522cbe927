"""What is remembered of keys that are not resident: ghosts, four to a cache line, found by a 32-bit hash of the key.

Two keys of one hash are taken for one, which costs a wrong estimate and nothing else. A ghost that has to go is the
one not used for longest of its line.

All functions take the state ``s`` of a policy: any tuple with ``pasts`` ([slots, then ghosts] of :data:`reuse.PAST`)
and ``numbers`` (i8), which begin as :func:`reuse.make_numbers` and then :func:`make_recall` made them.
"""

from typing import Any

from strataflux.cache_policy import reuse
from strataflux.cache_policy.base import wide
from strataflux.cache_policy.ghosts import WAYS
from strataflux.proto.compiled import borrowing

__all__ = ["NUMBERS", "find", "first_ghost", "first_way", "found", "make_recall", "seek", "sets", "sets_for"]

_GHOSTS_PER_SLOT = 16
_ENOUGH, _LEAST_PER_SLOT = 1 << 20, 2  # no more than so many, unless there are fewer than so many a slot
_FIRST, _SETS_MASK = reuse.NUMBERS, reuse.NUMBERS + 1  # index of the first ghost; sets of them - 1
_TAG, _FOUND = reuse.NUMBERS + 2, reuse.NUMBERS + 3  # of the key asked for last: its tag and ghost
NUMBERS = reuse.NUMBERS + 4
"""How many numbers are the model's and the ghosts'; a policy's own follow."""


def sets_for(n_slots: int, n_keys: int) -> int:
    """How many lines of ghosts a cache of ``n_slots`` keeps, where about ``n_keys`` will be asked for: 2**k."""
    count, most = 1, min(_GHOSTS_PER_SLOT * n_slots, max(_ENOUGH, _LEAST_PER_SLOT * n_slots))
    while count * WAYS < max(n_slots, min(n_keys, most)):
        count *= 2
    return count


def make_recall(numbers: Any, first: int, count: int) -> None:
    """No ghost is known of ``count`` lines from index ``first`` of the pasts on."""
    numbers[_FIRST], numbers[_SETS_MASK], numbers[_TAG] = first, count - 1, -1


@borrowing
def first_ghost(s: Any) -> int:
    """Index of the first ghost, behind the slots."""
    return s.numbers[_FIRST]  # type: ignore[no-any-return]


@borrowing
def sets(s: Any) -> int:
    """How many lines of ghosts there are."""
    return s.numbers[_SETS_MASK] + 1  # type: ignore[no-any-return]


@borrowing
def first_way(s: Any, tag: int) -> int:
    """Index of the first ghost of the line in which ``tag`` may stand."""
    return s.numbers[_FIRST] + (tag & s.numbers[_SETS_MASK]) * WAYS  # type: ignore[no-any-return]


@borrowing
def seek(s: Any, tag: int) -> tuple[int, bool]:
    """The ghost of ``tag`` and True, or the place for one and False: a free one, else that not used for longest."""
    first = first_way(s, tag)
    best, most = first, -1
    for at in range(first, first + WAYS):
        past = s.pasts[at]
        free, same = wide(past.last) == 0, wide(past.tag) == tag
        rank = reuse.since(s, past) | wide(free) << 32 | wide(same and not free) << 33
        if rank > most:
            best, most = at, rank
    return best, most >> 33 != 0


@borrowing
def found(s: Any, tag: int, at: int) -> None:
    """The ghost of ``tag`` stands at ``at``: :func:`find` is short until another is found."""
    s.numbers[_TAG], s.numbers[_FOUND] = tag, at


@borrowing
def find(s: Any, tag: int) -> int:
    """The ghost of ``tag``, or -1."""
    at = s.numbers[_FOUND]
    if s.numbers[_TAG] != tag or wide(s.pasts[at].tag) != tag or s.pasts[at].last == 0:
        at = _search(s, tag)
    return at  # type: ignore[no-any-return]


@borrowing
def _search(s: Any, tag: int) -> int:
    at, known = seek(s, tag)
    return at if known else -1
