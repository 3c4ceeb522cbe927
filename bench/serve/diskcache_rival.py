"""diskcache: records as rows of SQLite."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve.rival import Keys, Reader, Rival
from strataflux.proto.extras import install_command

__all__ = ["DiskCache"]

_SQLITE_PAGES = 256
"""Of 4 KiB, for each connection: what it holds is charged to the same budget as the kernel's pages."""


class _Cache:
    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def get(self, keys: Keys) -> int:
        get = self._cache.get
        return sum(get(key) is not None for key in keys.tolist())

    fetch = get

    def absent(self, keys: Keys) -> Keys:
        return keys

    def another(self) -> Reader:
        return self  # it has a connection a thread

    def close(self) -> None:
        self._cache.close()


class DiskCache(Rival):
    """SQLite's pages and the kernel's are the cache."""

    name = "diskcache"
    interface = (
        "diskcache: a get a record, no statistics, no eviction; its first 131,072 records only, and 16 MiB for them"
    )
    in_page_cache = True
    threads = 4
    most_records = 131_072
    least_budget = 16 << 20

    @classmethod
    def missing(cls) -> str | None:
        return None if importlib.util.find_spec("diskcache") else install_command("race")

    @property
    def _path(self) -> Path:
        return self.folder / "diskcache"

    def _open(self) -> Any:
        from diskcache import Cache

        return Cache(
            str(self._path),
            eviction_policy="none",
            statistics=0,
            size_limit=1 << 40,
            disk_min_file_size=1 << 30,
            sqlite_mmap_size=0,
            sqlite_cache_size=_SQLITE_PAGES,
        )

    def build(self) -> None:
        with self._open() as cache:
            for first in range(0, self.count, 8192):
                rows = self.records.rows(first, min(8192, self.count - first))
                with cache.transact():
                    for key, row in enumerate(rows, first):
                        cache.set(key, row.tobytes())

    def files(self) -> Sequence[Path]:
        return tuple(self._path.glob("cache.db*"))

    def open(self, sessions: int, words: int) -> Reader:
        return _Cache(self._open())
