"""The reader's core without its thread: a real tier over a small store, swept by hand, and a client of a real kind."""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strataflux.client import attach_block, directory
from strataflux.client.attach_block import Mapped
from strataflux.daemon import grace, integrity, reader
from strataflux.daemon.engines.board import Board, open_board
from strataflux.daemon.engines.uring import UringEngine
from strataflux.daemon.interface import SessionRequest
from strataflux.daemon.kv import KvSettings
from strataflux.daemon.state import Core
from strataflux.daemon.store import open_served
from strataflux.daemon.tier import Tier
from strataflux.proto import layout
from strataflux.proto.messages import KvGeometry
from strataflux.proto.store_format import SectionSpec
from strataflux.proto.store_writer import StoreWriter
from tests.fakes.board_worker import BoardWorker

PAGE = layout.CACHE_PAGE_BYTES


def make_store(folder: Path, shapes: Sequence[tuple[int, int]], name: str = "core") -> Path:
    """A published store with one section of random records for each (count, bytes); the same for the same arguments."""
    sections = [
        SectionSpec(f"{n}.s", "weight_channel", n, "qkv", count, size) for n, (count, size) in enumerate(shapes)
    ]
    random = np.random.default_rng([len(name), *(value for shape in shapes for value in shape)])
    with StoreWriter(folder, {"model": name}, sections) as writer:
        for number, (count, size) in enumerate(shapes):
            writer.write(number, 0, random.integers(0, 256, (count, size)).astype(np.uint8))
        writer.publish()
    return folder


def request(
    stores: Sequence[int] = (0,), ring_log2: int = 10, kv: KvGeometry | None = None, *, waits: bool = False
) -> SessionRequest:
    """An attachment of this process."""
    return SessionRequest(os.geteuid(), os.getegid(), os.getpid(), tuple(stores), ring_log2, kv, waits=waits)


class Client:
    """What a client does in a step, through its real compiled path, on the tier's own maps."""

    def __init__(
        self,
        tier: Tier,
        stores: Sequence[int] = (0,),
        ring_log2: int = 10,
        kv: KvGeometry | None = None,
        *,
        waits: bool = False,
    ) -> None:
        self.tier = tier
        opened = tier.open_session(request(stores, ring_log2, kv, waits=waits))
        for descriptor in opened.descriptors:
            os.close(descriptor)
        self.index = opened.index
        self.row = tier.rows[opened.index]
        pages = (tier.daemon_page.address, self.row.view.address, self.row.page.address)
        geometry = layout.session_geometry(ring_log2, opened.stamps_count, opened.staging_block_bytes)
        self.block = attach_block.make_block(pages, ring_log2, geometry)
        for number, store in enumerate(stores):
            records = tier.stores[store].manifest.record_count
            attach_block.set_table(self.block, number, tier.directories[store].address, records, kv=False)
        segments = [
            Mapped(s.first_page * layout.UNITS_PER_PAGE, s.segment.address, s.segment.size)
            for s in tier.segments
            if s.domain in self.row.domains
        ]
        if kv is not None and self.row.place is not None and self.row.place.directory is not None:
            place, records = self.row.place, kv.groups_per_block * kv.max_blocks
            attach_block.set_table(self.block, len(stores), self.row.place.directory.address, records, kv=True)
            first = zip(place.first_slots(), place.memory, strict=True)
            segments += [Mapped(slot, memory.address, memory.size) for slot, memory in first]
        attach_block.set_bases(self.block, segments)

    @property
    def page(self) -> Any:
        """The words it writes; read with ``[name]``."""
        return self.row.page.view(layout.SESSION_PAGE)[0]

    @property
    def view(self) -> Any:
        """The words the reader writes for it."""
        return self.row.view.view(layout.SESSION_VIEW)[0]

    @property
    def counters(self) -> Any:
        """Its row in the reader's table."""
        return self.tier.core.sessions[self.index]

    def set_steps(self, begun: int, ended: int) -> None:
        """Put step words into its page as if it had begun and ended so many."""
        self.page["step_begun"], self.page["step_ended"] = begun, ended

    def begin(self) -> None:
        """Enter a step; a reader that sleeps is rung for."""
        if attach_block.begin_step(self.block):
            os.eventfd_write(self.tier.doorbell, 1)

    def end(self) -> bool:
        """Leave it; whether it was valid."""
        return bool(attach_block.end_step(self.block))

    def look_up(self, oids: Sequence[int], table: int = 0, score: int = 0) -> NDArray[np.uint64]:
        """Addresses, 0 where absent (and then asked for); inside a step."""
        ids = np.asarray(oids, np.int64)
        addresses = np.zeros(ids.size, np.uint64)
        hits = directory.look_up(self.block, table, ids, np.full(ids.size, score, np.uint8), addresses, False)
        assert hits == np.count_nonzero(addresses)
        return addresses

    def ask(self, oids: Sequence[int], table: int = 0, score: int = 0) -> int:
        """A whole step that looks these up; how many were there."""
        self.begin()
        hits = int(np.count_nonzero(self.look_up(oids, table, score)))
        self.end()
        return hits

    def read(self, oids: Sequence[int], table: int = 0) -> list[bytes | None]:
        """A whole step that copies these records out of their slots; None where one is absent."""
        sections = self.tier.core.sections
        store = self.tier.core.tables[self.tier.core.session_tables[self.index, table]]
        mine = sections[int(store["first_section"]) : int(store["first_section"] + store["sections"])]
        self.begin()
        found: list[bytes | None] = []
        for oid, address in zip(oids, self.look_up(oids, table), strict=True):
            section = mine[int(np.searchsorted(mine["first"], oid, "right")) - 1]
            found.append(bytes_at(int(address), int(section["bytes"])) if address else None)
        self.end()
        return found

    def push(self, *payloads: int) -> None:
        """Write whole ring payloads, good or bad, as one step."""
        self.begin()
        state = self.block[attach_block.TAIL : attach_block.TAIL + 3]
        for payload in payloads:
            position = int(state[0])
            self.ring_cells()[position % self.ring_cells().size] = (1 + (position >> self.log2) % 255) << 56 | payload
            state[0] += np.uint64(1)
        self.end()

    @property
    def log2(self) -> int:
        """Size of its ring."""
        return int(self.block[attach_block.RING_LOG2])

    def ring_cells(self) -> NDArray[np.uint64]:
        """The ring's memory."""
        address = int(self.block[attach_block.RING]) - self.row.page.address
        return np.frombuffer(self.row.page._mapping, np.uint64, 1 << self.log2, address)


class Words:
    """The reader's words by name, and its counters by kind as their sums."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def __getitem__(self, name: str) -> int:
        if name in ("io_errors", "evictions"):
            return int((self._core.errnos if name == "io_errors" else self._core.evicted).sum())
        if name in (self._core.rd.dtype.names or ()):
            return int(self._core.rd[0][name])
        parts = {
            "fills": ("fills", "fills_preload"),
            "read_bytes": ("read_bytes", "ahead_bytes"),
            "requests": ("cold", "evicted_again", "duplicates", "resident_already", "quarantine_hits"),
        }
        return sum(int(self._core.kinds[part].sum()) for part in parts.get(name, (name,)))

    def __setitem__(self, name: str, value: int) -> None:
        if name in (self._core.rd.dtype.names or ()):
            self._core.rd[0][name] = value
            return
        counts = self._core.errnos if name == "io_errors" else self._core.kinds[name]
        counts[:] = 0
        counts.flat[0] = value


class Rig:
    """A tier, an engine and the loop's single turn. Pairs: construction / ``close``."""

    def __init__(
        self,
        folders: Sequence[Path],
        pages: int = 4,
        *,
        depth: int = 8,
        direct_io: str = "off",
        grace_seconds: float = 2.0,
        preload: bool = False,
        kv: KvSettings | None = None,
        policy: str = "lru",
    ) -> None:
        self.folders = list(folders)
        stores = [open_served(folder, direct_io=direct_io, preload=preload) for folder in folders]
        self.tier = Tier(stores, pages * PAGE, depth, grace_seconds, kv, policy)
        self.core = self.tier.core
        self.engine: Board | UringEngine = open_board(len(self.core.windows), self.tier.doorbell)

    @property
    def rd(self) -> "Words":
        """The reader's words and counters."""
        return Words(self.core)

    def sweep(self, times: int = 1) -> None:
        """Turn the loop."""
        for _ in range(times):
            reader.sweep(self.core, self.engine.state)

    def pretend_direct(self, store: int = 0, alignment: int = 512) -> None:
        """Let the reader think that it reads directly, through a descriptor that tells such reads from others."""
        row, served = self.core.tables[store], self.tier.stores[store]
        served.descriptor = os.dup(served.buffered)
        row["descriptor"], row["direct"], row["alignment"] = served.descriptor, 1, alignment

    def recycle(self) -> int:
        """Close the open batch and free what nobody holds."""
        grace.close_batch(self.core)
        return int(grace.recycle(self.core))

    def integrity(self) -> int:
        """0, or the code of the first broken invariant of the cache."""
        return int(integrity.check_integrity(self.core))

    def intact(self) -> None:
        """Assert every invariant of the cache."""
        assert self.integrity() == 0

    def record(self, oid: int, store: int = 0) -> bytes:
        """What the file says a record is."""
        return record_of(self.tier, store, oid)

    def entries(self, store: int = 0) -> NDArray[np.uint32]:
        """The directory of a store, live."""
        count = self.tier.stores[store].manifest.record_count
        return np.frombuffer(self.tier.directories[store]._mapping, np.uint32, count)

    def entry(self, oid: int, store: int = 0) -> int:
        """A record's directory entry."""
        return int(self.entries(store)[oid])

    def close(self) -> None:
        """Drop everything; nothing may be in flight."""
        self.engine.close()
        self.tier.close()


class Disk:
    """A rig whose reads a breakable worker completes, with one client."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.client = Client(rig.tier)
        assert isinstance(rig.engine, Board)
        self.worker = BoardWorker(rig.engine)

    def settle(self) -> None:
        """Turn the loop and the worker until nothing is left to do."""
        self.rig.sweep()
        while self.worker.work() or self.rig.rd["queued"] or self.rig.rd["in_flight"]:
            self.rig.sweep()
        self.rig.sweep()
        self.rig.intact()

    def fill(self, *oids: int) -> None:
        """Ask for records and let everything happen."""
        assert self.client.ask(oids) == 0
        self.settle()

    def count(self, *names: str) -> tuple[int, ...]:
        """Counters of the reader."""
        return tuple(int(self.rig.rd[name]) for name in names)

    def check_served(self, *oids: int) -> None:
        """These are resident, with the file's bytes."""
        assert self.client.read(oids) == [self.rig.record(oid) for oid in oids]


def record_of(tier: Tier, store: int, oid: int) -> bytes:
    """The oracle: a record as a plain read of the store's file gives it."""
    manifest = tier.stores[store].manifest
    section = next(s for s in reversed(manifest.sections) if s.first_oid <= oid)
    with manifest.records_path.open("rb") as file:
        file.seek(section.offset + (oid - section.first_oid) * section.stride)
        return file.read(section.record_bytes)


def bytes_at(address: int, count: int) -> bytes:
    """Copy memory of this process."""
    return ctypes.string_at(address, count)
