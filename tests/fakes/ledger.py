"""A ledger of faults: how many of each kind were given, and under which of the reader's counters each must stand."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Check", "Ledger"]


@dataclass(frozen=True)
class Check:
    """One number that must be as expected."""

    name: str
    expected: int
    counted: int

    @property
    def right(self) -> bool:
        return self.expected == self.counted


@dataclass
class Ledger:
    """``given`` by kind; ``cells`` by (kind, counter): how often the kind must have moved that counter."""

    given: Counter[str] = field(default_factory=Counter)
    cells: Counter[tuple[str, str]] = field(default_factory=Counter)
    compared: int = 0
    wrong: int = 0

    def note(self, kind: str, **counters: int) -> None:
        """One event of this kind, and what it adds to the reader's counters."""
        self.given[kind] += 1
        self.add(kind, **counters)

    def add(self, kind: str, **counters: int) -> None:
        """What an event that was noted before adds besides."""
        for name, count in counters.items():
            self.cells[kind, name] += count

    def total(self, kinds: Iterable[str]) -> int:
        """How many of these kinds were given."""
        return sum(self.given[kind] for kind in kinds)

    def expected(self, counter: str) -> int:
        """What the counter must stand at."""
        return sum(count for (_, name), count in self.cells.items() if name == counter)

    def compare(self, found: bytes | None, right: bytes) -> None:
        """A record as it was served; None where it was missed."""
        if found is not None:
            self.compared += 1
            self.wrong += found != right

    def columns(self) -> list[str]:
        """The counters that appear, in the order of their first appearance."""
        return list(dict.fromkeys(name for _, name in self.cells))
