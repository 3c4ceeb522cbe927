"""Tenants' shares of the reads, and of a full queue."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from strataflux.daemon import requests
from strataflux.daemon.config import TenantConfig
from strataflux.daemon.state import MAX_QUEUED, NONE
from tests.fakes.core_rig import Client, Rig, make_store

RECORDS = 60_000


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig([make_store(tmp_path / "s", [(RECORDS, 64)])])
    rig.tier.tenants.apply([TenantConfig("small", share=10), TenantConfig("large", share=30)])
    yield rig
    rig.close()


def client_of(rig: Rig, tenant: str) -> Client:
    client = Client(rig.tier, ring_log2=15)
    rig.tier.tenants.join(tenant, client.index)
    return client


def queue(rig: Rig, client: Client, first: int, count: int, score: int = 0) -> None:
    client.push(*(score << 48 | oid for oid in range(first, first + count)))
    while requests.take_requests(rig.core):
        pass


def serve(rig: Rig, count: int) -> list[int]:
    """Which session each of the next requests served is of."""
    served = []
    for _ in range(count):
        place = int(requests.pop(rig.core))
        assert place != NONE
        served.append(int(rig.core.queue[place]["session"]))
        requests.drop(rig.core, place)
    return served


def test_tenants_are_served_by_their_shares_and_sessions_of_one_alike(rig: Rig) -> None:
    small, first, second = (client_of(rig, name) for name in ("small", "large", "large"))
    queue(rig, small, 0, 400, score=255)
    queue(rig, first, 1000, 400)
    queue(rig, second, 2000, 400, score=9)
    counts = Counter(serve(rig, 400))
    assert counts[small.index] == pytest.approx(100, abs=2)
    assert counts[first.index] == pytest.approx(150, abs=2)
    assert counts[second.index] == pytest.approx(150, abs=2)
    assert [int(row["requests"]) for row in rig.core.tenants[:3]] in ([0, 400, 800], [0, 800, 400])


def test_who_was_idle_has_saved_up_nothing_and_who_is_alone_gets_all(rig: Rig) -> None:
    small, large = client_of(rig, "small"), client_of(rig, "large")
    queue(rig, small, 0, 600)
    assert set(serve(rig, 200)) == {small.index}
    queue(rig, large, 1000, 400)
    counts = Counter(serve(rig, 200))
    assert counts[large.index] == pytest.approx(150, abs=2)


def test_requests_that_are_put_back_cost_no_turn(rig: Rig) -> None:
    small, large = client_of(rig, "small"), client_of(rig, "large")
    queue(rig, small, 0, 300)
    queue(rig, large, 1000, 300)
    for _ in range(50):
        popped = [int(requests.pop(rig.core)) for _ in range(8)]
        for place in reversed(popped):
            requests.put_back(rig.core, place)
    assert rig.rd["queued"] == 600
    counts = Counter(serve(rig, 200))
    assert counts[large.index] == pytest.approx(150, abs=9)


def test_a_full_queue_takes_from_the_tenant_beyond_its_share(rig: Rig) -> None:
    small, large = client_of(rig, "small"), client_of(rig, "large")
    half = MAX_QUEUED // 2
    queue(rig, small, 0, half)
    queue(rig, large, half, half)
    queue(rig, large, 2 * half, 100)
    assert [int(client.counters["dropped_queue"]) for client in (small, large)] == [100, 0]
    dropped = {name: int(rig.core.tenants[row]["dropped"]) for name, row in rig.tier.tenants.names()}
    assert dropped == {"others": 0, "small": 100, "large": 0}


def test_sessions_of_a_tenant_that_goes_are_everybody_elses(rig: Rig) -> None:
    small, other = client_of(rig, "small"), client_of(rig, "")
    queue(rig, small, 0, 100)
    queue(rig, other, 1000, 100)
    rig.tier.tenants.apply([TenantConfig("large", share=30)])
    assert int(rig.core.tenants[0]["queued"]) == rig.rd["queued"] == 200
    counts = Counter(serve(rig, 100))
    assert counts[small.index] == pytest.approx(50, abs=2)
    rig.tier.close_session(small.index)
    assert len(serve(rig, 100)) == 100
    assert requests.pop(rig.core) == NONE
    assert not rig.core.tenants["queued"].any()
    assert not rig.core.lanes["queued"].any()


def test_no_tenants_no_names(rig: Rig) -> None:
    rig.tier.tenants.apply([])
    assert list(rig.tier.tenants.names()) == []
