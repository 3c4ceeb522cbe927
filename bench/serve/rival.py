"""What the race asks of a rival."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from serve.plan import Records

__all__ = ["IN_PLACE", "Keys", "Reader", "Rival"]

Keys = NDArray[np.int64]
IN_PLACE: Final[tuple[str, ...]] = ("hits", "hits_whole", "latency", "cold", "miss", "steps")


class Reader(Protocol):
    """A session, in a process or thread of its own."""

    def get(self, keys: Keys) -> int:
        """Read records and touch their bytes; returns how many were there. Rivals wait for what is not cached."""

    def fetch(self, keys: Keys) -> int:
        """The same, waiting for all."""

    def absent(self, keys: Keys) -> Keys:
        """Those that are not cached; all of them where nothing has been cached by this session."""

    def another(self) -> "Reader":
        """One of the same session, for another thread."""

    def close(self) -> None:
        """Give everything back."""


class Rival:
    """One way to keep records. Pairs: :meth:`start` / :meth:`stop`, :meth:`open` / ``Reader.close``.

    ``build``, ``start`` and ``stop`` run in a process that never opens it; ``open`` in forks of that.
    """

    name: ClassVar[str]
    interface: ClassVar[str]
    """How it is called, in words."""
    in_page_cache: ClassVar[bool] = False
    """What it caches is the kernel's to keep, so its process group is limited."""
    kinds: ClassVar[tuple[str, ...]] = ("hits", "latency", "cold", "miss", "steps")
    """Cells that say something about it; whole records are touched apart only where they are read in place."""
    threads: ClassVar[int] = 16
    """Readers at once that bring in cold records."""
    most_records: ClassVar[int] = 1 << 40
    """More would take too long to write; a larger store is cut to its first ones."""
    least_budget: ClassVar[int] = 0
    """Less would not hold its own pages."""

    def __init__(self, records: Records, folder: Path, budget_bytes: int, hot: int, width: int) -> None:
        """``width``: the most records of one call."""
        self.records = records
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.hot = hot
        self.width = width
        self.count = min(records.count, self.most_records)

    @property
    def share_bytes(self) -> int:
        """RAM for as many records as it has."""
        return max(self.budget_bytes * self.count // self.records.count, self.least_budget)

    @classmethod
    def missing(cls) -> str | None:
        """Why it cannot take part here; None if it can."""
        return None

    def build(self) -> None:
        """Write the records."""

    def start(self) -> None:
        """Start what sessions share."""

    def stop(self) -> None:
        """End it. Idempotent."""

    def pids(self) -> Sequence[int]:
        """Processes beside the sessions' own."""
        return ()

    def files(self) -> Sequence[Path]:
        """Files whose page cache is this rival's."""
        return ()

    def open(self, sessions: int, words: int) -> Reader:
        """A session of ``sessions``, which share the budget; it touches so many words of a record."""
        raise NotImplementedError

    def cold(self, order: Keys, seconds: float) -> tuple[int, float] | None:
        """Bring in records of ``order`` as fast as can be: (how many, in how many seconds). None: by threads that
        read them.
        """
        return None
