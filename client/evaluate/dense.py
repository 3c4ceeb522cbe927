"""Evaluate as if nothing ever missed: every token of a window refined, all positions at once.

When every record is resident, what a step adds depends on its input alone, so teacher forcing makes the refined model,
too, a function of the text: ``y = Ŵ x + C z`` with z the selected channels of x. Sums run in another order than token
by token; divergences agree to better than 1e-4.

Neuron bundles refine the MLP as a whole: with h = silu(g) · u, and h' the same after adding the products of gate and up
rows to g and u, ``y = Ŵ h + Σ_j d_j (h'_j - h_j) + c_j h_j`` over the neurons j with the largest |h|.

Runs on the device its weights are on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from strataflux.client.evaluate.scoring import TOP_TOKENS, Reference, Score
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.runtime.rope import rotary_table
from strataflux.client.runtime.shifted import run_shifted
from strataflux.kernels.topk import largest_mask

__all__ = ["DenseModel", "dense_logits", "dense_reference", "dense_score", "score_logits"]

# Rows of logits that are compared at a time: as float64 over a vocabulary of 128k, 64 of them take 64 MiB.
_ROWS_CPU, _ROWS_GPU = 64, 512


@dataclass(frozen=True)
class DenseModel:
    """Resident weights and, with ``refinement``, what is added to them for selected channels."""

    weights: DecoderWeights
    refinement: Sequence[Mapping[str, Tensor]] = ()
    """For each layer and projection set, refinement values [outputs, inputs] float32; empty: none is added."""
    k: Mapping[str, int] | None = None
    """Channels per 1,024 of each projection set; needed with ``refinement``."""
    choice: Literal["largest", "random"] = "largest"
    """Random selection shows what choosing by magnitude is worth."""
    shift: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(SETS, 0.0))
    """Blocks of fetch lead or lag of each projection set."""
    down_copies: Sequence[Tensor] = ()
    """For each layer, the whole down matrix [hidden, intermediate] as bundles hold it. With them the MLP is refined by
    neuron bundles, ``k["down"]`` neurons per 1,024, and ``k["gate_up"]`` is not used."""


@torch.inference_mode()
def dense_logits(model: DenseModel, tokens: Sequence[int]) -> Tensor:
    """Logits [n, vocabulary] float32 of the next token after each of ``tokens`` [n]."""
    weights = model.weights
    config, device = weights.config, weights.embedding.device
    cosine, sine = rotary_table(config, len(tokens))
    turns = cosine.to(device), sine.to(device)
    hidden = weights.embedding[torch.tensor(tokens, device=device)][None]
    hidden = run_shifted(config, weights.layers, hidden, turns, model.shift, _Products(model))
    return linear(rms_norm(hidden[0], (config.hidden,), weights.norm, config.norm_epsilon), weights.head)


class _Products:
    """The products of one pass over a model."""

    def __init__(self, model: DenseModel) -> None:
        self._model = model
        self._mlp = torch.empty(0), torch.empty(0)

    def base(self, layer: int, name: str, x: Tensor) -> Tensor:
        y = linear(x, self._model.weights.layers[layer].projections[name])
        if name == "gate_up":
            self._mlp = x, y
        return y

    def refined(self, layer: int, name: str, x: Tensor, ranks: Tensor) -> Tensor | None:
        model, bundled = self._model, bool(self._model.down_copies)
        if not model.refinement or model.k is None or not model.k[name] or (bundled and name == "gate_up"):
            return None
        chosen = largest_mask(ranks if model.choice == "largest" else torch.rand_like(x), model.k[name])
        added = linear(x * chosen, model.refinement[layer][name])
        if bundled and name == "down":
            added = added + linear((self._neurons(layer) - x) * chosen, model.down_copies[layer])
        return added

    def _neurons(self, layer: int) -> Tensor:
        """What every neuron's activation would be with its gate and up rows refined."""
        x, y = self._mlp
        gate, up = (y + linear(x, self._model.refinement[layer]["gate_up"])).chunk(2, -1)
        return silu(gate) * up


def dense_reference(weights: DecoderWeights, tokens: Sequence[int]) -> Reference:
    """What ``weights`` predict over ``tokens`` [n + 1]; its log-probabilities stay on the weights' device."""
    log_p = torch.log_softmax(dense_logits(DenseModel(weights), tokens[:-1]), -1)
    surprise = -_of_targets(log_p, tokens).double().cpu().numpy()
    zeros = np.zeros(len(tokens) - 1)
    return Reference(tuple(tokens), log_p, Score(surprise, zeros, zeros))


def dense_score(model: DenseModel, reference: Reference) -> Score:
    """Score ``model`` over the reference's text."""
    return score_logits(dense_logits(model, reference.tokens[:-1]), reference)


@torch.inference_mode()
def score_logits(logits: Tensor, reference: Reference) -> Score:
    """Score ``logits`` [n, vocabulary], those after each of the reference's tokens but the last."""
    log_q = torch.log_softmax(logits, -1)
    surprise = -_of_targets(log_q, reference.tokens).double().cpu().numpy()
    pairs = zip(_rows(reference.log_probabilities), _rows(log_q), strict=True)
    exact, top = (
        torch.cat(parts).cpu().numpy() for parts in zip(*(_divergences(*pair) for pair in pairs), strict=True)
    )
    return Score(surprise, exact, top)


def _rows(log_p: Tensor) -> list[Tensor]:
    step = _ROWS_GPU if log_p.is_cuda else _ROWS_CPU
    return [log_p[start : start + step] for start in range(0, log_p.shape[0], step)]


def _of_targets(log_q: Tensor, tokens: Sequence[int]) -> Tensor:
    targets = torch.tensor(tokens[1:], device=log_q.device)
    return log_q.gather(1, targets[:, None]).flatten()


def _divergences(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """``kl`` and ``kl_top`` of each row [rows] float64; the formulas of :mod:`strataflux.client.evaluate.scoring`."""
    log_p, log_q = log_p.double(), log_q.double()
    p, q = log_p.exp(), log_q.exp()
    terms = p * (log_p - log_q)
    exact = terms.sum(-1)
    if log_p.shape[-1] <= TOP_TOKENS:
        return exact, exact
    chosen = log_p.topk(TOP_TOKENS, sorted=False).indices
    apart = terms.gather(-1, chosen).sum(-1)
    # The rest's mass is summed from its members: as a difference from 1 it would be lost in rounding.
    rest_p, rest_q = p.scatter(-1, chosen, 0).sum(-1), q.scatter(-1, chosen, 0).sum(-1)
    rest = torch.where((rest_p > 0) & (rest_q > 0), rest_p * (rest_p / rest_q).log(), 0)
    return exact, apart + rest
