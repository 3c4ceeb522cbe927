"""Rows of the reader's tables that rank and count: whose turn it is, what became of what, and a sample of fills.

Kept by the reader thread, read without locks by whoever takes statistics: each word is aligned and only grows, but for
those of :data:`LANE` and :data:`SAMPLE`, which nobody else reads.
"""

import numpy as np

from strataflux.proto import layout

__all__ = [
    "AGE_BUCKETS_STEPS",
    "ERRNOS",
    "EVICTED_CAPACITY",
    "EVICTED_CLEAR",
    "EVICTED_EPOCH",
    "EVICTED_PRESSURE",
    "EVICTION_CAUSES",
    "GAP_BUCKETS_US",
    "KIND",
    "KINDS",
    "KV_KIND",
    "LANE",
    "LANES",
    "MAX_SAMPLED",
    "MAX_TENANT_ROWS",
    "NOBODY",
    "SAMPLE",
    "TENANT",
    "TENANT_TURN",
]

# Whose requests wait in the queue: a lane a session, and one for those of sessions that are gone. Each lane belongs to
# a tenant. A turn is a virtual time: who has the smallest is served next.
LANE = np.dtype([("tenant", "i8"), ("turn", "i8"), ("queued", "i8")])
NOBODY = layout.MAX_SESSIONS
"""Lane of requests without a session: it is gone, or there never was one."""
LANES = layout.MAX_SESSIONS + 1
TENANT = np.dtype(
    [
        ("stride", "i8"),  # what a request adds to its turn: TENANT_TURN / share
        ("turn", "i8"),
        ("lane_turn", "i8"),  # of its lane served last
        ("queued", "i8"),
        ("requests", "i8"),
        ("fills", "i8"),
        ("dropped", "i8"),
    ]
)
MAX_TENANT_ROWS = 17
"""Row 0 is everybody in no tenant."""
TENANT_TURN = 1 << 16

# Counters by kind of record. A store's are of kind 0, KV of kind 1.
KINDS = ("weight", "kv")
KV_KIND = 1
KIND = np.dtype(
    [
        ("cold", "i8"),  # results of a request, exhaustive: never resident before,
        ("evicted_again", "i8"),  # resident once,
        ("duplicates", "i8"),  # queued or filling already,
        ("resident_already", "i8"),  # filled between the look-up and now,
        ("quarantine_hits", "i8"),  # unreadable
        ("fills", "i8"),  # published: asked for,
        ("fills_preload", "i8"),  # read ahead,
        ("fills_put", "i8"),  # shown when they were put
        ("fills_useful", "i8"),  # of those that left or are about to: stamped since,
        ("fills_unused", "i8"),  # never
        ("fill_us_sum", "i8"),
        ("corrupt", "i8"),
        ("retries", "i8"),
        ("read_bytes", "i8"),  # for requests
        ("ahead_bytes", "i8"),  # read ahead, or prefetched
        ("rejected", "i8"),  # requests whose record the policy thought not worth a slot
        ("prefetch_asked", "i8"),  # by clients, before a miss:
        ("prefetch_needless", "i8"),  # resident or under way, or there is nothing to read,
        ("prefetch_dropped", "i8"),  # older than others, too old, or not read right,
        ("fills_prefetch", "i8"),  # published;
        ("prefetch_used", "i8"),  # of these, stamped since,
        ("prefetch_unused", "i8"),  # left before that
        ("write_bytes", "i8"),
    ]
)
EVICTED_CAPACITY, EVICTED_PRESSURE, EVICTED_EPOCH, EVICTED_CLEAR = range(4)
EVICTION_CAUSES = ("capacity", "pressure", "epoch", "clear")
"""Room for another; memory given back; a store's new generation or removal; KV blocks given back."""

# One fill of the sample, followed from publication to eviction.
SAMPLE = np.dtype(
    [
        ("entry", "i8"),
        ("number", "i8"),  # of its slot
        ("kind", "i8"),
        ("asker", "i8"),  # session; NONE when it is gone, or never was
        ("steps", "i8"),  # the asker's when it was filled
        ("stamp", "i8"),  # newest seen
        ("seen_us", "i8"),  # when that was
        ("used", "i8"),
    ]
)
MAX_SAMPLED = 1024
AGE_BUCKETS_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GAP_BUCKETS_US = tuple(digit * 10**power for power in range(3, 9) for digit in (1, 3))
ERRNOS = 256
