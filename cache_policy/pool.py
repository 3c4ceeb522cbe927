"""The few lowest of many slots, kept in order: what was found by looking at some slots at a time is not lost.

A pool is ``SIZE`` numbers (i64) from index ``at`` on: how many entries it holds, the entries, lowest first; how many
slots were passed over, and which. An
entry is ``value << 32 | slot``; values (within 31 bits) and slots so compare as one number. It may be stale: the slot
has left, or its value changed. Whoever takes the lowest looks again.
"""

from typing import Any

from strataflux.proto.compiled import borrowing

__all__ = ["SIZE", "drop_lowest", "lowest", "offer", "pass_over", "second", "second_value", "take_back", "was_passed"]

_ENTRIES = 15
_PASSED, _PASSES = 1 + _ENTRIES, 32
SIZE = _PASSED + 1 + _PASSES
"""Numbers in a pool."""
_SLOT = 0xFFFFFFFF
_NOTHING = 1 << 31


@borrowing
def lowest(numbers: Any, at: int) -> int:
    """The slot with the lowest value, or -1 if the pool is empty."""
    return numbers[at + 1] & _SLOT if numbers[at] else -1


@borrowing
def second(numbers: Any, at: int) -> int:
    """The slot next to the lowest; the lowest if there is no other (the pool is not empty)."""
    return numbers[at + 1 + (numbers[at] > 1)] & _SLOT  # type: ignore[no-any-return]


@borrowing
def second_value(numbers: Any, at: int) -> int:
    """The value next to the lowest; above all values if there is none."""
    return numbers[at + 2] >> 32 if numbers[at] > 1 else _NOTHING


@borrowing
def drop_lowest(numbers: Any, at: int) -> None:
    """Take the lowest entry out."""
    numbers[at] -= 1
    for i in range(at + 1, at + 1 + numbers[at]):
        numbers[i] = numbers[i + 1]


@borrowing
def offer(numbers: Any, at: int, slot: int, value: int) -> None:
    """Put ``slot`` at its place, once; if the pool is full of lower ones, all stays as it is."""
    entry = value << 32 | slot
    end = at + 1 + numbers[at]
    if numbers[at] == _ENTRIES and numbers[end - 1] <= entry:
        return
    hole = at + 1
    while hole < end and numbers[hole] & _SLOT != slot:
        hole += 1
    if hole == end:
        if numbers[at] < _ENTRIES:
            numbers[at] += 1
        else:
            hole -= 1
    end = at + 1 + numbers[at]
    while hole + 1 < end and numbers[hole + 1] < entry:
        numbers[hole] = numbers[hole + 1]
        hole += 1
    while hole > at + 1 and numbers[hole - 1] > entry:
        numbers[hole] = numbers[hole - 1]
        hole -= 1
    numbers[hole] = entry


@borrowing
def pass_over(numbers: Any, at: int, slot: int, slots: int) -> None:
    """``slot`` is not to be named again until :func:`take_back`; of the ``slots`` there are one is always left."""
    if lowest(numbers, at) == slot:
        drop_lowest(numbers, at)
    passed = numbers[at + _PASSED] + 1
    numbers[at + _PASSED + passed] = slot
    numbers[at + _PASSED] = passed if passed < min(slots, _PASSES) else 0


@borrowing
def was_passed(numbers: Any, at: int, slot: int) -> bool:
    """Whether ``slot`` was passed over."""
    found = False
    for passed in range(numbers[at + _PASSED]):
        found |= numbers[at + _PASSED + 1 + passed] == slot
    return found


@borrowing
def take_back(numbers: Any, at: int) -> None:
    """Every slot may be named again."""
    numbers[at + _PASSED] = 0
