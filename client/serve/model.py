"""The model behind a server: refined while a daemon serves its store, in its low-bit weights alone while none does.

A server outlives daemons. Once attached, the session itself sees a daemon go and come back; before that, attaching is
tried again when a sequence is opened, after a pause.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from torch import Tensor

from strataflux.cache_policy.miss import MissPolicy
from strataflux.client.errors import DaemonUnavailableError, RefusedError
from strataflux.client.kv import RefinedKVCache
from strataflux.client.kv_blocks import KvBlocks
from strataflux.client.kv_options import KvOptions, blocks_for
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.refined import RefinedSession
from strataflux.client.runtime.cache import KvCache
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.session import ATTACHED

__all__ = ["Counts", "ModelOptions", "OpenSequence", "SequenceSource", "ServedModel"]

_PAUSE_SECONDS: Final = 5.0


class OpenSequence(Protocol):
    """A sequence that is decoded. Pairs: :meth:`SequenceSource.open` / :meth:`close`."""

    def prefill(self, tokens: Sequence[int]) -> Tensor:
        """Take a prompt in one pass, unrefined; the next token's logits [vocabulary]."""

    def step(self, token: int) -> Tensor:
        """Append ``token``; the next one's logits [vocabulary]."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


class Counts(NamedTuple):
    """Look-ups so far, over all sequences, and whether a daemon fills what is missing now."""

    lookups: int
    hits: int
    refined: bool


class SequenceSource(Protocol):
    """Where an engine has its sequences from. One thread at a time."""

    def open(self, positions: int) -> OpenSequence:
        """An empty sequence of up to ``positions``."""

    def counts(self) -> Counts:
        """What was looked up so far."""

    def close(self) -> None:
        """Leave the daemon. Idempotent."""


@dataclass(frozen=True)
class ModelOptions:
    """How a model is served."""

    context: int
    """Positions of a sequence at most, prompt and answer together."""
    sequences: int
    """How many at once at most."""
    runtime_dir: Path | None
    k: int | None
    miss: MissPolicy
    kv: KvOptions | None
    require_daemon: bool
    ahead: float = 0.0
    residents: int = 0
    lag: float | None = None
    """Blocks by which what refines ``o`` and ``down`` is added later; None takes the prepared model's."""


class ServedModel:
    """A :class:`SequenceSource` of one prepared model.

    ``say`` is told, in a sentence, when the model is not refined, or ceases to be, and when it is again.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        weights: DecoderWeights,
        options: ModelOptions,
        say: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Attach if a daemon serves the model.

        Raises:
            MisuseError: an option is out of range for this model.
            DaemonUnavailableError, RefusedError: no daemon does, and one is required.
        """
        # fixed after construction
        self._prepared = prepared
        self._weights = weights
        self._options = options
        self._say = say
        self._clock = clock
        # changed by open
        self._session: RefinedSession | None = None
        self._told = True
        self._again_at = 0.0
        self._attach()

    def open(self, positions: int) -> OpenSequence:
        """An empty sequence.

        Raises:
            DaemonUnavailableError, RefusedError: nobody refines it, and that is required.
        """
        if self._session is None and self._clock() >= self._again_at:
            self._attach()
        if self._session is None:
            return _Alone(self._weights, positions, self._unrefined_cache(positions))
        attached = self._session.stats().state == ATTACHED
        self._tell(attached, "the daemon is gone")
        if self._options.require_daemon and not attached:
            remedy = "wait until it is back, or serve without --require-daemon"
            raise DaemonUnavailableError("stratafluxd", "no attachment now", "one that fills what misses", remedy)
        return self._session.open(positions)

    def counts(self) -> Counts:
        """What was looked up so far."""
        if self._session is None:
            return Counts(0, 0, False)
        stats = self._session.stats()
        return Counts(stats.lookups, stats.hits, stats.state == ATTACHED)

    def close(self) -> None:
        """Leave the daemon. Idempotent."""
        if self._session is not None:
            self._session.close()

    def _attach(self) -> None:
        o, kept = self._options, self._prepared.manifest.shift
        self._again_at = self._clock() + _PAUSE_SECONDS
        try:
            self._session = RefinedSession.attach(
                self._prepared,
                self._weights,
                context=o.context,
                sequences=o.sequences,
                runtime_dir=o.runtime_dir,
                k=o.k,
                shift=kept if o.lag is None else {**kept, "o": o.lag, "down": o.lag},
                miss=o.miss,
                kv=o.kv,
                ahead=o.ahead,
                residents=o.residents,
            )
        except (DaemonUnavailableError, RefusedError) as error:
            if o.require_daemon:
                raise
            self._tell(False, f"{error.subject}: {error.found}; {error.remedy}")
        else:
            self._tell(True, "")

    def _tell(self, refined: bool, why: str) -> None:
        if refined != self._told:
            self._told = refined
            self._say("refined by the daemon" if refined else f"not refined: {why}")

    def _unrefined_cache(self, positions: int) -> KvCache | None:
        """Keys and values in as few bits as with a daemon; None keeps them exact."""
        if self._options.kv is None:
            return None
        config = self._weights.config
        blocks = KvBlocks(config, self._options.kv.form(config.head_dim), blocks_for(positions))
        return RefinedKVCache(blocks, positions)


class _Alone(Decoder):
    """A sequence that nobody refines."""

    def __init__(self, weights: DecoderWeights, positions: int, cache: KvCache | None) -> None:
        super().__init__(weights, positions, cache=cache)

    def close(self) -> None:
        """Nothing is held elsewhere."""
