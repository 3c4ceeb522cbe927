"""The served stores' tables: their rows of the core, their directories, and who shares memory with whom.

A store may come and go while the daemon runs. Its table number is its name towards the reader as long as it is served,
and is given to another store only after nothing names it any more. The reader thread only, or before it runs.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy import budget
from strataflux.daemon.counting import HASHES
from strataflux.daemon.errors import Refusal
from strataflux.daemon.rows import MAX_SAMPLED
from strataflux.daemon.state import NONE, TABLE, Core
from strataflux.daemon.store import Store
from strataflux.proto import layout
from strataflux.proto.segment import Segment, create

__all__ = [
    "MAX_SERVED",
    "SPARE_SECTIONS",
    "StoreTables",
    "largest_window",
    "number_domains",
    "sampled_hashes",
    "share_pages",
]

MAX_SERVED: Final = 128
"""Stores at a time; numbers after these are for KV."""
SPARE_SECTIONS: Final = 16_384
"""Rows beyond those of the first stores: some forty stores of a large model each."""
_TYPICAL_SLOT: Final = 2048


def number_domains(stores: Iterable[Store]) -> dict[Hashable, int]:
    """Tell each store its domain: stores under the same access rule share one, and only they may lie side by side in
    one segment of memory. Returns the domain of each rule, in the order of appearance.
    """
    domains: dict[Hashable, int] = {}
    for store in stores:
        store.domain = domains.setdefault(store.rule, len(domains))
    return domains


def largest_window(store: Store) -> int:
    """Bytes of the largest aligned window that covers one of its records."""
    sizes = (section.record_bytes for section in store.manifest.sections)
    return max(layout.round_up(size, store.alignment) + 2 * store.alignment for size in sizes)


def share_pages(stores: Sequence[Store], pages: int, domains: int) -> list[int]:
    """Pages of each domain, by the bytes of its stores; every domain gets at least one."""
    sizes = [sum(s.manifest.records_bytes for s in stores if s.domain == domain) for domain in range(domains)]
    shares = [max(pages * size // sum(sizes), 1) for size in sizes]
    shares[int(np.argmax(shares))] += pages - sum(shares)
    return shares


def sampled_hashes(stores: Sequence[Store], pages: int) -> int:
    """One record in 64 is followed, fewer where half of the sample's rows would not do for all slots."""
    sizes = (layout.slot_bytes(section.record_bytes) for store in stores for section in store.manifest.sections)
    slots = pages * layout.CACHE_PAGE_BYTES // min(sizes, default=_TYPICAL_SLOT)
    return HASHES // max(64, slots // (MAX_SAMPLED // 2))


class StoreTables:
    """Pairs: :meth:`add` / :meth:`remove`; construction / :meth:`close`."""

    def __init__(self, core: Core, domains: dict[Hashable, int]) -> None:
        # fixed after construction
        self._core = core
        self._section_rows = len(core.sections) - len(core.kv)
        # reader thread only
        self.domains = domains
        self.stores: dict[int, Store] = {}
        self.directories: dict[int, Segment] = {}
        self._private: dict[int, list[NDArray[np.uint32]]] = {}
        self._warm: dict[int, NDArray[np.uint32]] = {}  # records to be read again

    @property
    def private_bytes(self) -> int:
        """Bytes of arrays that nobody else sees."""
        return sum(array.nbytes for arrays in self._private.values() for array in arrays)

    def add(self, store: Store) -> int:
        """Serve a store of a domain that has memory; its table number. On an error nothing was changed.

        Raises:
            Refusal: no room for it among the tables, sections or size classes. SegmentError: no memory.
        """
        number = self._free_number()
        first = self._free_sections(len(store.manifest.sections))
        self._check_classes(store)
        count = store.manifest.record_count
        size = layout.round_up(4 * count, layout.PAGE_HEADER_BYTES)
        self.directories[number] = create("strataflux-directory", size, reserve=False)
        pending = np.zeros(count, np.uint32)
        self._private[number] = [pending, store.checksums]
        self.stores[number] = store
        self._write_sections(store, first)
        row = np.zeros(1, TABLE)[0]
        row["active"], row["records"] = 1, count
        row["directory"], row["pending"] = self.directories[number].address, pending.ctypes.data
        row["checksums"] = store.checksums.ctypes.data
        row["first_section"], row["sections"] = first, len(store.manifest.sections)
        row["descriptor"], row["buffered"] = store.descriptor, store.buffered
        row["direct"], row["alignment"] = store.direct, store.alignment
        row["preload_next"] = 0 if store.preload else NONE
        row["kv"] = NONE
        self._core.tables[number] = row
        self._core.rd[0]["n_tables"] = max(self.stores) + 1
        return number

    def remove(self, number: int) -> Store:
        """Forget a store of which nothing is resident, queued or being read; whoever calls this closes it."""
        row = np.zeros(1, TABLE)[0]
        row["preload_next"] = row["kv"] = NONE
        self._core.tables[number] = row
        self.directories.pop(number).close()
        del self._private[number]
        self._warm.pop(number, None)
        store = self.stores.pop(number)
        self._core.rd[0]["n_tables"] = max(self.stores, default=-1) + 1
        return store

    def warm(self, number: int, oids: NDArray[np.uint32]) -> None:
        """Have these records of a store read, in this order, when nothing else is to be done."""
        kept = np.ascontiguousarray(oids, np.uint32)
        self._warm[number] = kept
        row = self._core.tables[number]
        row["warm"], row["warm_left"] = kept.ctypes.data, kept.size

    def warm_left(self, number: int) -> NDArray[np.uint32]:
        """What of :meth:`warm` was not looked at yet."""
        kept, left = self._warm.get(number, np.empty(0, np.uint32)), int(self._core.tables[number]["warm_left"])
        return kept[kept.size - left :]

    def classes_of(self, number: int) -> set[int]:
        """Size classes of a store's records."""
        row = self._core.tables[number]
        first = int(row["first_section"])
        return set(self._core.sections["cls"][first : first + int(row["sections"])].tolist())

    def close(self) -> None:
        """Drop the directories; the stores stay open. Idempotent."""
        for directory in self.directories.values():
            directory.close()
        self.directories = {}

    def _free_number(self) -> int:
        for number in range(MAX_SERVED):
            if number not in self.stores:
                return number
        limit = f"at most {MAX_SERVED}"
        raise Refusal("limit", "served stores", str(len(self.stores)), limit, "remove one that is not used")

    def _free_sections(self, count: int) -> int:
        """First of ``count`` rows in a row that no store has."""
        first = 0
        rows = self._core.tables[list(self.stores)]
        for start, length in sorted(zip(rows["first_section"].tolist(), rows["sections"].tolist(), strict=True)):
            if start - first >= count:
                break
            first = start + length
        if first + count > self._section_rows:
            found = f"{count} beside those of the served ones"
            raise Refusal("limit", "sections of a store", found, f"{self._section_rows} in all", "restart stratafluxd")
        return first

    def _check_classes(self, store: Store) -> None:
        classes = self._core.pages.classes[: int(self._core.pages.sizes[0])]
        known = set(classes["slot_bytes"][classes["budget"] == store.domain].tolist())
        wanted = {layout.slot_bytes(section.record_bytes) for section in store.manifest.sections}
        if len(classes) + len(wanted - known) > budget.MAX_CLASSES:
            found = f"{len(classes)}, and {len(wanted - known)} more for {store.manifest.folder}"
            remedy = "serve fewer stores with differing record sizes, or restart stratafluxd"
            raise Refusal("limit", "slot sizes", found, f"at most {budget.MAX_CLASSES}", remedy)
        smallest = layout.CACHE_PAGE_BYTES >> int(self._core.rd[0]["place_shift"])
        if min(wanted) < smallest:
            subject = f"records of {store.manifest.folder}"
            remedy = 'name the store in the configuration and restart stratafluxd, or set cache.policy = "lru"'
            raise Refusal("unsupported", subject, f"slots of {min(wanted)} bytes", f"at least {smallest}", remedy)

    def _write_sections(self, store: Store, first: int) -> None:
        core = self._core
        for at, section in enumerate(store.manifest.sections, first):
            size = layout.slot_bytes(section.record_bytes)
            cls = budget.add_class(core.pages, size, store.domain)
            core.classes[cls]["units"] = size // layout.SLOT_UNIT_BYTES
            core.sections[at] = (
                *(section.first_oid, section.count, section.record_bytes, section.stride, section.offset, cls),
                *(section.count, 0, 0),
            )
        core.rd[0]["n_classes"] = core.pages.sizes[0]
