"""Build the reader's state: cache segments, tables and sections, sessions. Python; the loop only ever sees arrays."""

import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy import budget
from strataflux.daemon import grace, requests
from strataflux.daemon.errors import Refusal
from strataflux.daemon.interface import SessionRequest
from strataflux.daemon.kv import KvPlace, KvSettings
from strataflux.daemon.state import NONE, Core, make_core
from strataflux.daemon.store import Store
from strataflux.proto import layout
from strataflux.proto.messages import SegmentInfo, TableInfo
from strataflux.proto.segment import Segment, create

__all__ = ["CacheSegment", "OpenSession", "Tier"]

_SEGMENT_PAGES_MIN = layout.SEGMENT_MIN_BYTES // layout.CACHE_PAGE_BYTES
_WINDOW_MIN = 16 * 1024


@dataclass
class OpenSession:
    """What a client needs; :class:`strataflux.daemon.interface.OpenedSession`."""

    index: int
    session_id: int
    tables: list[TableInfo]
    segments: list[SegmentInfo]
    ring_log2: int
    stamps_count: int
    staging_block_bytes: int
    descriptors: list[int]


@dataclass
class CacheSegment:
    """One memfd of cache slots. ``domain`` is the group of stores with the same access rule whose bytes it holds."""

    segment: Segment
    first_page: int
    domain: int

    @property
    def info(self) -> SegmentInfo:
        """As announced to clients."""
        return SegmentInfo(self.first_page * layout.UNITS_PER_PAGE, self.segment.size)


@dataclass
class _Row:
    """Memory of a session, kept while the reader may look at it."""

    session_id: int
    view: Segment
    page: Segment
    domains: set[int]
    place: KvPlace | None


class Tier:
    """The cache, the tables and the sessions of one daemon.

    Pairs: ``open_session`` / ``close_session``; construction / ``close``. All calls come from the reader thread between
    two runs of the loop, or before the first.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        weight_bytes: int,
        depth: int,
        grace_seconds: float,
        kv: KvSettings | None = None,
    ) -> None:
        # fixed after construction
        self.stores = list(stores)
        self.generation = secrets.randbits(63)
        self.segments: list[CacheSegment] = []
        self.retiring: list[CacheSegment] = []  # not for new sessions any more
        self.daemon_page = create("strataflux-daemon", layout.PAGE_HEADER_BYTES, reserve=True)
        self._write_header(self.daemon_page, layout.DAEMON_PAGE, layout.DAEMON_MAGIC, 0)
        self.doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.directories: list[Segment] = []
        self._private: list[NDArray[Any]] = []
        # reader thread only
        self.rows: dict[int, _Row] = {}
        self.invalid_closed = 0  # rubbish entries of sessions that are gone
        self.places: list[KvPlace] = []
        self.closing: list[KvPlace] = []
        try:
            self.core = self._make_core(weight_bytes, depth, kv)
            self._add_stores()
        except BaseException:
            self._drop_memory()
            raise
        self.pool = self._make_pool(depth)
        rd = self.core.rd[0]
        rd["page"] = self.daemon_page.address
        rd["doorbell"] = self.doorbell
        rd["grace_us"] = int(grace_seconds * 1e6)

    def _make_core(self, weight_bytes: int, depth: int, kv: KvSettings | None) -> Core:
        """Segments for each domain's share of the weight budget, exact to a page, and room in the address range for the
        KV places'; at most 64 in all.
        """
        domains = max((store.domain for store in self.stores), default=-1) + 1
        total_pages = max(weight_bytes // layout.CACHE_PAGE_BYTES, domains)
        shares = self._shares(total_pages, domains)
        places = kv.places if kv is not None else 0
        kv_pages = kv.cache_bytes // places // layout.CACHE_PAGE_BYTES if kv is not None else 0
        # Half of the segments at most are full ones; each domain and place may end with one that is not.
        full = -(-(total_pages + places * kv_pages) // (layout.MAX_SEGMENTS // 2))
        largest = layout.round_up(max(full, 1), _SEGMENT_PAGES_MIN)
        kv_segments = -(-kv_pages // largest)
        plan = [
            (domain, min(largest, share - start))
            for domain, share in enumerate(shares)
            for start in range(0, share, largest)
        ]
        sections = sum(len(store.manifest.sections) for store in self.stores)
        segments = len(plan) + places * kv_segments
        core = make_core(segments * largest, sections + places, domains + places, largest, depth, places)
        for number in range(places):
            first = len(plan) + number * kv_segments
            assert kv is not None
            at = range(first, first + kv_segments)
            self.places.append(KvPlace(core, number, kv, at, largest, domains + number, len(self.stores) + number))
        for number, (domain, pages) in enumerate(plan):
            memory = create("strataflux-cache", pages * layout.CACHE_PAGE_BYTES, reserve=True)
            self.segments.append(CacheSegment(memory, number * largest, domain))
            budget.grow(core.pages, domain, number)
            budget.trim(core.pages, number, pages)
            first = number * largest
            core.page_address[first : first + pages] = memory.address + np.arange(pages) * layout.CACHE_PAGE_BYTES
        return core

    def _shares(self, pages: int, domains: int) -> list[int]:
        """Pages of each domain, by the bytes of its stores; every domain gets at least one."""
        if not domains:
            return []
        sizes = [sum(s.manifest.records_bytes for s in self.stores if s.domain == domain) for domain in range(domains)]
        shares = [max(pages * size // sum(sizes), 1) for size in sizes]
        shares[int(np.argmax(shares))] += pages - sum(shares)
        return shares

    def _add_stores(self) -> None:
        first = 0
        for number, store in enumerate(self.stores):
            manifest = store.manifest
            directory = create("strataflux-directory", self._directory_bytes(manifest.record_count), reserve=False)
            pending = np.zeros(manifest.record_count, np.uint32)
            self.directories.append(directory)
            self._private += [pending, store.checksums]
            row = self.core.tables[number]
            row["active"] = 1
            row["records"] = manifest.record_count
            row["directory"] = directory.address
            row["pending"] = pending.ctypes.data
            row["checksums"] = store.checksums.ctypes.data
            row["first_section"] = first
            row["sections"] = len(manifest.sections)
            row["descriptor"] = store.descriptor
            row["buffered"] = store.buffered
            row["direct"] = store.direct
            row["alignment"] = store.alignment
            row["preload_next"] = 0 if store.preload else NONE
            for at, section in enumerate(manifest.sections, first):
                cls = budget.add_class(self.core.pages, layout.slot_bytes(section.record_bytes), store.domain)
                self.core.classes[cls]["units"] = layout.slot_bytes(section.record_bytes) // layout.SLOT_UNIT_BYTES
                self.core.sections[at] = (
                    section.first_oid,
                    section.count,
                    section.record_bytes,
                    section.stride,
                    section.offset,
                    cls,
                    section.count,
                    0,
                    0,
                )
            first += len(manifest.sections)
        self.core.rd[0]["n_tables"] = len(self.stores)
        self.core.rd[0]["n_classes"] = self.core.pages.sizes[0]

    @staticmethod
    def _directory_bytes(records: int) -> int:
        return layout.round_up(4 * records, layout.PAGE_HEADER_BYTES)

    def _make_pool(self, depth: int) -> mmap.mmap:
        """The bounce pool: one part a window, large enough for any record's aligned window, and to merge small ones."""
        largest = max(
            (
                layout.round_up(section.record_bytes, store.alignment) + 2 * store.alignment
                for store in self.stores
                for section in store.manifest.sections
            ),
            default=0,
        )
        window_bytes = layout.round_up(max(largest, _WINDOW_MIN), mmap.PAGESIZE)
        pool = mmap.mmap(-1, depth * window_bytes)
        address = int(np.frombuffer(pool, np.uint8).ctypes.data)
        self.core.windows["buffer"][:depth] = address + np.arange(depth) * window_bytes
        self.core.rd[0]["window_bytes"] = window_bytes
        return pool

    @property
    def pool_address(self) -> int:
        """Address of the bounce pool."""
        return int(self.core.windows["buffer"][0])

    @property
    def metadata_bytes(self) -> int:
        """Bytes of arrays beside the cache, sparse parts included."""
        arrays = [a for a in self.core if isinstance(a, np.ndarray)] + self._private
        nested = [*self.core.policy, *self.core.pages]
        return int(sum(a.nbytes for a in [*arrays, *nested])) + sum(d.size for d in self.directories)

    def _write_header(self, segment: Segment, page: np.dtype[np.void], magic: int, identity: int) -> None:
        header = segment.view(page)["header"]
        header["layout"] = layout.LAYOUT_VERSION
        header["bytes"] = min(segment.size, 0xFFFFFFFF)
        header["generation"] = self.generation
        header["id"] = identity
        header["magic"] = magic

    def open_session(self, request: SessionRequest) -> OpenSession:
        """Enter a session in the reader's table; only then do its descriptors exist.

        Raises:
            SegmentError: no memory for its segments.
        """
        index = int(np.flatnonzero(self.core.sessions["active"] == 0)[0])
        stamps_count = int(self.core.rd[0]["range_pages"]) * layout.UNITS_PER_PAGE
        staging = request.kv.groups_per_block * request.kv.record_bytes if request.kv is not None else 0
        geometry = layout.session_geometry(request.ring_log2, stamps_count, staging)
        place = self._free_place() if request.kv is not None else None
        session_id = secrets.randbits(63)
        view = create("strataflux-view", layout.PAGE_HEADER_BYTES, reserve=True)
        try:
            page = create("strataflux-session", geometry.total_bytes, reserve=False)
        except BaseException:
            view.close()
            raise
        self._write_header(view, layout.SESSION_VIEW, layout.VIEW_MAGIC, session_id)
        self._write_header(page, layout.SESSION_PAGE, layout.SESSION_MAGIC, session_id)
        row = self.core.sessions[index]
        self.core.sessions[index : index + 1] = np.zeros(1, self.core.sessions.dtype)
        row["page"], row["view_page"] = page.address, view.address
        row["ring"], row["ring_log2"] = page.address + geometry.ring_offset, request.ring_log2
        row["tables"] = len(request.stores)
        self.core.session_tables[index, :] = NONE
        self.core.session_tables[index, : len(request.stores)] = request.stores
        domains = {self.stores[number].domain for number in request.stores}
        self.rows[index] = _Row(session_id, view, page, domains, place)
        if place is not None and request.kv is not None:
            try:
                staging_at, ring_at = page.address + geometry.staging_offset, page.address + geometry.put_ring_offset
                place.open(index, request.kv, staging_at, geometry.staging_bytes, ring_at)
            except BaseException:
                self._forget_row(index)
                raise
            self.core.session_tables[index, len(request.stores)] = place.table
            row["tables"] += 1
        grace.begin_session(self.core, index, page.address + geometry.stamps_offset)
        try:
            return self._describe(index, request, stamps_count, staging)
        except BaseException:
            self.close_session(index)
            raise

    def _free_place(self) -> KvPlace:
        """A KV place that nobody holds.

        Raises:
            Refusal: all are taken.
        """
        taken = {row.place for row in self.rows.values()} | set(self.closing)
        for place in self.places:
            if place not in taken:
                return place
        raise Refusal(
            "busy" if self.places else "limit",
            "sessions with KV",
            f"{len(self.places)} attached or just leaving",
            f"at most {len(self.places)} (kv.sessions)",
            "try again shortly, or raise kv.sessions: they share cache.kv_bytes",
        )

    def _describe(self, index: int, request: SessionRequest, stamps_count: int, staging: int) -> OpenSession:
        row = self.rows[index]
        place, kv = row.place, request.kv
        mine = [s for s in self.segments if s.domain in row.domains]
        tables = [
            TableInfo(number, "weight", manifest.identity_digest, manifest.generation, manifest.record_count)
            for number, manifest in enumerate(self.stores[at].manifest for at in request.stores)
        ]
        infos = [s.info for s in mine]
        memory: list[Segment] = []
        if place is not None and kv is not None:
            tables.append(TableInfo(len(tables), kv.kind, "", 0, kv.groups_per_block * kv.max_blocks))
            memory = place.memory
            infos += [SegmentInfo(slot, m.size) for slot, m in zip(place.first_slots(), memory, strict=True)]
        directory = [place.directory] if place is not None and place.directory is not None else []
        directories = [self.directories[at] for at in request.stores] + directory
        shared = [*directories, *(s.segment for s in mine), *memory]
        descriptors: list[int] = []
        try:
            descriptors += [self.daemon_page.read_only_descriptor(), row.view.read_only_descriptor()]
            descriptors += [os.dup(row.page.descriptor), os.dup(self.doorbell)]
            descriptors.extend(segment.read_only_descriptor() for segment in shared)
        except OSError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return OpenSession(index, row.session_id, tables, infos, request.ring_log2, stamps_count, staging, descriptors)

    def close_session(self, index: int) -> None:
        """Forget a session; its grace holds are gone at once. Its memory goes with the last map of it."""
        requests.forget_session(self.core, index)
        grace.end_session(self.core, index)
        self.invalid_closed += int(self.core.sessions[index]["invalid"])
        self.core.sessions[index]["invalid"] = 0
        self._forget_row(index)

    def _forget_row(self, index: int) -> None:
        row = self.rows.pop(index)
        if row.place is not None and row.place.row["active"]:
            row.place.begin_close()
            self.closing.append(row.place)
        row.view.close()
        row.page.close()

    def settle(self) -> None:
        """Free the KV places of sessions that are gone, as soon as nothing holds them."""
        self.closing = [place for place in self.closing if not place.finish_close()]

    def close(self) -> None:
        """Drop all memory. The loop has ended and nothing is in flight."""
        # Sessions are not fenced: nobody writes to their memory any more, so what is resident stays right.
        for row in self.rows.values():
            row.view.close()
            row.page.close()
        self.rows.clear()
        for place in self.places:
            place.drop()
        self._drop_memory()
        for store in self.stores:
            store.close()

    def _drop_memory(self) -> None:
        for segment in (self.daemon_page, *self.directories, *(s.segment for s in (*self.segments, *self.retiring))):
            segment.close()
        os.close(self.doorbell)
