"""The stores that are served, by their index: each with the setting it is served under. The event loop only."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from strataflux.daemon.access import StoreAccess
from strataflux.daemon.config import StoreConfig
from strataflux.daemon.interface import ServedStore

__all__ = ["Served", "accesses_of", "rule_of"]

S = TypeVar("S", bound=ServedStore)


@dataclass(frozen=True)
class Served(Generic[S]):
    """A store and its settings. ``added``: by an administrator while the service ran, not by the configuration."""

    store: S
    config: StoreConfig
    added: bool = False


def accesses_of(served: Mapping[int, Served[S]]) -> dict[int, StoreAccess]:
    """Who may use each of them."""
    return {index: StoreAccess(entry.config) for index, entry in served.items()}


def rule_of(config: StoreConfig) -> Hashable:
    """What has to be equal for two stores to lie side by side in one segment of memory."""
    return config.share, config.allow_uids, config.allow_groups
