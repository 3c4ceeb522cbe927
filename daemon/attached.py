"""What the attach server knows about its clients, for operators: who is there, and what became of all who came."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from strataflux.daemon.access import Peer
from strataflux.proto import messages

__all__ = ["AttachCounters", "AttachedClient"]

_CAUSES: Final = ("hang_up", "process_end", "malformed", "slow", "segment", "reattach", "stop")


@dataclass
class AttachCounters:
    """Written on the event loop, read by whoever wants to."""

    accepted: int = 0
    turned_away: int = 0
    """Closed unheard: too many connections, or a peer that was gone."""
    malformed: int = 0
    attached: int = 0
    refused: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(messages.REFUSALS, 0)))
    """By the attach protocol's code."""
    ended: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_CAUSES, 0)))
    """Sessions, by cause."""


@dataclass(frozen=True)
class AttachedClient:
    """A session as operators see it."""

    index: int
    session_id: int
    peer: Peer
    client: str
    stores: tuple[int, ...]
    tenant: str
