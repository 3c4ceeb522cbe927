"""Live, ready and degraded, kept apart; and whether the data path moves.

A process whose data path moves is live. It is ready between the end of its start and the begin of its drain, except
while an obstacle stands in the way of serving anything: a reader that does not answer, a device that does not. It is
degraded for as long as one of its reasons holds: it serves then, but not as it was asked to.
"""

from collections.abc import Callable

__all__ = ["Health", "ProgressWatch"]


class Health:
    """Event loop only. Phases: starting → ready → draining; obstacles and reasons come and go in any of them."""

    def __init__(self, on_change: Callable[["Health"], None] | None = None) -> None:
        # fixed after construction
        self._on_change = on_change
        # event loop only
        self.phase = "starting"
        self.reasons: dict[str, str] = {}
        self.obstacles: dict[str, str] = {}

    @property
    def state(self) -> str:
        """The phase, or ``unready`` where it would be ready but for an obstacle."""
        return "unready" if self.phase == "ready" and self.obstacles else self.phase

    @property
    def ready(self) -> bool:
        """Whether requests are taken and can be answered."""
        return self.state == "ready"

    @property
    def degraded(self) -> bool:
        """Whether a reason holds."""
        return bool(self.reasons)

    def move_to(self, state: str) -> None:
        """Enter ``ready`` or ``draining``; there is no way back."""
        order = ("starting", "ready", "draining")
        if order.index(state) <= order.index(self.phase):
            return
        self.phase = state
        self._tell()

    def set_reason(self, name: str, text: str | None) -> None:
        """Say why the service is degraded, or with None that this reason is gone."""
        self._set(self.reasons, name, text)

    def set_obstacle(self, name: str, text: str | None) -> None:
        """Say what keeps the service from serving, or with None that it is gone."""
        self._set(self.obstacles, name, text)

    def _set(self, table: dict[str, str], name: str, text: str | None) -> None:
        if table.get(name) == text:
            return
        if text is None:
            del table[name]
        else:
            table[name] = text
        self._tell()

    def _tell(self) -> None:
        if self._on_change is not None:
            self._on_change(self)


class ProgressWatch:
    """Age of the last progress of the data path. One thread only.

    The reader counts loop turns when nothing is in flight and completions otherwise, so a count that stands still
    means a reader that hangs, or a device that does not answer.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        # fixed after construction
        self._clock = clock
        # one thread only
        self._last_count: int | None = None
        self._moved_at = clock()

    def moved(self, count: int) -> bool:
        """Whether ``count`` differs from the one of the last call; the first call counts as progress."""
        if count == self._last_count:
            return False
        self._last_count = count
        self._moved_at = self._clock()
        return True

    @property
    def age_seconds(self) -> float:
        """Seconds since the last progress."""
        return self._clock() - self._moved_at
