"""Tune a prepared model on this machine: what measures a decode step, what judges a candidate, and where it is kept.

Steps are measured end to end through a daemon whose cache holds the whole store, so that each selection is looked up,
stamped and added as in decoding, and none is missing.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from strataflux.client.evaluate.compare import join_scores
from strataflux.client.evaluate.dense import DenseModel, dense_reference, dense_score
from strataflux.client.prepare.prepared import MANIFEST, PreparedModel
from strataflux.client.prepare.refinement import read_refinement
from strataflux.client.prepare.tune import Candidate, Tuned
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.runtime.threads import decoding_threads
from strataflux.client.session import Session
from strataflux.client.weights import WeightRefiner, step_demand
from strataflux.proto.messages import StoreRef

__all__ = ["DecodeTimer", "keep", "make_judge"]

_ROUNDS = 3


class DecodeTimer:
    """Seconds of a decode step of one model; a :data:`strataflux.client.prepare.tune.Timer` for channels and s = 0.

    Each call decodes the same text four times; the first fills the cache and compiles, of the others the least median
    step counts: what disturbs a machine makes steps longer, never shorter.
    """

    def __init__(
        self, prepared: PreparedModel, weights: DecoderWeights, tokens: Sequence[int], runtime_dir: Path
    ) -> None:
        """Nothing is measured yet; the daemon of ``runtime_dir`` serves the store of ``prepared``."""
        self._prepared, self._weights, self._tokens, self._runtime_dir = prepared, weights, tokens, runtime_dir

    def __call__(self, candidate: Candidate | None) -> float:
        """Median seconds of a step; None is without refinement."""
        with decoding_threads(), self._steps(candidate) as step:
            step()
            return min(statistics.median(step()) for _ in range(_ROUNDS))

    @contextmanager
    def _steps(self, candidate: Candidate | None) -> Iterator[Callable[[], list[float]]]:
        if candidate is None:
            decoder = Decoder(self._weights, len(self._tokens))
            yield lambda: [_timed(decoder, token) for token in _from_start(decoder, self._tokens)]
            return
        budgets, manifest = candidate.budgets(), self._prepared.manifest
        session = Session.attach(
            [StoreRef(manifest.digest, manifest.identity)],
            selections_per_step=max(1, step_demand(self._prepared, budgets).selections),
            runtime_dir=self._runtime_dir,
        )
        with session:
            refiner = WeightRefiner(session, 0, self._prepared, budgets)
            refined = Decoder(self._weights, len(self._tokens), refiner)

            def round_of_steps() -> list[float]:
                seconds = []
                for token in _from_start(refined, self._tokens):
                    started = time.perf_counter()
                    with session.step() as step:
                        refined.step(token)
                    step.end()
                    seconds.append(time.perf_counter() - started)
                return seconds

            yield round_of_steps


def _from_start(decoder: Decoder, tokens: Sequence[int]) -> Sequence[int]:
    decoder.reset()
    return tokens


def _timed(decoder: Decoder, token: int) -> float:
    started = time.perf_counter()
    decoder.step(token)
    return time.perf_counter() - started


def make_judge(
    prepared: PreparedModel, reference: DecoderWeights, low: DecoderWeights, windows: Sequence[Sequence[int]]
) -> Callable[[Candidate], float]:
    """A :data:`strataflux.client.prepare.tune.Judge`: mean KL over ``windows`` as if nothing missed."""
    expected = [dense_reference(reference, window) for window in windows]
    values = list(read_refinement(prepared))

    def judge(candidate: Candidate) -> float:
        shift = dict(zip(SETS, candidate.shift, strict=True))
        model = DenseModel(low, values, candidate.budgets(), shift=shift)
        return join_scores([dense_score(model, one) for one in expected]).kl

    return judge


def keep(prepared: PreparedModel, tuned: Tuned) -> None:
    """Write the chosen budgets and shifts into ``prepared.json``; identity and store stay as they are."""
    chosen = tuned.chosen
    manifest = replace(
        prepared.manifest,
        k=chosen.budgets(),
        shift=dict(zip(SETS, chosen.shift, strict=True)),
        mlp_scheme=chosen.mlp,
    )
    path = prepared.folder / MANIFEST
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        file.write(json.dumps(manifest.to_json(), indent=2))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
