"""A prepared model that decodes with what a daemon holds: one session's step around each decoder's step."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from strataflux.cache_policy.miss import MissPolicy, Skip, Wait
from strataflux.client.errors import MisuseError
from strataflux.client.kv import RefinedKVCache
from strataflux.client.kv_blocks import KvBlocks
from strataflux.client.kv_options import KvOptions, blocks_for
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.runtime.decoder import Decoder, ShiftingRefiner, Unrefined
from strataflux.client.runtime.models import SETS, DecoderWeights, ModelConfig
from strataflux.client.session import Session
from strataflux.client.session_stats import SessionStats
from strataflux.client.weights import WeightRefiner, step_demand
from strataflux.kernels.refine import record_bytes
from strataflux.proto.layout import slot_bytes
from strataflux.proto.messages import StoreRef

__all__ = ["RefinedModel", "store_slot_bytes"]


class RefinedModel:
    """Decodes one sequence, each step refined with what is resident at that moment.

    Pairs: :meth:`attach` / :meth:`close`. A step that the daemon had to cut off (it held slots for too long) is run
    again without refinement before its logits are given out.
    """

    def __init__(
        self,
        session: Session,
        weights: DecoderWeights,
        context: int,
        refiner: ShiftingRefiner | None,
        kv: RefinedKVCache | None,
        shift: Mapping[str, float] | None = None,
    ) -> None:
        """Use :meth:`attach`."""
        # fixed after construction
        self._session = session
        self._switch = _Switch(refiner)
        self._decoder = Decoder(weights, context, self._switch, kv, shift)
        self.kv = kv
        """The cache, if it is one in low bits."""
        # changed by step
        self.steps = 0
        self.seconds = 0.0
        """Time spent in ``steps`` steps."""

    @classmethod
    def attach(
        cls,
        prepared: PreparedModel | None,
        weights: DecoderWeights,
        *,
        context: int,
        runtime_dir: Path | None = None,
        k: int | None = None,
        miss: MissPolicy = Skip(),  # noqa: B008 (immutable)
        kv: KvOptions | None = None,
    ) -> "RefinedModel":
        """Attach to the daemon that serves the store of ``prepared``.

        Args:
            prepared: the model; None refines no weights.
            weights: its weights, read from it.
            context: positions of the key and value cache.
            runtime_dir: where the daemon's sockets are; None looks in the usual places.
            k: channels per 1,024; None takes the prepared model's.
            miss: what to do about absent records.
            kv: a KV cache in low bits; None keeps it exact.

        Raises:
            MisuseError: ``k`` is out of range, or there is no such KV format.
            DaemonUnavailableError: nobody answers. RefusedError: the daemon does not serve this store, or said no.
        """
        demands = [] if prepared is None else [step_demand(prepared, k)]
        demands += [] if kv is None else [kv.demand(weights.config, context)]
        session = Session.attach(
            [] if prepared is None else [StoreRef(prepared.manifest.digest, prepared.manifest.identity)],
            selections_per_step=max(1, sum(demand.selections for demand in demands)),
            largest_set_bytes=0 if isinstance(miss, Skip) else max((d.largest_set_bytes for d in demands), default=0),
            runtime_dir=runtime_dir,
            miss=miss,
            kv=None if kv is None else kv.geometry(weights.config, blocks_for(context)),
        )
        try:
            refiner = None if prepared is None else WeightRefiner(session, 0, prepared, k)
            seconds = miss.deadline_seconds if isinstance(miss, Wait) else 0.0
            cache = None if kv is None else _kv_cache(session, weights.config, context, kv, seconds)
            return cls(session, weights, context, refiner, cache, None if prepared is None else prepared.manifest.shift)
        except BaseException:
            session.close()
            raise

    def prefill(self, tokens: Sequence[int]) -> Tensor:
        """Take ``tokens`` into an empty cache in one pass, unrefined; logits [vocabulary] of the next one.

        Raises:
            ContextFull, MisuseError: as :meth:`Decoder.prefill`.
        """
        return self._decoder.prefill(tokens)

    def step(self, token: int) -> Tensor:
        """Append ``token`` and return the logits [vocabulary] float32 of the next one.

        Raises:
            ContextFull, IndexError: as :meth:`Decoder.step`. Nothing for the daemon's sake.
        """
        started = time.perf_counter()
        self._decoder.cache.begin_step()  # before the session's step, which holds slots: it may encode a tile
        with self._session.step() as step:
            logits = self._decoder.step(token)
        if not step.end():
            logits = self._again(token)
        self.seconds += time.perf_counter() - started
        self.steps += 1
        return logits

    def reset(self) -> None:
        """Begin another sequence. What is resident stays so."""
        self._decoder.reset()

    def stats(self) -> SessionStats:
        """Counts and state of the session."""
        return self._session.stats()

    def close(self) -> None:
        """Leave the daemon. Idempotent."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except MisuseError:
            # Ctrl-C between two lines of a step's beginning or end leaves it open, and is what should be told.
            if error is None:
                raise

    def _again(self, token: int) -> Tensor:
        # The invalid step's key and value are overwritten; those before it come from valid steps.
        self._decoder.reset(self._decoder.position - 1)
        self._refine(False)
        try:
            return self._decoder.step(token)
        finally:
            self._refine(True)

    def _refine(self, on: bool) -> None:
        self._switch.on = on
        if self.kv is not None:
            self.kv.refining = on


def _kv_cache(
    session: Session, config: ModelConfig, context: int, options: KvOptions, wait_seconds: float
) -> RefinedKVCache:
    blocks = KvBlocks(config, options.form(config.head_dim), blocks_for(context), session.kv)
    table = 0 if session.kv is None else session.kv.table
    return RefinedKVCache(blocks, context, options.fraction, session, table, wait_seconds)


def store_slot_bytes(config: ModelConfig) -> int:
    """Bytes of cache slots that hold the whole store of a model with these dimensions."""
    return config.layers * sum(
        config.set_shape(name)[1] * slot_bytes(record_bytes(config.set_shape(name)[0])) for name in SETS
    )


class _Switch:
    """A refiner that can be turned off for a step."""

    def __init__(self, refiner: ShiftingRefiner | None) -> None:
        self.on = True
        self._off = Unrefined()
        self._refiner: ShiftingRefiner = refiner or self._off

    def begin(self, layer: int, set_index: int, x: NDArray[np.float32]) -> None:
        (self._refiner if self.on else self._off).begin(layer, set_index, x)

    def refine(self, layer: int, set_index: int, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        (self._refiner if self.on else self._off).refine(layer, set_index, x, y)
