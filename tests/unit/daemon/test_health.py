"""Readiness goes one way, reasons come and go, and progress is what changes."""

from strataflux.daemon.health import Health, ProgressWatch


def test_states_go_one_way() -> None:
    seen: list[str] = []
    health = Health(lambda h: seen.append(h.state))
    assert not health.ready
    health.move_to("ready")
    health.move_to("ready")
    assert health.ready
    health.move_to("draining")
    health.move_to("ready")
    assert not health.ready
    assert seen == ["ready", "draining"]


def test_reasons_come_and_go() -> None:
    seen: list[dict[str, str]] = []
    health = Health(lambda h: seen.append(dict(h.reasons)))
    health.set_reason("buffered", None)
    health.set_reason("buffered", "no direct reads")
    health.set_reason("buffered", "no direct reads")
    assert health.degraded
    health.set_reason("buffered", None)
    assert not health.degraded
    assert seen == [{"buffered": "no direct reads"}, {}]


def test_an_obstacle_takes_readiness_away_and_gives_it_back() -> None:
    seen: list[str] = []
    health = Health(lambda h: seen.append(h.state))
    health.set_obstacle("probe", "no answer")
    assert health.state == "starting"
    health.move_to("ready")
    assert (health.state, health.ready, health.degraded) == ("unready", False, False)
    health.set_obstacle("probe", None)
    assert health.ready
    health.move_to("draining")
    health.set_obstacle("probe", "no answer")
    assert health.state == "draining"
    assert seen == ["starting", "unready", "ready", "draining", "draining"]


def test_progress_is_a_count_that_changes() -> None:
    now = [100.0]
    watch = ProgressWatch(lambda: now[0])
    assert watch.moved(0)
    now[0] += 5
    assert not watch.moved(0)
    assert watch.age_seconds == 5
    assert watch.moved(3)
    assert watch.age_seconds == 0
    assert watch.moved(1)  # a wrapped or restarted count moved, too
