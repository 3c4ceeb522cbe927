"""Put a new generation of a store in the place of the one that is served, or take a store out. The reader thread only,
between two turns.

Both generations have the same identity, so the same records under the same numbers: what changes is the file, its
checksums and how it is read. Reads in flight end first and what is resident is evicted, so that no byte of the old file
is published under a checksum of the new one; slots pass their grace as ever, and sessions are told to attach again by
the caller.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from strataflux.cache_policy import budget
from strataflux.cache_policy.base import wide
from strataflux.daemon import requests
from strataflux.daemon.cache import drain_page, retire_unseen
from strataflux.daemon.errors import Refusal
from strataflux.daemon.rows import EVICTED_EPOCH
from strataflux.daemon.state import NONE, VALID, Core
from strataflux.daemon.store import Store
from strataflux.daemon.tables import largest_window
from strataflux.daemon.tier import Tier
from strataflux.proto import layout
from strataflux.proto.compiled import compiled

__all__ = ["compile_changes", "empty_table", "release_class", "remove_store", "replace_generation"]


@compiled
def empty_table(c: Core, table: int) -> int:
    """Retire every VALID slot of a table; how many."""
    count = 0
    for entry in range(c.slots.size):
        if c.slots[entry].state == VALID and wide(c.slots[entry].table) == table:
            retire_unseen(c, entry, EVICTED_EPOCH)
            count += 1
    return count


@compiled
def release_class(c: Core, cls: int) -> int:
    """Give the pages of a size class that nobody uses any more back to its budget; how many."""
    count = 0
    for page in range(c.rd[0].range_pages):
        if c.pages.pages[page].state == budget.OWNED and c.pages.pages[page].owner == cls:
            budget.release(c.pages, page)
            drain_page(c, page, EVICTED_EPOCH)
            count += 1
    return count


def compile_changes(core: Core) -> None:
    """Compile, or load, what a change of stores runs: in the middle of one the data path would stand still for it."""
    dispatchers: tuple[Any, ...] = (requests.drop_table, empty_table, release_class)
    for dispatcher in dispatchers:
        dispatcher.compile((numba.typeof(core), numba.int64))  # type: ignore[no-untyped-call]


def remove_store(tier: Tier, table: int, settle: Callable[[], None]) -> None:
    """Serve table ``table`` no more and close its store.

    Raises:
        Refusal: a session has it; nothing was changed.
    """
    users = sum(table in row.stores for row in tier.rows.values())
    if users:
        subject = f"store {tier.stores[table].manifest.folder}"
        raise Refusal("limit", subject, f"{users} sessions that use it", "none", "have them attach again first")
    tier.core.tables[table]["preload_next"] = NONE
    settle()
    requests.drop_table(tier.core, table)  # after: a read that failed has its record queued again
    empty_table(tier.core, table)
    classes = tier.tables.classes_of(table)
    tier.tables.remove(table).close()
    for cls in classes.difference(*map(tier.tables.classes_of, tier.stores)):
        release_class(tier.core, cls)


def replace_generation(tier: Tier, table: int, fresh: Store, settle: Callable[[], None]) -> None:
    """Serve ``fresh`` as table ``table``; takes its descriptors over, and closes it if it is refused.

    Args:
        tier: the tier that serves the store.
        table: index of the served store.
        fresh: another generation of it, open.
        settle: turns the loop, taking no requests, until no read is in flight.

    Raises:
        Refusal: it cannot take the old one's place; nothing was changed.
    """
    served, row = tier.stores[table], tier.core.tables[table]
    _refuse_another(tier, served, fresh)
    settle()
    empty_table(tier.core, table)
    words = ctypes.c_uint32 * int(row["records"])
    entries = np.ctypeslib.as_array(words.from_address(int(row["directory"])))
    entries[entries == layout.ENTRY_QUARANTINED] = layout.ENTRY_ABSENT
    row["quarantined"] = 0
    served.checksums[:] = fresh.checksums
    old = {served.descriptor, served.buffered} - {-1}
    served.manifest, served.alignment = fresh.manifest, fresh.alignment
    served.descriptor, served.buffered, served.direct = fresh.descriptor, fresh.buffered, fresh.direct
    row["descriptor"], row["buffered"] = fresh.descriptor, fresh.buffered
    row["direct"], row["alignment"] = fresh.direct, fresh.alignment
    row["preload_next"] = 0 if served.preload else NONE
    for descriptor in old:
        os.close(descriptor)


def _refuse_another(tier: Tier, served: Store, fresh: Store) -> None:
    window = int(tier.core.rd[0]["window_bytes"])
    largest = largest_window(fresh)
    same = fresh.manifest.identity_digest == served.manifest.identity_digest
    if same and fresh.manifest.sections == served.manifest.sections and largest <= window:
        return
    fresh.close()
    raise Refusal(
        "generation",
        fresh.manifest.folder,
        "another store" if not same else f"records that need windows of {largest} bytes",
        "another generation of the store that is served" if not same else f"at most {window} bytes",
        "restart stratafluxd to serve it",
    )
