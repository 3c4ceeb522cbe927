"""From the configuration to the open stores and the reader: the one place that imports compiled code."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from strataflux.daemon.config import Config
from strataflux.daemon.kv import KvSettings
from strataflux.daemon.reader_settings import ReaderSettings
from strataflux.daemon.reader_thread import ReaderThread
from strataflux.daemon.served import rule_of
from strataflux.daemon.store import Store, open_served
from strataflux.daemon.warm_up import warm_up

__all__ = ["compile_everything", "make_reader", "open_stores"]


def open_stores(config: Config) -> list[Store]:
    """Open and validate every store, in the order of the configuration; all or none.

    Raises:
        StoreError, DirectIoUnavailable: of the first store that cannot be served.
    """
    opened: list[Store] = []
    try:
        for store in config.stores:
            direct_io = config.reader.direct_io
            opened.append(open_served(store.path, direct_io=direct_io, preload=store.preload, rule=rule_of(store)))
    except BaseException:
        for done in opened:
            done.close()
        raise
    return opened


def make_reader(config: Config, stores: Sequence[Store], idle_seconds: float) -> ReaderThread:
    """The reader, not started. ``idle_seconds`` is how long it may sleep without turning its loop."""
    settings = ReaderSettings(
        weight_bytes=config.cache.weight_bytes,
        engine=config.reader.engine,
        queue_depth=config.reader.queue_depth,
        grace_seconds=config.reader.grace_seconds,
        threads=config.reader.threads,
        idle_seconds=idle_seconds,
        kv=_kv_settings(config),
        quarantine_seconds=config.reader.quarantine_seconds,
        policy=config.cache.policy,
        tenants=config.tenants,
    )
    return ReaderThread(settings, stores)


def _kv_settings(config: Config) -> KvSettings | None:
    if config.kv.sessions == 0:
        return None
    state = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    folder = config.kv.folder or Path(state or tempfile.gettempdir(), "strataflux-kv")
    return KvSettings(folder, config.cache.kv_bytes, config.kv.sessions, config.kv.file_bytes, config.kv.free_bytes)


def compile_everything(config: Config) -> None:
    """Bring all compiled code of the service, as it is configured, into the cache folder."""
    warm_up(config.cache.policy)
