"""Everything the reader thread knows, as arrays that compiled code can walk.

One :class:`Core` holds it all. Its arrays are made by :mod:`strataflux.daemon.tier`, written by the reader thread only,
and read without locks by whoever takes statistics (each counter is one aligned word). Addresses are i8: user addresses
fit, and compiled arithmetic stays integral.

A *slot entry* is ``page * UNITS_PER_PAGE + index within the page``: dense, so that metadata of large slots is compact.
The *slot number* of the directory counts 256-byte units instead; :func:`slot_number` and :func:`slot_entry` convert.

States of a slot and the calls of :mod:`strataflux.daemon.cache` that move it::

    ABSENT ── page given to a class ──► FREE ── begin_fill ──► FILLING ── publish ──► VALID ── retire ──► RETIRED ──┐
       ▲                                 ▲ ▲                     │                                                  │
       └── page taken from its class ────┘ └── abandon_fill ─────┘◄───────────── free (grace passed) ───────────────┘
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy import budget
from strataflux.daemon.rows import (
    AGE_BUCKETS_STEPS,
    ERRNOS,
    EVICTION_CAUSES,
    GAP_BUCKETS_US,
    KIND,
    KINDS,
    LANE,
    LANES,
    MAX_SAMPLED,
    MAX_TENANT_ROWS,
    SAMPLE,
    TENANT,
    TENANT_TURN,
)
from strataflux.daemon.words import READER
from strataflux.proto import layout

__all__ = [
    "ABSENT",
    "AHEAD",
    "BATCH",
    "BLOCK_BUFFERED",
    "BLOCK_FAILED",
    "BLOCK_GRANTED",
    "BLOCK_NONE",
    "BLOCK_WRITTEN",
    "CLASS",
    "DEPTH_BUCKETS",
    "FILLING",
    "FILL_BUCKETS_US",
    "FREE",
    "KV",
    "MAX_BATCHES",
    "MAX_QUEUED",
    "NONE",
    "PENDING_NONE",
    "PENDING_PREFETCH",
    "PENDING_QUEUED",
    "PENDING_SEEN",
    "PREFETCH",
    "PREFETCHED",
    "PREFETCHES",
    "QUEUED",
    "RETIRED",
    "SCORE_BUCKETS",
    "SECTION",
    "SESSION",
    "SLOT",
    "TABLE",
    "USED",
    "VALID",
    "WINDOW",
    "WRITES_A_PLACE",
    "Core",
    "make_core",
]

NONE = -1
AHEAD = -2  # in place of the session that asked: read ahead of any request
ABSENT, FREE, FILLING, VALID, RETIRED = 0, 1, 2, 3, 4

# A table's `pending` array (u32 a record): what the reader is doing about it, and whether it ever was resident.
PENDING_NONE, PENDING_PREFETCH, PENDING_QUEUED = 0, 0x7FFEFFFF, 0x7FFF0000  # QUEUED: + its place in the queue.
# Anything between NONE and PREFETCH is the filling slot's entry + 1.
PENDING_SEEN = 0x80000000  # added to any of these

SLOT = np.dtype(
    [
        ("state", "u1"),
        ("cls", "i1"),
        ("retries", "u1"),
        ("marks", "u1"),  # USED: stamped by some session since it was filled; PREFETCHED: by whom nobody missed it yet
        ("score", "u1"),
        ("session", "i1"),  # who asked first; NONE (gone, or put), AHEAD
        ("table", "i2"),
        ("oid", "u4"),
        ("next", "i4"),  # free list of its class | chain of its window | chain of its grace batch
        ("prev", "i4"),  # free list | while VALID: its row of the sample, NONE
        ("seen", "u4"),  # clock of publication, then of the newest use that the policy was told
        ("pinned", "u4"),  # not evicted before first use or this clock; 0 = not pinned
        ("asked_us", "u4"),  # low 32 bits of the microsecond the request was taken
    ]
)
assert SLOT.itemsize == 32
USED, PREFETCHED = 1, 2

CLASS = np.dtype(
    [
        ("units", "i8"),
        ("kind", "i8"),
        ("free_head", "i8"),
        ("free", "i8"),
        ("slots", "i8"),
        ("retired", "i8"),
        ("filling", "i8"),
        ("room", "i8"),  # slots kept free for prefetches beside the reserve
    ]
)

TABLE = np.dtype(
    [
        ("active", "i8"),
        ("records", "i8"),
        ("directory", "i8"),  # address, u32 a record, shared
        ("pending", "i8"),  # address, u32 a record, private
        ("checksums", "i8"),  # address, u32 a record
        ("first_section", "i8"),
        ("sections", "i8"),
        ("descriptor", "i8"),  # the file as it is read now (direct or buffered)
        ("buffered", "i8"),  # the buffered descriptor to fall back to; NONE under direct_io = require
        ("direct", "i8"),
        ("alignment", "i8"),
        ("preload_next", "i8"),  # next record to preload; NONE when done or off
        ("warm", "i8"),  # address, u32 each: records to read again that were resident before the start
        ("warm_left", "i8"),
        ("fallbacks", "i8"),
        ("quarantined", "i8"),
        ("resident", "i8"),
        ("fills", "i8"),
        ("read_bytes", "i8"),
        ("corrupt", "i8"),
        ("kv", "i8"),  # its KV place, NONE for a store
    ]
)
SECTION = np.dtype(
    [
        ("first", "i8"),
        ("count", "i8"),
        ("bytes", "i8"),
        ("stride", "i8"),
        ("offset", "i8"),
        ("cls", "i8"),
        ("block", "i8"),  # records a block; a store's section is one block
        ("block_stride", "i8"),
        ("misses", "i8"),  # of its records, that began to be filled
    ]
)

SESSION = np.dtype(
    [
        ("active", "i8"),
        ("fenced", "i8"),
        ("page", "i8"),  # address of the header that the client writes
        ("view_page", "i8"),  # address of the page that we write for it
        ("ring", "i8"),
        ("ring_log2", "i8"),
        ("head", "i8"),
        ("tables", "i8"),
        ("waits", "i8"),  # may wait for what it misses
        ("inside", "i8"),  # in a step when last looked at
        ("begun", "i8"),  # last step_begun seen
        ("renewed", "i8"),  # last renewals seen
        ("net_steps", "i8"),  # begun less renewed, as of now;
        ("steps", "i8"),  # at its highest: the two are not read at one moment
        ("taken", "i8"),
        ("duplicates", "i8"),
        ("invalid", "i8"),
        ("holes", "i8"),
        ("dropped_queue", "i8"),
        ("dropped_grace", "i8"),
        ("fills", "i8"),
        ("opened", "i8"),  # clock
        ("step_clock", "i8"),  # when the newest step was seen to have begun,
        ("before_clock", "i8"),  # and the one before;
        ("since", "i8"),  # that of the oldest step that may run
        ("prefetches", "i8"),  # that wait: from first on, PREFETCHES a lap
        ("first_prefetch", "i8"),
    ]
)

WINDOW = np.dtype(
    [
        ("state", "i8"),  # 0 free, 1 in flight
        ("table", "i8"),
        ("offset", "i8"),
        ("length", "i8"),
        ("needed", "i8"),  # bytes from offset that cover every record of the chain
        ("done", "i8"),
        ("direct", "i8"),  # last sent to the direct descriptor
        ("buffer", "i8"),  # address of its part of the bounce pool
        ("chain", "i8"),  # first slot entry
        ("count", "i8"),
        ("submitted_us", "i8"),
        ("ahead", "i8"),  # of any request
        ("next_free", "i8"),
    ]
)

# A session's KV blocks. Its place fixes its segment of the cache, its table and its write windows.
KV = np.dtype(
    [
        ("active", "i8"),
        ("session", "i8"),
        ("table", "i8"),
        ("records", "i8"),  # a block
        ("heads", "i8"),  # of all layers: records a block / groups a block
        ("bytes", "i8"),  # a record
        ("stride", "i8"),  # of a record in the file
        ("block_stride", "i8"),
        ("max_blocks", "i8"),
        ("blocks", "i8"),  # address, u8 a block: BLOCK_…
        ("staging", "i8"),
        ("staging_bytes", "i8"),
        ("put_ring", "i8"),
        ("head", "i8"),  # puts answered
        ("window", "i8"),  # write window that is being filled; NONE
        ("staged", "i8"),  # staging block it is filled from
        ("block", "i8"),
        ("copied", "i8"),  # records of it in the write buffer
        ("no_space", "i8"),  # a write found the disk full; puts are refused until blocks are released
        ("puts", "i8"),
        ("refused", "i8"),
        ("written", "i8"),
        ("failed", "i8"),
        ("write_bytes", "i8"),
    ]
)
BLOCK_NONE, BLOCK_GRANTED, BLOCK_BUFFERED, BLOCK_WRITTEN, BLOCK_FAILED = 0, 1, 2, 8, 9
"""State of a block; BLOCK_BUFFERED + k: its bytes are in the place's write window k, on their way to the file."""
WRITES_A_PLACE = layout.KV_WRITE_BUFFERS

QUEUED = np.dtype(
    [
        ("key", "i8"),
        ("asked_us", "i8"),
        ("next", "i4"),  # of its bucket, or free
        ("prev", "i4"),  # of its bucket
        ("session", "i2"),
        ("score", "u1"),
        ("retries", "u1"),
        ("", "u4"),
    ]
)
assert QUEUED.itemsize == 32

# A prefetch that waits. It is void once its record's pending word says something else.
PREFETCH = np.dtype([("key", "i8"), ("asked_us", "i8")])
PREFETCHES = 512

BATCH = np.dtype([("holders", "u8"), ("chain", "i8"), ("count", "i8"), ("closed_us", "i8")])

SCORE_BUCKETS = 16
MAX_BATCHES = 1024
MAX_QUEUED = 16_384
FILL_BUCKETS_US = (50, 100, 200, 400, 800, 1_600, 3_200, 6_400, 12_800, 25_600, 51_200, 102_400)
DEPTH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Core(NamedTuple):
    """The reader's whole state. Comments give shape and owner; see the module for the invariants."""

    rd: NDArray[np.void]  # [1] of READER
    slots: NDArray[np.void]  # [range_pages * UNITS_PER_PAGE] of SLOT, sparse
    classes: NDArray[np.void]  # [budget.MAX_CLASSES] of CLASS
    pages: budget.Budget  # who owns which page
    page_address: NDArray[np.int64]  # [range_pages] address of each page's first byte; 0 = no memory
    policies: Any  # [len(KINDS)] states of the replacement policy
    tables: NDArray[np.void]  # [MAX_TABLES] of TABLE
    sections: NDArray[np.void]  # [n] of SECTION, those of a table in oid order
    sessions: NDArray[np.void]  # [MAX_SESSIONS] of SESSION
    session_tables: NDArray[np.int16]  # [MAX_SESSIONS, MAX_TABLES] table numbers of a session → ours
    stamps: NDArray[np.uint64]  # [MAX_SESSIONS] addresses of last_used, dense over active sessions
    stepped: NDArray[np.uint32]  # [MAX_SESSIONS] clock of the last step seen, parallel to stamps
    stamp_owner: NDArray[np.int64]  # [MAX_SESSIONS + 1] session of each stamps entry; last cell = how many
    queue: NDArray[np.void]  # [MAX_QUEUED] of QUEUED
    prefetches: NDArray[np.void]  # [MAX_SESSIONS, PREFETCHES] of PREFETCH
    lanes: NDArray[np.void]  # [LANES] of LANE
    buckets: NDArray[np.int64]  # [LANES, SCORE_BUCKETS, 2] first and last queue entry of each lane's score bucket
    tenants: NDArray[np.void]  # [MAX_TENANT_ROWS] of TENANT
    windows: NDArray[np.void]  # [depth + WRITES_A_PLACE * places] of WINDOW: reads, then writes of each KV place
    kv: NDArray[np.void]  # [places] of KV
    batches: NDArray[np.void]  # [MAX_BATCHES] of BATCH
    batch_begun: NDArray[np.uint32]  # [MAX_BATCHES, MAX_SESSIONS] step_begun seen for each holder
    wanted: NDArray[np.int64]  # [depth] scratch: queue entries about to be read
    finished: NDArray[np.int64]  # [2, windows] scratch: windows and results of completions
    tails: NDArray[np.int64]  # [MAX_CLASSES] scratch: age information for the page budget
    kinds: NDArray[np.void]  # [len(KINDS)] of KIND
    evicted: NDArray[np.int64]  # [len(KINDS), len(EVICTION_CAUSES)] records
    errnos: NDArray[np.int64]  # [2, ERRNOS] reads and writes that failed, by errno; 0: the file ended
    sample: NDArray[np.void]  # [MAX_SAMPLED] of SAMPLE, the first rd.sampled in use
    fill_us: NDArray[np.int64]  # [len(KINDS), len(FILL_BUCKETS_US) + 1] histogram: request taken → slot valid
    read_us: NDArray[np.int64]  # [len(FILL_BUCKETS_US) + 1] histogram: read submitted → completed
    write_us: NDArray[np.int64]  # [len(FILL_BUCKETS_US) + 1] histogram: write submitted → completed
    depths: NDArray[np.int64]  # [len(DEPTH_BUCKETS) + 1] histogram: reads in flight when one is submitted
    ages: NDArray[np.int64]  # [len(KINDS), len(AGE_BUCKETS_STEPS) + 1] histogram of the sample: steps to the first use
    gaps: NDArray[np.int64]  # [len(KINDS), 2, len(GAP_BUCKETS_US) + 2] histograms of the sample, each with its sum:
    # microseconds between two uses, and from the last use to the eviction
    scratch: NDArray[np.uint64]  # [8] for system calls


def _counters() -> dict[str, Any]:
    """Those of a core's arrays that only count."""
    return {
        "kinds": np.zeros(len(KINDS), KIND),
        "evicted": np.zeros((len(KINDS), len(EVICTION_CAUSES)), np.int64),
        "errnos": np.zeros((2, ERRNOS), np.int64),
        "sample": np.zeros(MAX_SAMPLED, SAMPLE),
        "fill_us": np.zeros((len(KINDS), len(FILL_BUCKETS_US) + 1), np.int64),
        "read_us": np.zeros(len(FILL_BUCKETS_US) + 1, np.int64),
        "write_us": np.zeros(len(FILL_BUCKETS_US) + 1, np.int64),
        "depths": np.zeros(len(DEPTH_BUCKETS) + 1, np.int64),
        "ages": np.zeros((len(KINDS), len(AGE_BUCKETS_STEPS) + 1), np.int64),
        "gaps": np.zeros((len(KINDS), 2, len(GAP_BUCKETS_US) + 2), np.int64),
    }


def make_core(
    policies: Any,
    range_pages: int,
    n_sections: int,
    n_budgets: int,
    stride_pages: int,
    depth: int,
    kv_places: int = 0,
) -> Core:
    """A core without memory, tables or sessions.

    ``policies`` are the states of the replacement policy for each kind of record, ``range_pages`` is the cache's
    address range in pages, ``stride_pages`` the pages from one segment's start to the next, ``depth`` the number of
    reads in flight at most, ``kv_places`` of sessions with KV blocks.
    """
    entries = range_pages * layout.UNITS_PER_PAGE
    rd: Any = np.zeros(1, READER)
    core = Core(
        rd=rd,
        slots=np.zeros(entries, SLOT),
        classes=np.zeros(budget.MAX_CLASSES, CLASS),
        pages=budget.make_budget(range_pages // stride_pages, stride_pages, n_budgets),
        page_address=np.zeros(range_pages, np.int64),
        policies=policies,
        tables=np.zeros(layout.MAX_TABLES, TABLE),
        sections=np.zeros(n_sections, SECTION),
        sessions=np.zeros(layout.MAX_SESSIONS, SESSION),
        session_tables=np.full((layout.MAX_SESSIONS, layout.MAX_TABLES), NONE, np.int16),
        stamps=np.zeros(layout.MAX_SESSIONS, np.uint64),
        stepped=np.zeros(layout.MAX_SESSIONS, np.uint32),
        stamp_owner=np.zeros(layout.MAX_SESSIONS + 1, np.int64),
        queue=np.zeros(MAX_QUEUED, QUEUED),
        prefetches=np.zeros((layout.MAX_SESSIONS, PREFETCHES), PREFETCH),
        lanes=np.zeros(LANES, LANE),
        buckets=np.full((LANES, SCORE_BUCKETS, 2), NONE, np.int64),
        tenants=np.zeros(MAX_TENANT_ROWS, TENANT),
        windows=np.zeros(depth + WRITES_A_PLACE * kv_places, WINDOW),
        kv=np.zeros(kv_places, KV),
        batches=np.zeros(MAX_BATCHES, BATCH),
        batch_begun=np.zeros((MAX_BATCHES, layout.MAX_SESSIONS), np.uint32),
        wanted=np.zeros(depth, np.int64),
        finished=np.zeros((2, depth + WRITES_A_PLACE * kv_places), np.int64),
        tails=np.full(budget.MAX_CLASSES, NONE, np.int64),
        **_counters(),
        scratch=np.zeros(8, np.uint64),
    )
    _set_empty(core, depth)
    rd["range_pages"] = range_pages
    return core


def _set_empty(core: Core, depth: int) -> None:
    """Words that are not 0 while there is nothing."""
    core.classes["free_head"] = NONE
    core.queue["next"] = np.arange(1, MAX_QUEUED + 1)
    core.queue["next"][-1] = NONE
    core.windows["next_free"][:depth] = np.arange(1, depth + 1)
    core.windows["next_free"][depth - 1] = NONE
    core.kv["window"] = NONE
    core.tables["kv"] = NONE
    core.tenants["stride"] = TENANT_TURN
    core.rd[0]["open_chain"] = NONE
    core.rd[0]["depth"] = depth
    core.rd[0]["intake"] = core.rd[0]["clock"] = 1
