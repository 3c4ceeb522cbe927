"""One layer over whole sequences, all positions at once; what multiplies by its matrices is the caller's.

Evaluation, calibration and fitting run this one definition; they differ in what ``project`` does beside multiplying.
Prefill and the evaluation of low-bit caches differ in ``attend``.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from strataflux.client.runtime.models import LayerWeights, ModelConfig
from strataflux.client.runtime.rope import rotate

__all__ = [
    "Attend",
    "Project",
    "attend_causally",
    "attend_newest",
    "attention_of",
    "mix_heads",
    "multiply",
    "norm_heads",
    "norm_queries",
    "run_block",
    "seen_by_newest",
]

Project = Callable[[str, Tensor], Tensor]
"""Outputs [..., outputs] of the projection set with this name for its input [..., inputs]."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Mixed values [sequences, heads, n, head_dim] of queries [sequences, heads, n, head_dim], and keys and values
[sequences, kv_heads, n, head_dim], turned by position."""


def multiply(layer: LayerWeights, name: str, x: Tensor) -> Tensor:
    """Outputs [..., outputs] of the projection set ``name`` of ``layer`` for inputs [..., inputs], and nothing beside:
    with the layer bound, a :data:`Project`.
    """
    return linear(x, layer.projections[name])


def attend_causally(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Each position attends to itself and those before: an :data:`Attend`."""
    mixed: Tensor = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    return mixed


def seen_by_newest(count: int, held: int, device: torch.device, window: int = 0) -> Tensor:
    """[count, held] bool: the last ``count`` of ``held`` tokens see themselves and all before, or so many of them that
    it is ``window`` in all.
    """
    positions = torch.arange(held, device=device)
    now = positions[held - count :, None]
    return (positions <= now) & (positions > now - window) if window else positions <= now


def attend_newest(queries: Tensor, keys: Tensor, values: Tensor, window: int = 0) -> Tensor:
    """Mixed values [sequences, heads, m, head_dim] of queries of the newest m among the tokens of ``keys`` and
    ``values`` [sequences, kv_heads, n, head_dim]; each sees itself and all before, or the newest ``window`` of these.
    """
    count, held = queries.shape[2], keys.shape[2]
    limited = 0 < window < held
    if count == held and not limited:
        return attend_causally(queries, keys, values)
    seen = seen_by_newest(count, held, keys.device, window) if limited or count > 1 else None
    mixed: Tensor = scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=True)
    return mixed


def attention_of(layer: LayerWeights) -> Attend:
    """What ``layer`` does with a text from its first position on: every position attends to itself and those before,
    as far as its window.
    """
    return partial(attend_newest, window=layer.window) if layer.window else attend_causally


def run_block(
    config: ModelConfig,
    layer: LayerWeights,
    hidden: Tensor,
    turns: tuple[Tensor, Tensor],
    project: Project,
    attend: Attend | None = None,
) -> Tensor:
    """The hidden states [sequences, n, hidden] after ``layer``; a new tensor.

    Args:
        config: the model's dimensions.
        layer: only its norms, and its window, are used here; its matrices are behind ``project``.
        hidden: [sequences, n, hidden] before the layer.
        turns: rows of :func:`strataflux.client.runtime.rope.rotary_table`, those of the n positions.
        project: called for ``qkv``, ``o``, ``gate_up`` and ``down``, in this order.
        attend: what a position sees; by default as :func:`attention_of`.
    """
    shape, epsilon = (config.hidden,), config.norm_epsilon
    x = rms_norm(hidden, shape, layer.attention_norm, epsilon)
    mixed = mix_heads(config, layer, project("qkv", x), turns, attend or attention_of(layer))
    hidden = hidden + project("o", mixed)
    x = rms_norm(hidden, shape, layer.mlp_norm, epsilon)
    gate, up = project("gate_up", x).chunk(2, -1)
    return hidden + project("down", silu(gate) * up)


def norm_heads(config: ModelConfig, layer: LayerWeights, heads: Tensor) -> Tensor:
    """``heads`` [..., query, key and value heads, head_dim], with biases added, and queries and keys normed, where the
    model does that.
    """
    if layer.qkv_bias is not None:
        heads = heads + layer.qkv_bias.view(-1, config.head_dim)
    if layer.query_norm is None or layer.key_norm is None:
        return heads
    queries, keys, values = heads.split((config.heads, config.kv_heads, config.kv_heads), -2)  # type: ignore[no-untyped-call]
    shape, epsilon = (config.head_dim,), config.norm_epsilon
    queries = rms_norm(queries, shape, layer.query_norm, epsilon)
    return torch.cat((queries, rms_norm(keys, shape, layer.key_norm, epsilon), values), -2)


def norm_queries(config: ModelConfig, layer: LayerWeights, queries: Tensor) -> Tensor:
    """The query heads of :func:`norm_heads` alone: ``queries`` [..., query heads, head_dim]."""
    if layer.qkv_bias is not None:
        queries = queries + layer.qkv_bias[: config.heads * config.head_dim].view(-1, config.head_dim)
    if layer.query_norm is None:
        return queries
    return rms_norm(queries, (config.head_dim,), layer.query_norm, config.norm_epsilon)


def mix_heads(
    config: ModelConfig, layer: LayerWeights, qkv: Tensor, turns: tuple[Tensor, Tensor], attend: Attend
) -> Tensor:
    """The heads' mixed values [sequences, n, heads · head_dim] of queries, keys and values [sequences, n, rows]."""
    heads = norm_heads(config, layer, qkv.view(*qkv.shape[:-1], -1, config.head_dim))
    turned = rotate(heads[..., : -config.kv_heads, :], turns[0][:, None], turns[1][:, None]).transpose(1, 2)
    values = heads[..., -config.kv_heads :, :].transpose(1, 2)
    queries, keys = turned[:, : config.heads], turned[:, config.heads :]
    return attend(queries, keys, values).transpose(1, 2).flatten(2)
