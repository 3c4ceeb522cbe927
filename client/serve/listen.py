"""A socket to listen on, or the reason why not."""

import os
import socket
from typing import Final

from strataflux.client.errors import MisuseError

__all__ = ["address_of", "listen"]

_BACKLOG: Final = 128


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
            "choose another --port or --host, or stop what listens there",
        ) from error
    return bound


def address_of(bound: socket.socket) -> str:
    """Where to find it: ``http://127.0.0.1:8000``."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
