"""What a session counted, over all its attachments."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strataflux.client import attach_block
from strataflux.client.prefetches import PrefetchCounts, Prefetches
from strataflux.proto import layout
from strataflux.proto.messages import Welcome

__all__ = [
    "SessionStats",
    "counts_of",
    "make_stats",
]


@dataclass(frozen=True)
class SessionStats:
    """Counts since the session was made, over all its attachments; state and daemon as of now.

    ``hits`` are records present when asked for; ``dropped`` are requests lost to a full ring or made after a fence;
    ``rubbish`` are directory entries that named no mapped slot. ``lookups`` and ``hits`` are of weights and KV
    together; ``kv_lookups`` and ``kv_hits`` of KV alone. ``puts_dropped`` are KV blocks that stay unrefined.
    Prefetches are no look-ups.
    """

    lookups: int
    hits: int
    dropped: int
    rubbish: int
    waits: int
    wait_nanoseconds: int
    deadlines_exceeded: int
    steps_invalid: int
    kv_lookups: int
    kv_hits: int
    puts_dropped: int
    weight_prefetches: PrefetchCounts
    kv_prefetches: PrefetchCounts
    state: str
    generation: int
    engine: str
    direct_io: str


def counts_of(block: attach_block.Block) -> NDArray[np.uint64]:
    """The counters of one attachment in the layout's order, then rubbish: u64 [11]."""
    counters = block[attach_block.COUNTERS : attach_block.COUNTERS + len(layout.COUNTERS)].copy()
    counters[attach_block.RING_DROPPED - attach_block.COUNTERS] = block[attach_block.DROPPED]
    return np.append(counters, block[attach_block.RUBBISH])


def make_stats(counts: NDArray[np.uint64], state: str, welcome: Welcome, prefetches: Prefetches) -> SessionStats:
    """Name the sums of :func:`counts_of`; ``prefetches`` are the session's."""
    by_name = dict(zip((*layout.COUNTERS, "rubbish"), map(int, counts), strict=True))
    return SessionStats(
        lookups=by_name["weight_lookups"] + by_name["kv_lookups"],
        hits=by_name["weight_hits"] + by_name["kv_hits"],
        dropped=by_name["ring_dropped"],
        rubbish=by_name["rubbish"],
        waits=by_name["waits"],
        wait_nanoseconds=by_name["wait_nanoseconds"],
        deadlines_exceeded=by_name["deadlines_exceeded"],
        steps_invalid=by_name["steps_invalid"],
        kv_lookups=by_name["kv_lookups"],
        kv_hits=by_name["kv_hits"],
        puts_dropped=by_name["puts_dropped"],
        weight_prefetches=prefetches.counts(kv=False),
        kv_prefetches=prefetches.counts(kv=True),
        state=state,
        generation=welcome.generation,
        engine=welcome.engine,
        direct_io=welcome.direct_io,
    )
