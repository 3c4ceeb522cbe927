"""Tune a prepared model on this machine: what measures a decode step, what judges a candidate, and where it is kept.

Steps are measured end to end through a daemon, in turn with steps of the base on the same tokens, so that what else
disturbs a machine disturbs both alike; the median over neighbouring pairs is what counts. With a cache that holds the
whole store each selection is looked up, stamped and added, which is the most a step that skips misses can cost.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from strataflux.cache_policy.miss import MissPolicy, Skip
from strataflux.client.evaluate.compare import join_scores
from strataflux.client.evaluate.dense import DenseModel, dense_score
from strataflux.client.evaluate.dense_run import refined_dense
from strataflux.client.evaluate.scoring import Reference
from strataflux.client.prepare.candidates import Candidate, Judge, Timing
from strataflux.client.prepare.prepared import MANIFEST, PreparedModel
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import DecoderWeights, ModelConfig
from strataflux.client.runtime.threads import decoding_threads
from strataflux.kernels.topk import selected_count
from strataflux.proto.store_writer import sync_folder, write_synced

__all__ = ["DecodeTimer", "keep", "make_judge", "selection_of"]


class DecodeTimer:
    """Steps of one model with a candidate and without: a :data:`strataflux.client.prepare.candidates.Timer`.

    Each call attaches, decodes the text once to fill the cache, and then in ``rounds`` more passes takes each step
    twice, with and without refinement, now one first and now the other.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        weights: DecoderWeights,
        tokens: Sequence[int],
        runtime_dir: Path,
        *,
        miss: MissPolicy = Skip(),  # noqa: B008 (immutable)
        rounds: int = 1,
    ) -> None:
        """Nothing is measured yet; the daemon of ``runtime_dir`` serves the store of ``prepared``."""
        # fixed after construction
        self._prepared, self._weights, self._tokens = prepared, weights, tokens
        self._runtime_dir, self._miss, self._rounds = runtime_dir, miss, rounds

    def __call__(self, candidate: Candidate) -> Timing:
        """Medians over ``rounds · len(tokens)`` pairs of steps."""
        base = Decoder(self._weights, len(self._tokens))
        attached = RefinedModel.attach(
            self._prepared,
            self._weights,
            context=len(self._tokens),
            runtime_dir=self._runtime_dir,
            k=candidate.budgets(),
            shift=candidate.shifts(),
            scheme=candidate.mlp,
            miss=self._miss,
        )
        with decoding_threads(), attached as model:
            for token in self._tokens:
                model.step(token)
            pairs = [pair for _ in range(self._rounds) for pair in self._pairs(base, model)]
        plain, refined = zip(*pairs, strict=True)
        ratios = [b / a for a, b in pairs]
        return Timing(statistics.median(refined), statistics.median(plain), statistics.median(ratios) - 1)

    def _pairs(self, base: Decoder, model: RefinedModel) -> list[tuple[float, float]]:
        base.reset()
        model.reset()
        pairs = []
        for at, token in enumerate(self._tokens):
            if at % 2:
                refined = _timed(model.step, token)
                pairs.append((_timed(base.step, token), refined))
            else:
                pairs.append((_timed(base.step, token), _timed(model.step, token)))
        return pairs


def _timed(step: Callable[[int], Tensor], token: int) -> float:
    started = time.perf_counter()
    step(token)
    return time.perf_counter() - started


def selection_of(config: ModelConfig) -> Callable[[Candidate], object]:
    """What tells candidates of a model apart: how many of each set they select, shifts, and the MLP's scheme.

    A set with fewer inputs than 1,024 selects equally many for neighbouring budgets.
    """

    def selection(candidate: Candidate) -> object:
        counts = (selected_count(k, config.set_shape(name)[1]) for name, k in candidate.budgets().items())
        return *counts, candidate.shift, candidate.mlp

    return selection


def make_judge(
    prepared: PreparedModel, low: DecoderWeights, expected: Sequence[Reference], *, laddered: bool = True
) -> Judge:
    """Mean divergence from what the unquantized model ``expected`` on held-out windows, as if nothing missed.

    Values are those fitted for the nearest budget if they are ``laddered``, else the store's.
    """

    def judge(candidate: Candidate) -> float:
        budgets, shift = candidate.budgets(), candidate.shifts()
        if any(candidate.k):
            model = refined_dense(prepared, low, budgets, candidate.mlp, shift, laddered=laddered)
        else:
            model = DenseModel(low)
        return join_scores([dense_score(model, one) for one in expected]).kl

    return judge


def keep(prepared: PreparedModel, chosen: Candidate) -> None:
    """Write budgets, shifts and scheme into ``prepared.json``; identity and store stay as they are."""
    manifest = replace(prepared.manifest, k=chosen.budgets(), shift=chosen.shifts(), mlp_scheme=chosen.mlp)
    path = prepared.folder / MANIFEST
    partial = path.with_suffix(".partial")
    write_synced(partial, json.dumps(manifest.to_json(), indent=2).encode())
    partial.replace(path)
    sync_folder(prepared.folder)
