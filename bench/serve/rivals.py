"""Who takes part."""

from serve.diskcache_rival import DiskCache
from serve.lmdb_rival import Lmdb
from serve.mapped import Mapped
from serve.ours import Skipping, Waiting
from serve.redis_rival import Redis
from serve.rival import Rival
from serve.rocksdb_rival import RocksDb

__all__ = ["RIVALS", "SKIPPED"]

RIVALS: tuple[type[Rival], ...] = (Skipping, Waiting, Mapped, Lmdb, RocksDb, DiskCache, Redis)

SKIPPED = {
    "lmcache": "0.5.6 asks for numpy <= 2.2.6, protobuf < 7 and cupy for CUDA: it does not install beside this package",
}
"""Rivals that no machine with this package's pins can run, with the reason."""
