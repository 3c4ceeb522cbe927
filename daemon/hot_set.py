"""The hot set's file: which records of which store were resident, the most recently used first (FORMAT.md, 18).

It is a hint. What is wrong with it costs a cold start and nothing else, so whoever reads it believes none of it that
does not hold together, and whoever serves stores takes from it only what fits them.
"""

import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from strataflux.daemon.interface import HotRecords
from strataflux.proto.checksum import crc32c

__all__ = ["MAX_RECORDS", "HotSetError", "read_hot_set", "write_hot_set"]

MAX_RECORDS: Final = 1 << 22
"""Of all stores; more would take longer to read than to miss."""
_MAX_STORES: Final = 128
_MAGIC: Final = b"SFHOTSET"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sIIQII")
_STORE: Final = struct.Struct("<32sQQ")
_MAX_BYTES: Final = _HEADER.size + _MAX_STORES * _STORE.size + 4 * MAX_RECORDS


class HotSetError(ValueError):
    """The file is not what this program writes. Its text says in what."""


def write_hot_set(path: Path, hot: Sequence[HotRecords]) -> None:
    """Publish the file by rename: whoever opens it, or dies meanwhile, finds the old one or the new one whole. Only its
    owner may read it, for it tells of all stores; nothing that lies in its way is written through.

    Raises:
        OSError: it cannot be written; the old one is still there.
    """
    stores = b"".join(_STORE.pack(bytes.fromhex(part.digest), part.records, part.oids.size) for part in hot)
    body = stores + b"".join(part.oids.astype("<u4").tobytes() for part in hot)
    total = sum(part.oids.size for part in hot)
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)
    with open(beside, "xb", opener=_private) as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, len(hot), total, crc32c(body), 0) + body)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_hot_set(path: Path) -> list[HotRecords]:
    """What the file says.

    Raises:
        FileNotFoundError: there is none. OSError: it cannot be read. HotSetError: it is damaged, or another version's.
    """
    with open(path, "rb", opener=_unfollowed) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise HotSetError("no regular file, expected one")
        raw = file.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise HotSetError(f"more than {_MAX_BYTES} bytes")
    if len(raw) < _HEADER.size:
        raise HotSetError(f"{len(raw)} bytes, expected at least {_HEADER.size}")
    magic, version, stores, total, checksum, _ = _HEADER.unpack_from(raw)
    if (magic, version) != (_MAGIC, _VERSION):
        raise HotSetError(f"magic {magic!r} and version {version}, expected {_MAGIC!r} and {_VERSION}")
    expected = _HEADER.size + _STORE.size * stores + 4 * total
    if stores > _MAX_STORES or len(raw) != expected:
        raise HotSetError(f"{len(raw)} bytes for {stores} stores, expected {expected} and at most {_MAX_STORES}")
    if crc32c(raw[_HEADER.size :]) != checksum:
        raise HotSetError("a wrong checksum")
    return _parts(raw, stores, total)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _unfollowed(path: str, flags: int) -> int:
    """No link is followed, and no pipe waited for."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _parts(raw: bytes, stores: int, total: int) -> list[HotRecords]:
    rows = [_STORE.unpack_from(raw, _HEADER.size + _STORE.size * number) for number in range(stores)]
    if sum(count for _, _, count in rows) != total:
        raise HotSetError(f"stores of {sum(count for _, _, count in rows)} records, expected {total}")
    oids = np.frombuffer(raw, "<u4", total, _HEADER.size + _STORE.size * stores)
    found, first = [], 0
    for digest, records, count in rows:
        mine = oids[first : first + count]
        if count and int(mine.max()) >= records:
            raise HotSetError(f"record {mine.max()} of a store, expected one below {records}")
        if np.unique(mine).size != count:
            raise HotSetError("a record twice, expected each once")
        found.append(HotRecords(digest.hex(), records, mine))
        first += count
    return found
