"""What errors of a layer's keys and values weigh when directions are chosen: S [m, m], for ``E|S (y - D u)|²`` (ours).

- *balanced*: keys and values at equal total variance.
- *divergence*: of what the variances weigh half is balanced, half by the second derivative of the divergence, F
  (``client/prepare/fsq_sensitivity.py``): ``S² = F / tr(F Cov) + B / tr(B Cov)``. F alone measured worse than both.
- *output*: by what an error does to the layer's output, to first order: for a value head ``Σ_j W_O^jᵀ W_O^j`` over the
  query heads j that read it; for a key head a diagonal, one weight a rotary pair, of mean squared queries times
  ``τ = Σ_j tr(W_O^j Cov(v) W_O^jᵀ)``, since an error of a logit moves the output by what the values differ.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from strataflux.client.runtime.block import norm_heads
from strataflux.client.runtime.models import LayerWeights, ModelConfig

__all__ = ["balanced_metric", "divergence_metric", "output_metric"]

_BATCH = 8192


def balanced_metric(config: ModelConfig, covariance: Tensor) -> Tensor:
    """Keys and values at equal total variance."""
    blocks = covariance.diagonal().view(2, -1).mean(-1).rsqrt()
    return torch.diag(blocks.repeat_interleave(config.kv_heads * config.head_dim))


def divergence_metric(config: ModelConfig, covariance: Tensor, sensitivity: Tensor) -> Tensor:
    """S [m, m] float64: half of what the variances weigh is by the divergence's second derivative, half balanced."""
    balance = balanced_metric(config, covariance).square()
    weighed = (matrix / (matrix * covariance).sum() for matrix in (sensitivity, balance))
    return _root(sum(weighed, torch.zeros_like(covariance)))


def output_metric(config: ModelConfig, layer: LayerWeights, x: Tensor, covariance: Tensor) -> Tensor:
    """S [m, m] float64, block-diagonal over heads, from queries of the text and the output projection."""
    head, kv_heads = config.head_dim, config.kv_heads
    shared = config.heads // kv_heads
    keys = kv_heads * head
    squares, key_square = _mean_squares(config, layer, x)
    outputs = layer.projections["o"].double().view(config.hidden, kv_heads, shared, head)
    value_squares = torch.einsum("okjh,okji->khi", outputs, outputs)
    metric = covariance.new_zeros(2 * keys, 2 * keys)
    for index in range(kv_heads):
        mine = slice(index * head, (index + 1) * head)
        behind = slice(keys + mine.start, keys + mine.stop)
        exchange = (value_squares[index] * covariance[behind, behind]).sum()
        weight = squares[index * shared : (index + 1) * shared].mean(0)
        paired = (weight + weight.roll(head // 2)) / 2
        scale = (exchange * paired / (head * key_square[index])).sqrt()
        metric[mine, mine] = torch.diag(scale if layer.key_norm is None else scale * layer.key_norm.double())
        metric[behind, behind] = _root(value_squares[index])
    return metric


def _mean_squares(config: ModelConfig, layer: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean squared queries [heads, head_dim] after their norm, and key heads' mean square [kv_heads], 1 where keys are
    not normed afterwards.
    """
    heads = linear(x[:_BATCH], layer.projections["qkv"]).view(-1, config.heads + 2 * config.kv_heads, config.head_dim)
    keys = heads[:, config.heads : -config.kv_heads].double().square().mean((0, 2))
    queries = norm_heads(config, layer, heads)[:, : config.heads].double().square().mean(0)
    return queries, keys if config.head_norms else torch.ones_like(keys)


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    root: Tensor = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    return root
