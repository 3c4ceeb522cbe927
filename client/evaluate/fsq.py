"""Evaluate a model whose keys and values come out of finite-scalar-quantized codes, all positions of a text at once.

Two tiers are evaluated as if no refinement ever missed: a part of a code is resident, the rest refines the tokens that
a position attends to most. Their keys are then built anew, since norm and rotation come after the
decoder; selection is by groups of tokens, shared by all heads of a layer, as one record refines them all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from strataflux.client.prepare.fsq import project_fsq
from strataflux.client.runtime.block import Attend, attend_causally, multiply, norm_heads, run_block
from strataflux.client.runtime.models import DecoderWeights, LayerWeights, ModelConfig
from strataflux.client.runtime.rope import rotary_table, rotate
from strataflux.kernels.fsq import FsqLayer

__all__ = ["FsqTiers", "fsq_logits", "recall_of_tiers"]


@dataclass(frozen=True)
class FsqTiers:
    """A layer's code at both precisions, and how much is refined."""

    coarse: FsqLayer
    fine: FsqLayer
    fraction: Fraction
    """Of the groups of past tokens, at least one."""
    group_tokens: int
    block_tokens: int = 0
    """Refinement goes to a slower tier in blocks of so many tokens, a multiple of a group's: positions since the last
    whole block are fine and not selected. 0: all positions are selected from.
    """


@torch.inference_mode()
def fsq_logits(weights: DecoderWeights, codes: Sequence[FsqLayer | FsqTiers], tokens: Sequence[int]) -> Tensor:
    """Logits [n, vocabulary] float32 after each of ``tokens`` [n]; ``codes`` has one for each layer that attends to all
    positions.
    """
    config, device = weights.config, weights.embedding.device
    cosine, sine = rotary_table(config, len(tokens))
    turns = cosine.to(device), sine.to(device)
    hidden = weights.embedding[torch.tensor(tokens, device=device)][None]
    for layer, code in zip(weights.layers, config.by_layer(codes), strict=True):
        hidden = _run_layer(config, layer, code, hidden, turns)
    return linear(rms_norm(hidden[0], (config.hidden,), weights.norm, config.norm_epsilon), weights.head)


def _run_layer(
    config: ModelConfig,
    layer: LayerWeights,
    code: FsqLayer | FsqTiers | None,
    hidden: Tensor,
    turns: tuple[Tensor, Tensor],
) -> Tensor:
    if code is None:
        return run_block(config, layer, hidden, turns, partial(multiply, layer))
    if isinstance(code, FsqLayer):
        return run_block(config, layer, hidden, turns, project_fsq(config, layer, code))
    x = rms_norm(hidden, (config.hidden,), layer.attention_norm, config.norm_epsilon)
    attend = _tiered(code, _heads(config, layer, code.fine, x, turns))
    return run_block(config, layer, hidden, turns, project_fsq(config, layer, code.coarse), attend)


def _heads(
    config: ModelConfig, layer: LayerWeights, code: FsqLayer, x: Tensor, turns: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Keys, turned, and values [kv_heads, n, head_dim] of inputs [1, n, hidden]."""
    qkv = project_fsq(config, layer, code)("qkv", x)
    heads = norm_heads(config, layer, qkv.view(*qkv.shape[:-1], -1, config.head_dim))[0]
    keys, values = heads[:, config.heads : -config.kv_heads], heads[:, -config.kv_heads :]
    return rotate(keys, turns[0][:, None], turns[1][:, None]).transpose(0, 1), values.transpose(0, 1)


def _tiered(tiers: FsqTiers, fine: tuple[Tensor, Tensor]) -> Attend:
    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        exact, logits = _logits(queries[0], fine[0]), _logits(queries[0], keys[0])
        positions = torch.arange(logits.shape[-1], device=logits.device)
        near = positions >= _selectable(tiers, positions)[:, None]
        chosen = near | _chosen(torch.where(near, exact, logits), tiers)
        logits = torch.where(chosen, exact, logits)
        weights = logits.softmax(-1)
        refined = (weights * chosen).unflatten(0, (keys.shape[1], -1)).flatten(1, 2)  # type: ignore[no-untyped-call]
        plain = weights.unflatten(0, (keys.shape[1], -1)).flatten(1, 2)  # type: ignore[no-untyped-call]
        mixed: Tensor = plain @ values[0] + refined @ (fine[1] - values[0])
        return mixed.view(queries.shape)

    return attend


def _logits(queries: Tensor, keys: Tensor) -> Tensor:
    """[heads, n, n] of queries [heads, n, D] and keys [kv_heads, n, D]; what lies ahead is minus infinity."""
    shared = queries.reshape(keys.shape[0], -1, queries.shape[-1])
    logits = (shared @ keys.transpose(1, 2) / math.sqrt(queries.shape[-1])).view(*queries.shape[:2], -1)
    return logits.masked_fill_(_ahead(logits.shape[-1], logits.device), -math.inf)


def _ahead(count: int, device: torch.device) -> Tensor:
    positions = torch.arange(count, device=device)
    return positions > positions[:, None]


def _selectable(tiers: FsqTiers, positions: Tensor) -> Tensor:
    """[n]: how many first positions each of ``positions`` [n] selects from."""
    if not tiers.block_tokens:
        return positions + 1
    return positions.div(tiers.block_tokens, rounding_mode="floor") * tiers.block_tokens


def _chosen(logits: Tensor, tiers: FsqTiers) -> Tensor:
    """Tokens [n, n] bool that each position refines: the groups of the largest share of any head."""
    count, size = logits.shape[-1], tiers.group_tokens
    padded = torch.nn.functional.pad(logits.softmax(-1), (0, -count % size))
    shares = padded.unflatten(-1, (-1, size)).sum(-1).amax(0)  # type: ignore[no-untyped-call]
    seen = _selectable(tiers, torch.arange(count, device=logits.device))
    firsts = torch.arange(0, count, size, device=logits.device)
    shares = shares.masked_fill(firsts >= seen[:, None], 0)
    wanted = (seen.div(size, rounding_mode="floor") * tiers.fraction.numerator).div(
        tiers.fraction.denominator, rounding_mode="floor"
    )
    ranks = torch.argsort(shares, dim=-1, descending=True, stable=True).argsort(-1)
    groups = (ranks < wanted.clamp_min(1)[:, None]) & (shares > 0)
    chosen: Tensor = groups.repeat_interleave(size, -1)[:, :count]
    return chosen


@torch.inference_mode()
def recall_of_tiers(weights: DecoderWeights, tiers: Sequence[FsqTiers], tokens: Sequence[int]) -> list[float]:
    """For each layer the share of groups that fine keys would select which coarse keys select, on the fine model's
    inputs, the mean over positions past the first 256.
    """
    config, device = weights.config, weights.embedding.device
    cosine, sine = rotary_table(config, len(tokens))
    turns = cosine.to(device), sine.to(device)
    hidden = weights.embedding[torch.tensor(tokens, device=device)][None]
    found = []
    for layer, tier in zip(weights.layers, tiers, strict=True):
        x = rms_norm(hidden, (config.hidden,), layer.attention_norm, config.norm_epsilon)
        seen: list[Tensor] = []
        attend = _recording(seen)
        hidden = run_block(config, layer, hidden, turns, project_fsq(config, layer, tier.fine), attend)
        coarse = _chosen(_logits(seen[0], _heads(config, layer, tier.coarse, x, turns)[0]), tier)[256:]
        fine = _chosen(_logits(seen[0], seen[1]), tier)[256:]
        found.append(float((coarse & fine).sum() / fine.sum()))
    return found


def _recording(seen: list[Tensor]) -> Attend:
    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        seen.extend((queries[0], keys[0]))
        return attend_causally(queries, keys, values)

    return attend
