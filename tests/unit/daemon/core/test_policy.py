"""The reader with each of the policies that are worth running: same contract, same bytes; what differs is who stays."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strataflux.cache_policy.policies import DEFAULT
from strataflux.daemon import replacement, requests
from strataflux.daemon.errors import Refusal
from strataflux.daemon.state import PENDING_NONE
from strataflux.daemon.store import open_served
from strataflux.proto import layout
from tests.fakes.core_rig import Client, Disk, Rig, make_store

RECORDS, BYTES = 6000, 1000
POLICIES = sorted({"lru", DEFAULT})


@pytest.fixture(params=POLICIES)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    rig = Rig([make_store(tmp_path / "store", [(RECORDS, BYTES)])], pages=1, policy=request.param)
    yield Disk(rig)
    rig.close()


def tick(disk: Disk) -> None:
    """Let the clock move, and with it whatever is done once a tick."""
    disk.rig.core.rd[0]["tick_us"] = 0
    disk.rig.sweep()


def test_more_than_fits_is_served_right(disk: Disk) -> None:
    random = np.random.default_rng(3)
    for _ in range(40):
        oids = random.integers(0, RECORDS, 60).tolist()
        found = disk.client.read(oids)
        assert all(record in (None, disk.rig.record(oid)) for oid, record in zip(oids, found, strict=True))
        disk.settle()
        tick(disk)
    assert disk.rig.rd["evictions"] > 1000
    assert int(disk.rig.core.kinds[0]["fills"]) > 1000


def test_every_request_is_filled_rejected_or_asked_again(disk: Disk) -> None:
    """None stays queued; a record that was refused is absent, with nothing pending."""
    random = np.random.default_rng(4)
    for _ in range(30):
        disk.client.ask(random.zipf(1.2, 80).clip(max=RECORDS - 1).tolist())
        disk.settle()
        tick(disk)
    row = disk.rig.core.kinds[0]
    assert row["cold"] + row["evicted_again"] == row["fills"] + row["rejected"] + disk.rig.rd["dropped_grace"]
    pending = np.ctypeslib.as_array(disk.rig.tier.tables._private[0][0])
    assert not ((pending & 0x7FFFFFFF) != PENDING_NONE).any()


def cache_what_is_worth_it(disk: Disk) -> None:
    """A cache that is full of records that every step uses, beside many that none uses again."""
    for round_ in range(60):
        disk.client.ask([*range(250), *range(1000 + 40 * round_, 1040 + 40 * round_)])
        disk.settle()
        tick(disk)


def test_whoever_waits_is_never_refused(disk: Disk) -> None:
    cache_what_is_worth_it(disk)
    wanted = list(range(5000, 5010))
    disk.client.page["awaiting"] = int(disk.rig.rd["clock"]) + 1000
    disk.client.ask(wanted)
    disk.settle()
    assert all(disk.rig.entry(oid) for oid in wanted)


def test_whoever_will_wait_is_never_refused(disk: Disk) -> None:
    """A client asks first and says then that it waits: its request may be looked at in between."""
    cache_what_is_worth_it(disk)
    patient, wanted, before = Client(disk.rig.tier, waits=True), list(range(5000, 5010)), disk.rig.rd["rejected"]
    patient.ask(wanted)
    disk.rig.sweep()
    patient.page["awaiting"] = int(disk.rig.rd["clock"]) + 1000
    disk.settle()
    assert all(disk.rig.entry(oid) for oid in wanted)
    assert disk.rig.rd["rejected"] == before


def hot_hits(disk: Disk) -> float:
    """Hits on records that each step uses, while as many others as the cache holds pass through."""
    hot, hits, looked = list(range(100)), 0, 0
    for step in range(120):
        once = list(range(200 + 45 * step, 245 + 45 * step))
        found = disk.client.ask(once) * 0 + disk.client.ask(hot)
        hits, looked = hits + found * (step >= 20), looked + len(hot) * (step >= 20)
        disk.settle()
        tick(disk)
    return hits / looked


def test_what_each_step_uses_survives_what_passes_through(disk: Disk) -> None:
    assert hot_hits(disk) > 0.9


def test_uses_are_told_without_an_eviction(tmp_path: Path) -> None:
    """A policy that learns hears of hits soon; for LRU nobody goes looking."""
    seen: dict[str, int] = {}
    for policy in ("lru", DEFAULT):
        rig = Rig([make_store(tmp_path / policy, [(RECORDS, BYTES)])], pages=4, policy=policy)
        disk = Disk(rig)
        disk.fill(*range(50))
        for _ in range(5):
            tick(disk)
        disk.client.ask(range(50))
        for _ in range(5):
            tick(disk)
        seen[policy] = int(rig.core.kinds[0]["fills_useful"])
        rig.close()
    assert seen["lru"] == 0
    assert seen[DEFAULT] == (50 if DEFAULT != "lru" else 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_places_and_entries_are_one_to_one(policy: str, tmp_path: Path) -> None:
    stores = [make_store(tmp_path / "store", [(100, 700), (100, 9000)])]
    rig = Rig(stores, pages=3, policy=policy)
    core: Any = rig.core
    units = layout.UNITS_PER_PAGE
    entries = [page * units + at for page in range(3) for at in range(units // 3)]
    places = [int(replacement.place_of(core, entry)) for entry in entries]
    assert len(set(places)) == len(places)
    assert [int(replacement.entry_at(core, 0, place)) for place in places] == entries
    assert replacement.entry_at(core, 0, -1) == -1
    if policy != "lru":  # 341 slots of 768 bytes a page, in the next power of two
        assert max(places) < 3 * 512
    rig.close()


def test_a_store_of_smaller_slots_than_were_planned_is_refused(tmp_path: Path) -> None:
    big, small = (make_store(tmp_path / name, [(50, size)], name) for name, size in (("big", 4000), ("small", 200)))
    rig = Rig([big], policy=DEFAULT)
    with pytest.raises(Refusal, match="slots of 256 bytes; expected at least 4096"):
        rig.tier.add_store(open_served(small, direct_io="off"))
    assert requests.take_requests(rig.core) == 0
    rig.close()
    rig = Rig([big], policy="lru")
    assert rig.tier.add_store(open_served(small, direct_io="off")) == 1
    rig.close()
