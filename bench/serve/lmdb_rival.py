"""LMDB, by its own C functions called from a compiled loop: no Python for a record."""

import ctypes
import importlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from serve.loops import touch_addresses
from serve.rival import IN_PLACE, Keys, Reader, Rival
from strataflux.proto.extras import install_command

__all__ = ["Lmdb"]

_RDONLY, _NOTLS, _NORDAHEAD = 0x20000, 0x200000, 0x800000
_CHUNK = 65_536
_TABLE = b"records"


class _Library:
    """The engine inside the Python package, whose C functions it exports."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(importlib.import_module("lmdb.cpython").__file__)
        get = self._library.mdb09_get
        get.argtypes = [ctypes.c_size_t, ctypes.c_uint, ctypes.c_size_t, ctypes.c_size_t]
        get.restype = ctypes.c_int
        self.loop = _make_loop(get)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, f"mdb09_{name}")(*arguments)
        if code != 0:
            raise OSError(code, f"mdb_{name} gave {code}")


def _make_loop(get: Any) -> Any:
    @numba.njit(nogil=True, error_model="numpy")
    def loop(txn: int, dbi: int, keys: NDArray[np.int64], found: NDArray[np.uint64], cells: NDArray[np.uint64]) -> int:
        """``cells``: a key's value, MDB_val of the key, MDB_val of the data."""
        hits = 0
        at = np.uint64(cells.ctypes.data)
        cells[1], cells[2] = np.uint64(8), at
        for i in range(keys.size):
            cells[0] = np.uint64(keys[i])
            missing = get(txn, dbi, at + np.uint64(8), at + np.uint64(24))
            found[i] = cells[4] if missing == 0 else np.uint64(0)
            hits += missing == 0
        return hits

    return loop


class _Environment:
    """A process may open a file once."""

    def __init__(self, path: Path, map_bytes: int) -> None:
        self.library = _Library()
        self.handle = ctypes.c_void_p()
        self.library.call("env_create", ctypes.byref(self.handle))
        self.library.call("env_set_mapsize", self.handle, ctypes.c_size_t(map_bytes))
        self.library.call("env_set_maxdbs", self.handle, ctypes.c_uint(1))
        flags = ctypes.c_uint(_RDONLY | _NOTLS | _NORDAHEAD)
        self.library.call("env_open", self.handle, os.fsencode(path), flags, ctypes.c_uint(0o644))


class _Transaction:
    def __init__(self, environment: _Environment, width: int, words: int) -> None:
        self._environment, self._width, self._words = environment, width, words
        self._txn, dbi = ctypes.c_void_p(), ctypes.c_uint()
        call = environment.library.call
        call("txn_begin", environment.handle, None, ctypes.c_uint(_RDONLY), ctypes.byref(self._txn))
        call("dbi_open", self._txn, _TABLE, ctypes.c_uint(0), ctypes.byref(dbi))
        self._dbi = dbi.value
        self._found, self._cells = np.zeros(width, np.uint64), np.zeros(8, np.uint64)
        self.get(np.zeros(1, np.int64))  # compiles

    def get(self, keys: Keys) -> int:
        found = self._found[: keys.size]
        hits = self._environment.library.loop(self._txn.value, self._dbi, keys, found, self._cells)
        touch_addresses(found, self._words)
        return int(hits)

    fetch = get

    def absent(self, keys: Keys) -> Keys:
        return keys

    def another(self) -> Reader:
        return _Transaction(self._environment, self._width, self._words)

    def close(self) -> None:
        """The process ends with it, and with that the transaction."""


class Lmdb(Rival):
    """A B+ tree in a mapped file: the page cache is the cache."""

    name = "lmdb"
    interface = (
        "mdb_get from a compiled loop, integer keys, one read transaction, no read-ahead; records touched in place"
    )
    in_page_cache = True
    kinds = IN_PLACE

    @classmethod
    def missing(cls) -> str | None:
        if importlib.util.find_spec("lmdb") is None:
            return install_command("race")
        try:
            _Library()
        except (ImportError, AttributeError) as error:
            return f"this build of lmdb does not export its C functions: {error}"
        return None

    @property
    def _path(self) -> Path:
        return self.folder / "lmdb"

    @property
    def _map_bytes(self) -> int:
        return (64 << 20) + 2 * self.count * (self.records.record_bytes + 48)

    def build(self) -> None:
        import lmdb

        with lmdb.open(
            str(self._path), map_size=self._map_bytes, sync=False, writemap=True, max_dbs=1, lib_version=0
        ) as made:
            table = made.open_db(_TABLE, integerkey=True)
            with made.begin(db=table, write=True) as txn, txn.cursor() as cursor:
                cursor.putmulti(self._items(), append=True)
            made.sync(True)

    def _items(self) -> Iterator[tuple[bytes, bytes]]:
        for first in range(0, self.count, _CHUNK):
            rows = np.ascontiguousarray(self.records.rows(first, min(_CHUNK, self.count - first)))
            keys = np.arange(first, first + len(rows), dtype=np.uint64)
            yield from zip(keys.view("V8").tolist(), rows.view(f"V{rows.shape[1]}").ravel().tolist(), strict=True)

    def files(self) -> Sequence[Path]:
        return (self._path / "data.mdb",)

    def open(self, sessions: int, words: int) -> Reader:
        return _Transaction(_Environment(self._path, self._map_bytes), self.width, words)
