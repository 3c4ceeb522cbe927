"""Wait for what another thread does: on conditions, with a watchdog instead of a time limit."""

import threading
from collections.abc import Callable
from typing import TypeVar

from strataflux.client.keeper import Event

T = TypeVar("T")

WATCHDOG_SECONDS = 60.0
"""Longer than any machine takes; only a test that would hang forever reaches it."""


class Watch:
    """Collects a session's events, and holds its attempts to attach again until a test lets them go."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.events: list[Event] = []
        self.also: Callable[[Event], None] = lambda _: None
        """Called with each event after it was noted."""
        self._changed = threading.Condition()
        self._attempts = 0

    def tell(self, event: Event) -> None:
        """``on_event`` of a session."""
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()
        self.also(event)

    def pause(self, seconds: float) -> None:
        """``pause`` of a session: returns when :meth:`let_go` allows another attempt."""
        with self._changed:
            self.pauses.append(seconds)
            self._changed.notify_all()
            while self._attempts == 0:
                self._changed.wait()
            self._attempts -= 1

    def let_go(self, attempts: int = 1 << 30) -> None:
        """Allow so many more attempts."""
        with self._changed:
            self._attempts += attempts
            self._changed.notify_all()

    def until(self, kind: str, times: int = 1) -> Event:
        """Wait until an event of ``kind`` was told so many times; the last of these."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: len([e for e in self.events if e.kind == kind]) >= times, WATCHDOG_SECONDS
            )
            assert found, f"no {kind} among {self.events}"
            return [e for e in self.events if e.kind == kind][times - 1]

    def wait_for(self, condition: Callable[[], T]) -> T:
        """Wait until ``condition`` gives something true; what it gave. Asked again after each event and every 5 ms."""
        with self._changed:
            for _ in range(int(WATCHDOG_SECONDS / 0.005)):
                if result := condition():
                    return result
                self._changed.wait(0.005)
        raise AssertionError("the condition never came true")
