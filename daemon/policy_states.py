"""The states of the replacement policy that the configuration names, one for each kind of record."""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy import budget, lru
from strataflux.daemon.store import Store
from strataflux.proto import layout

__all__ = ["flat", "make_states", "places_shift"]

_UNITS_SHIFT = layout.UNITS_PER_PAGE.bit_length() - 1
_KEYS_A_SLOT = 2  # of KV, whose slots are mostly larger than the smallest that there could be


def make_states(policy: str, places: int, records: int, kv_pages: int) -> tuple[Any, Any]:
    """A state for ``places`` slots of weights, of which there are ``records``, and one for ``kv_pages`` pages of KV."""
    kv = max(kv_pages * layout.UNITS_PER_PAGE, 1)
    if policy == "lru":
        return lru.make_state(places, budget.MAX_CLASSES, 0), lru.make_state(kv, budget.MAX_CLASSES, 0)
    # By name: an import would make the machine code of every policy's reader depend on all policies. It depends on the
    # one that it is compiled for, by the type of these states.
    chosen = importlib.import_module("strataflux.cache_policy.policies").POLICIES[policy]
    return (
        chosen.make_state(places, budget.MAX_CLASSES, max(records, 1)),
        chosen.make_state(kv, budget.MAX_CLASSES, _KEYS_A_SLOT * kv),
    )


def places_shift(policy: str, stores: Sequence[Store]) -> int:
    """log2 of the numbers that each page's slots have towards the policy.

    LRU does not care how dense they are. Others learn from slots at random, and size what they remember by how many
    there are: then it is what the smallest slots of the first stores need. Without a store any size may come.
    """
    sizes = [layout.slot_bytes(section.record_bytes) for store in stores for section in store.manifest.sections]
    if policy == "lru" or not sizes:
        return _UNITS_SHIFT
    return (layout.CACHE_PAGE_BYTES // min(sizes) - 1).bit_length()


def flat(states: Any) -> Iterator[NDArray[Any]]:
    """The arrays of nested states."""
    for part in states:
        if isinstance(part, np.ndarray):
            yield part
        else:
            yield from flat(part)
