"""Run ahead of misses: ask early for what a layer will probably select, by the residual stream blocks before it.

The stream changes little from block to block, so a layer's norm and query projection applied to it a block early give
nearly the queries that the layer will attend with (InfiniGen, Lee et al. 2024, prefetches KV so), and nearly the
channels that its projections will select. What they select and is absent is asked for then; a block's time is enough to
read it. The layer itself selects by its true input, as ever: a guess changes what is resident, nothing else.

Ours: guesses of groups are made on the resident low-bit keys, so that no second index is kept, and how much is asked
for follows what the daemon says became of it (:mod:`strataflux.client.throttle`).
"""

from collections.abc import Sequence
from math import ceil
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from strataflux.client.session_stats import SessionStats
from strataflux.client.throttle import Seen, Throttle

__all__ = ["GuessedChannels", "GuessedGroups", "PrefetchTarget", "ReadAhead"]

_RENEW_LAYERS: Final = 4
"""What is read for a step takes slots that stay taken until the step lets go of them. A token on a CPU takes tens of
milliseconds and, with a small cache, more slots than the daemon keeps free; so it lets go every so many layers."""
_WEIGHTS: Final = 0
"""Number of the weight store's table."""
_Guess = tuple[NDArray[np.int64], NDArray[np.uint8]]


class PrefetchTarget(Protocol):
    """Where is asked: a session, or a stand-in."""

    def prefetch(self, table: int, oids: NDArray[np.int64], scores: NDArray[np.uint8], most: int) -> int:
        """Ask for those of ``oids`` [n] that are absent, the first ``most`` of them at most; how many."""

    def renew(self) -> None:
        """Let evicted slots be filled again, within a step; what was found so far is void."""

    def stats(self) -> SessionStats:
        """What was counted so far."""


@runtime_checkable
class GuessedChannels(Protocol):
    """A refiner of weights."""

    def foresee(self, layer: int, set_index: int, x: NDArray[np.float32]) -> _Guess:
        """Ids and scores of the records that an input like ``x`` [inputs] would select."""


class GuessedGroups(Protocol):
    """A KV cache."""

    def foresee(self, layer: int, queries: Tensor) -> _Guess:
        """Ids and scores of the records that queries like these [heads, head_dim] would select."""


class ReadAhead:
    """Of one sequence; a :class:`~strataflux.client.runtime.decoder.Foresight`. One thread.

    Sequences of a session share its ``throttles``: of weights, then of KV.
    """

    def __init__(
        self,
        target: PrefetchTarget,
        blocks: float,
        throttles: Sequence[Throttle],
        refiner: GuessedChannels | None,
        cache: GuessedGroups | None,
        kv_table: int,
    ) -> None:
        """Nothing is asked for yet.

        Args:
            target: is asked.
            blocks: how many blocks early; above 0.
            throttles: how much may be asked for, of weights and of KV.
            refiner: guesses channels; None: nobody.
            cache: guesses groups; None: nobody.
            kv_table: number of the KV table.
        """
        # fixed after construction
        self.blocks = blocks
        self._target = target
        self._weights, self._kv = throttles
        self._refiner = refiner
        self._cache = cache
        self._kv_table = kv_table
        # changed by whoever runs steps
        self.on = True
        """Off: nothing is wanted, as outside of a session's steps."""

    @property
    def channels_wanted(self) -> bool:
        """Whether channels are guessed in this step."""
        return self.on and self._refiner is not None and self._weights.share > 0

    @property
    def groups_wanted(self) -> bool:
        """Whether groups are."""
        return self.on and self._cache is not None and self._kv.share > 0

    def begin_layer(self, layer: int) -> None:
        """As :class:`~strataflux.client.runtime.decoder.Foresight`."""
        if self.on and layer and layer % _RENEW_LAYERS == 0:
            self._target.renew()

    def channels(self, layer: int, set_index: int, x: NDArray[np.float32]) -> None:
        """As :class:`~strataflux.client.runtime.decoder.Foresight`."""
        assert self._refiner is not None
        self._ask(_WEIGHTS, self._refiner.foresee(layer, set_index, x), self._weights)

    def groups(self, layer: int, queries: Tensor) -> None:
        """As :class:`~strataflux.client.runtime.decoder.Foresight`."""
        assert self._cache is not None
        self._ask(self._kv_table, self._cache.foresee(layer, queries), self._kv)

    def _ask(self, table: int, guess: _Guess, throttle: Throttle) -> None:
        oids, scores = guess
        if oids.size:
            order = np.argsort(scores, kind="stable")[::-1]
            self._target.prefetch(table, oids[order], scores[order], ceil(throttle.share * oids.size))

    def end_step(self) -> None:
        """A step of the sequence ended: learn now and then what came of it."""
        if self._refiner is not None and self._weights.step():
            stats = self._target.stats()
            lookups, hits = stats.lookups - stats.kv_lookups, stats.hits - stats.kv_hits
            self._weights.decide(Seen(lookups, hits, stats.weight_prefetches))
        if self._cache is not None and self._kv.step():
            stats = self._target.stats()
            self._kv.decide(Seen(stats.kv_lookups, stats.kv_hits, stats.kv_prefetches))
