"""Jobs of a disk that completes them late, or after others that came later."""

from dataclasses import dataclass, field
from typing import Final

from tests.fakes.board_worker import RIGHT, Job

__all__ = ["LATE", "OVERTAKEN", "HeldJobs"]

LATE: Final = "late"
OVERTAKEN: Final = "overtaken"


@dataclass
class _Held:
    job: Job
    kind: str
    serial: int
    turn: int


@dataclass
class HeldJobs:
    """``late_turns``: how long a late job is held."""

    late_turns: int
    _held: list[_Held] = field(default_factory=list)
    _serial: int = 0
    _newest_done: int = 0

    def add(self, job: Job, kind: str, turn: int) -> None:
        """A job of this turn. It completes in the next, unless its kind is LATE or OVERTAKEN."""
        self._serial += 1
        self._held.append(_Held(job, kind, self._serial, turn + 1 + self.late_turns * (kind == LATE)))

    def due(self, turn: int) -> list[tuple[Job, str]]:
        """Jobs that complete in this turn, each with its kind: OVERTAKEN only if a later one was completed before."""
        due: list[_Held] = []
        left: list[_Held] = []
        for held in self._held:
            overtaken = held.serial < self._newest_done
            is_due = overtaken if held.kind == OVERTAKEN else held.turn <= turn
            (due if is_due else left).append(held)
        if left and not due and all(held.kind == OVERTAKEN for held in left):
            due.append(left.pop())  # they wait for one another
        self._held = left
        found = [(held.job, RIGHT if self._alone(held) else held.kind) for held in due]
        self._newest_done = max([self._newest_done, *(held.serial for held in due)])
        return found

    def _alone(self, held: _Held) -> bool:
        return held.kind == OVERTAKEN and held.serial > self._newest_done
