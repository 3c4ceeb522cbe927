"""Rates are differences of counters over the daemon's own clock, and survive another daemon and rubbish."""

import pytest

from strataflux.client.watch import Moment, rates
from strataflux.proto import control_pb2

DIGEST = "ab" * 32


def moment(at: float, scale: int, generation: int = 1, **changes: int) -> Moment:
    """Counters grow by ``scale`` times what each begins with."""
    stats = control_pb2.Stats(
        at_seconds=at,
        lookups=control_pb2.LookupStats(
            weight_lookups=changes.get("lookups", 100 * scale), weight_hits=75 * scale, kv_lookups=0, kv_hits=0
        ),
        fills=control_pb2.FillStats(
            fills=20 * scale, latency_us=8000 * scale, evictions=10 * scale, prefetched=8 * scale
        ),
        kinds=[
            control_pb2.KindStats(
                kind=kind,
                prefetch_used=3 * scale,
                prefetch_unused=scale,
                prefetches=10 * scale,
                prefetch_dropped=2 * scale,
            )
            for kind in ("weight", "kv")
        ],
        reads=control_pb2.ReadStats(
            reads=16 * scale, bytes=65536 * scale, microseconds=3200 * scale, in_flight=3, queued=2, errors=1
        ),
        requests=control_pb2.RequestStats(dropped_ring=scale, dropped_queue=2 * scale, dropped_grace=3 * scale),
    )
    stats.requests.rejected = 5 * scale
    store = control_pb2.Store(
        digest=DIGEST,
        sections=[control_pb2.Section(layer=n, set="qkv", records=50) for n in range(2)],
        stats=control_pb2.StoreStats(section_misses=[4 * scale, 6 * scale]),
    )
    row = control_pb2.SessionStats(steps=12 * scale, lookups=100 * scale, hits=75 * scale, dropped=6 * scale)
    session = control_pb2.Session(session=255, client="decoder", pid=7, uid=8, stats=row)
    info = control_pb2.GetInfoResponse(generation=generation, uptime_seconds=8.0)
    return Moment(info, stats, [store], [session])


def test_rates_are_differences_by_seconds() -> None:
    found = rates(moment(14.0, 3), moment(10.0, 1))
    assert found.seconds == 4.0
    assert (found.lookups["weight"].per_second, found.lookups["weight"].hit_rate) == (50.0, 0.75)
    assert (found.lookups["kv"].per_second, found.lookups["kv"].hit_rate) == (0.0, None)
    assert (found.fills_per_second, found.fill_seconds, found.evictions_per_second) == (10.0, 400e-6, 5.0)
    assert (found.reads_per_second, found.read_bytes_per_second, found.read_seconds) == (8.0, 32768.0, 200e-6)
    assert (found.dropped_per_second, found.in_flight, found.queued, found.read_errors) == (3.0, 3, 2, 1)
    assert (found.prefetched_per_second, found.prefetches_useful) == (4.0, 0.75)
    assert (found.prefetches_asked_per_second, found.prefetches_dropped_per_second) == (10.0, 2.0)
    assert found.rejected_per_second == 2.5
    (session,) = found.sessions
    assert (session.session, session.client, session.pid, session.uid) == ("ff", "decoder", 7, 8)
    assert found.steps_per_second == session.steps_per_second == 6.0
    assert (session.lookups.hit_rate, session.dropped_per_second) == (0.75, 3.0)
    assert [(row.layer, row.set, row.per_second) for row in found.misses] == [(0, "qkv", 2.0), (1, "qkv", 3.0)]


@pytest.mark.parametrize("before", [None, moment(2.0, 50, generation=2)])
def test_without_an_earlier_moment_of_this_daemon_they_are_since_it_started(before: Moment | None) -> None:
    found = rates(moment(100.0, 4), before)
    assert (found.seconds, found.fills_per_second) == (8.0, 10.0)
    assert [row.per_second for row in found.misses] == [2.0, 3.0]


def test_nothing_happened() -> None:
    found = rates(moment(11.0, 1), moment(10.0, 1))
    assert (found.fill_seconds, found.read_seconds, found.lookups["weight"].hit_rate) == (None, None, None)
    assert found.prefetches_useful is None
    assert found.steps_per_second == 0


def test_a_client_that_writes_nonsense_spoils_nothing() -> None:
    found = rates(moment(11.0, 2, lookups=1), moment(10.0, 1))
    assert (found.lookups["weight"].per_second, found.lookups["weight"].hit_rate) == (0.0, None)
    found = rates(moment(11.0, 2, lookups=150), moment(10.0, 1))
    assert found.lookups["weight"].hit_rate == 1.0


def test_a_store_of_another_shape_counts_from_nothing() -> None:
    before = moment(10.0, 1)
    before.stores[0].stats.section_misses.append(9)
    assert [row.per_second for row in rates(moment(12.0, 2), before).misses] == [4.0, 6.0]
