"""Which blocks of adjacent slots hold slots of a class, and a walk over them in parts.

A block with slots of a class is named once in the class's list; one without any may be, until it is next looked at.
``listed`` of a block has the bits of the classes that name it, and a slot whose ``named`` is a class stands in a block
that the class names, to save asking again.

All functions take the state ``s`` of a policy: ``pasts`` ([slots in whole blocks, …] of :data:`reuse.PAST`) and
``numbers`` (i8) with three of this module behind those of :mod:`recall`; ``listed`` and the lists, each with its length
before it, are where :func:`make_blocks` is told.
"""

from typing import Any

from strataflux.cache_policy import recall
from strataflux.cache_policy.base import INTACT, LOST_SLOT, WRONG_CLASS, WRONG_COUNT, wide
from strataflux.cache_policy.lists import ABSENT
from strataflux.proto.compiled import borrowing

__all__ = ["BLOCK", "NUMBERS", "check_blocks", "forget", "index", "make_blocks", "name", "part", "place", "size"]

BLOCK = 16
"""Slots in a block."""
_BLOCKS, _PART_BITS, _FIRST = recall.NUMBERS, recall.NUMBERS + 1, recall.NUMBERS + 2
NUMBERS = recall.NUMBERS + 3
"""How many numbers are the model's, the ghosts' and these; a policy's own follow."""


def size(n_blocks: int, n_classes: int) -> int:
    """Numbers that ``listed`` and the lists of blocks need."""
    return n_blocks + n_classes * (1 + n_blocks)


def make_blocks(numbers: Any, first: int, n_blocks: int, part_bits: int) -> None:
    """No block is named; ``listed`` and the lists are the zeros from ``first`` on. A part is a block / 2**part_bits."""
    numbers[_BLOCKS], numbers[_PART_BITS], numbers[_FIRST] = n_blocks, part_bits, first


@borrowing
def name(s: Any, slot: int, cls: int) -> None:
    """The block of ``slot`` stands in the list of ``cls``; ``slot`` remembers that."""
    n, block, row = s.numbers, slot // BLOCK, _row(s, cls)
    s.pasts[slot].named = cls
    if not n[n[_FIRST] + block] >> cls & 1:
        n[n[_FIRST] + block] |= 1 << cls
        n[row] += 1
        n[row + n[row]] = block


@borrowing
def place(s: Any, cls: int, sweep: int) -> int:
    """The place of a part, of all of ``cls``, by a number below 2**32."""
    n = s.numbers
    return sweep * (n[_row(s, cls)] << n[_PART_BITS]) >> 32  # type: ignore[no-any-return]


@borrowing
def index(s: Any, cls: int, at: int) -> int:
    """Index in the numbers of the block of the part at place ``at``."""
    return _row(s, cls) + 1 + (at >> s.numbers[_PART_BITS])  # type: ignore[no-any-return]


@borrowing
def part(s: Any, cls: int, at: int) -> tuple[int, int]:
    """The first slot of the part at place ``at``, and how many it has."""
    n, bits = s.numbers, s.numbers[_PART_BITS]
    slots = BLOCK >> bits
    return n[index(s, cls, at)] * BLOCK + (at & (1 << bits) - 1) * slots, slots


@borrowing
def forget(s: Any, cls: int, at: int) -> None:
    """No slot of ``cls`` is in the part at place ``at``: its block leaves the list, if there is none in it at all."""
    n, row, named = s.numbers, _row(s, cls), index(s, cls, at)
    block = n[named]
    for slot in range(block * BLOCK, block * BLOCK + BLOCK):
        if s.pasts[slot].cls == cls:
            return
    n[named] = n[row + n[row]]
    n[row] -= 1
    n[n[_FIRST] + block] ^= 1 << cls
    for slot in range(block * BLOCK, block * BLOCK + BLOCK):
        if s.pasts[slot].named == cls:
            s.pasts[slot].named = ABSENT


@borrowing
def check_blocks(s: Any, n_classes: int) -> int:
    """Whether lists, ``listed``, slots and their ``named`` agree: a code of :mod:`base`, as ``blend`` explains it."""
    n, first = s.numbers, s.numbers[_FIRST]
    for slot in range(recall.first_ghost(s)):
        past, listed = s.pasts[slot], n[first + slot // BLOCK]
        if past.cls != ABSENT and not 0 <= past.cls < n_classes:
            return WRONG_CLASS
        if past.cls != ABSENT and not listed >> wide(past.cls) & 1:
            return LOST_SLOT
        if past.named != ABSENT and not listed >> wide(past.named) & 1:
            return WRONG_CLASS
    for cls in range(n_classes):
        row, count = _row(s, cls), 0
        for at in range(row + 1, row + 1 + n[row]):
            if not n[first + n[at]] >> cls & 1:
                return WRONG_CLASS
        for block in range(n[_BLOCKS]):
            count += n[first + block] >> cls & 1
        if count != n[row]:
            return WRONG_COUNT
    return INTACT


@borrowing
def _row(s: Any, cls: int) -> int:
    """Index of the length of the list of ``cls``, which follows it."""
    return s.numbers[_FIRST] + s.numbers[_BLOCKS] + cls * (1 + s.numbers[_BLOCKS])  # type: ignore[no-any-return]
