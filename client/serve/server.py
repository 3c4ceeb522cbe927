"""Serve and stop: the life of the server's process around its application."""

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette

from strataflux.client.serve.engine import Engine

__all__ = ["run"]

_CONNECTIONS = 256
_LAST_SECONDS = 5
"""After the engine stopped: for answers to leave."""


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
