"""Cells of the attach block as kernels see it: a device-resident copy (int64) of the client's array of the same layout.

``client/attach_block.py`` says what each cell holds; a test compares the numbers. On the device the addresses are those
under which the GPU reaches the daemon's memory, and TAIL, DROPPED, RUBBISH and the counters are counted up by kernels.
One pointer to the block is all that a kernel takes, so that a captured graph stays valid when the client attaches anew:
it rewrites the block between launches.
"""

import triton.language as tl

from strataflux.proto import layout

__all__ = [
    "BASES",
    "CHUNK_PAGES",
    "CHUNK_UNITS_LOG2",
    "CHUNK_UNITS_MASK",
    "CLOCK",
    "COUNTERS",
    "DAEMON_PAGE",
    "DROPPED",
    "ENABLED",
    "LAST_CHUNK",
    "LIMIT",
    "N_COUNTERS",
    "PAGE",
    "PAGES_MASK",
    "PAGE_UNITS_LOG2",
    "RING",
    "RING_DROPPED",
    "RING_LOG2",
    "RUBBISH",
    "STAMPS",
    "STEP",
    "TABLES",
    "TABLE_CELLS",
    "TAIL",
    "UNIT_BYTES_LOG2",
    "VIEW",
]

ENABLED = tl.constexpr(0)
STEP = tl.constexpr(1)
CLOCK = tl.constexpr(2)
DAEMON_PAGE = tl.constexpr(3)
VIEW = tl.constexpr(4)
PAGE = tl.constexpr(5)
RING = tl.constexpr(6)
RING_LOG2 = tl.constexpr(7)
TAIL = tl.constexpr(8)
LIMIT = tl.constexpr(9)
DROPPED = tl.constexpr(10)
STAMPS = tl.constexpr(11)
RUBBISH = tl.constexpr(12)
LAST_CHUNK = tl.constexpr(14)
COUNTERS = tl.constexpr(16)
RING_DROPPED = tl.constexpr(16 + layout.COUNTERS.index("ring_dropped"))
N_COUNTERS = tl.constexpr(len(layout.COUNTERS))
TABLES = tl.constexpr(32)
TABLE_CELLS = tl.constexpr(4)
BASES = tl.constexpr(32 + 4 * layout.MAX_TABLES)

CHUNK_UNITS_LOG2 = tl.constexpr((layout.SEGMENT_MIN_BYTES // layout.SLOT_UNIT_BYTES).bit_length() - 1)
CHUNK_UNITS_MASK = tl.constexpr(layout.SEGMENT_MIN_BYTES // layout.SLOT_UNIT_BYTES - 1)
PAGE_UNITS_LOG2 = tl.constexpr(layout.UNITS_PER_PAGE.bit_length() - 1)
CHUNK_PAGES = tl.constexpr(layout.SEGMENT_MIN_BYTES // layout.CACHE_PAGE_BYTES)
UNIT_BYTES_LOG2 = tl.constexpr(layout.SLOT_UNIT_BYTES.bit_length() - 1)
PAGES_MASK = tl.constexpr(0xFFF)
