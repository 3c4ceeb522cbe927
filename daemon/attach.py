"""The attach socket: one connection a client, whose life is the session's life.

States of a connection, and what moves it:

    WAITING    accepted, no hello yet            → OPENING by a hello that is admitted; CLOSED by anything else, or time
    OPENING    the reader makes the session      → ATTACHED when descriptors are sent; CLOSED if the client went away
    ATTACHED   the session lives                 → CLOSED by hang-up, end of the process, a malformed message, our stop
    CLOSED     nothing of it is left but, for a moment, the call that frees the session

Everything runs on the event loop and never blocks: one message per wake-up, sends that do not fit end the session, and
the reader is called from worker threads.
"""

import asyncio
import contextlib
import enum
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from strataflux.daemon.access import Peer, peer_of, pidfd_of
from strataflux.daemon.admission import Admission
from strataflux.daemon.attached import AttachCounters, AttachedClient
from strataflux.daemon.errors import DaemonError, Refusal
from strataflux.daemon.interface import OpenedSession, Reader, SessionRequest
from strataflux.daemon.notices import SegmentNotices
from strataflux.daemon.quotas import Holder
from strataflux.daemon.refusals import limit_of, message_of
from strataflux.proto import layout, messages
from strataflux.proto.errors import ContractError, MessageError

__all__ = ["AttachServer", "State"]

_LOG: Final = logging.getLogger(__name__)
_PENDING_SHARE: Final = 2
"""Connections allowed for each session allowed: enough to be told the reason of a refusal, and bounded."""
_RETRY_SECONDS: Final = 1.0
_SETTLE_SECONDS: Final = 0.002

T = TypeVar("T")


class State(enum.Enum):
    """See the module's text."""

    WAITING = enum.auto()
    OPENING = enum.auto()
    ATTACHED = enum.auto()
    CLOSED = enum.auto()


class AttachServer:
    """Takes over ``listener``. Pairs: ``start`` / ``close``; ``stop_intake`` may come between. Event loop only."""

    def __init__(self, listener: socket.socket, reader: Reader, admission: Admission) -> None:
        # fixed after construction
        self.reader = reader
        self.kv_calls = asyncio.Semaphore(4)  # of five threads or more: a disk that hangs stops KV alone
        self._listener = listener
        # event loop only
        self.admission = admission
        self.counters = AttachCounters()
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._taking = False
        self.notices = SegmentNotices(lambda: self._connections)

    def start(self) -> None:
        """Take connections from now on."""
        self._taking = True
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    @property
    def clients(self) -> list[AttachedClient]:
        """The sessions that live."""
        return [c.attached for c in self._connections if c.attached is not None and c.state is State.ATTACHED]

    @property
    def tenant_sessions(self) -> Counter[str]:
        """How many sessions live, by tenant. Any thread."""
        return Counter(c.attached.tenant for c in list(self._connections) if c.attached is not None)

    @property
    def session_count(self) -> int:
        """How many sessions live. Any thread."""
        return self.counters.attached - self.counters.ended.total()

    @property
    def holders(self) -> list[Holder]:
        """What sessions, living or in the making, hold."""
        return [
            Holder(c.peer.uid, c.request.stores, c.request.tenant, c.request.kv is not None)
            for c in self._connections
            if c.request is not None
        ]

    def stop_intake(self) -> None:
        """Take no more connections and refuse what has not attached yet; tell the sessions that the end is near."""
        if not self._taking:
            return
        self._taking = False
        asyncio.get_running_loop().remove_reader(self._listener)
        for connection in list(self._connections):
            if connection.state is State.ATTACHED:
                connection.send(messages.Draining())
            else:
                connection.refuse(_DRAINING)

    def holds(self, store: int) -> bool:
        """Whether a session, living, in the making or just being freed, has a store."""
        return any(c.request is not None and store in c.request.stores for c in self._connections)

    def reattach(self, store: int, reason: str) -> int:
        """End the sessions of a store and have them attach again; how many."""
        using = [c for c in self._connections if c.state is State.ATTACHED and store in c.held_stores]
        for connection in using:
            connection.send(messages.Reattach(reason))
            connection.close("reattach")
        return len(using)

    async def close(self) -> None:
        """End every session and wait until the reader has let go of each."""
        self.stop_intake()
        for connection in list(self._connections):
            connection.close("stop")
        while self._tasks:
            await asyncio.gather(*self._tasks)
        self._listener.close()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a call to the reader to its end, whatever becomes of the connection that asked for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, connection: "_Connection") -> None:
        """The connection holds nothing any more."""
        self._connections.discard(connection)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors: the listener would wake us without end. Whoever waits is served after a pause.
            _LOG.error("attach: no connection can be accepted: %s; raise LimitNOFILE", error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            loop.call_later(_RETRY_SECONDS, self._resume)
            return
        accepted.setblocking(False)
        self.counters.accepted += 1
        try:
            peer = peer_of(accepted)
        except OSError:
            peer = None
        if peer is None or self._crowded(peer):
            self.counters.turned_away += 1
            accepted.close()
            return
        connection = _Connection(self, accepted, peer)
        self._connections.add(connection)
        connection.start()

    def _resume(self) -> None:
        if self._taking:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _crowded(self, peer: Peer) -> bool:
        settings = self.admission.settings
        of_peer = sum(c.peer.uid == peer.uid for c in self._connections)
        return (
            of_peer >= _PENDING_SHARE * settings.max_sessions_per_uid
            or len(self._connections) >= _PENDING_SHARE * settings.max_sessions
        )


_DRAINING: Final = Refusal(
    "draining", "stratafluxd", "a daemon that is stopping", "a running one", "attach again later"
)

_FAULT: Final = Refusal("limit", "session", "an internal error", "a session", "see the log of the service")


class _Connection:
    """One client. Event loop only."""

    def __init__(self, server: AttachServer, connected: socket.socket, peer: Peer) -> None:
        # fixed after construction
        self.peer = peer
        self._server = server
        self._socket = connected
        self._pidfd = pidfd_of(connected, peer)
        self._loop = asyncio.get_running_loop()
        self._calls = asyncio.Lock()
        # event loop only
        self.state = State.WAITING
        self.request: SessionRequest | None = None
        self.attached: AttachedClient | None = None
        self.segments: set[int] = set()
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def opening(self) -> bool:
        """Its session is in the making."""
        return self.state is State.OPENING

    @property
    def held_stores(self) -> tuple[int, ...]:
        """Indices of the stores of its session."""
        return self.attached.stores if self.attached is not None else ()

    def start(self) -> None:
        """Wait for the hello, but not for long."""
        self._loop.add_reader(self._socket, self._on_readable)
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self.close, "process_end")
        seconds = self._server.admission.settings.hello_seconds
        late = Refusal("limit", "hello", "none so far", f"one within {seconds:g} s", "say hello right after connecting")
        self._deadline = self._loop.call_later(seconds, self.refuse, late)

    def send(self, message: messages.Message, descriptors: list[int] | None = None) -> bool:
        """Send now, or end the connection: a client that does not read may not hold us up."""
        try:
            messages.send(self._socket, message, descriptors or [])
        except OSError as error:
            self.close("slow" if isinstance(error, BlockingIOError) else "hang_up")
            return False
        return True

    def refuse(self, refusal: Refusal) -> None:
        """Say why, and hang up."""
        if self.state is State.CLOSED:
            return
        self._server.counters.refused[refusal.code] += 1
        _LOG.info("attach: uid %d, process %d refused: %s", self.peer.uid, self.peer.pid, refusal)
        self.send(message_of(refusal))
        self.close("malformed" if refusal.code == "malformed" else "hang_up")

    def close(self, cause: str) -> None:
        """Hang up and free the session. Idempotent."""
        if self.state is State.CLOSED:
            return
        was_opening, self.state = self.state is State.OPENING, State.CLOSED
        self._server.notices.left(self)
        if self._deadline is not None:
            self._deadline.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        if self.attached is not None:
            self._server.counters.ended[cause] += 1
            _LOG.info("session %x of process %d ended: %s", self.attached.session_id, self.peer.pid, cause)
            self._server.run(self._free(self.attached.index))
        elif not was_opening:  # else _open frees it
            self._server.forget(self)

    def _on_readable(self) -> None:
        try:
            received = messages.receive(self._socket)
        except BlockingIOError:
            return
        except MessageError as error:
            self._malformed(error.found, error.expected)
            return
        except OSError:
            received = None
        except Exception:
            # A fault of ours in reading it; the client must not wait for it, nor keep us from the others.
            _LOG.exception("attach: a message of process %d could not be read", self.peer.pid)
            self._malformed("a message that could not be read", "a message of the attach protocol")
            return
        if received is None:
            self.close("hang_up")
            return
        message, descriptors = received
        for descriptor in descriptors:
            os.close(descriptor)
        if descriptors:
            self._malformed(f"{len(descriptors)} descriptors", "none: this side takes none")
        elif self.state is State.WAITING and isinstance(message, messages.Hello):
            self._on_hello(message)
        elif self.state is State.ATTACHED and isinstance(message, messages.KvReserve | messages.KvRelease):
            self._server.run(self._answer_kv(message))
        elif isinstance(message, messages.SegmentDropped) and self._server.notices.dropped(self, message.first_slot):
            pass
        else:
            self._malformed(f"{message.type} while {self.state.name.lower()}", "a message that fits the state")

    def _malformed(self, found: str, expected: str) -> None:
        self._server.counters.malformed += 1
        remedy = "is the other side strataflux of the same layout version?"
        self.refuse(Refusal("malformed", "message", found, expected, remedy))

    def _on_hello(self, hello: messages.Hello) -> None:
        try:
            request = self._server.admission.admit(hello, self.peer, self._server.holders)
        except Refusal as refusal:
            self.refuse(refusal)
            return
        self.request = request
        self.state = State.OPENING
        if self._deadline is not None:
            self._deadline.cancel()
        # Not read while the session is made: what the client says meanwhile waits in its socket.
        self._loop.remove_reader(self._socket)
        self._server.run(self._open(request, ascii(hello.client[:80])[1:-1]))

    async def _open(self, request: SessionRequest, client: str) -> None:
        try:
            opened = await asyncio.to_thread(self._server.reader.open_session, request)
        except (DaemonError, ContractError) as error:
            _LOG.warning("attach: no session for process %d: %s", self.peer.pid, error)
            self._end_opening(limit_of(error))
            return
        except Exception:
            # A fault of ours; the client must not wait for it.
            _LOG.exception("attach: no session for process %d", self.peer.pid)
            self._end_opening(_FAULT)
            return
        try:
            if self.state is State.CLOSED:
                await self._free(opened.index)
                return
            ids = (opened.index, opened.session_id)
            self.attached = AttachedClient(*ids, self.peer, client, request.stores, request.tenant)
            self._server.counters.attached += 1
            if self.send(self._welcome(opened), opened.descriptors):
                self.state = State.ATTACHED
                self.segments = {info.first_slot for info in opened.segments}
                self._server.notices.attached(self)
                self._loop.add_reader(self._socket, self._on_readable)
                _LOG.info("session %x: %s, uid %d, process %d", opened.session_id, client, request.uid, request.pid)
        finally:
            for descriptor in opened.descriptors:
                os.close(descriptor)

    async def _answer_kv(self, message: messages.KvReserve | messages.KvRelease) -> None:
        """Grant or take back blocks; a release is answered only when its ids may be granted again."""
        assert self.attached is not None
        index, reader = self.attached.index, self._server.reader
        answer: messages.Message
        try:
            if isinstance(message, messages.KvReserve):
                ranges = await self._call(reader.grant_blocks, index, message.blocks)
                answer = messages.KvReserved(message.request, ranges)
            else:
                settled = await self._call(reader.release_blocks, index, message.ranges)
                while not await self._call(settled):
                    await asyncio.sleep(_SETTLE_SECONDS)
                answer = messages.KvReleased(message.request)
        except Refusal as refusal:
            answer = message_of(refusal, message.request)
        except (DaemonError, OSError) as error:
            failed = Refusal("quota", "kv", str(error), "blocks", "see the log of the daemon")
            answer = message_of(failed, message.request)
        if self.state is State.ATTACHED:
            self.send(answer)

    async def _call(self, call: Callable[..., T], *arguments: Any) -> T:
        """Have a thread ask the reader about this session, unless that has ended. No client may hold more than one."""
        async with self._calls, self._server.kv_calls:
            if self.state is State.CLOSED:
                raise Refusal("limit", "session", "one that has ended", "one that lives", "attach again")
            return await asyncio.to_thread(call, *arguments)

    def _end_opening(self, refusal: Refusal) -> None:
        self.request = None
        if self.state is State.CLOSED:
            self._server.forget(self)
            return
        self.state = State.WAITING
        self.refuse(refusal)

    async def _free(self, index: int) -> None:
        with contextlib.suppress(DaemonError):  # a reader that died holds nothing any more
            async with self._calls:  # what was asked by its index comes before another session may have that
                await asyncio.to_thread(self._server.reader.close_session, index)
        self._server.forget(self)

    def _welcome(self, opened: OpenedSession) -> messages.Welcome:
        reader = self._server.reader
        return messages.Welcome(
            layout=layout.LAYOUT_VERSION,
            session=opened.session_id,
            generation=reader.generation,
            tables=opened.tables,
            segments=opened.segments,
            ring_log2=opened.ring_log2,
            stamps_count=opened.stamps_count,
            staging_block_bytes=opened.staging_block_bytes,
            engine=reader.engine,
            direct_io=reader.direct_io,
        )
