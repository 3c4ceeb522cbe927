"""KV blocks for a session, and back: from its place, within its tenant's quota. The reader thread only."""

from strataflux.daemon.errors import Refusal
from strataflux.daemon.kv import KvPlace
from strataflux.daemon.tier import Tier

__all__ = ["Release", "grant", "place_of"]


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


class Release:
    """KV blocks on their way back from a session. Pairs: construction / :meth:`settled`, asked again until it is True.

    It is about the session that had the index at first: another one that has it later is left alone.
    """

    def __init__(self, tier: Tier, index: int, ranges: list[list[int]]) -> None:
        """Begin to take ``ranges`` ([first, count] each) back.

        Raises:
            Refusal: the session has no KV, or they are not granted blocks; nothing was changed.
        """
        # fixed after construction
        self._tier, self._index, self._ranges = tier, index, ranges
        self._place = place_of(tier, index)
        self._row = tier.rows[index]
        # changed by settled
        self._unnamed = self._place.give_back(ranges)
        self._done = False

    def settled(self) -> bool:
        """Whether no step, read or write holds them any more, and their ids are free. False: ask again.

        Raises:
            Refusal: the session has ended, and its blocks with it.
        """
        if self._tier.rows.get(self._index) is not self._row:
            raise Refusal("limit", "kv_release", "a session that has ended", "one that lives", "attach again")
        if not self._unnamed:
            self._unnamed = self._place.give_back(self._ranges)
        elif not self._done:
            self._done = self._place.settled_blocks(self._ranges)
        return self._done
