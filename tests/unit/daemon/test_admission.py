"""Admission as arithmetic and rules, without a socket."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strataflux.daemon.access import Peer, StoreAccess
from strataflux.daemon.admission import Admission, ring_log2
from strataflux.daemon.config import AttachConfig, StoreConfig, TenantConfig
from strataflux.daemon.errors import Refusal
from strataflux.daemon.quotas import Holder, Quotas
from strataflux.proto import layout
from strataflux.proto.messages import REFUSALS, Hello, KvGeometry, StoreRef
from tests.unit.daemon.conftest import fake_store

UID = 1_000_001
PEER = Peer(1, UID, UID, frozenset({UID}))
STORES = {0: fake_store(Path("/a"), weights="a", bits=3), 1: fake_store(Path("/b"), weights="b", bits=4)}


KV = KvGeometry("kv_group", 128, 4, 64, 256, 8)


def admission(*tenants: TenantConfig, **first: Any) -> Admission:
    accesses = {0: StoreAccess(StoreConfig(Path("/a"), **first)), 1: StoreAccess(StoreConfig(Path("/b")))}
    return Admission(STORES, accesses, AttachConfig(), 1 << 20, Quotas(tenants))


def ref(index: int) -> StoreRef:
    return StoreRef(STORES[index].manifest.identity_digest, STORES[index].manifest.identity)


def hello(*stores: StoreRef, selections: int = 10, kv: KvGeometry | None = None, waits_for: int = 0) -> Hello:
    return Hello(layout.LAYOUT_VERSION, "t", list(stores), selections, waits_for, kv)


def refused(made: Admission, message: Hello, holders: tuple[Holder, ...] = ()) -> Refusal:
    with pytest.raises(Refusal) as caught:
        made.admit(message, PEER, holders)
    assert caught.value.code in REFUSALS
    return caught.value


def test_what_is_admitted_names_indices_and_credentials() -> None:
    request = admission().admit(hello(ref(1), ref(0)), PEER, [])
    assert (request.uid, request.pid, request.stores, request.ring_log2) == (UID, 1, (1, 0), layout.RING_LOG2_MIN)


def test_who_waits_is_who_says_for_how_much() -> None:
    assert not admission().admit(hello(ref(0)), PEER, []).waits
    assert admission().admit(hello(ref(0), waits_for=1), PEER, []).waits


@given(st.integers(0, 1 << (layout.RING_LOG2_MAX - 1)))
def test_the_ring_is_the_smallest_that_holds_two_steps(selections: int) -> None:
    log2 = ring_log2(selections)
    assert layout.RING_LOG2_MIN <= log2 <= layout.RING_LOG2_MAX
    assert 1 << log2 >= 2 * selections
    assert log2 == layout.RING_LOG2_MIN or 1 << (log2 - 1) < 2 * selections


def test_more_selections_than_the_largest_ring_serves() -> None:
    most = 1 << (layout.RING_LOG2_MAX - 1)
    refusal = refused(admission(), hello(ref(0), selections=most + 1))
    assert (refusal.code, refusal.found) == ("too_large", str(most + 1))
    assert str(most) in refusal.expected


def test_the_nearest_identity_is_compared() -> None:
    wanted = StoreRef("f" * 64, {"weights": "b", "bits": 2})
    refusal = refused(admission(), hello(wanted))
    assert refusal.code == "identity"
    assert (refusal.found, refusal.expected) == ("served: bits = 4", "asked: bits = 2")


def test_a_field_that_is_missing_is_said_to_be_nothing() -> None:
    refusal = refused(admission(), hello(StoreRef("f" * 64, {"weights": "b", "bits": 4, "new": 1})))
    assert (refusal.found, refusal.expected) == ("served: new = nothing", "asked: new = 1")


def test_a_digest_of_another_identity_is_malformed() -> None:
    assert refused(admission(), hello(StoreRef("f" * 64, STORES[0].manifest.identity))).code == "malformed"


def test_stores_of_others_are_denied_and_not_described() -> None:
    made = admission(allow_uids=(5,))
    assert refused(made, hello(ref(0))).code == "denied"
    refusal = refused(made, hello(StoreRef("f" * 64, {"weights": "a", "bits": 2})))
    assert "3" not in refusal.found  # the nearest is store 0, which this user may not see


@pytest.mark.parametrize(("stores", "code"), [((), "limit"), ((0, 0), "malformed")])
def test_lists_of_stores(stores: tuple[int, ...], code: str) -> None:
    assert refused(admission(), hello(*(ref(i) for i in stores))).code == code


def test_another_user_waits_for_a_store_that_is_not_shared() -> None:
    made = admission(share="uid")
    assert refused(made, hello(ref(0)), (Holder(5, (0,)),)).code == "denied"
    assert made.admit(hello(ref(0)), PEER, [Holder(5, (1,)), Holder(UID, (0,))]).stores == (0,)


def test_whoever_is_in_a_tenant_has_its_name_and_others_none() -> None:
    made = admission(TenantConfig("first", gids=(UID,)), TenantConfig("second", uids=(UID,)))
    assert made.admit(hello(ref(0)), PEER, []).tenant == "first"
    assert made.admit(hello(ref(0)), Peer(1, 7, 7, frozenset({7})), []).tenant == ""


@pytest.mark.parametrize(
    ("settings", "kv", "setting", "limit"),
    [
        ({"max_sessions": 2}, None, "tenant.max_sessions", 2),
        ({"kv_sessions": 1}, KV, "tenant.kv_sessions", 1),
        ({"max_sessions": 0}, None, "tenant.max_sessions", 0),
    ],
)
def test_a_tenant_that_holds_what_it_may_is_refused_by_its_setting(
    settings: dict[str, Any], kv: KvGeometry | None, setting: str, limit: int
) -> None:
    made = admission(TenantConfig("first", uids=(UID,), **settings))
    mine = Holder(UID, (1,), "first", kv=kv is not None)
    strangers = [Holder(UID + n, (1,), "second", kv=True) for n in range(9)]
    if limit:
        assert made.admit(hello(ref(0), kv=kv), PEER, [*strangers, *[mine] * (limit - 1)])
    refusal = refused(made, hello(ref(0), kv=kv), (*strangers, *[mine] * limit))
    assert refusal.code == "quota"
    assert setting in refusal.expected
    assert refusal.found == str(limit)


def test_sessions_without_kv_are_not_bounded_by_those_with() -> None:
    made = admission(TenantConfig("first", uids=(UID,), kv_sessions=0))
    assert made.admit(hello(ref(0)), PEER, []).kv is None
    assert refused(made, hello(ref(0), kv=KV)).code == "quota"
