"""What a reload may change while the service runs, and what waits for a restart; and its count."""

import time
from collections import Counter
from dataclasses import dataclass, field, replace

from strataflux.daemon.config import Config
from strataflux.daemon.errors import ConfigError
from strataflux.daemon.store_folder import StoreFolder

__all__ = ["Reloads", "merge", "require_something"]

_LIVE = ("tenants", "attach", "life", "health", "memory", "scrub", "log")
_LATER = ("runtime_dir", "imports", "cache", "kv", "reader", "metrics")


def merge(running: Config, wanted: Config) -> tuple[Config, list[str]]:
    """The configuration to go on with, and the sections of ``wanted`` that only a restart brings.

    Limits, tenants, marks, health, scrubbing and logging change at once; memory, engine and addresses are taken at the
    start. Stores are the catalogue's business (:mod:`strataflux.daemon.catalog`).
    """
    later = [name for name in _LATER if getattr(running, name) != getattr(wanted, name)]
    return replace(running, **{name: getattr(wanted, name) for name in _LIVE}), later


def require_something(config: Config, imports: StoreFolder | None) -> None:
    """Refuse a configuration that would serve nobody anything. ``imports``: where stores may come from later.

    Raises:
        ConfigError: no store, no KV and no folder of imports.
    """
    if not config.stores and not config.kv.sessions and imports is None:
        remedy = "add a [[store]], or set kv.sessions or imports.folder"
        raise ConfigError("store", "no store and no KV", "something to serve", remedy)


@dataclass
class Reloads:
    """Event loop only; read by any thread."""

    results: Counter[str] = field(default_factory=lambda: Counter({"ok": 0, "failed": 0}))
    last_success: float = field(default_factory=time.time)
    """Seconds since the epoch; the start counts as one."""

    def succeeded(self) -> None:
        """Another configuration is in force."""
        self.results["ok"] += 1
        self.last_success = time.time()

    def failed(self) -> None:
        """The one before stays in force."""
        self.results["failed"] += 1
