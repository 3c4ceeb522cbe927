"""One layer over whole sequences, all positions at once; what multiplies by its matrices is the caller's.

Evaluation, calibration and fitting run this one definition; they differ in what ``project`` does beside multiplying.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from strataflux.client.runtime.models import LayerWeights, ModelConfig
from strataflux.client.runtime.rope import rotate

__all__ = ["Project", "run_block"]

Project = Callable[[str, Tensor], Tensor]
"""Outputs [..., outputs] of the projection set with this name for its input [..., inputs]."""


def run_block(
    config: ModelConfig, layer: LayerWeights, hidden: Tensor, turns: tuple[Tensor, Tensor], project: Project
) -> Tensor:
    """The hidden states [sequences, n, hidden] after ``layer``; a new tensor.

    Args:
        config: the model's dimensions.
        layer: only its norms are used here; its matrices are behind ``project``.
        hidden: [sequences, n, hidden] before the layer; each position sees itself and those before.
        turns: :func:`strataflux.client.runtime.rope.rotary_table` of n positions.
        project: called for ``qkv``, ``o``, ``gate_up`` and ``down``, in this order.
    """
    shape, epsilon = (config.hidden,), config.norm_epsilon
    x = rms_norm(hidden, shape, layer.attention_norm, epsilon)
    hidden = hidden + project("o", _attend(config, project("qkv", x), turns))
    x = rms_norm(hidden, shape, layer.mlp_norm, epsilon)
    gate, up = project("gate_up", x).chunk(2, -1)
    return hidden + project("down", silu(gate) * up)


def _attend(config: ModelConfig, qkv: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """The heads' mixed values [sequences, n, heads · head_dim] of queries, keys and values [sequences, n, rows]."""
    heads = qkv.view(*qkv.shape[:-1], -1, config.head_dim)
    turned = rotate(heads[..., : -config.kv_heads, :], turns[0][:, None], turns[1][:, None]).transpose(1, 2)
    values = heads[..., -config.kv_heads :, :].transpose(1, 2)
    queries, keys = turned[:, : config.heads], turned[:, config.heads :]
    mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2)
