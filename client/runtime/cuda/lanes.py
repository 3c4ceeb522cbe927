"""Where a step's launches go: one main lane and side lanes that run beside it, ordered by marks.

Captured in a graph, lanes are its branches (Appendix G): ``mark`` is what was queued on a lane so far, ``wait`` lets
another lane go on only after it. Program order is always one right order, so a machine without streams runs
everything in it, inline.

Pair: each mark that a side lane leaves is waited for by the main lane before the step ends (:func:`join`).
"""

from collections.abc import Callable
from typing import Final, Protocol

import torch

__all__ = ["MAIN", "InlineLanes", "Lanes", "Operation", "StreamLanes", "join"]

MAIN: Final = 0

Operation = Callable[[bool], object]
"""Queues launches on the current stream; told whether the first may start while what is before it still runs."""


class Lanes(Protocol):
    """Queues of launches; lane 0 is the main one."""

    def run(self, lane: int, operation: Operation) -> None:
        """Queue ``operation`` on ``lane``."""

    def mark(self, lane: int) -> object:
        """What is queued on ``lane`` so far."""

    def wait(self, lane: int, mark: object) -> None:
        """What is queued on ``lane`` from now on runs after ``mark``."""


def join(lanes: Lanes, used: set[int]) -> None:
    """Let the main lane go on after all that was queued on the lanes ``used``."""
    for lane in sorted(used - {MAIN}):
        lanes.wait(MAIN, lanes.mark(lane))


class InlineLanes:
    """Runs everything at once, in program order: whatever is waited for has run."""

    def run(self, lane: int, operation: Operation) -> None:  # noqa: ARG002 (all lanes are one)
        """Run it now."""
        operation(False)

    def mark(self, lane: int) -> object:
        """The lane's number."""
        return lane

    def wait(self, lane: int, mark: object) -> None:
        """Nothing to wait for."""


class StreamLanes:
    """CUDA streams; the main lane is the stream that is current when a launch is queued."""

    def __init__(self, device: torch.device, count: int, *, early: bool) -> None:
        """Make ``count`` lanes.

        Args:
            device: of the streams.
            count: lanes, the main one included.
            early: let kernels start before the one before them ended. Right after a wait they never do: what they
                must not overtake is then not only the kernel before.
        """
        self._side = [torch.cuda.Stream(device) for _ in range(count - 1)]
        self._early = early
        self._waited = [True] * count

    def run(self, lane: int, operation: Operation) -> None:
        """Queue it on the lane's stream."""
        early = self._early and not self._waited[lane]
        self._waited[lane] = False
        if lane == MAIN:
            operation(early)
            return
        with torch.cuda.stream(self._side[lane - 1]):
            operation(early)

    def mark(self, lane: int) -> object:
        """An event."""
        event = torch.cuda.Event()
        event.record(self._stream(lane))
        return event

    def wait(self, lane: int, mark: object) -> None:
        """An edge of the graph."""
        assert isinstance(mark, torch.cuda.Event)
        self._stream(lane).wait_event(mark)
        self._waited[lane] = True

    def _stream(self, lane: int) -> torch.cuda.Stream:
        return torch.cuda.current_stream() if lane == MAIN else self._side[lane - 1]
