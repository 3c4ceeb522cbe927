"""The replacement policy that the configuration names, as the reader's compiled code calls it.

The reader is compiled for the type of its policies' state: these functions stand for those of the module in which that
type is defined (:mod:`strataflux.cache_policy.base` is the contract), chosen when the caller is compiled. So nothing is
decided, or looked up, while it runs, and each policy has a machine code of the reader of its own.

There is a state for each kind of record (:data:`strataflux.daemon.rows.KINDS`): what is learnt of weights says nothing
of KV. The two number their slots apart, and densely where the policy needs that (:func:`place_of`, :func:`entry_at`).
"""

import sys
from collections.abc import Callable
from typing import Any

from numba.extending import overload

from strataflux.cache_policy.base import wide
from strataflux.daemon.rows import KV_KIND
from strataflux.daemon.state import Core
from strataflux.proto import layout
from strataflux.proto.compiled import borrowing

__all__ = [
    "admit",
    "candidate",
    "check_integrity",
    "entry_at",
    "insert",
    "place_of",
    "remove",
    "requested",
    "tail_clock",
    "touch",
]

_UNITS = layout.UNITS_PER_PAGE
# As for the functions that call them: no references are counted.
_OPTIONS: Any = {"nogil": True, "boundscheck": False, "error_model": "numpy", "_nrt": False}


@borrowing
def place_of(c: Core, entry: int) -> int:
    """A policy's number of a slot entry: dense over the pages of its kind."""
    page = entry // _UNITS
    if page >= c.rd[0].kv_page:
        return wide(entry - c.rd[0].kv_page * _UNITS)
    return wide((page << c.rd[0].place_shift) + entry - page * _UNITS)


@borrowing
def entry_at(c: Core, kind: int, place: int) -> int:
    """The slot entry that the policy of a kind knows by a number; negative numbers name none and stay as they are."""
    if place < 0:
        return place
    if kind == KV_KIND:
        return wide(place + c.rd[0].kv_page * _UNITS)
    page = place >> c.rd[0].place_shift
    return wide(page * _UNITS + place - (page << c.rd[0].place_shift))


def insert(s: Any, place: int, cls: int, key: int, clock: int, score: int) -> None:
    """As :meth:`strataflux.cache_policy.base.Policy.insert`, as all that follow."""
    _of(type(s), "insert")(s, place, cls, key, clock, score)


def candidate(s: Any, cls: int) -> int:
    """The next victim."""
    return int(_of(type(s), "candidate")(s, cls))


def tail_clock(s: Any, cls: int) -> int:
    """When the next victim last moved."""
    return int(_of(type(s), "tail_clock")(s, cls))


def touch(s: Any, place: int, clock: int, score: int) -> None:
    """A slot was used."""
    _of(type(s), "touch")(s, place, clock, score)


def remove(s: Any, place: int, evicted: bool) -> None:
    """A slot becomes absent."""
    _of(type(s), "remove")(s, place, evicted)


def admit(s: Any, key: int, cls: int, score: int, clock: int) -> bool:
    """Whether an absent record is worth a slot of a full class."""
    return bool(_of(type(s), "admit")(s, key, cls, score, clock))


def requested(s: Any, key: int, score: int, clock: int) -> None:
    """A record was missed."""
    _of(type(s), "requested")(s, key, score, clock)


def check_integrity(s: Any) -> int:
    """0, or the code of a broken invariant."""
    return int(_of(type(s), "check_integrity")(s))


def _of(state: Any, name: str) -> Callable[..., Any]:
    """A function of the policy whose state is of this class."""
    return getattr(sys.modules[state.__module__], name)  # type: ignore[no-any-return]


# Not strict: an implementation has the arguments of the function that it stands for, but no annotations.


@overload(insert, strict=False, jit_options=_OPTIONS)
def _insert(s: Any, place: Any, cls: Any, key: Any, clock: Any, score: Any) -> Any:
    chosen = _of(s.instance_class, "insert")
    return lambda s, place, cls, key, clock, score: chosen(s, place, cls, key, clock, score)


@overload(candidate, strict=False, jit_options=_OPTIONS)
def _candidate(s: Any, cls: Any) -> Any:
    chosen = _of(s.instance_class, "candidate")
    return lambda s, cls: chosen(s, cls)


@overload(tail_clock, strict=False, jit_options=_OPTIONS)
def _tail_clock(s: Any, cls: Any) -> Any:
    chosen = _of(s.instance_class, "tail_clock")
    return lambda s, cls: chosen(s, cls)


@overload(touch, strict=False, jit_options=_OPTIONS)
def _touch(s: Any, place: Any, clock: Any, score: Any) -> Any:
    chosen = _of(s.instance_class, "touch")
    return lambda s, place, clock, score: chosen(s, place, clock, score)


@overload(remove, strict=False, jit_options=_OPTIONS)
def _remove(s: Any, place: Any, evicted: Any) -> Any:
    chosen = _of(s.instance_class, "remove")
    return lambda s, place, evicted: chosen(s, place, evicted)


@overload(admit, strict=False, jit_options=_OPTIONS)
def _admit(s: Any, key: Any, cls: Any, score: Any, clock: Any) -> Any:
    chosen = _of(s.instance_class, "admit")
    return lambda s, key, cls, score, clock: chosen(s, key, cls, score, clock)


@overload(requested, strict=False, jit_options=_OPTIONS)
def _requested(s: Any, key: Any, score: Any, clock: Any) -> Any:
    chosen = _of(s.instance_class, "requested")
    return lambda s, key, score, clock: chosen(s, key, score, clock)


@overload(check_integrity, strict=False, jit_options=_OPTIONS)
def _check_integrity(s: Any) -> Any:
    chosen = _of(s.instance_class, "check_integrity")
    return lambda s: chosen(s)
