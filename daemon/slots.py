"""Arithmetic of slots, and the private word of a record: what it is, not what becomes of it. The reader thread only."""

from strataflux.cache_policy.base import wide
from strataflux.daemon.state import PENDING_SEEN, Core
from strataflux.proto import layout
from strataflux.proto.atomics import load_u32, store_u32
from strataflux.proto.compiled import borrowing

__all__ = ["pending_of", "set_pending", "slot_address", "slot_entry", "slot_number", "was_resident"]

_UNITS = layout.UNITS_PER_PAGE


@borrowing
def slot_number(c: Core, entry: int) -> int:
    """Directory's number (256-byte units) of a slot entry that belongs to a class."""
    page = entry // _UNITS
    return wide(page * _UNITS + (entry - page * _UNITS) * c.classes[c.slots[entry].cls].units)


@borrowing
def slot_address(c: Core, entry: int) -> int:
    """Address of a slot's bytes in this process."""
    page = entry // _UNITS
    inside = (entry - page * _UNITS) * c.classes[c.slots[entry].cls].units
    return wide(c.page_address[page] + inside * layout.SLOT_UNIT_BYTES)


@borrowing
def slot_entry(c: Core, number: int) -> int:
    """Entry of a slot number that a directory of ours names."""
    page = number // _UNITS
    first = page * _UNITS
    return wide(first + (number - first) // c.classes[c.pages.pages[page].owner].units)


@borrowing
def pending_of(c: Core, table: int, oid: int) -> int:
    """What the reader is doing about a record: a PENDING_… value, or its filling slot's entry + 1."""
    return wide(load_u32(c.tables[table].pending + 4 * oid)) & ~PENDING_SEEN


@borrowing
def set_pending(c: Core, table: int, oid: int, value: int) -> None:
    """Change :func:`pending_of`; that a record was resident once is kept."""
    at = c.tables[table].pending + 4 * oid
    store_u32(at, (wide(load_u32(at)) & PENDING_SEEN) | value)


@borrowing
def was_resident(c: Core, table: int, oid: int) -> bool:
    """The record was published at least once since the daemon started."""
    return bool(wide(load_u32(c.tables[table].pending + 4 * oid)) & PENDING_SEEN)
