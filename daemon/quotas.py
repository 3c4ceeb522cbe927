"""Tenants towards clients: who belongs to which, and whether one may have another session.

What a tenant may read and put on disk is kept by :mod:`strataflux.daemon.tenants`, next to the reader.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from strataflux.daemon.access import Peer
from strataflux.daemon.config import TenantConfig
from strataflux.daemon.errors import Refusal

__all__ = ["Holder", "Quotas"]


@dataclass(frozen=True)
class Holder:
    """A session that exists or is being made. ``tenant`` is empty for one of nobody's."""

    uid: int
    stores: tuple[int, ...]
    tenant: str = ""
    kv: bool = False


class Quotas:
    """Fixed after construction."""

    def __init__(self, tenants: Sequence[TenantConfig] = ()) -> None:
        self._tenants = {tenant.name: tenant for tenant in tenants}

    def tenant_of(self, peer: Peer) -> str:
        """Name of the first tenant that a peer belongs to; empty for none."""
        for name, tenant in self._tenants.items():
            if peer.uid in (tenant.uids or ()) or not peer.groups.isdisjoint(tenant.gids or ()):
                return name
        return ""

    def check(self, name: str, kv: bool, holders: Sequence[Holder]) -> None:
        """Whether a tenant may have one more session, with KV or without.

        Raises:
            Refusal: it has as many as it may.
        """
        if name not in self._tenants:
            return
        tenant, mine = self._tenants[name], [holder for holder in holders if holder.tenant == name]
        bounds = [("sessions", len(mine), tenant.max_sessions, "max_sessions")]
        if kv:
            bounds.append(("sessions with KV", sum(h.kv for h in mine), tenant.kv_sessions, "kv_sessions"))
        for what, held, limit, setting in bounds:
            if held >= limit:
                raise Refusal(
                    "quota",
                    f"{what} of tenant {name}",
                    str(held),
                    f"at most {limit} (tenant.{setting})",
                    "close one, or ask whoever runs the service",
                )
