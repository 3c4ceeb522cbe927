"""An open weight store: its manifest, checksums, descriptors, and how its file must be read.

Alignment comes from the device through ``statx(STATX_DIOALIGN)``, never from a constant. Whether direct reads work is
tried once at open with one real read; the reader falls back on the first EINVAL later, too.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from strataflux.daemon.errors import DirectIoUnavailable
from strataflux.proto.store_format import StoreManifest, load_checksums, open_store

__all__ = ["DIRECT_IO_MODES", "Store", "direct_alignment", "open_served"]

DIRECT_IO_MODES: Final = ("require", "prefer", "off")
_STATX_DIOALIGN: Final = 0x2000
_AT_EMPTY_PATH: Final = 0x1000
_MASK_AT, _MEMORY_AT, _OFFSET_AT, _STATX_BYTES = 0, 152, 156, 256
_GUESS: Final = 4096
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Store:
    """A validated, open store. ``descriptor`` is what is read; ``buffered`` what to fall back to (-1: nothing). Stores
    whose ``rule`` (who may use them) is equal share a ``domain`` of memory, which the tier decides.
    """

    manifest: StoreManifest
    checksums: NDArray[np.uint32]
    descriptor: int
    buffered: int
    direct: bool
    alignment: int
    preload: bool
    rule: Hashable
    domain: int = 0

    def close(self) -> None:
        """Close the descriptors; nothing may be in flight."""
        for descriptor in {self.descriptor, self.buffered} - {-1}:
            os.close(descriptor)


def open_served(folder: Path, *, direct_io: str, preload: bool = False, rule: Hashable = None) -> Store:
    """Open and validate a store for serving.

    Raises:
        StoreError: by cause, see :mod:`strataflux.proto.errors`.
        DirectIoUnavailable: ``direct_io`` is ``require`` and the file system refuses direct reads.
        OSError: its records cannot be opened, or the device fails. Nothing is left open by any of these.
    """
    manifest = open_store(folder)
    checksums = load_checksums(manifest)
    path = manifest.records_path
    buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        direct, alignment = (-1, 1) if direct_io == "off" else _open_direct(path)
    except BaseException:
        os.close(buffered)
        raise
    if direct_io == "require":
        os.close(buffered)
        buffered = -1
        if direct == -1:
            raise DirectIoUnavailable(
                path,
                "a file system that refuses O_DIRECT",
                "direct reads, as reader.direct_io = require asks",
                'move the store, or set reader.direct_io = "prefer"',
            )
    if direct == -1:
        return Store(manifest, checksums, buffered, buffered, False, 1, preload, rule)
    return Store(manifest, checksums, direct, buffered, True, alignment, preload, rule)


def _open_direct(path: Path) -> tuple[int, int]:
    """(descriptor, alignment) for direct reads, proven by one; (-1, 1) where they are refused."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return -1, 1
    alignment = direct_alignment(descriptor)
    try:
        with mmap.mmap(-1, max(alignment, mmap.PAGESIZE)) as buffer:
            os.preadv(descriptor, [memoryview(buffer)[:alignment]], 0)
    except OSError as error:
        os.close(descriptor)
        if error.errno != errno.EINVAL:
            raise
        return -1, 1
    return descriptor, alignment


def direct_alignment(descriptor: int) -> int:
    """Bytes that offsets, lengths and addresses of direct reads must be multiples of.

    Kernels before 6.1 do not say; 4096 is then used, and the reader's fallback covers a device that wants more.
    """
    buffer = (ctypes.c_uint8 * _STATX_BYTES)()
    result = _libc.statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer)
    words = np.frombuffer(bytes(buffer), np.uint32)
    if result != 0 or not words[_MASK_AT] & _STATX_DIOALIGN:
        return _GUESS
    memory, offset = int(words[_MEMORY_AT // 4]), int(words[_OFFSET_AT // 4])
    return max(memory, offset, 1)
