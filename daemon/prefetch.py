"""Prefetches that wait: what clients expect to look up soon, and have not missed. The reader thread only.

Each session has a short queue of its own, first come first served: what is predicted first is needed first, and what
waits too long is not needed any more. A record that waits here says so in its ``pending`` word. A miss of it changes
that word, and so voids its place in this queue; nothing is searched for. Pairs: :func:`ask` / :func:`take`.
"""

from strataflux.cache_policy.base import wide
from strataflux.daemon.counting import kind_of
from strataflux.daemon.slots import pending_of, set_pending
from strataflux.daemon.state import PENDING_NONE, PENDING_PREFETCH, PREFETCHES, Core
from strataflux.proto import layout
from strataflux.proto.atomics import load_u32, load_u64, store_u64
from strataflux.proto.compiled import borrowing

__all__ = [
    "KEY_SHIFT",
    "ask",
    "count_drop",
    "drop_prefetch",
    "drop_stale",
    "forget_prefetches",
    "purge_prefetches",
    "take",
    "waits",
]

KEY_SHIFT = 32
"""A prefetch's key is its table << this | its oid."""
_OID = (1 << KEY_SHIFT) - 1
_STALE_US = 100_000
_DROPPED = layout.offset_of(layout.SESSION_VIEW, "prefetch_dropped")


@borrowing
def ask(c: Core, index: int, table: int, oid: int) -> None:
    """Queue a record that was checked to be one of the session's; if too many wait, the oldest is dropped."""
    session, counts = c.sessions[index], c.kinds[kind_of(c.tables[table])]
    counts.prefetch_asked += 1
    if load_u32(c.tables[table].directory + 4 * oid) != layout.ENTRY_ABSENT or pending_of(c, table, oid):
        counts.prefetch_needless += 1
        return
    if session.prefetches == PREFETCHES:
        drop_prefetch(c, index, take(c, index))
    _append(c, index, table << KEY_SHIFT | oid, c.rd[0].now_us)
    set_pending(c, table, oid, PENDING_PREFETCH)


@borrowing
def waits(c: Core, key: int) -> bool:
    """Whether a queued prefetch still stands for its record."""
    return pending_of(c, key >> KEY_SHIFT, key & _OID) == PENDING_PREFETCH


@borrowing
def take(c: Core, index: int) -> int:
    """Take the oldest prefetch out of a session's queue, which has some: its key."""
    session = c.sessions[index]
    key = c.prefetches[index, session.first_prefetch].key
    session.first_prefetch = (session.first_prefetch + 1) % PREFETCHES
    session.prefetches -= 1
    c.rd[0].prefetches -= 1
    return wide(key)


@borrowing
def drop_prefetch(c: Core, index: int, key: int) -> None:
    """A prefetch that was taken out of the session's queue will not be read."""
    if waits(c, key):
        set_pending(c, key >> KEY_SHIFT, key & _OID, PENDING_NONE)
        count_drop(c, index, key >> KEY_SHIFT)


@borrowing
def count_drop(c: Core, index: int, table: int) -> None:
    """A record of a table that was prefetched was not read; by a session that is gone if ``index`` is negative."""
    kind = kind_of(c.tables[table])
    c.kinds[kind].prefetch_dropped += 1
    if index >= 0:
        at = c.sessions[index].view_page + _DROPPED + 8 * kind
        store_u64(at, wide(load_u64(at)) + 1)


@borrowing
def drop_stale(c: Core) -> None:
    """Once a tick: drop what has waited too long."""
    for place in range(c.stamp_owner[layout.MAX_SESSIONS]):
        index = wide(c.stamp_owner[place])
        session = c.sessions[index]
        while session.prefetches:
            if c.rd[0].now_us - c.prefetches[index, session.first_prefetch].asked_us < _STALE_US:
                break
            drop_prefetch(c, index, take(c, index))


@borrowing
def forget_prefetches(c: Core, index: int) -> None:
    """A session is gone, and what it expected with it."""
    while c.sessions[index].prefetches:
        drop_prefetch(c, index, take(c, index))


@borrowing
def purge_prefetches(c: Core, table: int) -> None:
    """A table goes away: its number will be another's, so not even void places may name it."""
    for index in range(layout.MAX_SESSIONS):
        for _ in range(c.sessions[index].prefetches):
            asked_us = c.prefetches[index, c.sessions[index].first_prefetch].asked_us
            key = take(c, index)
            if key >> KEY_SHIFT == table:
                drop_prefetch(c, index, key)
            else:
                _append(c, index, key, asked_us)


@borrowing
def _append(c: Core, index: int, key: int, asked_us: int) -> None:
    session = c.sessions[index]
    row = c.prefetches[index, (session.first_prefetch + session.prefetches) % PREFETCHES]
    row.key, row.asked_us = key, asked_us
    session.prefetches += 1
    c.rd[0].prefetches += 1
