"""When refinement is selected and when it is added: fetch lead and lag as tables over the residual stream's positions.

The stream has a state before each half of a block (:mod:`strataflux.client.runtime.shifted`): position 2l before the
attention of layer l, which reads it through ``qkv`` and writes position 2l + 1 through ``o``; position 2l + 1 before
its MLP, which reads it through ``gate_up`` and writes position 2l + 2 through ``down``. A shift of s blocks is 2s
positions.

The paper says nothing of the ends. Here what would be selected before the first state is selected from that one, so
leads of the first blocks are as long as the stream is old; what would be added after the last state is added to that
one, before the last norm, so lags of the last blocks are as short as the stream is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strataflux.client.runtime.models import SETS
from strataflux.client.runtime.shifted import check_shift

__all__ = ["Place", "Schedule", "make_foresight", "make_schedule"]

Place = tuple[int, int]
"""A projection: its layer, and its set's number in ``SETS``."""


@dataclass(frozen=True)
class Schedule:
    """Of one step."""

    selects: Sequence[Sequence[Place]]
    """For each position that is read, [2 · layers], the projections that select from it though they read later."""
    adds: Sequence[Sequence[Place]]
    """For each position, [2 · layers + 1], the projections whose refinement is added to it though they wrote
    earlier, in the order of their writing."""
    lags: Sequence[bool]
    """For each set, whether its refinement is added later than its product."""

    @property
    def shifted(self) -> bool:
        """Whether anything is early or late."""
        return any(self.lags) or any(self.selects)


def make_schedule(layers: int, shift: Mapping[str, float]) -> Schedule:
    """The tables for ``shift`` blocks of each projection set.

    Raises:
        MisuseError: a shift is missing or not supported.
    """
    check_shift(shift)
    behind = [round(2 * shift[name]) for name in SETS]
    last = 2 * layers
    selects: list[list[Place]] = [[] for _ in range(last)]
    adds: list[list[Place]] = [[] for _ in range(last + 1)]
    for position in range(last):
        layer, half = divmod(position, 2)
        reads, writes = 2 * half, 2 * half + 1
        if (early := max(0, position - behind[reads])) < position:
            selects[early].append((layer, reads))
        if behind[writes]:
            adds[min(last, position + 1 + behind[writes])].append((layer, writes))
    return Schedule(selects, adds, [bool(half % 2 and blocks) for half, blocks in enumerate(behind)])


def make_foresight(layers: int, blocks: float) -> Sequence[Sequence[Place]]:
    """For each position that is read, [2 · layers], the projections whose input is guessed from it: those that read the
    stream ``blocks`` later, or less at its beginning; none for 0 blocks.

    Raises:
        MisuseError: a distance that is not supported.
    """
    check_shift(dict.fromkeys(SETS, blocks))
    guesses: list[list[Place]] = [[] for _ in range(2 * layers)]
    for position in range(2 * layers):
        if (early := max(0, position - round(2 * blocks))) < position:
            guesses[early].append((position // 2, 2 * (position % 2)))
    return guesses
