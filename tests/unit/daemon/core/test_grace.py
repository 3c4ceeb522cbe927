"""Grace with step words set by hand: who holds a batch, until when, and what happens to those who hold it too long."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from strataflux.daemon import cache, grace
from strataflux.daemon.rows import EVICTED_CAPACITY
from strataflux.daemon.state import FREE, MAX_BATCHES, RETIRED
from strataflux.proto import layout
from tests.fakes.core_rig import Client, Disk, Rig, make_store

LAST = 0xFFFFFFFF


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig([make_store(tmp_path / "store", [(4000, 200)])], pages=3)
    yield rig
    rig.close()


def retired(rig: Rig, *oids: int) -> list[int]:
    """Publish and retire records; their entries, in the open batch."""
    entries = []
    for oid in oids:
        entries.append(int(cache.begin_fill(rig.core, 0, 0, oid)))
        cache.publish(rig.core, entries[-1])
        cache.retire(rig.core, entries[-1], EVICTED_CAPACITY)
        assert rig.entry(oid) == layout.ENTRY_ABSENT
    return entries


def states(rig: Rig, entries: list[int]) -> set[int]:
    return {int(rig.core.slots[entry]["state"]) for entry in entries}


def test_without_sessions_nothing_waits(rig: Rig) -> None:
    entries = retired(rig, 0, 1, 2)
    assert grace.recycle(rig.core) == 0  # still open
    assert rig.recycle() == 3
    assert states(rig, entries) == {FREE}
    rig.intact()


def test_empty_batch_is_not_closed(rig: Rig) -> None:
    assert not grace.close_batch(rig.core)
    assert rig.rd["batch_last"] == 0


@pytest.mark.parametrize(
    ("begun", "ended", "then"),
    [
        (1, 0, [1]),
        (2, 0, [1, 2]),  # two steps in flight: both are waited for
        (7, 5, [6, 7]),
        (0, LAST, [0]),  # step numbers wrap
        (1, LAST, [0, 1]),
        (LAST, LAST - 1, [LAST]),
        (0x80000001, 0x80000000, [0x80000001]),
    ],
)
def test_session_inside_a_step_holds_until_it_ended_the_last_one_seen(
    rig: Rig, begun: int, ended: int, then: list[int]
) -> None:
    client = Client(rig.tier)
    client.set_steps(begun, ended)
    entries = retired(rig, 0, 1)
    assert rig.recycle() == 0
    for position, now_ended in enumerate(then, 1):
        assert states(rig, entries) == {RETIRED}
        client.set_steps(begun, now_ended)
        assert grace.recycle(rig.core) == (2 if position == len(then) else 0)
    assert states(rig, entries) == {FREE}
    rig.intact()


@pytest.mark.parametrize("steps", [(0, 0), (5, 5), (LAST, LAST), (3, 4)], ids=str)
def test_session_outside_of_steps_holds_nothing(rig: Rig, steps: tuple[int, int]) -> None:
    Client(rig.tier).set_steps(*steps)
    retired(rig, 0)
    assert rig.recycle() == 1


def test_later_steps_do_not_hold_an_earlier_batch(rig: Rig) -> None:
    client = Client(rig.tier)
    client.set_steps(1, 0)
    retired(rig, 0)
    assert rig.recycle() == 0
    client.set_steps(2, 1)  # a step that began after the batch was closed
    assert grace.recycle(rig.core) == 1


def test_batches_go_in_order(rig: Rig) -> None:
    slow, quick = Client(rig.tier), Client(rig.tier)
    slow.set_steps(1, 0)
    first = retired(rig, 0)
    grace.close_batch(rig.core)
    slow.set_steps(1, 1)
    quick.set_steps(1, 0)
    second = retired(rig, 1)
    grace.close_batch(rig.core)
    slow.set_steps(1, 0)
    assert grace.recycle(rig.core) == 0
    slow.set_steps(1, 1)
    assert grace.recycle(rig.core) == 1
    assert (states(rig, first), states(rig, second)) == ({FREE}, {RETIRED})
    quick.set_steps(1, 1)
    assert grace.recycle(rig.core) == 1


def test_full_ring_of_batches_keeps_the_open_one(rig: Rig) -> None:
    client = Client(rig.tier)
    client.set_steps(1, 0)
    for oid in range(MAX_BATCHES):
        retired(rig, oid)
        assert grace.close_batch(rig.core)
    more = retired(rig, 2000, 2001)
    assert not grace.close_batch(rig.core)
    assert rig.rd["open_count"] == 2
    assert grace.recycle(rig.core) == 0
    client.set_steps(1, 1)
    assert grace.recycle(rig.core) == MAX_BATCHES
    assert states(rig, more) == {RETIRED}
    assert rig.recycle() == 2
    rig.intact()


def test_session_that_leaves_holds_nothing(rig: Rig) -> None:
    leaving, staying = Client(rig.tier), Client(rig.tier)
    leaving.set_steps(1, 0)
    staying.set_steps(1, 0)
    retired(rig, 0)
    assert rig.recycle() == 0
    rig.tier.close_session(leaving.index)
    assert grace.recycle(rig.core) == 0
    staying.set_steps(1, 1)
    assert grace.recycle(rig.core) == 1


def test_place_of_a_session_that_left_is_clean(rig: Rig) -> None:
    left = Client(rig.tier)
    left.set_steps(1, 0)
    retired(rig, 0)
    grace.close_batch(rig.core)
    rig.tier.close_session(left.index)
    after = Client(rig.tier)
    assert after.index == left.index
    assert grace.recycle(rig.core) == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
def test_sessions_may_leave_in_any_order(rig: Rig, order: tuple[int, ...]) -> None:
    clients = [Client(rig.tier) for _ in range(3)]
    count = rig.core.stamp_owner
    for left, position in enumerate(order, 1):
        rig.tier.close_session(clients[position].index)
        remaining = {c.index for at, c in enumerate(clients) if at not in order[:left]}
        assert set(count[: count[layout.MAX_SESSIONS]].tolist()) == remaining
        for place in range(len(remaining)):
            stamps = clients[count[place]].row.page.address
            assert stamps < rig.core.stamps[place] < stamps + clients[count[place]].row.page.size


def starve(rig: Rig, seconds: float) -> int:
    """Say that fills wait and that so much time has passed; how many sessions were fenced."""
    rig.rd["starved"] = 1
    rig.rd["now_us"] += int(seconds * 1e6)
    return int(grace.fence_stuck(rig.core))


def test_session_that_holds_too_long_is_fenced(rig: Rig) -> None:
    stuck, fine = Client(rig.tier), Client(rig.tier)
    stuck.set_steps(1, 0)
    entries = retired(rig, 0)
    grace.close_batch(rig.core)
    fine.set_steps(1, 0)  # began after the batch: does not hold it
    assert starve(rig, 1.9) == 0
    assert starve(rig, 0.1) == 1
    assert (int(stuck.view["fenced"]), int(fine.view["fenced"])) == (1, 0)
    assert grace.recycle(rig.core) == 1
    assert states(rig, entries) == {FREE}
    assert rig.rd["fences"] == 1
    assert not stuck.end()


def test_fenced_session_holds_no_later_batch(rig: Rig) -> None:
    stuck = Client(rig.tier)
    stuck.set_steps(1, 0)
    for oid in (0, 1):
        retired(rig, oid)
        grace.close_batch(rig.core)
    assert starve(rig, 2.0) == 1
    retired(rig, 2)
    assert rig.recycle() == 3
    assert starve(rig, 2.0) == 0


def test_nobody_is_fenced_while_fills_find_room(rig: Rig) -> None:
    client = Client(rig.tier)
    client.set_steps(1, 0)
    retired(rig, 0)
    grace.close_batch(rig.core)
    rig.rd["now_us"] += 10_000_000
    assert grace.fence_stuck(rig.core) == 0
    assert client.view["fenced"] == 0


def test_fenced_client_misses_everything(rig: Rig) -> None:
    client = Client(rig.tier)
    client.begin()
    retired(rig, 0)
    grace.close_batch(rig.core)
    assert starve(rig, 2.0) == 1
    assert not client.end()
    cache.publish(rig.core, cache.begin_fill(rig.core, 0, 0, 5))
    assert client.read([5]) == [None]
    assert grace.observe_steps(rig.core) == 0


def test_steps_are_observed(rig: Rig) -> None:
    client = Client(rig.tier)
    assert not grace.observe_steps(rig.core)
    rig.rd["clock"] = 77
    client.set_steps(3, 2)
    assert grace.observe_steps(rig.core)
    assert (int(client.counters["steps"]), int(client.counters["inside"])) == (3, 1)
    assert rig.core.stepped[0] == 77
    client.set_steps(2, 2)  # a client may write anything: counts never go back
    assert not grace.observe_steps(rig.core)
    assert client.counters["steps"] == 3


def test_held_slots_drop_fills_until_the_fence_frees_them(rig: Rig) -> None:
    """The whole way: a full cache whose slots a step holds drops fills with a reason, fences, and fills again."""
    stuck = Client(rig.tier)
    for oid in range(3 * layout.UNITS_PER_PAGE):
        cache.publish(rig.core, cache.begin_fill(rig.core, 0, 0, oid))
    wanted = range(3900, 3908)
    stuck.begin()
    stuck.look_up(wanted)
    while not rig.rd["dropped_grace"]:
        rig.sweep()
        assert rig.rd["reads"] == 0
    assert rig.core.classes[0]["retired"] * 4 > rig.core.classes[0]["slots"]
    assert stuck.counters["dropped_grace"] == rig.rd["dropped_grace"]
    rig.intact()
    rig.rd["grace_us"] = 0
    rig.sweep(2)
    assert (int(rig.rd["fences"]), int(stuck.view["fenced"])) == (1, 1)
    other = Disk(rig)
    other.fill(*wanted)
    other.check_served(*wanted)
    assert not stuck.end()
