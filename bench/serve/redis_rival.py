"""Redis: a server of its own on a Unix socket, with the hot records in it. It reads nothing from a disk: hits only."""

import importlib.util
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serve.rival import Keys, Reader, Rival
from strataflux.proto.extras import install_command

__all__ = ["Redis"]

_CHUNK = 4096


class _Connection:
    def __init__(self, client: Any) -> None:
        self._client = client

    def get(self, keys: Keys) -> int:
        return sum(value is not None for value in self._client.mget(keys.view("V8").tolist()))

    fetch = get

    def absent(self, keys: Keys) -> Keys:
        return keys

    def another(self) -> Reader:
        return self

    def close(self) -> None:
        self._client.close()


class Redis(Rival):
    """All in the server's RAM."""

    name = "redis"
    interface = "an MGET a call over a Unix socket, parsed by hiredis; no persistence"
    kinds = ("hits", "latency")

    _server: "subprocess.Popen[bytes] | None" = None

    @classmethod
    def missing(cls) -> str | None:
        if shutil.which("redis-server") is None:
            return "no redis-server (Debian: redis-server)"
        found = importlib.util.find_spec("redis") and importlib.util.find_spec("hiredis")
        return None if found else install_command("race")

    @property
    def _socket(self) -> Path:
        return self.folder / "redis.sock"

    def _connect(self) -> Any:
        import redis

        return redis.Redis(unix_socket_path=str(self._socket), socket_timeout=60)

    def start(self) -> None:
        words = ["redis-server", "--port", "0", "--unixsocket", str(self._socket), "--save", "", "--appendonly", "no"]
        self._server = subprocess.Popen(
            [*words, "--dir", str(self.folder), "--loglevel", "notice"],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )
        assert self._server.stdout is not None
        while line := self._server.stdout.readline():
            if b"eady to accept connections" in line:
                break
        else:
            raise RuntimeError(f"redis-server ended with {self._server.wait()}")
        self._fill()

    def _fill(self) -> None:
        client = self._connect()
        for first in range(0, self.hot, _CHUNK):
            rows = self.records.rows(first, min(_CHUNK, self.hot - first))
            keys = np.arange(first, first + len(rows), dtype=np.int64).view("V8").tolist()
            client.mset({key: row.tobytes() for key, row in zip(keys, rows, strict=True)})
        client.close()

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.terminate()
            server.wait()

    def pids(self) -> Sequence[int]:
        return () if self._server is None else (self._server.pid,)

    def open(self, sessions: int, words: int) -> Reader:
        return _Connection(self._connect())
