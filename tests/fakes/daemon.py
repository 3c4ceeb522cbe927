"""A daemon inside the test's process: real sockets, real memfds, one Python thread, and a script instead of a disk.

It keeps the daemon's half of proto/FORMAT.md, slowly and in the plainest way, so that the client's half can be tested
without the service. Every public method runs in the fake's thread and returns when it is done, so a test needs no
waiting: publish, then look up. ``sleeping`` is always set, so each step begun rings the doorbell.
"""

import contextlib
import ctypes
import os
import queue
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from strataflux.proto import layout, messages
from strataflux.proto.messages import Refuse, SegmentInfo, TableInfo
from strataflux.proto.ring import Ring
from strataflux.proto.runtime import ATTACH_SOCKET
from strataflux.proto.segment import Segment, create
from strataflux.proto.store_format import StoreManifest
from tests.fakes.kv import FakeKv, wake_sleepers
from tests.fakes.session import FakeSession, Request, bump_and_look, load_word, publish_word, record_bytes, store_word

T = TypeVar("T")

_POLL_SECONDS = 0.001


class FakeDaemon:
    """Serves ``manifests`` under ``folder`` until :meth:`die` or the end of the ``with`` block."""

    def __init__(
        self,
        folder: Path,
        manifests: Sequence[StoreManifest],
        *,
        generation: int = 1,
        layout_version: int = layout.LAYOUT_VERSION,
        capacity_bytes: int = layout.SEGMENT_MIN_BYTES,
        range_segments: int = 2,
        ring_log2: int = layout.RING_LOG2_MIN,
    ) -> None:
        # fixed after construction
        self.path = folder / ATTACH_SOCKET
        self.manifests = list(manifests)
        self.generation = generation
        self.layout_version = layout_version
        self.capacity_bytes = capacity_bytes
        self.ring_log2 = ring_log2
        self._stamps_count = range_segments * layout.SEGMENT_MIN_BYTES // layout.SLOT_UNIT_BYTES
        self._page = create("fake-daemon", layout.PAGE_HEADER_BYTES, reserve=False)
        self._write_header(self._page, layout.DAEMON_PAGE, layout.DAEMON_MAGIC, 0)
        self._directories = [
            create("fake-directory", layout.round_up(4 * m.record_count, layout.PAGE_HEADER_BYTES), reserve=False)
            for m in manifests
        ]
        self._doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # the fake's thread only; tests may set the script's switches before they act
        self.fill_when_awaited = self.hold_puts = False
        self.put_result = layout.PUT_ACCEPTED
        self.cache_puts = True  # records are resident as soon as their block is put
        self.drop_requests = self.die_when_awaited = False
        self.refuse_next: Refuse | None = None
        # changes a welcome, or the descriptors beside it, before they are sent
        self.tamper: Callable[[messages.Welcome, list[int]], messages.Message] = lambda welcome, _: welcome
        self.sessions: list[FakeSession] = []
        self.doorbells = 0
        self._segments: dict[int, Segment] = {}
        self._next_unit = 0
        self._requests: list[Request] = []
        self._numbers = 100
        self._commands: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._running = True
        self._add_segment(0)
        store_word(self._page.address + layout.offset_of(layout.DAEMON_PAGE, "sleeping"), 1)
        self.set_clock(1)
        self._listener = self._listen()
        self._thread = threading.Thread(target=self._run, name="fake-daemon", daemon=True)
        self._thread.start()

    # --- what tests do -----------------------------------------------------------------------------------------------

    def call(self, action: Callable[[], T]) -> T:
        """Run ``action`` in the fake's thread and return what it returns."""
        future: Future[T] = Future()
        self._commands.put((future, action))
        os.eventfd_write(self._wake, 1)
        return future.result()

    def publish(self, table: int, *oids: int) -> list[int]:
        """Put records into slots and their directory entries in place; the slot numbers."""
        return self.call(lambda: [self._fill(table, oid) for oid in oids])

    def write_entry(self, table: int, oid: int, value: int) -> None:
        """Store any value into a directory entry."""
        self.call(lambda: publish_word(self._directories[table].address + 4 * oid, value))

    def take_puts(self) -> int:
        """Settle all announced puts now; how many."""
        return self.call(self._take_puts)

    def take_requests(self) -> list[Request]:
        """What clients asked for since the last call."""

        def action() -> list[Request]:
            self._drain()
            taken, self._requests = self._requests, []
            return taken

        return self.call(action)

    def fence(self) -> None:
        """Set ``fenced`` for every session."""
        self.call(self._fence)

    def retire(self, first_slot: int) -> None:
        """Ask clients to unmap a segment (its entries are the test's business)."""
        self.call(lambda: self._broadcast(messages.SegmentRetiring(first_slot)))

    def add_segment(self, first_slot: int) -> None:
        """Make the cache larger; later records go there."""

        def action() -> None:
            segment = self._add_segment(first_slot)
            self._broadcast(messages.SegmentsAdded([SegmentInfo(first_slot, segment.size)]), [segment])

        self.call(action)

    def tell(self, message: messages.Message) -> None:
        """Send a message to every session."""
        self.call(lambda: self._broadcast(message))

    def hang_up(self) -> None:
        """End every session, without a fence and without an end of the daemon."""
        self.call(self._close_sessions)

    def die(self) -> None:
        """Stop at once, as if killed: sockets close, memory stays as it is. Idempotent."""
        if self._thread.is_alive():
            self.call(self._stop)
            self._thread.join()

    def stamp(self, session: int, slot: int) -> int:
        """What a session stored as last use of a slot."""
        at = self.sessions[session]
        return load_word(at.page.address + at.geometry.stamps_offset + 4 * slot)

    def set_clock(self, clock: int) -> None:
        """Move the daemon's clock."""
        store_word(self._page.address + layout.offset_of(layout.DAEMON_PAGE, "clock"), clock)

    def word(self, session: int, name: str) -> int:
        """A word of a session's page, as the daemon sees it."""
        page = self.sessions[session].page.view(layout.SESSION_PAGE)
        return int(page[name][0])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.die()

    # --- the fake's thread -------------------------------------------------------------------------------------------

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        listener.bind(os.fspath(self.path))
        listener.listen()
        for source in (listener.fileno(), self._doorbell, self._wake):
            self._selector.register(source, selectors.EVENT_READ)
        return listener

    def _run(self) -> None:
        while self._running:
            ready = {key.fd for key, _ in self._selector.select(self._timeout())}
            for eventfd in ready & {self._doorbell, self._wake}:
                os.eventfd_read(eventfd)
                self.doorbells += eventfd == self._doorbell
            if self._listener.fileno() in ready:
                self._accept()
            for session in [s for s in self.sessions if s.connection.fileno() in ready]:
                self._read(session)
            awaited = any(load_word(s.page_at("awaiting")) for s in self.sessions)
            if self.fill_when_awaited and awaited:
                self._drain()
            if not self.hold_puts:
                self._take_puts()
            if self.die_when_awaited and awaited:
                self._stop()
            self._obey()

    def _timeout(self) -> float | None:
        busy = any(s.inside() or load_word(s.page_at("awaiting")) for s in self.sessions)
        putting = not self.hold_puts and any(s.kv for s in self.sessions)
        return _POLL_SECONDS if putting or (busy and (self.fill_when_awaited or self.die_when_awaited)) else None

    def _obey(self) -> None:
        while not self._commands.empty():
            future, action = self._commands.get()
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        received = messages.receive(connection)
        if received is None or not isinstance(received[0], messages.Hello):
            connection.close()
            return
        refusal = self._refusal(received[0])
        if refusal is not None:
            messages.send(connection, refusal)
            connection.close()
            return
        self._open(connection, received[0])

    def _refusal(self, hello: messages.Hello) -> Refuse | None:
        refusal, self.refuse_next = self.refuse_next, None
        if refusal is not None:
            return refusal
        if hello.layout != self.layout_version:
            found, expected = f"layout version {hello.layout}", f"layout version {self.layout_version}"
            return Refuse("layout", found, expected, "upgrade the older side")
        if hello.largest_set_bytes > self.capacity_bytes:
            found = f"a set of {hello.largest_set_bytes} bytes"
            return Refuse("too_large", found, f"at most {self.capacity_bytes}", "raise weight_bytes")
        unknown = {s.digest for s in hello.stores} - {m.identity_digest for m in self.manifests}
        if unknown:
            return Refuse("identity", f"store {sorted(unknown)[0][:12]}", "a store that is served", "add it")
        return None

    def _open(self, connection: socket.socket, hello: messages.Hello) -> None:
        self._numbers += 1
        kv = None if hello.kv is None else FakeKv.make(hello.kv)
        geometry = layout.session_geometry(self.ring_log2, self._stamps_count, kv.block_bytes if kv else 0)
        view = create("fake-view", layout.PAGE_HEADER_BYTES, reserve=False)
        page = create("fake-session", geometry.total_bytes, reserve=False)
        self._write_header(view, layout.SESSION_VIEW, layout.VIEW_MAGIC, self._numbers)
        self._write_header(page, layout.SESSION_PAGE, layout.SESSION_MAGIC, self._numbers)
        tail = page.address + layout.offset_of(layout.SESSION_PAGE, "ring_tail")
        head = view.address + layout.offset_of(layout.SESSION_VIEW, "ring_head")
        consumer = Ring(page.address + geometry.ring_offset, self.ring_log2, tail, head).consumer()
        session = FakeSession(self._numbers, connection, hello, view, page, geometry, consumer, kv)
        self.sessions.append(session)
        self._selector.register(connection.fileno(), selectors.EVENT_READ)
        self._welcome(session)

    def _welcome(self, session: FakeSession) -> None:
        at = [[m.identity_digest for m in self.manifests].index(s.digest) for s in session.hello.stores]
        tables = [
            TableInfo(n, "weight", m.identity_digest, m.generation, m.record_count)
            for n, m in enumerate(self.manifests[i] for i in at)
        ]
        kv_directories = []
        if session.kv is not None:
            tables.append(TableInfo(len(tables), session.kv.geometry.kind, "", 0, session.kv.records))
            kv_directories.append(session.kv.directory)
        segments = [SegmentInfo(first, segment.size) for first, segment in self._segments.items()]
        shared = [self._page, session.view]
        rest = [*(self._directories[i] for i in at), *kv_directories, *self._segments.values()]
        welcome = messages.Welcome(
            self.layout_version,
            session.number,
            self.generation,
            tables,
            segments,
            self.ring_log2,
            self._stamps_count,
            session.kv.block_bytes if session.kv else 0,
            "fake",
            "buffered",
        )
        read_only = [s.read_only_descriptor() for s in (*shared, *rest)]
        descriptors = [*read_only[:2], session.page.descriptor, self._doorbell, *read_only[2:]]
        message = self.tamper(welcome, descriptors)
        messages.send(session.connection, message, descriptors)
        for descriptor in read_only:
            os.close(descriptor)

    def _read(self, session: FakeSession) -> None:
        with contextlib.suppress(ConnectionError):
            received = messages.receive(session.connection)
            if received is not None:
                session.received.append(received[0])
                if session.kv and isinstance(received[0], messages.KvReserve | messages.KvRelease):
                    messages.send(session.connection, session.kv.answer(received[0]))
                return
        self._close(session)

    def _close(self, session: FakeSession) -> None:
        self._selector.unregister(session.connection.fileno())
        session.connection.close()
        session.view.close()
        session.page.close()
        if session.kv is not None:
            session.kv.directory.close()
        self.sessions.remove(session)

    def _close_sessions(self) -> None:
        for session in list(self.sessions):
            self._close(session)

    def _fence(self) -> None:
        for session in self.sessions:
            store_word(session.view_at("fenced"), 1)

    def _broadcast(self, message: messages.Message, segments: Sequence[Segment] = ()) -> None:
        for session in self.sessions:
            descriptors = [segment.read_only_descriptor() for segment in segments]
            messages.send(session.connection, message, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)

    def _add_segment(self, first_slot: int) -> Segment:
        self._segments[first_slot] = create("fake-cache", layout.SEGMENT_MIN_BYTES, reserve=False)
        self._next_unit = first_slot
        return self._segments[first_slot]

    def _drain(self) -> None:
        for session in self.sessions:
            for payload in session.consumer.take(1 << self.ring_log2):
                request = Request(
                    session.number,
                    payload >> layout.TABLE_SHIFT & 0xFF,
                    payload & layout.OID_MASK,
                    payload >> layout.SCORE_SHIFT & 0xFF,
                    bool(payload & layout.PREFETCH),
                )
                if self.drop_requests:
                    continue
                self._requests.append(request)
                if not self.fill_when_awaited:
                    continue
                if session.kv is None or request.table < len(session.hello.stores):
                    self._fill(request.table, request.oid)
                elif session.kv.has(request.oid):
                    self._place_kv(session.kv, request.oid)

    def _take_puts(self) -> int:
        taken = 0
        for session in self.sessions:
            kv = session.kv
            place = partial(self._place_kv, kv) if kv and self.cache_puts else lambda _: None
            while kv and kv.take_put(session.page, session.view, session.geometry, self.put_result, place):
                taken += 1
        return taken

    def _place_kv(self, kv: FakeKv, oid: int) -> None:
        self._place(kv.directory, oid, kv.record(oid))

    def _fill(self, table: int, oid: int) -> int:
        return self._place(self._directories[table], oid, record_bytes(self.manifests[table], oid))

    def _place(self, directory: Segment, oid: int, record: bytes) -> int:
        units = layout.slot_bytes(len(record)) // layout.SLOT_UNIT_BYTES
        if self._next_unit % layout.UNITS_PER_PAGE + units > layout.UNITS_PER_PAGE:
            self._next_unit = layout.round_up(self._next_unit, layout.UNITS_PER_PAGE)
        slot, self._next_unit = self._next_unit, self._next_unit + units
        first = max(f for f in self._segments if f <= slot)
        target = self._segments[first].address + (slot - first) * layout.SLOT_UNIT_BYTES
        ctypes.memmove(target, record, len(record))
        publish_word(directory.address + 4 * oid, slot + 1)
        for session in self.sessions:
            fills = session.view_at("fills")
            if bump_and_look(fills, session.page_at("awaiting")):
                wake_sleepers(fills)
        return slot

    def _write_header(self, segment: Segment, page: np.dtype[np.void], magic: int, number: int) -> None:
        header = segment.view(page)["header"]
        header["magic"], header["layout"], header["bytes"] = magic, layout.LAYOUT_VERSION, segment.size
        header["generation"], header["id"] = self.generation, number

    def _stop(self) -> None:
        self._running = False
        self._close_sessions()
        self._selector.close()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        for segment in (self._page, *self._directories, *self._segments.values()):
            segment.close()
        os.close(self._doorbell)
