"""Build the reader's state: cache segments, tables and sections, sessions. Python; the loop only ever sees arrays."""

import mmap
import os
import secrets
from collections.abc import Sequence

import numpy as np

from strataflux.cache_policy import budget
from strataflux.daemon import grace, requests
from strataflux.daemon.errors import Refusal
from strataflux.daemon.holdings import CacheSegment, OpenSession, SessionRow
from strataflux.daemon.interface import SessionRequest
from strataflux.daemon.kv import KvPlace, KvSettings
from strataflux.daemon.policy_states import flat, make_states, places_shift
from strataflux.daemon.state import NONE, Core, make_core
from strataflux.daemon.store import Store
from strataflux.daemon.tables import (
    SPARE_SECTIONS,
    StoreTables,
    largest_window,
    number_domains,
    sampled_hashes,
    share_pages,
)
from strataflux.daemon.tenants import TenantTable
from strataflux.proto import layout
from strataflux.proto.messages import SegmentInfo, TableInfo
from strataflux.proto.segment import Segment, create

__all__ = ["Tier"]

_SEGMENT_PAGES_MIN = layout.SEGMENT_MIN_BYTES // layout.CACHE_PAGE_BYTES
_WINDOW_MIN = 32 * 1024
"""Of the bounce pool: what stores that come later need is not known yet."""


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
        policy: str = "lru",
    ) -> None:
        # fixed after construction
        self.policy = policy
        self.generation = secrets.randbits(63)
        self.segments: list[CacheSegment] = []
        self.retiring: list[CacheSegment] = []  # not for new sessions any more
        self.daemon_page = create("strataflux-daemon", layout.PAGE_HEADER_BYTES, reserve=True)
        self._write_header(self.daemon_page, layout.DAEMON_PAGE, layout.DAEMON_MAGIC, 0)
        self.doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # reader thread only
        self._unmade: list[tuple[int, int, int]] = []  # segments (number, domain, pages) planned for a first store
        self.rows: dict[int, SessionRow] = {}
        self.invalid_closed = 0  # rubbish entries of sessions that are gone
        self.places: list[KvPlace] = []
        self.closing: list[KvPlace] = []
        domains = number_domains(stores)
        try:
            self.core = self._make_core(stores, len(domains), weight_bytes, depth, kv)
        except BaseException:
            self._drop_memory()
            raise
        self.tables = StoreTables(self.core, domains)
        self.tenants = TenantTable(self.core)
        try:
            for store in stores:
                self.tables.add(store)
        except BaseException:
            self.tables.close()
            self._drop_memory()
            raise
        self.pool = self._make_pool(depth)
        rd = self.core.rd[0]
        rd["page"] = self.daemon_page.address
        rd["doorbell"] = self.doorbell
        rd["grace_us"] = int(grace_seconds * 1e6)

    @property
    def stores(self) -> dict[int, Store]:
        """The served stores by their table numbers."""
        return self.tables.stores

    @property
    def directories(self) -> dict[int, Segment]:
        """Their directories."""
        return self.tables.directories

    def _make_core(
        self, stores: Sequence[Store], domains: int, weight_bytes: int, depth: int, kv: KvSettings | None
    ) -> Core:
        """Segments for each domain's share of the weight budget, exact to a page, and room in the address range for the
        KV places'; at most 64 in all. Without stores the memory is planned for one domain, and taken with its first.
        """
        total_pages = max(weight_bytes // layout.CACHE_PAGE_BYTES, domains)
        shares = share_pages(stores, total_pages, domains) if domains else [total_pages]
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
        sections = sum(len(store.manifest.sections) for store in stores) + SPARE_SECTIONS
        segments = len(plan) + places * kv_segments
        shift = places_shift(self.policy, stores)
        records = sum(store.manifest.record_count for store in stores)
        policies = make_states(self.policy, len(plan) * largest << shift, records, places * kv_segments * largest)
        core = make_core(policies, segments * largest, sections + places, len(shares) + places, largest, depth, places)
        core.rd[0]["kv_page"], core.rd[0]["place_shift"] = len(plan) * largest, shift
        core.rd[0]["learns"] = self.policy != "lru"
        core.rd[0]["sampled_hashes"] = sampled_hashes(stores, total_pages)
        for number in range(places):
            first = len(plan) + number * kv_segments
            assert kv is not None
            at = range(first, first + kv_segments)
            table = layout.MAX_TABLES - places + number
            self.places.append(KvPlace(core, number, kv, at, largest, len(shares) + number, table))
        self._unmade = [(number, domain, pages) for number, (domain, pages) in enumerate(plan)]
        if domains:
            self._make_segments(core)
        return core

    def _make_segments(self, core: Core) -> None:
        """Take the memory that is planned.

        Raises:
            SegmentError: there is none.
        """
        stride = int(core.pages.sizes[1])
        while self._unmade:
            number, domain, pages = self._unmade[0]
            memory = create("strataflux-cache", pages * layout.CACHE_PAGE_BYTES, reserve=True)
            self.segments.append(CacheSegment(memory, number * stride, domain))
            budget.grow(core.pages, domain, number)
            budget.trim(core.pages, number, pages)
            first = number * stride
            core.page_address[first : first + pages] = memory.address + np.arange(pages) * layout.CACHE_PAGE_BYTES
            self._unmade.pop(0)

    def add_store(self, store: Store) -> int:
        """Serve one more store, which is taken over; its table number. On an error it is closed, nothing else changed.

        Raises:
            Refusal: its records or its access rule do not fit what was set up at the start. SegmentError: no memory.
        """
        try:
            self._check_window(store)
            if not self.tables.domains:
                self.tables.domains[store.rule] = 0
            if store.rule not in self.tables.domains:
                raise Refusal(
                    "unsupported",
                    f"access rule of {store.manifest.folder}",
                    "one that no store has had since the start",
                    "that of another store: memory is kept apart by these rules when the service starts",
                    "give it the same share, allow_uids and allow_groups as another, or restart stratafluxd",
                )
            store.domain = self.tables.domains[store.rule]
            self._make_segments(self.core)
            return self.tables.add(store)
        except BaseException:
            store.close()
            raise

    def _check_window(self, store: Store) -> None:
        window, needed = int(self.core.rd[0]["window_bytes"]), largest_window(store)
        if needed > window:
            raise Refusal(
                "too_large",
                f"records of {store.manifest.folder}",
                f"{needed} bytes to read one",
                f"at most {window}, as set up at the start",
                "name the store in the configuration and restart stratafluxd",
            )

    def _make_pool(self, depth: int) -> mmap.mmap:
        """The bounce pool: one part a window, large enough for any record's aligned window, and to merge small ones."""
        largest = max(map(largest_window, self.stores.values()), default=0)
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
        arrays = [a for a in self.core if isinstance(a, np.ndarray)]
        nested = [*flat(self.core.policies), *self.core.pages]
        shared = self.tables.private_bytes + sum(d.size for d in self.directories.values())
        return int(sum(a.nbytes for a in [*arrays, *nested])) + shared

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
            SegmentError: no memory for its segments. Refusal: a store that is not served any more, or no KV place.
        """
        if not set(request.stores) <= self.stores.keys():
            raise Refusal("identity", "store", "one that was just removed", "a served one", "attach again")
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
        row["tables"], row["waits"] = len(request.stores), request.waits
        self.core.session_tables[index, :] = NONE
        self.core.session_tables[index, : len(request.stores)] = request.stores
        domains = {self.stores[number].domain for number in request.stores}
        self.rows[index] = SessionRow(session_id, view, page, request.stores, domains, place, request.tenant)
        self.tenants.join(request.tenant, index)
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
        row = self.core.sessions[index]
        self.invalid_closed += int(row["invalid"]) + int(row["holes"])
        row["invalid"] = row["holes"] = 0
        self._forget_row(index)

    def _forget_row(self, index: int) -> None:
        row = self.rows.pop(index)
        if row.place is not None and row.place.row["active"]:
            row.place.begin_close()
            self.closing.append(row.place)
        row.view.close()
        row.page.close()

    def granted_bytes(self, tenant: str) -> int:
        """Bytes on disk of KV blocks that the sessions of a tenant hold."""
        mine = self.tenants.row_of(tenant)
        places = [row.place for row in list(self.rows.values()) if self.tenants.row_of(row.tenant) == mine]
        return sum(place.granted_bytes for place in places if place is not None)

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
        self.tables.close()
        self._drop_memory()
        for store in self.stores.values():
            store.close()

    def _drop_memory(self) -> None:
        for segment in (self.daemon_page, *(s.segment for s in (*self.segments, *self.retiring))):
            segment.close()
        os.close(self.doorbell)
