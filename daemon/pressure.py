"""When to give cache back to the machine, and when to take it again: watermarks on free memory, and pressure stalls.

Low: less than ``low_bytes`` are available to this process (machine or cgroup, whichever is tighter), or tasks stalled
for memory longer than ``pressure_percent`` of the last ten seconds. Then one segment goes, and another after a pause
for as long as it stays low. High: after ``calm_seconds`` without that, and with room for a whole segment above
``high_bytes``, one comes back.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strataflux.daemon.config import MemoryConfig
from strataflux.daemon.memory import available_memory

__all__ = ["GROW", "HOLD", "RELEASE", "MemoryState", "Watermarks", "memory_state"]

RELEASE: Final = "release"
GROW: Final = "grow"
HOLD: Final = "hold"

_PAUSE_SECONDS: Final = 2.0
_STALL_PAUSE_SECONDS: Final = 10.0
"""An average over ten seconds shows the effect of a release only after as long."""
_CALM_SHARE: Final = 0.1
_AVERAGE: Final = re.compile(r"^(some|full) avg10=(\d+\.\d+)", re.MULTILINE)
_OWN_GROUP: Final = re.compile(r"^0::/(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class MemoryState:
    """``available`` bytes (None: the system does not say) and shares of time stalled for memory, in percent."""

    available: int | None
    some_percent: float = 0.0
    full_percent: float = 0.0


def memory_state(root: Path = Path("/")) -> MemoryState:
    """The state now; pressure is this cgroup's own where the kernel tells it. ``root`` is for tests."""
    available = available_memory(root)
    shares = _pressure(root)
    return MemoryState(None if available is None else available.size, shares.get("some", 0.0), shares.get("full", 0.0))


def _pressure(root: Path) -> dict[str, float]:
    own = _OWN_GROUP.search(_text(root / "proc/self/cgroup"))
    group = root / "sys/fs/cgroup" / (own[1] if own else "")
    for path in (group / "memory.pressure", root / "proc/pressure/memory"):
        if found := _AVERAGE.findall(_text(path)):
            return {kind: float(percent) for kind, percent in found}
    return {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


class Watermarks:
    """Decides; remembers when it last did. One thread only."""

    def __init__(self, config: MemoryConfig, clock: Callable[[], float]) -> None:
        # fixed after construction
        self._config = config
        self._clock = clock
        # one thread only
        self._not_before = clock()
        self._calm_since = clock()

    def decide(self, state: MemoryState, missing_bytes: int, segment_bytes: int) -> str:
        """RELEASE, GROW or HOLD. A cache that misses nothing of its budget never grows."""
        now, config = self._clock(), self._config
        short = state.available is not None and state.available < config.low_bytes
        stalled = state.some_percent > config.pressure_percent
        if short or stalled:
            self._calm_since = now
            if now < self._not_before:
                return HOLD
            self._not_before = now + (_PAUSE_SECONDS if short else _STALL_PAUSE_SECONDS)
            return RELEASE
        if not missing_bytes or state.some_percent > config.pressure_percent * _CALM_SHARE:
            return HOLD
        room = state.available is None or state.available - segment_bytes >= config.high_bytes
        if not room or now - self._calm_since < config.calm_seconds or now < self._not_before:
            return HOLD
        self._not_before = now + _PAUSE_SECONDS
        return GROW
