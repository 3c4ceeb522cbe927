"""Listen, serve, and stop: the life of the server's process around its application."""

import asyncio
import os
import socket
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette

from strataflux.client.errors import MisuseError
from strataflux.client.serve.engine import Engine

__all__ = ["address_of", "listen", "run"]

_BACKLOG = 128
_CONNECTIONS = 256
_LAST_SECONDS = 5
"""After the engine stopped: for answers to leave."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound to ``host`` and ``port`` (0: any that is free).

    Raises:
        MisuseError: there is no such address here, or the port is in use or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(_BACKLOG)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise MisuseError(
            "--host and --port",
            f"{host}:{port} ({reason})",
            "an address of this machine with a free port",
            "choose another --port, or stop what listens there",
        ) from error
    return bound


def address_of(bound: socket.socket) -> str:
    """Where to find it: ``http://127.0.0.1:8000``."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(app: Starlette, engine: Engine, bound: socket.socket, ready: Callable[[], object]) -> None:
    """Serve until a signal; ``ready`` is called once requests are taken. ``engine`` is started and stopped here."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=_CONNECTIONS,
        timeout_graceful_shutdown=_LAST_SECONDS,
    )
    engine.start()
    try:
        asyncio.run(_Server(config, engine, ready).serve([bound]))
    finally:
        engine.stop()


class _Server(uvicorn.Server):
    """Says when it is ready, and ends streams before it waits for connections to close."""

    def __init__(self, config: uvicorn.Config, engine: Engine, ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._engine = engine
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.begin_stop()
        await super().shutdown(sockets)
