"""What a session asked for ahead of its look-ups, and what became of it, over all its attachments."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from strataflux.client import attach_block, directory

__all__ = ["PrefetchCounts", "Prefetches"]


@dataclass(frozen=True)
class PrefetchCounts:
    """Records of one kind. All but ``asked`` are the daemon's counts and come some ticks late."""

    asked: int = 0
    """Requests made; what is under way already may be asked for again."""
    fills: int = 0
    """Read and published."""
    used: int = 0
    """Of these, looked up since."""
    unused: int = 0
    """Of these, gone before they were."""
    dropped: int = 0
    """Not read: too old, too many, or no memory that no miss needs."""

    @property
    def useful(self) -> float | None:
        """Used ones of those whose fate is known; None before there are any."""
        known = self.used + self.unused
        return self.used / known if known else None

    def since(self, earlier: "PrefetchCounts") -> "PrefetchCounts":
        """What was added after ``earlier``."""
        names = [field.name for field in fields(self)]
        return PrefetchCounts(*(getattr(self, name) - getattr(earlier, name) for name in names))

    def to_json(self) -> dict[str, object]:
        """The counts by name, and ``useful``."""
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, "useful": self.useful}


class Prefetches:
    """The stepping thread's; :meth:`counts` may be asked from any."""

    def __init__(self) -> None:
        self._asked = np.zeros(2, np.uint64)
        self._before = np.zeros((4, 2), np.uint64)
        """Of attachments that are over."""
        self._now = np.zeros((4, 2), np.uint64)

    def ask(
        self, block: attach_block.Block, table: int, oids: NDArray[np.int64], scores: NDArray[np.uint8], most: int
    ) -> int:
        """As :func:`~strataflux.client.directory.ask_ahead`, counted."""
        asked = directory.ask_ahead(block, table, oids, scores, most)
        if asked > 0:
            counter = int(block[attach_block.TABLES + attach_block.TABLE_CELLS * table + 2])
            self._asked[int(counter == attach_block.KV_LOOKUPS)] += np.uint64(asked)
        return asked

    def observe(self, block: attach_block.Block) -> None:
        """Take the daemon's counts over; its page must be mapped."""
        if self._asked.any():
            attach_block.load_prefetches(block, self._now)

    def change_over(self) -> None:
        """Another attachment begins, whose counts are 0."""
        self._before = self._before + self._now
        self._now = np.zeros((4, 2), np.uint64)

    def counts(self, *, kv: bool) -> PrefetchCounts:
        """As of the last step's end."""
        of_daemon = (self._before + self._now)[:, int(kv)]
        return PrefetchCounts(int(self._asked[int(kv)]), *map(int, of_daemon))
