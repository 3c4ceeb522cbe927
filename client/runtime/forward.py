"""A whole text in one pass: what unrefined weights predict after each token, all positions at once.

The same function of the weights as a decoder's steps, summed in another order. Refinement depends on what was resident
at each step and has no such short cut.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from strataflux.client.runtime.models import DecoderWeights, ModelConfig
from strataflux.client.runtime.rope import rotary_table, rotate

__all__ = ["forward_text"]


@torch.inference_mode()
def forward_text(weights: DecoderWeights, tokens: Sequence[int]) -> Tensor:
    """Logits [n, vocabulary] float32 of the next token after each of ``tokens`` [n]."""
    config = weights.config
    shape, epsilon = (config.hidden,), config.norm_epsilon
    turns = rotary_table(config, len(tokens))
    hidden = weights.embedding[list(tokens)]
    for layer in weights.layers:
        x = rms_norm(hidden, shape, layer.attention_norm, epsilon)
        mixed = _attend(config, linear(x, layer.projections["qkv"]), turns)
        hidden = hidden + linear(mixed, layer.projections["o"])
        x = rms_norm(hidden, shape, layer.mlp_norm, epsilon)
        gate, up = linear(x, layer.projections["gate_up"]).chunk(2, -1)
        hidden = hidden + linear(silu(gate) * up, layer.projections["down"])
    return linear(rms_norm(hidden, shape, weights.norm, epsilon), weights.head)


def _attend(config: ModelConfig, qkv: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """The heads' mixed values [n, heads · head_dim] of queries, keys and values [n, rows]; each position sees itself
    and those before.
    """
    heads = qkv.view(qkv.shape[0], -1, config.head_dim)
    turned = rotate(heads[:, : -config.kv_heads], turns[0][:, None], turns[1][:, None]).transpose(0, 1)
    values = heads[:, -config.kv_heads :].transpose(0, 1)
    queries, keys = turned[: config.heads], turned[config.heads :]
    mixed = scaled_dot_product_attention(queries[None], keys[None], values[None], is_causal=True, enable_gqa=True)
    return mixed[0].transpose(0, 1).flatten(1)
