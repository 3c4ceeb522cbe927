"""Counting by kind of record, and a sample of fills that is followed to the end. The reader thread only.

Whether a fill was worth it shows only in clients' stamps, which say when a slot was used last. So a sample is looked at
again and again: a record is in it by its hash (about one in 64, fewer in large caches), and a tick of the clock looks
at no more than 128 stamps. What is told of the sample is therefore exact to a few ticks, and costs next to nothing.

Pairs: :func:`follow` (at publication) / :func:`unfollow` (at eviction), for the few that :func:`hash_of` picks: whoever
calls looks first, since a call passes the whole core. Invariant: rows ``0 … sampled - 1`` are in use,
and ``slot.prev`` of a VALID slot is its row or NONE.
"""

from typing import Any

import numpy as np

from strataflux.cache_policy import lru
from strataflux.cache_policy.base import wide
from strataflux.daemon.rows import AGE_BUCKETS_STEPS, GAP_BUCKETS_US, MAX_SAMPLED
from strataflux.daemon.state import NONE, Core
from strataflux.proto import layout
from strataflux.proto.compiled import borrowing

__all__ = ["HASHES", "bucket_of", "follow", "forget_asker", "hash_of", "kind_of", "look", "unfollow"]

HASHES = 1 << 16
_MULTIPLIER, _TABLE_STEP = 40_503, 977
_STAMPS_A_TICK = 128
_BETWEEN, _IDLE = 0, 1
_AGES = np.array(AGE_BUCKETS_STEPS, np.int64)
_GAPS_US = np.array(GAP_BUCKETS_US, np.int64)


@borrowing
def kind_of(table: Any) -> int:
    """Index into :data:`strataflux.daemon.rows.KINDS` of the records of a row of TABLE."""
    return 0 if table.kv == NONE else 1


@borrowing
def bucket_of(bounds: Any, value: int) -> int:
    """The first bound that ``value`` does not exceed; one more than there are for the rest."""
    bucket = 0
    while bucket < len(bounds) and value > bounds[bucket]:
        bucket += 1
    return bucket


@borrowing
def hash_of(oid: int, table: int) -> int:
    """A record is followed if this, below :data:`HASHES`, is below ``rd.sampled_hashes``."""
    return (oid * _MULTIPLIER + table * _TABLE_STEP) % HASHES


@borrowing
def follow(c: Core, entry: int, number: int) -> None:
    """A slot (``number`` in the directory) was published: take it into the sample, if there is room."""
    slot, rd = c.slots[entry], c.rd[0]
    if rd.sampled == MAX_SAMPLED:
        return
    asker = wide(slot.session)
    row = c.sample[rd.sampled]
    slot.prev = rd.sampled
    rd.sampled += 1
    row.entry = entry
    row.number = number
    row.kind = kind_of(c.tables[slot.table])
    row.asker = max(asker, NONE)
    row.steps = c.sessions[asker].steps if asker >= 0 else 0
    # One tick back: a step that begins in this very tick is a use.
    row.stamp = (rd.clock - 1) & 0xFFFFFFFF
    row.seen_us = rd.now_us
    row.used = 0


@borrowing
def look(c: Core) -> None:
    """Once a tick: see which of the sample's next rows were used since they were looked at."""
    rd, sessions = c.rd[0], c.stamp_owner[layout.MAX_SESSIONS]
    if sessions == 0:
        return
    for _ in range(min(max(_STAMPS_A_TICK // sessions, 1), rd.sampled)):
        if rd.sample_next >= rd.sampled:
            rd.sample_next = 0
        _see(c, rd.sample_next)
        rd.sample_next += 1


@borrowing
def _see(c: Core, at: int) -> None:
    row, rd = c.sample[at], c.rd[0]
    stamp = lru.newest_stamp(row.number, row.stamp, rd.clock, c.stamps, c.stepped, c.stamp_owner[layout.MAX_SESSIONS])
    if stamp == row.stamp:
        return
    if row.used:
        _count_gap(c, row.kind, _BETWEEN, rd.now_us - row.seen_us)
    elif row.asker != NONE:
        c.ages[row.kind, bucket_of(_AGES, c.sessions[row.asker].steps - row.steps)] += 1
    row.used = 1
    row.stamp = stamp
    row.seen_us = rd.now_us


@borrowing
def _count_gap(c: Core, kind: int, which: int, gap_us: int) -> None:
    c.gaps[kind, which, bucket_of(_GAPS_US, gap_us)] += 1
    c.gaps[kind, which, len(_GAPS_US) + 1] += gap_us


@borrowing
def unfollow(c: Core, entry: int) -> None:
    """A followed slot is about to be retired: say how long it was idle, or that it never was of use."""
    at = wide(c.slots[entry].prev)
    _see(c, at)
    row, rd = c.sample[at], c.rd[0]
    if row.used == 0 and row.asker != NONE:
        c.ages[row.kind, len(_AGES)] += 1
    _count_gap(c, row.kind, _IDLE, rd.now_us - row.seen_us)
    rd.sampled -= 1
    c.sample[at] = c.sample[rd.sampled]
    if at != rd.sampled:
        c.slots[c.sample[at].entry].prev = at


@borrowing
def forget_asker(c: Core, index: int) -> None:
    """A session is gone: its steps count no more."""
    for at in range(c.rd[0].sampled):
        if c.sample[at].asker == index:
            c.sample[at].asker = NONE
