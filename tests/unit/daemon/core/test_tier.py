"""Memory of the tier: exact budgets, stores apart, sessions that see what is theirs, nothing left behind."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from strataflux.cache_policy import budget
from strataflux.daemon import tables
from strataflux.daemon import tier as module
from strataflux.daemon.store import open_served
from strataflux.daemon.tier import Tier
from strataflux.proto import layout
from strataflux.proto.errors import SegmentError
from strataflux.proto.segment import Segment, create, map_descriptor
from tests.fakes.core_rig import PAGE, Client, make_store, request

MakeTier = Callable[..., Tier]


@pytest.fixture
def make_tier(tmp_path: Path) -> Iterator[MakeTier]:
    with ExitStack() as stack:

        def make(domains: tuple[int, ...] = (0,), pages: int = 4, records: int = 500) -> Tier:
            stores = [
                open_served(make_store(tmp_path / str(n), [(records, 1000)], str(n)), direct_io="off", rule=domain)
                for n, domain in enumerate(domains)
            ]
            tier = Tier(stores, pages * PAGE, 8, 2.0)
            stack.callback(tier.close)
            return tier

        yield make


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("pages", [1, 3, 64, 65, 130])
def test_budget_is_exact_to_a_page(make_tier: MakeTier, pages: int) -> None:
    tier = make_tier(pages=pages)
    assert sum(s.segment.size for s in tier.segments) == pages * PAGE
    assert int((tier.core.pages.pages["state"] == budget.UNUSED).sum()) == pages
    assert int((tier.core.page_address != 0).sum()) == pages
    assert len(tier.segments) <= layout.MAX_SEGMENTS


def test_pages_have_their_own_memory(make_tier: MakeTier) -> None:
    tier = make_tier(pages=130)
    addresses = np.sort(tier.core.page_address[tier.core.page_address != 0])
    assert (np.diff(addresses) >= PAGE).all()
    for segment in tier.segments:
        first = tier.core.page_address[segment.first_page]
        assert first == segment.segment.address
        assert segment.info.first_slot == segment.first_page * layout.UNITS_PER_PAGE


def test_stores_under_different_rules_share_no_segment(make_tier: MakeTier) -> None:
    tier = make_tier(domains=(0, 1), pages=4)
    client = Client(tier, stores=(1,))
    mine = {s.first_page for s in tier.segments if s.domain == 1}
    opened = tier.open_session(request((1,)))
    assert {s.first_slot // layout.UNITS_PER_PAGE for s in opened.segments} == mine
    assert len(opened.descriptors) == 4 + 1 + len(mine)
    for descriptor in opened.descriptors:
        os.close(descriptor)
    assert client.row.domains == {1}
    assert tier.core.classes["units"][:2].tolist() == [4, 4]  # a class each, although the records are alike
    assert tier.core.pages.classes["budget"][:2].tolist() == [0, 1]


def test_domains_share_by_the_bytes_of_their_stores(make_tier: MakeTier) -> None:
    tier = make_tier(domains=(0, 1, 0), pages=9)
    pages = {domain: sum(s.segment.size for s in tier.segments if s.domain == domain) // PAGE for domain in (0, 1)}
    assert pages == {0: 6, 1: 3}


def test_every_domain_gets_a_page(make_tier: MakeTier) -> None:
    tier = make_tier(domains=(0, 1, 2), pages=1)
    assert [s.segment.size for s in tier.segments] == 3 * [PAGE]


def test_session_gets_what_it_may_write_and_no_more(make_tier: MakeTier) -> None:
    tier = make_tier(domains=(0,))
    opened = tier.open_session(request())
    sizes = [os.fstat(descriptor).st_size for descriptor in opened.descriptors]
    writable = []
    for position, (descriptor, size) in enumerate(zip(opened.descriptors, sizes, strict=True)):
        if position == 3:  # the doorbell, an eventfd
            os.close(descriptor)
            continue
        try:
            map_descriptor(descriptor, size, writable=True).close()
            writable.append(position)
        except SegmentError:
            continue
    assert writable == [2]  # its own segment


def test_page_headers_tell_both_sides_apart(make_tier: MakeTier) -> None:
    tier = make_tier()
    first, second = Client(tier), Client(tier)
    headers = [c.row.page.view(layout.SESSION_PAGE)[0]["header"] for c in (first, second)]
    assert {int(h["magic"]) for h in headers} == {layout.SESSION_MAGIC}
    assert {int(h["generation"]) for h in headers} == {tier.generation}
    assert len({int(h["id"]) for h in headers}) == 2
    assert tier.daemon_page.view(layout.DAEMON_PAGE)[0]["header"]["magic"] == layout.DAEMON_MAGIC
    assert first.view["header"]["magic"] == layout.VIEW_MAGIC


def test_close_leaves_nothing_open(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store", [(10, 100)])
    before = open_descriptors()
    tier = Tier([open_served(folder, direct_io="prefer")], PAGE, 8, 2.0)
    Client(tier)
    Client(tier)
    tier.close()
    assert open_descriptors() == before


@pytest.mark.parametrize("allowed", range(2))
def test_session_without_memory_leaves_nothing_behind(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    tier = make_tier()
    before = open_descriptors()
    made: list[Segment] = []

    def scarce(name: str, size: int, *, reserve: bool) -> Segment:
        if len(made) == allowed:
            raise SegmentError(f"segment {name}", "no memory", "memory for all of it", "lower the budgets")
        made.append(create(name, size, reserve=reserve))
        return made[-1]

    for makes in (module, tables):
        monkeypatch.setattr(makes, "create", scarce)
    with pytest.raises(SegmentError):
        tier.open_session(request())
    assert open_descriptors() == before
    assert not tier.rows
    assert not tier.core.sessions["active"].any()


def test_tier_without_memory_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stores stay open: they are whoever's who opened them until there is a tier to own them."""
    store = open_served(make_store(tmp_path / "store", [(10, 100)]), direct_io="off")
    before = open_descriptors()
    made: list[Segment] = []

    def scarce(name: str, size: int, *, reserve: bool) -> Segment:
        if len(made) == 2:
            raise SegmentError(f"segment {name}", "no memory", "memory for all of it", "lower the budgets")
        made.append(create(name, size, reserve=reserve))
        return made[-1]

    for makes in (module, tables):
        monkeypatch.setattr(makes, "create", scarce)
    with pytest.raises(SegmentError):
        Tier([store], PAGE, 8, 2.0)
    assert open_descriptors() == before
    store.close()


def test_a_session_that_cannot_be_described_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier([open_served(make_store(tmp_path / "s", [(8, 256)]), direct_io="off")], PAGE, 4, 2.0)
    descriptors = len(os.listdir("/proc/self/fd"))

    def refuse(_descriptor: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("strataflux.daemon.tier.os.dup", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        tier.open_session(request())
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not tier.rows
    assert not tier.core.sessions["active"].any()
    tier.close()
