"""KV block ids as the [first, count] ranges of messages."""

from strataflux.daemon.errors import Refusal

__all__ = ["as_ranges", "listed"]


def as_ranges(blocks: list[int]) -> list[list[int]]:
    """Sorted ids as [first, count] ranges."""
    ranges: list[list[int]] = []
    for block in blocks:
        if ranges and sum(ranges[-1]) == block:
            ranges[-1][1] += 1
        else:
            ranges.append([block, 1])
    return ranges


def listed(ranges: list[list[int]], limit: int) -> list[int]:
    """The ids of [first, count] ranges that a client sent.

    Raises:
        Refusal: not ranges, out of bounds, or an id twice.
    """
    bad = Refusal("malformed", "kv_release", f"{ranges}"[:200], f"[first, count] below {limit}", "mend the client")
    blocks: list[int] = []
    for item in ranges:
        if len(item) != 2 or item[1] < 1 or item[0] + item[1] > limit:
            raise bad
        blocks += range(item[0], item[0] + item[1])
        if len(blocks) > limit:
            raise bad
    if len(set(blocks)) != len(blocks):
        raise bad
    return blocks
