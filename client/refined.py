"""A prepared model that decodes with what a daemon holds: one session's step around each decoder's step."""

import time
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from strataflux.cache_policy.miss import MissPolicy, Skip
from strataflux.client.errors import MisuseError
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.runtime.decoder import Decoder, Refiner, Unrefined
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

    def __init__(self, session: Session, refiner: WeightRefiner, weights: DecoderWeights, context: int) -> None:
        """Use :meth:`attach`."""
        # fixed after construction
        self._session = session
        self._switch = _Switch(refiner)
        self._decoder = Decoder(weights, context, self._switch)
        # changed by step
        self.steps = 0
        self.seconds = 0.0
        """Time spent in ``steps`` steps."""

    @classmethod
    def attach(
        cls,
        prepared: PreparedModel,
        weights: DecoderWeights,
        *,
        context: int,
        runtime_dir: Path | None = None,
        k: int | None = None,
        miss: MissPolicy = Skip(),  # noqa: B008 (immutable)
    ) -> "RefinedModel":
        """Attach to the daemon that serves the store of ``prepared``.

        Args:
            prepared: the model.
            weights: its weights, read from it.
            context: positions of the key and value cache.
            runtime_dir: where the daemon's sockets are; None looks in the usual places.
            k: channels per 1,024; None takes the prepared model's.
            miss: what to do about absent records.

        Raises:
            MisuseError: ``k`` is out of range.
            DaemonUnavailableError: nobody answers. RefusedError: the daemon does not serve this store, or said no.
        """
        demand = step_demand(prepared, k)
        session = Session.attach(
            [StoreRef(prepared.manifest.digest, prepared.manifest.identity)],
            selections_per_step=max(1, demand.selections),
            largest_set_bytes=0 if isinstance(miss, Skip) else demand.largest_set_bytes,
            runtime_dir=runtime_dir,
            miss=miss,
        )
        return cls(session, WeightRefiner(session, 0, prepared, k), weights, context)

    def step(self, token: int) -> Tensor:
        """Append ``token`` and return the logits [vocabulary] float32 of the next one.

        Raises:
            ContextFull, IndexError: as :meth:`Decoder.step`. Nothing for the daemon's sake.
        """
        started = time.perf_counter()
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
        self._switch.on = False
        try:
            return self._decoder.step(token)
        finally:
            self._switch.on = True


def store_slot_bytes(config: ModelConfig) -> int:
    """Bytes of cache slots that hold the whole store of a model with these dimensions."""
    return config.layers * sum(
        config.set_shape(name)[1] * slot_bytes(record_bytes(config.set_shape(name)[0])) for name in SETS
    )


class _Switch:
    """A refiner that can be turned off for a step."""

    def __init__(self, refiner: Refiner) -> None:
        self.on = True
        self._refiner = refiner
        self._off = Unrefined()

    def refine(self, layer: int, set_index: int, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        (self._refiner if self.on else self._off).refine(layer, set_index, x, y)
