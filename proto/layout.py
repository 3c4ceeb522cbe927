"""Shared-memory layouts: structured dtypes, magic numbers and the arithmetic that both sides must agree on.

FORMAT.md is the text of record; this module is its executable half. Everything is little-endian and naturally aligned;
words written by different parties never share a 64-byte cache line. Sizes are asserted at import.
"""

from typing import Final, NamedTuple

import numpy as np

LAYOUT_VERSION: Final = 2
"""Version of every shared segment and attach message; the two sides must be equal."""

CACHE_LINE: Final = 64
PAGE_HEADER_BYTES: Final = 4096
"""Size of the daemon page, the session view and the header of a session segment."""

# --- the cache's address range ---------------------------------------------------------------------------------------
SLOT_UNIT_BYTES: Final = 256
"""Slot number = byte offset in the cache's one address range / this."""
CACHE_PAGE_BYTES: Final = 256 * 1024
"""One page holds slots of one size class."""
UNITS_PER_PAGE: Final = CACHE_PAGE_BYTES // SLOT_UNIT_BYTES
SEGMENT_MIN_BYTES: Final = 16 << 20
SEGMENT_MAX_BYTES: Final = 1 << 30
MAX_SEGMENTS: Final = 64

# --- directory entries -----------------------------------------------------------------------------------------------
ENTRY_ABSENT: Final = 0
ENTRY_QUARANTINED: Final = 0xFFFFFFFF
"""Anything between the two is slot + 1."""

# --- limits ----------------------------------------------------------------------------------------------------------
MAX_SESSIONS: Final = 64
MAX_TABLES: Final = 255
MAX_OID: Final = (1 << 32) - 2
MAX_RECORD_BYTES: Final = CACHE_PAGE_BYTES
RING_LOG2_MIN: Final = 8
RING_LOG2_MAX: Final = 20
STAGING_BLOCKS: Final = 4
KV_WRITE_BUFFERS: Final = 6
"""Blocks that a session's KV budget pays for beside its slots: one is filled while others are written."""
MAX_STEPS_IN_FLIGHT: Final = 2

# --- ring entries ----------------------------------------------------------------------------------------------------
LAP_SHIFT: Final = 56
SCORE_SHIFT: Final = 48
TABLE_SHIFT: Final = 40
PREFETCH: Final = 1 << 39
"""Bit of a request for a record that was not missed, but will be looked up soon."""
OID_MASK: Final = PREFETCH - 1
PUT_STAGING_SHIFT: Final = 48
LAPS: Final = 255

# --- record kinds ----------------------------------------------------------------------------------------------------
WEIGHT_CHANNEL: Final = 1
NEURON_BUNDLE: Final = 2
KV_GROUP: Final = 3
FSQ_UNIT: Final = 4
RECORD_KINDS: Final = {
    "weight_channel": WEIGHT_CHANNEL,
    "neuron_bundle": NEURON_BUNDLE,
    "kv_group": KV_GROUP,
    "fsq_unit": FSQ_UNIT,
}

# --- results of a put, one word a staging block in the session view --------------------------------------------------
PUT_NONE: Final = 0
PUT_ACCEPTED: Final = 1
PUT_REFUSED_QUOTA: Final = 2
PUT_REFUSED_SPACE: Final = 3
PUT_REFUSED_DUPLICATE: Final = 4
PUT_REFUSED_INVALID: Final = 5


def _magic(text: bytes) -> int:
    return int.from_bytes(text, "little")


DAEMON_MAGIC: Final = _magic(b"SFDAEMON")
VIEW_MAGIC: Final = _magic(b"SFSVIEW\0")
SESSION_MAGIC: Final = _magic(b"SFSESSN\0")

HEADER = np.dtype([("magic", "<u8"), ("layout", "<u4"), ("bytes", "<u4"), ("generation", "<u8"), ("id", "<u8")])
"""First 32 bytes of each of the three pages below. ``bytes`` is the size of the whole segment."""


def _page(fields: list[tuple[str, str, int]]) -> np.dtype[np.void]:
    names, formats, offsets = zip(("header", HEADER, 0), *fields, strict=True)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": PAGE_HEADER_BYTES})


DAEMON_PAGE = _page([("clock", "<u4", 64), ("sleeping", "<u4", 128), ("stopping", "<u4", 192)])
"""One per daemon, read-only to clients."""

SESSION_VIEW = _page(
    [
        ("fenced", "<u4", 64),
        ("fills", "<u4", 128),
        ("ring_head", "<u8", 192),
        ("puts_done", "<u8", 256),
        ("put_results", "(4,)<u4", 264),
        # of weights, of KV
        ("prefetch_fills", "(2,)<u8", 320),
        ("prefetch_used", "(2,)<u8", 336),
        ("prefetch_unused", "(2,)<u8", 352),
        ("prefetch_dropped", "(2,)<u8", 368),
    ]
)
"""One per session, written by the daemon, read-only to its client."""

SESSION_PAGE = _page(
    [
        ("step_begun", "<u4", 64),
        ("renewals", "<u4", 68),
        ("step_ended", "<u4", 128),
        ("ring_tail", "<u8", 192),
        ("put_tail", "<u8", 256),
        ("awaiting", "<u4", 320),
        ("weight_lookups", "<u8", 384),
        ("weight_hits", "<u8", 392),
        ("kv_lookups", "<u8", 400),
        ("kv_hits", "<u8", 408),
        ("ring_dropped", "<u8", 416),
        ("waits", "<u8", 424),
        ("wait_nanoseconds", "<u8", 432),
        ("deadlines_exceeded", "<u8", 440),
        ("steps_invalid", "<u8", 448),
        ("puts_dropped", "<u8", 456),
    ]
)
"""Header of a session segment: the only memory a client may write. The daemon bounds every word of it."""

COUNTERS: Final = (
    "weight_lookups",
    "weight_hits",
    "kv_lookups",
    "kv_hits",
    "ring_dropped",
    "waits",
    "wait_nanoseconds",
    "deadlines_exceeded",
    "steps_invalid",
    "puts_dropped",
)

assert HEADER.itemsize == 32
for _dtype in (DAEMON_PAGE, SESSION_VIEW, SESSION_PAGE):
    assert _dtype.itemsize == PAGE_HEADER_BYTES
assert CACHE_PAGE_BYTES % SLOT_UNIT_BYTES == 0
assert SEGMENT_MIN_BYTES % CACHE_PAGE_BYTES == 0


def offset_of(page: np.dtype[np.void], field: str) -> int:
    """Byte offset of ``field`` in a page, for compiled code that works on addresses."""
    assert page.fields is not None
    return int(page.fields[field][1])


class SessionGeometry(NamedTuple):
    """Byte offsets inside a session segment; every part starts on a 4096-byte boundary."""

    ring_offset: int
    ring_capacity: int
    put_ring_offset: int
    put_ring_capacity: int
    stamps_offset: int
    stamps_count: int
    staging_offset: int
    staging_bytes: int
    total_bytes: int


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def session_geometry(ring_log2: int, stamps_count: int, staging_block_bytes: int) -> SessionGeometry:
    """Geometry of a session segment (FORMAT.md, "Session segment").

    ``stamps_count`` is the number of slot units in the cache's address range at its largest, ``staging_block_bytes``
    the size of one KV block (0 for sessions that put none).
    """
    ring_offset = PAGE_HEADER_BYTES
    ring_capacity = 1 << ring_log2
    put_ring_offset = ring_offset + round_up(8 * ring_capacity, PAGE_HEADER_BYTES)
    put_ring_capacity = 2 * STAGING_BLOCKS
    stamps_offset = put_ring_offset + PAGE_HEADER_BYTES
    staging_offset = stamps_offset + round_up(4 * stamps_count, PAGE_HEADER_BYTES)
    staging_bytes = round_up(staging_block_bytes, PAGE_HEADER_BYTES)
    return SessionGeometry(
        ring_offset,
        ring_capacity,
        put_ring_offset,
        put_ring_capacity,
        stamps_offset,
        stamps_count,
        staging_offset,
        staging_bytes,
        staging_offset + STAGING_BLOCKS * staging_bytes,
    )


def slot_bytes(record_bytes: int) -> int:
    """Bytes that a record occupies in the cache: its size class."""
    return round_up(record_bytes, SLOT_UNIT_BYTES)
