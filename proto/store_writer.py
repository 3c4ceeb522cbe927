"""Write a store: into a sibling folder, synced, published by one rename (FORMAT.md, "Publishing")."""

import ctypes
import errno
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from strataflux.proto.checksum import crc32c, crc32c_rows
from strataflux.proto.errors import StoreGeometryError
from strataflux.proto.store_format import (
    CHECKSUMS_FILE,
    MANIFEST_FILE,
    RECORDS_FILE,
    SectionSpec,
    StoreManifest,
    identity_digest,
    manifest_body,
    open_store,
    plan_sections,
    records_header,
)

__all__ = ["StoreWriter", "replace_folder", "sync_folder", "write_synced"]

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_libc = ctypes.CDLL(None, use_errno=True)


class StoreWriter:
    """Fill a store's sections in any order, then :meth:`publish`; leaving the context without it removes every trace.

    Pairs: construction / ``publish`` or ``abort``. Nothing under ``folder`` changes before ``publish``.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        sections: Sequence[SectionSpec],
        generation: int = 1,
    ) -> None:
        # fixed after construction
        self.folder = folder
        self.identity = dict(identity)
        self.generation = generation
        self.sections, self._records_bytes = plan_sections(tuple(sections))
        self._temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
        # the writing thread only
        self._checksums = np.zeros(sum(s.count for s in self.sections), dtype="<u4")
        self._written = np.zeros(self._checksums.size, dtype=bool)
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._temporary.mkdir(mode=0o755)
        self._file = (self._temporary / RECORDS_FILE).open("wb")
        self._file.truncate(self._records_bytes)
        self._file.write(records_header(identity_digest(identity), generation, self._checksums.size))

    def write(self, section: int, first: int, records: NDArray[np.uint8]) -> None:
        """Write ``records`` (u8 [n, record_bytes]) as records ``first … first + n - 1`` of a section.

        Raises:
            StoreGeometryError: they do not fit the section.
        """
        target = self.sections[section]
        count = records.shape[0] if records.ndim == 2 else -1
        if records.shape != (count, target.record_bytes) or not 0 <= first <= target.count - count:
            raise StoreGeometryError(
                f"section {target.name}",
                f"records {first} … of shape {records.shape}",
                f"[n, {target.record_bytes}] within {target.count} records",
                "write whole records of this section",
            )
        padded = np.zeros((count, target.stride), dtype=np.uint8)
        padded[:, : target.record_bytes] = records
        self._file.seek(target.offset + first * target.stride)
        self._file.write(padded.data)
        oid = target.first_oid + first
        crc32c_rows(np.ascontiguousarray(records), self._checksums[oid : oid + count])
        self._written[oid : oid + count] = True

    def publish(self) -> StoreManifest:
        """Sync everything and put the store in place, whole, over whatever was there.

        Raises:
            StoreGeometryError: a record was never written.
        """
        if not self._written.all():
            raise StoreGeometryError(
                self.folder,
                f"{int(self._written.sum())} records written",
                f"all {self._written.size}",
                "write every record before publish()",
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        write_synced(self._temporary / CHECKSUMS_FILE, self._checksums.tobytes())
        body = manifest_body(
            self.identity,
            self.generation,
            self.sections,
            self._records_bytes,
            crc32c(self._checksums.view(np.uint8)),
        )
        write_synced(self._temporary / MANIFEST_FILE, json.dumps(body, indent=1).encode())
        open_store(self._temporary)
        replace_folder(self._temporary, self.folder)
        return open_store(self.folder)

    def abort(self) -> None:
        """Remove the temporary folder. Harmless after ``publish``."""
        self._file.close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


def write_synced(path: Path, data: bytes) -> None:
    """Write a file whose bytes are durable when this returns; its name is by :func:`sync_folder`."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(new: Path, target: Path) -> None:
    """Put folder ``new`` in ``target``'s place in one step; what was there is removed afterwards.

    An open reader of the old files keeps them: nothing is shortened or overwritten.

    Raises:
        OSError: as rename(2); ``target`` is then as it was.
    """
    sync_folder(new)
    try:
        new.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _exchange(new, target)
        shutil.rmtree(new)
    sync_folder(target.parent)


def _exchange(first: Path, second: Path) -> None:
    result = _libc.renameat2(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE)
    )
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(first), None, str(second))
