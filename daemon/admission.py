"""Whether a hello can be met: pure checks, each refusal with its numbers.

A client that is refused can tell its user what differs: layouts by number, identities by field, limits by setting.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from strataflux.daemon.access import Peer, StoreAccess
from strataflux.daemon.config import AttachConfig
from strataflux.daemon.errors import Refusal
from strataflux.daemon.interface import ServedStore, SessionRequest
from strataflux.daemon.quotas import Holder, Quotas
from strataflux.proto import layout
from strataflux.proto.messages import MAX_ATTACHED_TABLES, Hello, StoreRef

__all__ = ["RESERVE_SHARE", "Admission", "ring_log2"]

RESERVE_SHARE: Final = 16
"""The reader evicts ahead to keep one part in this many of the cache free, which no projection set can count on."""


class Admission:
    """Fixed after construction. ``stores`` and ``accesses`` are by the index of the served stores."""

    def __init__(
        self,
        stores: Mapping[int, ServedStore],
        accesses: Mapping[int, StoreAccess],
        settings: AttachConfig,
        weight_bytes: int,
        quotas: Quotas | None = None,
    ) -> None:
        self.settings = settings
        self._quotas = quotas or Quotas()
        self._stores = stores
        self._accesses = accesses
        self._weight_bytes = weight_bytes

    def admit(self, hello: Hello, peer: Peer, holders: Sequence[Holder]) -> SessionRequest:
        """The request to put to the reader.

        Raises:
            Refusal: what stands in the way; its code is one of the attach protocol's.
        """
        if hello.layout != layout.LAYOUT_VERSION:
            raise Refusal(
                "layout",
                "layout version",
                str(hello.layout),
                str(layout.LAYOUT_VERSION),
                "install the same version of strataflux on both sides",
            )
        self._check_limits(peer, holders)
        tenant = self._quotas.tenant_of(peer)
        self._quotas.check(tenant, hello.kv is not None, holders)
        indices = self._find_stores(hello, peer, holders)
        self._check_set(hello.largest_set_bytes)
        log2 = ring_log2(hello.selections_per_step)
        waits = hello.largest_set_bytes > 0
        return SessionRequest(peer.uid, peer.gid, peer.pid, indices, log2, hello.kv, tenant, waits)

    def _check_limits(self, peer: Peer, holders: Sequence[Holder]) -> None:
        settings = self.settings
        of_peer = sum(holder.uid == peer.uid for holder in holders)
        if of_peer >= settings.max_sessions_per_uid:
            limit = f"at most {settings.max_sessions_per_uid} (attach.max_sessions_per_uid)"
            raise Refusal("limit", f"sessions of uid {peer.uid}", str(of_peer), limit, "close one, or raise the limit")
        if len(holders) >= settings.max_sessions:
            limit = f"at most {settings.max_sessions} (attach.max_sessions)"
            raise Refusal("limit", "sessions", str(len(holders)), limit, "close one, or raise the limit")

    def _find_stores(self, hello: Hello, peer: Peer, holders: Sequence[Holder]) -> tuple[int, ...]:
        tables = len(hello.stores) + (hello.kv is not None)
        if not 0 < tables <= MAX_ATTACHED_TABLES:
            limit = f"1 … {MAX_ATTACHED_TABLES}"
            raise Refusal("limit", "stores and KV of one session", str(tables), limit, "name the stores it uses")
        indices = tuple(self._find_store(wanted, peer) for wanted in hello.stores)
        twice = [index for index, count in Counter(indices).items() if count > 1]
        if twice:
            digest = self._stores[twice[0]].manifest.identity_digest
            raise Refusal("malformed", "stores", f"{digest[:12]}… twice", "each store once", "remove one of the two")
        for index in indices:
            users = [holder.uid for holder in holders if index in holder.stores]
            if self._accesses[index].excluded_by(peer, users):
                share = self._accesses[index].share
                subject = f"store {self._stores[index].manifest.identity_digest[:12]}…"
                found = f"in use by {len(users)} sessions"
                raise Refusal(
                    "denied", subject, found, f'use as share = "{share}" allows', "wait, or change its share setting"
                )
        return indices

    def _find_store(self, wanted: StoreRef, peer: Peer) -> int:
        """The index of the store of that digest. What the peer may not use is not shown to it either."""
        usable = [i for i, access in self._accesses.items() if access.allows(peer)]
        for index, store in self._stores.items():
            if store.manifest.identity_digest == wanted.digest:
                if index in usable:
                    return index
                raise Refusal(
                    "denied",
                    f"store {wanted.digest[:12]}…",
                    f"uid {peer.uid}",
                    "a user in its allow_uids or allow_groups",
                    "ask whoever runs the service",
                )
        raise _unknown(wanted, [self._stores[i].manifest.identity for i in usable])

    def _check_set(self, largest_set_bytes: int) -> None:
        room = self._weight_bytes - self._weight_bytes // RESERVE_SHARE
        if largest_set_bytes > room:
            raise Refusal(
                "too_large",
                "largest projection set",
                f"{largest_set_bytes} bytes",
                f"at most {room} bytes (cache.weight_bytes {self._weight_bytes} minus its reserve)",
                "raise --weight-cache, or select fewer channels",
            )


def ring_log2(selections_per_step: int) -> int:
    """log2 of the smallest ring that holds twice the selections of a step.

    Raises:
        Refusal: more selections than the largest ring serves.
    """
    log2 = max(layout.RING_LOG2_MIN, (2 * selections_per_step - 1).bit_length() if selections_per_step else 0)
    if log2 > layout.RING_LOG2_MAX:
        limit = f"at most {1 << (layout.RING_LOG2_MAX - 1)}"
        raise Refusal("too_large", "selections per step", str(selections_per_step), limit, "select fewer channels")
    return log2


def _unknown(wanted: StoreRef, served: Iterable[Mapping[str, Any]]) -> Refusal:
    """Name the fields in which the wanted identity differs from the served one that is nearest to it."""
    subject = f"store {wanted.digest[:12]!a}"
    remedy = "serve that store (--store), or use the prepared model that belongs to a served one"
    try:
        differences = [_differences(wanted.identity, identity) for identity in served]
    except RecursionError:
        return Refusal("malformed", subject, "an identity that is nested too deeply", "a flat object", remedy)
    if not differences:
        return Refusal("identity", subject, "no store that you may use", "that store", remedy)
    nearest = min(differences, key=len)
    if not nearest:
        return Refusal("malformed", subject, "a digest that is not its identity's", "the SHA-256 of identity", remedy)
    found = "; ".join(f"{name} = {there}" for name, (_, there) in nearest.items())
    expected = "; ".join(f"{name} = {here}" for name, (here, _) in nearest.items())
    return Refusal("identity", subject, f"served: {found}", f"asked: {expected}", remedy)


def _differences(wanted: Mapping[str, Any], served: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Fields that differ, as (wanted, served), each cut to a readable length."""
    names = sorted(wanted.keys() | served.keys())
    shown = {name: (_short(wanted, name), _short(served, name)) for name in names}
    return {ascii(name[:40])[1:-1]: pair for name, pair in shown.items() if wanted.get(name) != served.get(name)}


def _short(identity: Mapping[str, Any], name: str) -> str:
    return json.dumps(identity[name], sort_keys=True)[:100] if name in identity else "nothing"
