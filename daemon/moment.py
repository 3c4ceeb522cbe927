"""What one scrape of the metrics sees of the service."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from strataflux.daemon.attached import AttachCounters
from strataflux.daemon.config import TenantConfig
from strataflux.daemon.interface import ServedStore
from strataflux.daemon.pressure import MemoryState
from strataflux.daemon.rpc_counter import RpcTimes
from strataflux.daemon.stats import Stats

__all__ = ["Moment", "ServedFiles", "files_of"]


class ServedFiles(NamedTuple):
    """One served store. ``digest`` is shortened; ``used`` and ``free`` are bytes of the file system it lies in."""

    digest: str
    generation: int
    records: int
    bytes: int
    used: int
    free: int


class Moment(NamedTuple):
    """What one scrape sees."""

    stats: Stats
    attach: AttachCounters
    control_connections: Mapping[str, int]
    rpcs: Mapping[tuple[str, str], int]
    """Calls that ended, by method and code."""
    rpc_times: Mapping[str, RpcTimes]
    sessions: int
    stores: Mapping[int, ServedFiles]
    """By index."""
    tenants: tuple[TenantConfig, ...]
    tenant_sessions: Mapping[str, int]
    """Sessions that live, by tenant; the empty name is everybody else's."""
    reloads: Mapping[str, int]
    last_reload: float
    """Seconds since the epoch."""
    scrubbed_bytes: int
    scrub_passes: int
    scrub_damaged: int
    """Records of the served stores that the last passes found damaged."""
    memory: MemoryState
    releases: int
    released_bytes: int
    """Cache segments given back to the machine so far, and their bytes."""
    ready: bool
    degraded: Mapping[str, str]
    progress_age_seconds: float
    engine: str
    direct_io: str
    registered_buffers: bool
    policy: str
    hot_set: Mapping[tuple[str, str], int]
    """Files of the hot set written and read, by operation and result."""
    version: str


def files_of(store: ServedStore) -> ServedFiles:
    """Its files as they are on disk now."""
    manifest = store.manifest
    try:
        used = sum(file.stat().st_blocks * 512 for file in manifest.folder.iterdir())
        system = os.statvfs(manifest.folder)
        free = system.f_bavail * system.f_frsize
    except OSError:  # the folder was taken away; its open files are still served
        used = free = 0
    digest = manifest.identity_digest[:12]
    return ServedFiles(digest, manifest.generation, manifest.record_count, manifest.records_bytes, used, free)
