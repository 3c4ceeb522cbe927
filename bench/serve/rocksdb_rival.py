"""RocksDB through rocksdict: sorted tables with their block cache, direct reads."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serve.rival import Keys, Reader, Rival
from strataflux.proto.extras import install_command

__all__ = ["RocksDb"]

_CHUNK = 65_536
_BLOCK_BYTES = 4096
_TABLES = 8


class _Database:
    def __init__(self, database: Any) -> None:
        self._database = database

    def get(self, keys: Keys) -> int:
        # Big-endian keys are in order as bytes; the values come as bytes objects, copied out of the block cache.
        values = self._database.get(keys.astype(">u8").view("V8").tolist())
        return sum(value is not None for value in values)

    fetch = get

    def absent(self, keys: Keys) -> Keys:
        return keys

    def another(self) -> Reader:
        return self

    def close(self) -> None:
        self._database.close()


class RocksDb(Rival):
    """Direct reads into a block cache of the budget; each of several sessions has its share of it."""

    name = "rocksdb"
    interface = "rocksdict: raw keys, a multi-get a call, direct reads, clock block cache, hash index within blocks"

    @classmethod
    def missing(cls) -> str | None:
        return None if importlib.util.find_spec("rocksdict") else install_command("race")

    @property
    def _path(self) -> Path:
        return self.folder / "rocksdb"

    def _options(self, cache_bytes: int) -> Any:
        from rocksdict import BlockBasedOptions, Cache, DataBlockIndexType, DBCompressionType, Options

        blocks = BlockBasedOptions()
        blocks.set_block_cache(Cache.new_hyper_clock_cache(cache_bytes, _BLOCK_BYTES))
        blocks.set_data_block_index_type(DataBlockIndexType.binary_and_hash())
        blocks.set_bloom_filter(10, False)
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(DBCompressionType.none())
        options.set_use_direct_reads(True)
        options.set_block_based_table_factory(blocks)
        return options

    def build(self) -> None:
        from rocksdict import IngestExternalFileOptions, Rdict, SstFileWriter

        options = self._options(1 << 20)
        tables = []
        for number, part in enumerate(np.array_split(np.arange(self.count, dtype=np.int64), _TABLES)):
            writer = SstFileWriter(options)
            tables.append(str(self.folder / f"part{number}.sst"))
            writer.open(tables[-1])
            for first in range(0, len(part), _CHUNK):
                keys = part[first : first + _CHUNK]
                rows = np.ascontiguousarray(self.records.rows(int(keys[0]), len(keys)))
                values = rows.view(f"V{rows.shape[1]}").ravel().tolist()
                for key, value in zip(keys.astype(">u8").view("V8").tolist(), values, strict=True):
                    writer[key] = value
            writer.finish()
        moved = IngestExternalFileOptions()
        moved.set_move_files(True)
        with Rdict(str(self._path), options) as database:
            database.ingest_external_file(tables, moved)

    def files(self) -> Sequence[Path]:
        return tuple(self._path.glob("*.sst"))

    def open(self, sessions: int, words: int) -> Reader:
        from rocksdict import AccessType, Rdict

        options = self._options(max(self.budget_bytes // sessions, 1 << 20))
        return _Database(Rdict(str(self._path), options, access_type=AccessType.read_only(False)))
