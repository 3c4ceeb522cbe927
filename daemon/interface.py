"""What the parts around the reader ask of it: the requests, the answers and the calls, without the reader itself.

Attach, control, metrics and the server's life are written against :class:`Reader`, so they run in tests without
compiled code, and a start that fails early does not pay for importing it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from strataflux.daemon.config import TenantConfig
from strataflux.daemon.stats import Stats
from strataflux.proto.messages import KvGeometry, SegmentInfo, TableInfo
from strataflux.proto.store_format import Section

__all__ = ["AddedSegment", "HotRecords", "Manifest", "OpenedSession", "Reader", "ServedStore", "SessionRequest"]


@dataclass(frozen=True)
class SessionRequest:
    """An attachment that was checked and may be opened. ``stores`` are indices of served stores, in table order."""

    uid: int
    gid: int
    pid: int
    stores: tuple[int, ...]
    ring_log2: int
    kv: KvGeometry | None
    tenant: str = ""
    """Empty: everybody else."""
    waits: bool = False
    """It may wait for what it misses."""


class OpenedSession(Protocol):
    """A session that the reader already has in its table. Whoever asked for it closes ``descriptors`` after sending."""

    index: int
    session_id: int
    tables: list[TableInfo]
    segments: list[SegmentInfo]
    ring_log2: int
    stamps_count: int
    staging_block_bytes: int
    descriptors: list[int]


@dataclass(frozen=True)
class AddedSegment:
    """A new cache segment for ``stores`` (indices of served stores). Whoever asked for it closes ``descriptor``."""

    info: SegmentInfo
    stores: tuple[int, ...]
    descriptor: int


class HotRecords(NamedTuple):
    """Records of one store: its identity digest, how many it has, and oids (u32), none twice."""

    digest: str
    records: int
    oids: NDArray[np.uint32]


class Manifest(Protocol):
    """The part of a store's manifest that is shown to clients and operators."""

    @property
    def folder(self) -> Path:
        """Where the store lies."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What the bytes are: weights, architecture, quantizer, layout, version."""

    @property
    def identity_digest(self) -> str:
        """SHA-256 of the identity: the store's name."""

    @property
    def generation(self) -> int:
        """Grows with each update of the store."""

    @property
    def record_count(self) -> int:
        """Number of records."""

    @property
    def records_bytes(self) -> int:
        """Size of the file of records."""

    @property
    def sections(self) -> Sequence[Section]:
        """Its runs of records, in the order of their ids."""


class ServedStore(Protocol):
    """A store that is open. Its index is its name towards the reader for as long as it is served."""

    @property
    def manifest(self) -> Manifest:
        """Its validated manifest."""

    @property
    def preload(self) -> bool:
        """Whether the whole store is read ahead."""

    @property
    def descriptor(self) -> int:
        """What its records are read from."""

    @property
    def alignment(self) -> int:
        """Of offsets, lengths and addresses of reads, in bytes."""

    def close(self) -> None:
        """Close its files; only of a store that the reader has not got."""


class Reader(Protocol):
    """The reader thread as seen from the event loop and the metrics thread. It owns the stores it was made with."""

    @property
    def generation(self) -> int:
        """Random number of this run of the daemon: what clients mapped under another one is void."""

    @property
    def engine(self) -> str:
        """The engine that runs: ``uring`` or ``threads``."""

    @property
    def direct_io(self) -> str:
        """How reads are done in fact: ``direct``, ``buffered`` or ``mixed``."""

    @property
    def policy(self) -> str:
        """Replacement policy of the cache."""

    @property
    def registered_buffers(self) -> bool:
        """Whether the kernel holds the bounce pool registered (memlock allows it)."""

    @property
    def setup_flags(self) -> tuple[str, ...]:
        """Features of the engine that this kernel has."""

    def start(self) -> None:
        """Allocate, compile if needed, start; returns when the loop runs. Raises DaemonError."""

    def open_session(self, request: SessionRequest) -> OpenedSession:
        """Thread-safe, blocks for milliseconds at most. Raises DaemonError when no session can be made."""

    def close_session(self, index: int) -> None:
        """Thread-safe. Frees the session's grace holds at once."""

    def grant_blocks(self, index: int, count: int) -> list[list[int]]:
        """KV block ids for a session, as [first, count] ranges. Thread-safe. Raises Refusal."""

    def release_blocks(self, index: int, ranges: list[list[int]]) -> Callable[[], bool]:
        """Begin to take KV blocks back; what is returned says whether nothing names them any more (a step, a write),
        and is to be called until it does. Both are thread-safe, return at once, and raise Refusal.
        """

    def snapshot(self) -> Stats:
        """Thread-safe, at any time between start and stop; never stops the reader."""

    def begin_release(self) -> int | None:
        """Start to give one cache segment back: its first slot; None at the least. Thread-safe, as all of these."""

    def release_settled(self, first_slot: int) -> bool:
        """Its records are out of the directories and past grace: sessions may be told to unmap it."""

    def finish_release(self, first_slot: int) -> int:
        """Nobody maps it any more: drop it; its bytes."""

    def grow(self) -> AddedSegment | None:
        """Take the segment that was released last again; None where nothing is missing. Raises SegmentError."""

    def missing_bytes(self) -> int:
        """How far the cache is below its budget."""

    def review_quarantine(self) -> int:
        """Let records go that were quarantined for long enough; how many. Thread-safe."""

    def set_tenants(self, tenants: Sequence[TenantConfig]) -> None:
        """These are the tenants from now on. Thread-safe."""

    def add_store(self, fresh: Any) -> int:
        """Serve one more store, as opened by whoever opened the first: its index. Thread-safe. Raises Refusal."""

    def remove_store(self, index: int) -> None:
        """Serve a store no more, whose sessions have ended. Thread-safe. Raises Refusal."""

    def replace_store(self, index: int, fresh: Any) -> None:
        """Serve another generation of a store, as opened by whoever opened the first. Thread-safe. Raises Refusal."""

    def hot_records(self) -> list[HotRecords]:
        """What is resident of each store, and what :meth:`warm` has not read yet. Thread-safe; takes a while."""

    def warm(self, hot: Sequence[HotRecords]) -> int:
        """Read records of the served stores when nothing else is to be done; how many. Thread-safe."""

    def echo(self) -> None:
        """Return once the loop took note of this call: it turns, and hears its doorbell. Raises DaemonError."""

    def progress(self) -> tuple[int, bool]:
        """A count that grows with each unit of data-path progress, and whether anything is in flight."""

    def begin_drain(self) -> None:
        """Take no more requests from the rings; what is in flight ends."""

    def stop(self) -> None:
        """Reap everything in flight, join the thread, unmap, close the stores. Idempotent."""
