"""Serves the page and its data: two addresses, no other file, nothing to change anything with."""

import base64
import hashlib
import http.server
import json
import re
import socket
from functools import cached_property
from importlib.resources import files
from typing import Final

from strataflux.client.dashboard.sampler import Sampler
from strataflux.client.serve.errors import RequestError
from strataflux.client.serve.guard import check_host, is_loopback

__all__ = ["DashboardServer", "page"]

_TIMEOUT_SECONDS: Final = 10
_SCRIPT: Final = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


def page() -> bytes:
    """The page: one file with its style and its script in it, which names no other host."""
    return files("strataflux.client.dashboard").joinpath("page.html").read_bytes()


class DashboardServer(http.server.ThreadingHTTPServer):
    """``/`` and ``/state`` on a socket that listens already. Pairs: ``serve_forever`` / ``shutdown``, construction /
    ``server_close``.
    """

    daemon_threads = True

    def __init__(self, bound: socket.socket, sampler: Sampler) -> None:
        """Take ``bound`` over; ``sampler`` is started and stopped by whoever made it."""
        super().__init__(bound.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound
        # fixed after construction
        self.sampler = sampler
        self.page = page()
        self.loopback = is_loopback(str(bound.getsockname()[0]))

    @cached_property
    def policy(self) -> str:
        """What the page may do: run the script it came with, and ask this server. Client names are strangers' text."""
        scripts = [hashlib.sha256(script).digest() for script in _SCRIPT.findall(self.page)]
        allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in scripts)
        return (
            f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that went away: nothing to tell anybody."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: DashboardServer
    server_version = "strataflux"
    sys_version = ""
    timeout = _TIMEOUT_SECONDS

    def do_GET(self) -> None:
        """The page, or its data."""
        try:
            if self.server.loopback:
                check_host({"host": self.headers.get("Host", "")})
        except RequestError as error:
            self._answer(error.status, "application/json", json.dumps(error.to_json()).encode())
            return
        path = self.path.partition("?")[0]
        if path == "/":
            self._answer(200, "text/html; charset=utf-8", self.server.page)
        elif path == "/state":
            self._answer(200, "application/json", self.server.sampler.text)
        else:
            self._answer(404, "text/plain", b"/ or /state\n")

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", self.server.policy)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 – http.server names it
        """Requests are no news."""
