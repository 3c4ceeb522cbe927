"""Attach to a daemon: connect, say hello, check and map what it sends (proto/FORMAT.md, "Attach").

Nothing that arrives is believed before it was compared with what was asked for and with the limits of the layout. A
failure at any point leaves neither descriptor nor map behind.
"""

import contextlib
import os
import pwd
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from strataflux.client import attach_block
from strataflux.client.attach_block import Mapped
from strataflux.client.errors import BusyError, DaemonUnavailableError, MisuseError, RefusedError
from strataflux.proto import layout, messages
from strataflux.proto.errors import MessageError
from strataflux.proto.messages import KvGeometry, SegmentInfo, StoreRef, TableInfo, Welcome
from strataflux.proto.segment import Segment, map_descriptor
from strataflux.proto.store_format import StoreManifest

__all__ = [
    "SERVICE_USER",
    "WELCOME_SECONDS",
    "AttachRequest",
    "Attachment",
    "attach",
    "map_segments",
]

WELCOME_SECONDS: Final = 10.0
SERVICE_USER: Final = "strataflux"
_FIRST_TABLE: Final = 4
"""Descriptors of a welcome before the directories: daemon page, session view, session segment, doorbell."""


@dataclass(frozen=True)
class AttachRequest:
    """What a session asks for, the same at each attachment."""

    socket_path: Path
    stores: tuple[StoreManifest | StoreRef, ...]
    selections_per_step: int
    largest_set_bytes: int
    client: str
    kv: KvGeometry | None = None

    def hello(self) -> messages.Hello:
        """The first message."""
        refs = [s if isinstance(s, StoreRef) else StoreRef(s.identity_digest, s.identity) for s in self.stores]
        return messages.Hello(
            layout.LAYOUT_VERSION, self.client, refs, self.selections_per_step, self.largest_set_bytes, self.kv
        )

    @property
    def kv_records(self) -> int:
        """Records of the KV table; 0 without KV."""
        return 0 if self.kv is None else self.kv.max_blocks * self.kv.groups_per_block

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of a KV block's records; 0 without KV."""
        return 0 if self.kv is None else self.kv.groups_per_block * self.kv.record_bytes


class Attachment:
    """One attachment: its connection, its maps and their attach block.

    Pairs: :func:`attach` / :meth:`close`. ``show``, ``hide`` and ``close`` change what compiled code reaches, so they
    are for the moments between steps.
    """

    def __init__(self, connection: socket.socket, welcome: Welcome, maps: list[Segment], doorbell: int) -> None:
        # fixed after construction
        self.connection = connection
        self.welcome = welcome
        self._doorbell = doorbell
        self._maps = maps
        # whoever holds the moment between two steps
        self.segments: dict[int, Segment] = {}
        self.block = self._make_block()
        self._open = True
        # set by the thread that reads the connection
        self.filling = True
        self.ended = False

    def _make_block(self) -> attach_block.Block:
        pages, directories = self._maps[:3], self._maps[3:]
        geometry = _geometry(self.welcome)
        addresses = (pages[0].address, pages[1].address, pages[2].address)
        block = attach_block.make_block(addresses, self.welcome.ring_log2, geometry)
        for table, directory in zip(self.welcome.tables, directories, strict=True):
            attach_block.set_table(block, table.number, directory.address, table.records, kv=not table.store)
        return block

    def show(self, segments: dict[int, Segment]) -> None:
        """Make more cache segments, by first slot, reachable."""
        if not self._open:
            for segment in segments.values():
                segment.close()
            return
        self.segments.update(segments)
        self._set_bases()

    def hide(self, first_slot: int) -> None:
        """Unmap a retiring segment and tell the daemon; nothing to do if it is not mapped."""
        segment = self.segments.pop(first_slot, None)
        if segment is None:
            return
        self._set_bases()
        segment.close()
        with contextlib.suppress(OSError):  # a connection that broke gives the segment back as well
            messages.send(self.connection, messages.SegmentDropped(first_slot))

    def _set_bases(self) -> None:
        mapped = [Mapped(first, segment.address, segment.size) for first, segment in self.segments.items()]
        attach_block.set_bases(self.block, mapped)

    def ring_doorbell(self) -> None:
        """Wake the daemon; without effect when it is gone."""
        if self.filling:
            with contextlib.suppress(OSError):
                os.eventfd_write(self._doorbell, 1)

    def hang_up(self) -> None:
        """End the connection; whoever reads it sees that at once."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection and drop all maps. Idempotent. Also right in a forked child, where no map exists: the
        parent's connection is not touched.
        """
        if not self._open:
            return
        self._open = False
        self.filling = False
        self.block[attach_block.ENABLED] = 0
        self.connection.close()
        os.close(self._doorbell)
        for segment in (*self._maps, *self.segments.values()):
            segment.close()
        self.segments.clear()


def attach(request: AttachRequest) -> Attachment:
    """Connect and become a session.

    Raises:
        DaemonUnavailableError: nobody answers, or whoever does is not trusted.
        RefusedError: the daemon said no.
        ContractError: it sent what this layout version does not allow.
    """
    connection = _connect(request.socket_path)
    try:
        return _greet(connection, request)
    except OSError as error:
        connection.close()
        raise _unavailable(request.socket_path, f"no welcome ({error})", "is the daemon overloaded?") from error
    except BaseException:
        connection.close()
        raise


def map_segments(infos: Sequence[SegmentInfo], descriptors: list[int], stamps_count: int) -> dict[int, Segment]:
    """Map cache segments read-only; takes the descriptors over, on error, too.

    Raises:
        ContractError: a segment outside the address range, or one that cannot be mapped.
    """
    waiting, mapped = list(descriptors), dict[int, Segment]()
    try:
        if len(infos) != len(descriptors):
            raise _bad("segments", f"{len(descriptors)} descriptors", f"{len(infos)}")
        for info in infos:
            _check_segment(info, stamps_count)
            mapped[info.first_slot] = map_descriptor(waiting.pop(0), info.bytes, writable=False)
    except BaseException:
        _close_all(waiting, list(mapped.values()))
        raise
    return mapped


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(WELCOME_SECONDS)
        connection.connect(os.fspath(path))
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except OSError as error:
        connection.close()
        raise _unavailable(
            path, str(error.strerror or error), "start stratafluxd, or pass its runtime folder"
        ) from error
    if uid not in _trusted_uids():
        connection.close()
        raise _unavailable(path, f"a server of uid {uid}", f"connect to one of uid {sorted(_trusted_uids())}")
    return connection


def _unavailable(path: Path, found: str, remedy: str) -> DaemonUnavailableError:
    return DaemonUnavailableError(path, found, "a stratafluxd that answers", remedy)


def _trusted_uids() -> set[int]:
    trusted = {0, os.geteuid()}
    with contextlib.suppress(KeyError):
        trusted.add(pwd.getpwnam(SERVICE_USER).pw_uid)
    return trusted


def _greet(connection: socket.socket, request: AttachRequest) -> Attachment:
    try:
        hello = request.hello()
        messages.send(connection, hello)
    except MessageError as error:
        raise MisuseError("stores", error.found, error.expected, error.remedy) from error
    answer = messages.receive(connection)
    if answer is None:
        raise _unavailable(request.socket_path, "a hang-up instead of a welcome", "see the log of the service")
    welcome, descriptors = answer
    if isinstance(welcome, messages.Refuse):
        _close_all(descriptors, [])
        kind = BusyError if welcome.code == "busy" else RefusedError
        raise kind(f"attach ({welcome.code})", welcome.found, welcome.expected, welcome.remedy)
    if not isinstance(welcome, Welcome):
        _close_all(descriptors, [])
        raise _bad("answer to hello", welcome.type, "welcome or refuse")
    attachment = _map(connection, welcome, descriptors, request)
    connection.settimeout(None)
    return attachment


def _map(connection: socket.socket, welcome: Welcome, descriptors: list[int], request: AttachRequest) -> Attachment:
    waiting, maps = list(descriptors), list[Segment]()
    try:
        _check_welcome(welcome, len(descriptors), request)
        maps.append(map_descriptor(waiting.pop(0), layout.PAGE_HEADER_BYTES, writable=False))
        maps.append(map_descriptor(waiting.pop(0), layout.PAGE_HEADER_BYTES, writable=False))
        maps.append(map_descriptor(waiting.pop(0), _geometry(welcome).total_bytes, writable=True))
        _check_headers(maps, welcome)
        doorbell = waiting.pop(0)
        try:
            for table in welcome.tables:
                size = layout.round_up(4 * table.records, layout.PAGE_HEADER_BYTES)
                maps.append(map_descriptor(waiting.pop(0), size, writable=False))
            segments, waiting = map_segments(welcome.segments, waiting, welcome.stamps_count), []
        except BaseException:
            os.close(doorbell)
            raise
    except BaseException:
        _close_all(waiting, maps)
        raise
    attachment = Attachment(connection, welcome, maps, doorbell)
    attachment.show(segments)
    return attachment


def _close_all(descriptors: list[int], maps: list[Segment]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    for segment in maps:
        segment.close()


def _bad(subject: str, found: str, expected: str) -> MessageError:
    return MessageError(subject, found, expected, "is the other side strataflux of the same layout version?")


def _geometry(welcome: Welcome) -> layout.SessionGeometry:
    return layout.session_geometry(welcome.ring_log2, welcome.stamps_count, welcome.staging_block_bytes)


def _check_welcome(welcome: Welcome, descriptors: int, request: AttachRequest) -> None:
    if welcome.layout != layout.LAYOUT_VERSION:
        raise _bad("welcome.layout", str(welcome.layout), str(layout.LAYOUT_VERSION))
    if not layout.RING_LOG2_MIN <= welcome.ring_log2 <= layout.RING_LOG2_MAX:
        expected = f"{layout.RING_LOG2_MIN} … {layout.RING_LOG2_MAX}"
        raise _bad("welcome.ring_log2", str(welcome.ring_log2), expected)
    units_limit = layout.MAX_SEGMENTS * layout.SEGMENT_MAX_BYTES // layout.SLOT_UNIT_BYTES
    if welcome.stamps_count > units_limit or welcome.staging_block_bytes > layout.SEGMENT_MAX_BYTES:
        found = f"{welcome.stamps_count} stamps, {welcome.staging_block_bytes} bytes of staging"
        raise _bad("welcome", found, f"at most {units_limit} stamps, {layout.SEGMENT_MAX_BYTES} bytes")
    expected_descriptors = _FIRST_TABLE + len(welcome.tables) + len(welcome.segments)
    if descriptors != expected_descriptors or len(welcome.segments) > layout.MAX_SEGMENTS:
        raise _bad("welcome", f"{descriptors} descriptors", str(expected_descriptors))
    if welcome.staging_block_bytes != request.kv_block_bytes:
        raise _bad("welcome.staging_block_bytes", str(welcome.staging_block_bytes), str(request.kv_block_bytes))
    count = len(request.stores)
    if len(welcome.tables) != count + (request.kv is not None):
        raise _bad("welcome.tables", str(len(welcome.tables)), str(count + (request.kv is not None)))
    for number, (table, store) in enumerate(zip(welcome.tables[:count], request.stores, strict=True)):
        _check_table(number, table, store)
    if request.kv is not None:
        last, records = welcome.tables[count], request.kv_records
        if (last.number, last.kind, last.store, last.records) != (count, request.kv.kind, "", records):
            raise _bad("KV table", str(last), f"number {count}, {request.kv.kind}, {records} records")
    _check_apart(welcome.segments)


def _check_table(number: int, table: TableInfo, store: StoreManifest | StoreRef) -> None:
    digest = store.digest if isinstance(store, StoreRef) else store.identity_digest
    if (table.number, table.store) != (number, digest) or not 0 < table.records <= layout.MAX_OID:
        raise _bad(f"table {number}", f"number {table.number}, store {table.store[:12]}…", f"store {digest[:12]}…")
    if isinstance(store, StoreManifest) and table.records != store.record_count:
        raise RefusedError(
            f"table {number}",
            f"{table.records} records at the daemon",
            f"the manifest's {store.record_count}",
            "serve the same store, or prepare the model again",
        )


def _check_segment(info: SegmentInfo, stamps_count: int) -> None:
    end = info.first_slot + info.bytes // layout.SLOT_UNIT_BYTES
    if (
        info.first_slot % (1 << attach_block.CHUNK_UNITS_LOG2)
        or info.bytes % layout.CACHE_PAGE_BYTES
        or not 0 < info.bytes <= layout.SEGMENT_MAX_BYTES
        or end > stamps_count
    ):
        raise _bad("segment", f"{info.bytes} bytes at slot {info.first_slot}", f"whole pages below slot {stamps_count}")


def _check_apart(infos: Sequence[SegmentInfo]) -> None:
    end = 0
    for info in sorted(infos, key=lambda i: i.first_slot):
        if info.first_slot < end:
            raise _bad("segments", f"one at slot {info.first_slot} over another", "segments side by side")
        end = info.first_slot + info.bytes // layout.SLOT_UNIT_BYTES


def _check_headers(maps: list[Segment], welcome: Welcome) -> None:
    pages: list[tuple[np.dtype[np.void], int, int]] = [
        (layout.DAEMON_PAGE, layout.DAEMON_MAGIC, 0),
        (layout.SESSION_VIEW, layout.VIEW_MAGIC, welcome.session),
        (layout.SESSION_PAGE, layout.SESSION_MAGIC, welcome.session),
    ]
    for segment, (dtype, magic, number) in zip(maps, pages, strict=True):
        header: Any = segment.view(dtype)["header"][0]
        found = tuple(int(header[name]) for name in ("magic", "layout", "bytes", "generation", "id"))
        expected = (magic, layout.LAYOUT_VERSION, segment.size, welcome.generation, number)
        if found != expected:
            raise _bad("page header (magic, layout, bytes, generation, id)", str(found), str(expected))
