"""How much is asked for ahead: as much as pays, nothing where it does not, and a little now and then to learn again.

A prefetch that is used turned a miss into a hit. One that is not took the place of the record that was used least
recently, and a read. Measured on SmolLM2 (docs/CACHING.md, "Running ahead of misses"): with 41 % of them used
divergence falls by two thirds, with 12 % it rises. The bound lies between, at a quarter.
"""

from dataclasses import dataclass
from typing import Final

from strataflux.client.prefetches import PrefetchCounts

__all__ = ["Seen", "Throttle"]

_WINDOW: Final = 16
"""Steps between two decisions."""
_REST: Final = 64
"""Steps without prefetches before a few are tried again."""
_ENOUGH: Final = 64
"""Prefetches whose fate must be known to decide by them."""
_LEAST: Final = 1 / 16
_PAYS: Final = 1 / 4
"""Used ones among those whose fate is known."""
_RARE: Final = 1 / 256
"""Misses among look-ups, below which there is nothing to gain."""


@dataclass(frozen=True)
class Seen:
    """Counts of one kind since a session began."""

    lookups: int
    hits: int
    prefetches: PrefetchCounts

    def since(self, earlier: "Seen") -> "Seen":
        """What was added after ``earlier``."""
        prefetches = self.prefetches.since(earlier.prefetches)
        return Seen(self.lookups - earlier.lookups, self.hits - earlier.hits, prefetches)


class Throttle:
    """States: asking (``share`` from 1/16 to 1) → resting (0) where it does not pay → asking for 1/16 after a while."""

    def __init__(self) -> None:
        self.share = 1.0
        """Part of what is foreseen that may be asked for."""
        self._steps = 0
        self._before = Seen(0, 0, PrefetchCounts())

    def step(self) -> bool:
        """Count a step; True if it is time for :meth:`decide`."""
        self._steps += 1
        return self._steps >= (_WINDOW if self.share else _REST)

    def decide(self, now: Seen) -> None:
        """Set the share by what came of the steps since the last decision. Too little known leaves it as it is."""
        self._steps = 0
        seen = now.since(self._before)
        known = seen.prefetches.used + seen.prefetches.unused
        if not self.share:
            self.share, self._before = _LEAST, now
        elif seen.lookups - seen.hits + seen.prefetches.used < _RARE * seen.lookups:
            self.share, self._before = 0.0, now
        elif known >= _ENOUGH or seen.prefetches.dropped >= _ENOUGH:
            self.share, self._before = self._after(seen.prefetches, known), now

    def _after(self, counts: PrefetchCounts, known: int) -> float:
        if counts.used >= _PAYS * known and counts.dropped <= counts.fills:
            return min(1.0, 2 * self.share)
        return self.share / 2 if self.share > _LEAST else 0.0
