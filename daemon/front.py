"""The door of the control plane: who knocks decides which private server answers.

gRPC does not show a handler the credentials of a Unix peer. So this side owns the public socket, reads them from each
connection, and forwards bytes to the server of that role. It never looks into the bytes.
"""

import asyncio
import contextlib
import logging
import socket
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from strataflux.daemon.access import ADMIN, READER, peer_of, role_of

__all__ = ["ControlFront"]

_LOG: Final = logging.getLogger(__name__)
_CHUNK_BYTES: Final = 64 * 1024
_MAX_CONNECTIONS: Final = {ADMIN: 16, READER: 48}
"""Apart, so that whoever may only read cannot keep an administrator out."""
_LAST_WORDS_SECONDS: Final = 0.2


class ControlFront:
    """Takes over ``listener``. Pairs: ``start`` / ``close``. Event loop only."""

    def __init__(self, listener: socket.socket, servers: Mapping[str, Path]) -> None:
        # fixed after construction
        self._listener = listener
        self._servers = servers
        # event loop only
        self.connections: Counter[str] = Counter({ADMIN: 0, READER: 0, "refused": 0})
        """Connections so far, by role; ``refused`` for those beyond the bound."""
        self._live: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Take connections from now on."""
        # The name belongs to the runtime folder or to the service manager; Python 3.13 would remove it by itself.
        keep_name: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
        self._server = await asyncio.start_unix_server(
            self._serve, sock=self._listener, limit=_CHUNK_BYTES, **keep_name
        )

    async def close(self) -> None:
        """Stop listening and cut every connection. Idempotent."""
        if self._server is not None:
            self._server.close()
        if self._tasks:
            # The servers behind have ended by now: what they said last is still on its way.
            await asyncio.wait(list(self._tasks), timeout=_LAST_WORDS_SECONDS)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        self._listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            role = role_of(peer_of(writer.get_extra_info("socket")))
            if self._live[role] >= _MAX_CONNECTIONS[role]:
                self.connections["refused"] += 1
                return
            self.connections[role] += 1
            self._live[role] += 1
            try:
                await self._forward(role, reader, writer)
            finally:
                self._live[role] -= 1
        except OSError as error:
            _LOG.debug("control: a connection ended: %s", error)
        except asyncio.CancelledError:
            _LOG.debug("control: a connection was cut at the stop")
        finally:
            self._tasks.discard(task)
            await _close(writer)

    async def _forward(self, role: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_unix_connection(str(self._servers[role]), limit=_CHUNK_BYTES)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, back_writer))
                both.create_task(_pump(back_reader, writer))
        except* OSError as errors:
            _LOG.debug("control: a connection ended: %s", errors.exceptions[0])
        finally:
            await _close(back_writer)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copy until the source ends, then end the sink. Holds one chunk; a slow sink slows the source."""
    while chunk := await source.read(_CHUNK_BYTES):
        sink.write(chunk)
        await sink.drain()
    if sink.can_write_eof():
        sink.write_eof()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError, asyncio.CancelledError):
        await writer.wait_closed()
