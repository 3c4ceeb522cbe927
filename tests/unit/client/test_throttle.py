"""How much is asked for ahead, by what came of it."""

import pytest

from strataflux.client.prefetches import PrefetchCounts
from strataflux.client.throttle import Seen, Throttle


class Session:
    """Counts as a session's would grow, a window of steps at a time."""

    def __init__(self) -> None:
        self.throttle = Throttle()
        self.seen = Seen(0, 0, PrefetchCounts())

    def window(self, *, used: int = 0, unused: int = 0, dropped: int = 0, missed: int = 100) -> float:
        steps = 1
        while not self.throttle.step():
            steps += 1
        old, fills = self.seen.prefetches, used + unused
        counts = PrefetchCounts(
            old.asked + fills + dropped, old.fills + fills, old.used + used, old.unused + unused, old.dropped + dropped
        )
        self.seen = Seen(self.seen.lookups + 1000, self.seen.hits + 1000 - missed, counts)
        self.throttle.decide(self.seen)
        return self.throttle.share


@pytest.fixture
def session() -> Session:
    return Session()


def test_what_pays_goes_on(session: Session) -> None:
    assert [session.window(used=60, unused=60) for _ in range(3)] == [1.0, 1.0, 1.0]


def test_what_does_not_pay_goes_to_zero_and_is_tried_again(session: Session) -> None:
    shares = [session.window(used=10, unused=90) for _ in range(5)]
    assert shares == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 0.0]
    # A rest, and then a little: it pays now.
    assert session.window() == 1 / 16
    assert [session.window(used=90, unused=10) for _ in range(5)] == [1 / 8, 1 / 4, 1 / 2, 1.0, 1.0]


def test_a_rest_is_longer_than_a_window(session: Session) -> None:
    throttle = session.throttle
    busy = next(step for step in range(1, 1000) if throttle.step())
    for _ in range(5):
        session.window(unused=100)
    assert throttle.share == 0.0
    resting = next(step for step in range(1, 1000) if throttle.step())
    assert resting > 2 * busy


def test_too_little_known_changes_nothing_until_it_is_enough(session: Session) -> None:
    assert session.window(unused=40) == 1.0
    assert session.window(unused=40) == 1 / 2


def test_a_daemon_that_drops_them_is_asked_for_fewer(session: Session) -> None:
    assert session.window(used=20, dropped=200) == 1 / 2


def test_without_misses_there_is_nothing_to_gain(session: Session) -> None:
    assert session.window(missed=0) == 0.0
    assert session.window(missed=0) == 1 / 16
    assert session.window(missed=0) == 0.0
    # What prefetches prevented counts as a miss that would have been.
    assert session.window() == 1 / 16
    assert session.window(missed=0, used=100) == 1 / 8
