"""From rings to the queue: order, duplicates, limits, and entries that no right client would write."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from strataflux.client import attach_block
from strataflux.daemon import cache, evict, requests, slots
from strataflux.daemon.state import MAX_QUEUED, NONE, SCORE_BUCKETS
from strataflux.proto import layout
from tests.fakes.core_rig import Client, Rig, make_store

RECORDS = 40_000


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig([make_store(tmp_path / "a", [(RECORDS, 64)], "a"), make_store(tmp_path / "b", [(10, 64)], "b")])
    yield rig
    rig.close()


def payload(oid: int, table: int = 0, score: int = 0) -> int:
    return score << layout.SCORE_SHIFT | table << layout.TABLE_SHIFT | oid


def take(rig: Rig) -> int:
    return int(requests.take_requests(rig.core))


def pop_all(rig: Rig) -> list[tuple[int, int]]:
    """Take the whole queue; (table, oid) in its order."""
    popped = []
    while (place := requests.pop(rig.core)) != NONE:
        key = int(rig.core.queue[place]["key"])
        popped.append((key >> 32, key & 0xFFFFFFFF))
        requests.drop(rig.core, place)
    assert rig.rd["queued"] == 0
    return popped


def test_most_wanted_first_then_first_come(rig: Rig) -> None:
    client = Client(rig.tier)
    scores = [0, 255, 16, 15, 240, 255, 31]
    client.push(*(payload(oid, score=score) for oid, score in enumerate(scores)))
    assert take(rig) == len(scores)
    buckets = [score * SCORE_BUCKETS // 256 for score in scores]
    expected = sorted(range(len(scores)), key=lambda oid: -buckets[oid])
    assert [oid for _, oid in pop_all(rig)] == expected


def test_tables_are_those_of_the_session(rig: Rig) -> None:
    client = Client(rig.tier, stores=(1, 0))
    client.push(payload(3, table=0), payload(4, table=1))
    take(rig)
    assert pop_all(rig) == [(1, 3), (0, 4)]


def test_requests_appear_before_the_step_ends(rig: Rig) -> None:
    client = Client(rig.tier)
    client.begin()
    client.look_up([1, 2])
    assert take(rig) == 2
    client.end()
    assert take(rig) == 0


def test_one_record_is_queued_once(rig: Rig) -> None:
    first, second = Client(rig.tier), Client(rig.tier)
    first.push(payload(1), payload(1))
    second.push(payload(1), payload(2))
    take(rig)
    assert sorted(pop_all(rig)) == [(0, 1), (0, 2)]
    assert rig.rd["duplicates"] == 2
    assert (int(first.counters["duplicates"]), int(second.counters["duplicates"])) == (1, 1)


def test_who_asks_again_for_more_is_served_earlier(rig: Rig) -> None:
    """The score that counts is the largest a session gave; another's does not move it, nor does a smaller one."""
    client, other = Client(rig.tier), Client(rig.tier)
    client.push(*(payload(oid, score=40 + 16 * oid) for oid in range(6)))
    client.push(payload(1, score=255), payload(4, score=1), payload(2, score=200))
    other.push(payload(0, score=255))
    take(rig)
    assert rig.rd["queued"] == 6
    assert [oid for _, oid in pop_all(rig)] == [1, 2, 5, 4, 3, 0]
    assert rig.rd["duplicates"] == 4


def test_moving_up_and_down_keeps_the_queue_whole(rig: Rig) -> None:
    client = Client(rig.tier, ring_log2=12)
    random = np.random.default_rng(2)
    best: dict[int, int] = {}
    for _ in range(60):
        asked = [(int(oid), int(score)) for oid, score in random.integers(0, [50, 256], (40, 2))]
        client.push(*(payload(oid, score=score) for oid, score in asked))
        take(rig)
        for oid, score in asked:
            best[oid] = max(score, best.get(oid, 0))
        assert rig.rd["queued"] == len(best)
        for _ in range(3):
            place = requests.pop(rig.core)
            oid = int(rig.core.queue[place]["key"])
            top = max(score * SCORE_BUCKETS // 256 for score in best.values())
            assert best.pop(oid) * SCORE_BUCKETS // 256 == top
            requests.drop(rig.core, place)
    assert len(pop_all(rig)) == len(best)


def test_request_has_one_result(rig: Rig) -> None:
    """Taken = cold + evicted + duplicate + resident + quarantined."""
    client = Client(rig.tier)
    for oid in (1, 2):
        cache.publish(rig.core, cache.begin_fill(rig.core, 0, 0, oid))
    assert evict.evict_one(rig.core, 0, True)  # 1
    cache.quarantine(rig.core, 0, 3)
    cache.begin_fill(rig.core, 0, 0, 4)
    client.push(*map(payload, (0, 1, 2, 3, 4, 0)))
    take(rig)
    names = ("requests", "cold", "evicted_again", "resident_already", "quarantine_hits", "duplicates")
    assert [int(rig.rd[name]) for name in names] == [6, 1, 1, 1, 1, 2]


def test_full_queue_drops_the_least_wanted_of_one_session(rig: Rig) -> None:
    client = Client(rig.tier, ring_log2=15)
    client.push(*(payload(oid, score=20) for oid in range(MAX_QUEUED)))
    while take(rig):
        pass
    assert rig.rd["queued"] == MAX_QUEUED
    client.push(payload(30_000, score=100), payload(30_001, score=20), payload(30_002, score=3))
    take(rig)
    # An old one for the first, then the two that are no better than any.
    assert rig.rd["dropped_queue"] == client.counters["dropped_queue"] == 3
    assert slots.pending_of(rig.core, 0, 0) == 0
    popped = pop_all(rig)
    assert popped[0] == (0, 30_000)
    assert popped[1:] == [(0, oid) for oid in range(1, MAX_QUEUED)]


def test_full_queue_drops_from_the_longest_lane(rig: Rig) -> None:
    """Whoever fills the queue loses by it, whatever scores it gives."""
    greedy, modest = Client(rig.tier, ring_log2=15), Client(rig.tier)
    greedy.push(*(payload(oid, score=255) for oid in range(MAX_QUEUED)))
    while take(rig):
        pass
    modest.push(payload(30_000, score=1), payload(30_001, score=1))
    take(rig)
    assert (int(greedy.counters["dropped_queue"]), int(modest.counters["dropped_queue"])) == (2, 0)
    assert rig.rd["dropped_queue"] == 2
    popped = pop_all(rig)
    assert {(0, 30_000), (0, 30_001)} <= set(popped[:4])
    assert [oid for _, oid in popped if oid < 30_000] == list(range(2, MAX_QUEUED))


@pytest.mark.parametrize("waiting", [(300, 10, 10), (5, 300, 40), (1, 1, 1)])
def test_sessions_take_turns_however_many_requests_they_have_waiting(rig: Rig, waiting: tuple[int, ...]) -> None:
    clients = [Client(rig.tier) for _ in waiting]
    for number, (client, count) in enumerate(zip(clients, waiting, strict=True)):
        client.push(*(payload(1000 * number + i, score=255 if number == 0 else 7) for i in range(count)))
    while take(rig):
        pass
    order = [oid // 1000 for _, oid in pop_all(rig)]
    assert len(order) == sum(waiting)
    for number, count in enumerate(waiting):
        last = max(at for at, owner in enumerate(order) if owner == number)
        assert last < count * len(waiting), "a turn was missed"


def test_requests_of_a_table_that_goes_are_dropped_and_no_others(rig: Rig) -> None:
    client, other = Client(rig.tier, stores=(0, 1)), Client(rig.tier)
    client.push(payload(1), payload(2, table=1), payload(3, score=90), payload(4, table=1, score=90), payload(5))
    other.push(payload(6))
    take(rig)
    requests.drop_table(rig.core, 1)
    assert rig.rd["queued"] == 4
    assert slots.pending_of(rig.core, 1, 2) == slots.pending_of(rig.core, 1, 4) == 0
    assert sorted(pop_all(rig)) == [(0, 1), (0, 3), (0, 5), (0, 6)]


@pytest.mark.parametrize(
    "rubbish",
    [
        payload(0, table=1),  # a table it did not attach
        payload(0, table=254),
        payload(0, table=255),
        payload(RECORDS),
        payload(0xFFFFFFFF),
        payload(layout.OID_MASK),
        (1 << 56) - 1,
    ],
)
def test_rubbish_counts_against_its_session_only(rig: Rig, rubbish: int) -> None:
    bad, good = Client(rig.tier), Client(rig.tier)
    bad.push(rubbish, payload(1), rubbish)
    good.push(payload(2))
    take(rig)
    assert sorted(pop_all(rig)) == [(0, 1), (0, 2)]
    assert (int(bad.counters["invalid"]), int(good.counters["invalid"])) == (2, 0)
    assert rig.rd["requests"] == 2


def test_random_bytes_in_the_ring_are_harmless(rig: Rig) -> None:
    """Cells and tail full of noise: bounded work, everything taken is counted, good sessions are served."""
    bad, good = Client(rig.tier), Client(rig.tier)
    random = np.random.default_rng(5)
    for _ in range(50):
        bad.ring_cells()[:] = random.integers(0, 1 << 64, bad.ring_cells().size, np.uint64)
        bad.page["ring_tail"] = random.integers(0, 1 << 64, dtype=np.uint64)
        oid = int(random.integers(RECORDS))
        good.push(payload(oid, score=255))
        assert take(rig) <= 2 * 256
        assert (0, oid) in pop_all(rig)
    counts = bad.counters
    answered = int(rig.rd["requests"]) - 50
    assert int(counts["taken"]) == int(counts["holes"]) + int(counts["invalid"]) + answered
    assert (int(good.counters["invalid"]), int(good.counters["holes"])) == (0, 0)
    rig.intact()


def test_holes_are_skipped_and_counted(rig: Rig) -> None:
    """A producer that reserved places and died before it filled them stalls nobody."""
    client = Client(rig.tier)
    client.begin()
    state = client.block[attach_block.TAIL : attach_block.TAIL + 3]
    state[0] += np.uint64(3)
    client.look_up([7])
    client.end()
    assert take(rig) == 4
    assert pop_all(rig) == [(0, 7)]
    assert (int(client.counters["holes"]), int(client.counters["head"])) == (3, 4)


def test_entry_of_an_earlier_round_is_not_taken_again(rig: Rig) -> None:
    client = Client(rig.tier, ring_log2=8)
    for _ in range(3):
        client.push(*map(payload, range(256)))
        assert take(rig) == 256
        pop_all(rig)
    client.page["ring_tail"] = 3 * 256 + 5
    assert take(rig) == 5
    assert client.counters["holes"] == 5
    assert rig.rd["requests"] == 768


def test_head_is_given_back_to_the_client(rig: Rig) -> None:
    client = Client(rig.tier, ring_log2=8)
    client.push(*map(payload, range(100)))
    take(rig)
    assert client.view["ring_head"] == 100
    client.begin()
    client.look_up(range(1000, 1300))
    client.end()
    assert client.page["ring_dropped"] == 300 - 256
    assert take(rig) == 256


def test_busy_ring_does_not_crowd_out_the_others(rig: Rig) -> None:
    busy, quiet = Client(rig.tier, ring_log2=12), Client(rig.tier)
    busy.push(*map(payload, range(4000)))
    quiet.push(payload(5000))
    assert take(rig) == 256 + 1
    assert (int(busy.counters["taken"]), int(quiet.counters["taken"])) == (256, 1)


def test_sessions_take_turns_at_going_first(rig: Rig) -> None:
    """What all ask for at once belongs to whoever's ring was looked at first."""
    clients = [Client(rig.tier) for _ in range(3)]
    firsts = []
    for turn in range(3):
        for client in clients:
            client.push(payload(turn))
        rig.rd["turns"] = turn
        take(rig)
        place = requests.pop(rig.core)
        firsts.append(int(rig.core.queue[place]["session"]))
        requests.drop(rig.core, place)
    assert sorted(firsts) == [client.index for client in clients]


def test_fenced_session_is_not_listened_to(rig: Rig) -> None:
    client = Client(rig.tier)
    client.push(payload(1))
    client.counters["fenced"] = 1
    assert take(rig) == 0


def test_requests_outlive_their_session(rig: Rig) -> None:
    leaving, staying = Client(rig.tier), Client(rig.tier)
    leaving.push(payload(1, score=200), payload(2))
    staying.push(payload(3))
    take(rig)
    rig.tier.close_session(leaving.index)
    sessions = {}
    while (place := requests.pop(rig.core)) != NONE:
        sessions[int(rig.core.queue[place]["key"])] = int(rig.core.queue[place]["session"])
        requests.release(rig.core, place)
    assert sessions == {1: NONE, 2: NONE, 3: staying.index}


def test_put_back_goes_to_the_front(rig: Rig) -> None:
    client = Client(rig.tier)
    client.push(payload(1, score=50), payload(2, score=50))
    take(rig)
    first = requests.pop(rig.core)
    requests.put_back(rig.core, first)
    assert pop_all(rig) == [(0, 1), (0, 2)]
    client.push(payload(3, score=50))
    take(rig)
    requests.put_back(rig.core, requests.pop(rig.core))
    client.push(payload(4, score=50))
    take(rig)
    assert pop_all(rig) == [(0, 3), (0, 4)]
