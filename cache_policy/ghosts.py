"""A bounded memory of keys that are not resident: a hash table of fixed size, four entries to a cache line.

An entry is a structured record with at least ``key`` (u8, the key + 1; 0 = free). A key may stand in any of the four
entries its hash names; a full set gives up the entry the caller's policy calls the least worth keeping, so the table
never grows and never rehashes. Forgetting costs hit rate, nothing else.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strataflux.proto.compiled import borrowing

__all__ = ["WAYS", "first_way", "forget", "hash_key", "lookup", "make_ghosts"]

WAYS = 4


def make_ghosts(dtype: np.dtype[np.void], entries: int) -> NDArray[np.void]:
    """An empty table of at least ``entries`` entries, a power of two of sets."""
    sets = 1
    while sets * WAYS < entries:
        sets *= 2
    return np.zeros(sets * WAYS, dtype)


@borrowing
def hash_key(key: int) -> int:
    """32 well-mixed bits of ``key`` (the finaliser of MurmurHash3), as i64."""
    x = np.uint64(key) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return np.int64((x ^ (x >> np.uint64(33))) & np.uint64(0xFFFFFFFF))  # type: ignore[return-value]


@borrowing
def first_way(ghosts: Any, key: int) -> int:
    """Index of the first of the ``WAYS`` entries that may hold ``key``."""
    return (hash_key(key) & (len(ghosts) // WAYS - 1)) * WAYS


@borrowing
def lookup(ghosts: Any, key: int) -> int:
    """Index of the entry of ``key``, or -1."""
    first = first_way(ghosts, key)
    for at in range(first, first + WAYS):
        if ghosts[at].key == np.uint64(key + 1):
            return at
    return -1


@borrowing
def forget(ghosts: Any, key: int) -> None:
    """Free the entry of ``key``, if there is one."""
    at = lookup(ghosts, key)
    if at >= 0:
        ghosts[at].key = 0
