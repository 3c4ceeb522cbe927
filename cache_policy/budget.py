"""Which size class may use which page: a byte budget over classes of equal slot size.

The cache's memory is cut into segments of ``pages_per_segment`` pages of 256 KiB; a page holds slots of one
class. Every budget (weights, KV) is a number of pages and each class belongs to one budget, so classes
compete for pages only within it. States of a page, and the calls that move it::

    ABSENT ── grow ──► UNUSED ── want_page ──► OWNED(class) ── pick_drain, release, shrink ──► DRAINING(to)
      ▲                  ▲                        ▲                                                 │
      └── shrink ────────┘                        └──────────── page_drained ───────────────────────┘
                                                   (to the class it drains for, to UNUSED, or to ABSENT)

The tier gives slots only from OWNED pages, counts each slot that is not free with ``take_slot`` /
``give_slot`` (a slot in its grace period is not free), evicts what a DRAINING page still holds, and says
``page_drained`` when nothing is left.

Pairs: ``take_slot`` / ``give_slot``; ``grow`` / ``shrink``; ``pick_drain``, ``release`` or ``shrink`` /
``page_drained``.
Invariants: ``used`` is 0 on ABSENT and UNUSED pages and at most the slots of its class elsewhere; the
counters per class and per budget equal what the page table says; an ABSENT page belongs to no budget, any
other to one.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy.base import (
    BROKEN_LINK,
    INTACT,
    WRONG_CLASS,
    WRONG_COUNT,
    WRONG_VALUE,
    later_by,
    wide,
)
from strataflux.cache_policy.errors import SlotTooLargeError, TooManyClassesError
from strataflux.proto.compiled import borrowing, compiled

__all__ = [
    "ABSENT",
    "DRAINING",
    "GONE",
    "KV",
    "MAX_CLASSES",
    "NO_PAGE",
    "OWNED",
    "PAGE_BYTES",
    "REFUSED",
    "SLOT_STEP",
    "UNUSED",
    "WEIGHTS",
    "Budget",
    "add_class",
    "check_integrity",
    "give_slot",
    "grow",
    "make_budget",
    "page_drained",
    "pick_drain",
    "release",
    "segment_pages",
    "shrink",
    "take_slot",
    "trim",
    "want_page",
]

PAGE_BYTES = 256 * 1024
SLOT_STEP = 256
"""Slot sizes are multiples of this many bytes."""
MAX_CLASSES = 32
WEIGHTS, KV = 0, 1
"""The two budgets every cache has; a tier that keeps memory apart further (KV of one session) asks for
more.
"""

ABSENT, UNUSED, OWNED, DRAINING = 0, 1, 2, 3
NO_PAGE = -1
GONE = -1
"""``page_drained``: the page is now UNUSED or ABSENT. Also ``owner`` of a page without a class."""
REFUSED = -2
"""``page_drained``: the page is not draining, or slots in it are not free; nothing was changed."""

# Besides a class number, what a draining page can become.
_TO_UNUSED, _TO_ABSENT = -1, -2
_IDLE_AGE = 1 << 32  # a class whose pages hold nothing is older than any clock difference

_PAGE = np.dtype([("state", "u1"), ("", "u1"), ("budget", "i2"), ("owner", "i2"), ("target", "i2"), ("used", "i4")])
_CLASS = np.dtype([("slot_bytes", "i4"), ("per_page", "i4"), ("owned", "i4"), ("coming", "i4"), ("budget", "i4")])
_POOL = np.dtype([("pages", "i8"), ("unused", "i8"), ("first", "i8")])
assert (_PAGE.itemsize, _CLASS.itemsize, _POOL.itemsize) == (12, 20, 24)


class Budget(NamedTuple):
    """The page table and its counters."""

    pages: NDArray[np.void]  # [segments * pages_per_segment] of _PAGE
    classes: NDArray[np.void]  # [MAX_CLASSES] of _CLASS; owned: OWNED pages, coming: pages draining for it
    pools: NDArray[np.void]  # [n_budgets] of _POOL; no UNUSED page lies before `first`
    sizes: NDArray[np.int64]  # [2]: classes in use, pages per segment


def make_budget(max_segments: int, pages_per_segment: int, n_budgets: int = 2) -> Budget:
    """A budget without classes whose pages are all ABSENT; ``grow`` brings segments in."""
    pages = np.zeros(max_segments * pages_per_segment, _PAGE)
    pages["owner"] = pages["budget"] = GONE
    sizes = np.array([0, pages_per_segment], np.int64)
    return Budget(pages, np.zeros(MAX_CLASSES, _CLASS), np.zeros(n_budgets, _POOL), sizes)


def add_class(b: Budget, slot_bytes: int, budget: int) -> int:
    """The class of slots of ``slot_bytes`` in ``budget``, made if it is new; the same arguments give the same
    class.

    Raises:
        SlotTooLargeError: a slot is larger than a page, not positive, or not a multiple of :data:`SLOT_STEP`.
        TooManyClassesError: all :data:`MAX_CLASSES` are in use.
    """
    if not 0 < slot_bytes <= PAGE_BYTES or slot_bytes % SLOT_STEP:
        raise SlotTooLargeError(
            f"slots of {slot_bytes} bytes were asked for; a slot is a multiple of {SLOT_STEP} bytes and at most "
            f"one page ({PAGE_BYTES} bytes); prepare the model with smaller records"
        )
    known = int(b.sizes[0])
    for cls in range(known):
        if b.classes[cls]["slot_bytes"] == slot_bytes and b.classes[cls]["budget"] == budget:
            return cls
    if known == MAX_CLASSES:
        raise TooManyClassesError(
            f"slots of {slot_bytes} bytes would be size class {known + 1}; the limit is {MAX_CLASSES}; serve "
            "fewer stores with differing record sizes from one daemon"
        )
    b.classes[known] = (slot_bytes, PAGE_BYTES // slot_bytes, 0, 0, budget)
    b.sizes[0] += 1
    return known


@borrowing
def grow(b: Budget, budget: int, segment: int) -> bool:
    """All pages of an ABSENT segment become UNUSED in ``budget``; False (nothing changed) if one is not
    ABSENT.
    """
    if segment_pages(b, segment):
        return False
    first = segment * b.sizes[1]
    for page in range(first, first + b.sizes[1]):
        b.pages[page].state = UNUSED
        b.pages[page].budget = budget
    pool = b.pools[budget]
    pool.pages += b.sizes[1]
    pool.unused += b.sizes[1]
    pool.first = min(pool.first, first)
    return True


@borrowing
def trim(b: Budget, segment: int, pages: int) -> int:
    """Only the first ``pages`` of a segment whose pages are all UNUSED have memory: the rest leave at once.

    Call it right after ``grow``, for a budget that is no multiple of a segment. Returns the pages that are left.
    """
    first = segment * b.sizes[1]
    for page in range(first + pages, first + b.sizes[1]):
        if b.pages[page].state == UNUSED:
            b.pools[b.pages[page].budget].unused -= 1
            _leave(b, page)
    return segment_pages(b, segment)


@borrowing
def shrink(b: Budget, segment: int) -> int:
    """Start to take a segment out: UNUSED pages leave at once, the rest drain. Returns how many still have
    to.
    """
    first = segment * b.sizes[1]
    for page in range(first, first + b.sizes[1]):
        state = b.pages[page].state
        if state == UNUSED:
            b.pools[b.pages[page].budget].unused -= 1
            _leave(b, page)
        elif state in (OWNED, DRAINING):
            _start_drain(b, page, _TO_ABSENT)
    return segment_pages(b, segment)


@borrowing
def segment_pages(b: Budget, segment: int) -> int:
    """Pages of the segment that are not ABSENT; at 0 its memory may be dropped."""
    first = segment * b.sizes[1]
    there = 0
    for page in range(first, first + b.sizes[1]):
        there += b.pages[page].state != ABSENT
    return there


@borrowing
def want_page(b: Budget, cls: int) -> int:
    """Give ``cls`` the lowest UNUSED page of its budget, which becomes OWNED; ``NO_PAGE`` if there is
    none.
    """
    pool = b.pools[b.classes[cls].budget]
    if pool.unused == 0:
        return NO_PAGE
    page = wide(pool.first)
    while b.pages[page].state != UNUSED or b.pages[page].budget != b.classes[cls].budget:
        page += 1
    pool.first = page + 1
    pool.unused -= 1
    _own(b, page, cls)
    return page


@borrowing
def pick_drain(b: Budget, need: int, tails: Any, clock: int) -> int:
    """Choose a page for the class ``need`` to take over, and set it DRAINING; ``NO_PAGE`` if none should
    move.

    The class with the oldest tail gives the page with the fewest used slots (the lowest such page) if its
    tail is older than that of ``need`` by more than 1/8 of the age span, the age of the oldest tail of the
    budget. A class without any page takes one in any case. One page at a time drains for a class.

    Args:
        b: the budget.
        need: the class that lacks a slot.
        tails: i8[≥ classes], ``tail_clock`` of each class's replacement policy, -1 = nothing resident.
        clock: the tier's clock now.
    """
    if b.classes[need].coming:
        return NO_PAGE
    donor = -1
    oldest = -1
    for cls in range(b.sizes[0]):
        if cls != need and b.classes[cls].budget == b.classes[need].budget and b.classes[cls].owned:
            age = _IDLE_AGE if tails[cls] < 0 else later_by(clock, tails[cls])
            if age > oldest:
                donor, oldest = cls, age
    if donor < 0:
        return NO_PAGE
    own_age = 0 if tails[need] < 0 else later_by(clock, tails[need])
    if b.classes[need].owned and (oldest - own_age) * 8 <= max(oldest, own_age):
        return NO_PAGE
    page = _emptiest_page(b, donor)
    _start_drain(b, page, need)
    return page


@borrowing
def release(b: Budget, page: int) -> bool:
    """Start to give an OWNED page back to its budget (its store was closed); False if it is not OWNED."""
    if b.pages[page].state != OWNED:
        return False
    _start_drain(b, page, _TO_UNUSED)
    return True


@borrowing
def page_drained(b: Budget, page: int) -> int:
    """All slots of a DRAINING page are free: it goes where it was drained for.

    Returns the class that now owns it, :data:`GONE` if it became UNUSED or ABSENT, or :data:`REFUSED`.
    """
    if b.pages[page].state != DRAINING or b.pages[page].used:
        return REFUSED
    target = wide(b.pages[page].target)
    if target >= 0:
        b.classes[target].coming -= 1
        _own(b, page, target)
        return target
    if target == _TO_ABSENT:
        _leave(b, page)
        return GONE
    b.pages[page].state = UNUSED
    b.pages[page].owner = GONE
    pool = b.pools[b.pages[page].budget]
    pool.unused += 1
    pool.first = min(pool.first, page)
    return GONE


@borrowing
def take_slot(b: Budget, page: int) -> bool:
    """Count one more slot of an OWNED page as not free; False (nothing changed) if it is not OWNED or is
    full.
    """
    owner = b.pages[page].owner
    if b.pages[page].state != OWNED or b.pages[page].used >= b.classes[owner].per_page:
        return False
    b.pages[page].used += 1
    return True


@borrowing
def give_slot(b: Budget, page: int) -> int:
    """Count one slot of the page as free again; returns how many of its slots are still not free."""
    b.pages[page].used -= 1
    return wide(b.pages[page].used)


@compiled
def check_integrity(b: Budget) -> int:
    """``INTACT`` or a code of :mod:`base`: page fields (WRONG_CLASS, WRONG_VALUE) and counters (WRONG_COUNT,
    BROKEN_LINK).
    """
    owned = np.zeros(MAX_CLASSES, np.int64)
    coming = np.zeros(MAX_CLASSES, np.int64)
    pages = np.zeros(len(b.pools), np.int64)
    unused = np.zeros(len(b.pools), np.int64)
    for page in range(len(b.pages)):
        entry = b.pages[page]
        code = _check_page(b, entry)
        if code != INTACT:
            return code
        if entry.state == OWNED:
            owned[entry.owner] += 1
        if entry.state == DRAINING and entry.target >= 0:
            coming[entry.target] += 1
        if entry.state != ABSENT:
            pages[entry.budget] += 1
        if entry.state == UNUSED:
            unused[entry.budget] += 1
            if page < b.pools[entry.budget].first:
                return BROKEN_LINK
    for cls in range(MAX_CLASSES):
        if b.classes[cls].owned != owned[cls] or b.classes[cls].coming != coming[cls]:
            return WRONG_COUNT
    for budget in range(len(b.pools)):
        if b.pools[budget].pages != pages[budget] or b.pools[budget].unused != unused[budget]:
            return WRONG_COUNT
    return INTACT


@borrowing
def _check_page(b: Budget, entry: Any) -> int:
    if entry.state == ABSENT or entry.state == UNUSED:
        if entry.owner != GONE or (entry.budget < 0) != (entry.state == ABSENT):
            return WRONG_CLASS
        return INTACT if entry.used == 0 else WRONG_VALUE
    if not 0 <= entry.owner < b.sizes[0] or b.classes[entry.owner].budget != entry.budget:
        return WRONG_CLASS
    return INTACT if 0 <= entry.used <= b.classes[entry.owner].per_page else WRONG_VALUE


@borrowing
def _own(b: Budget, page: int, cls: int) -> None:
    b.pages[page].state = OWNED
    b.pages[page].owner = cls
    b.classes[cls].owned += 1


@borrowing
def _start_drain(b: Budget, page: int, target: int) -> None:
    """OWNED or DRAINING → DRAINING for ``target``."""
    entry = b.pages[page]
    if entry.state == OWNED:
        b.classes[entry.owner].owned -= 1
    elif entry.target >= 0:
        b.classes[entry.target].coming -= 1
    entry.state = DRAINING
    entry.target = target
    if target >= 0:
        b.classes[target].coming += 1


@borrowing
def _leave(b: Budget, page: int) -> None:
    """UNUSED or drained → ABSENT."""
    b.pools[b.pages[page].budget].pages -= 1
    b.pages[page].state = ABSENT
    b.pages[page].budget = GONE
    b.pages[page].owner = GONE


@borrowing
def _emptiest_page(b: Budget, cls: int) -> int:
    best = NO_PAGE
    for page in range(len(b.pages)):
        entry = b.pages[page]
        if entry.state == OWNED and entry.owner == cls and (best < 0 or entry.used < b.pages[best].used):
            best = page
    return best
