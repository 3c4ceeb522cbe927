"""What the reader is told, and the engine that it reads with by these settings."""

from collections.abc import Callable
from dataclasses import dataclass

from strataflux.daemon.config import TenantConfig
from strataflux.daemon.engines.board import Board, open_board
from strataflux.daemon.engines.liburing import open_liburing
from strataflux.daemon.engines.uring import UringEngine, open_uring
from strataflux.daemon.kv import KvSettings
from strataflux.daemon.tier import Tier

__all__ = ["EngineFactory", "ReaderSettings", "make_engine"]


@dataclass(frozen=True)
class ReaderSettings:
    """What the reader is told; see the configuration for each value's cost."""

    weight_bytes: int
    engine: str = "uring"
    queue_depth: int = 128
    grace_seconds: float = 2.0
    threads: int = 4
    idle_seconds: float = 1.0
    quarantine_seconds: float = 60.0
    kv: KvSettings | None = None
    policy: str = "lru"
    tenants: tuple[TenantConfig, ...] = ()


EngineFactory = Callable[[Tier, ReaderSettings], "UringEngine | Board"]


def make_engine(tier: Tier, settings: ReaderSettings) -> UringEngine | Board:
    """The engine that the settings name, made in the calling thread.

    Raises:
        EngineUnavailable: the kernel or sandbox forbids it.
    """
    depth, windows = settings.queue_depth, len(tier.core.windows)
    if settings.engine == "uring":
        return open_uring(windows, tier.pool_address, depth * int(tier.core.rd[0]["window_bytes"]), tier.doorbell)
    if settings.engine == "liburing":
        return open_liburing(windows, tier.doorbell)
    board = open_board(windows, tier.doorbell)
    board.start_threads(settings.threads)
    return board
