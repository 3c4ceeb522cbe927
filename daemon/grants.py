"""KV blocks for a session: from its place, within its tenant's quota. The reader thread only."""

from strataflux.daemon.errors import Refusal
from strataflux.daemon.kv import KvPlace
from strataflux.daemon.tier import Tier

__all__ = ["grant", "place_of"]


def place_of(tier: Tier, index: int) -> KvPlace:
    """The KV place of a session.

    Raises:
        Refusal: it has none.
    """
    row = tier.rows.get(index)
    if row is None or row.place is None:
        found = "a session without KV blocks"
        raise Refusal("unsupported", "kv", found, "one attached with a KV geometry", "say it in hello")
    return row.place


def grant(tier: Tier, index: int, count: int) -> list[list[int]]:
    """Block ids as [first, count] ranges.

    Raises:
        Refusal: it has no KV, or its tenant's quota, its own ids or the disk do not allow as many.
    """
    place = place_of(tier, index)
    tenant = tier.rows[index].tenant
    tier.tenants.check_disk(tenant, tier.granted_bytes(tenant), count * int(place.row["block_stride"]))
    return place.grant(count)
