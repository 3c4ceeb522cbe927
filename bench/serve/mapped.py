"""A mapping of the very file that StrataFlux reads: the page cache is the cache."""

import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from serve.loops import touch_mapped
from serve.plan import Records
from serve.rival import IN_PLACE, Keys, Reader, Rival

__all__ = ["Mapped"]


class _Mapping:
    def __init__(self, records: Records, words: int) -> None:
        with records.path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        self._map.madvise(mmap.MADV_RANDOM)
        self._base = np.frombuffer(self._map, np.uint8).ctypes.data + records.offset
        self._stride = records.stride
        self._words = words

    def get(self, keys: Keys) -> int:
        touch_mapped(self._base, self._stride, keys, self._words)
        return keys.size

    fetch = get

    def absent(self, keys: Keys) -> Keys:
        return keys

    def another(self) -> Reader:
        return self

    def close(self) -> None:
        """The process ends with it: its address is held by arrays."""


class Mapped(Rival):
    """The file, mapped; a miss is a page fault."""

    name = "mmap"
    interface = "the store's own file mapped (MADV_RANDOM), touched by compiled code; a page brings its neighbours"
    in_page_cache = True
    kinds = IN_PLACE

    def files(self) -> Sequence[Path]:
        return (self.records.path,)

    def open(self, sessions: int, words: int) -> Reader:
        return _Mapping(self.records, words)
