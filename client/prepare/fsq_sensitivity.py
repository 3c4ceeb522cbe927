"""How much the divergence grows with an error of a layer's keys and values, to second order (ours).

For a small error e of the keys and values of a token the divergence of what the model then predicts is ``eᵀ F e / 2``,
with F the Fisher information ``E[g gᵀ]``, g the gradient, by those keys and values, of the log-probability of a token
drawn from the prediction. One F a layer is the mean over a text.

The first positions are left out of it: every later one attends to them, so that they outweigh all others, and have few
directions of their own.

Layers are gone through forwards and backwards with one of them in memory at a time; what is between them is kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from strataflux.client.runtime.block import run_block
from strataflux.client.runtime.models import LayerWeights, ModelConfig, WeightSource
from strataflux.client.runtime.rope import rotary_table

__all__ = ["sensitivities"]

_TOKENS = 16384
"""Of the text."""
_AT_ONCE = 8192
"""Of these; states between layers take 4 bytes a token, layer and channel."""
_FIRST = 4
_SEQUENCES = 2
_ROWS = 512


def sensitivities(source: WeightSource, tokens: Tensor, device: torch.device, seed: int = 0) -> list[Tensor]:
    """F [m, m] float64, on ``device``, of each layer that attends to all positions.

    Args:
        source: the model.
        tokens: [sequences, n] int64; of more than 16,384 tokens the first sequences.
        device: where to compute.
        seed: of the tokens that are drawn.
    """
    length = tokens.shape[1]
    tokens = tokens[: -(-_TOKENS // length)]
    parts = torch.split(tokens, max(_SEQUENCES, _AT_ONCE // length))
    made = [_of_part(source, part, device, seed + number) for number, part in enumerate(parts)]
    shares = [part.shape[0] / tokens.shape[0] for part in parts]
    return [_mean(ones, shares) for ones in zip(*made, strict=True)]


def _mean(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    total = torch.zeros_like(tensors[0])
    for tensor, share in zip(tensors, shares, strict=True):
        total += share * tensor
    return total


def _of_part(source: WeightSource, tokens: Tensor, device: torch.device, seed: int) -> list[Tensor]:
    config = source.config
    cosine, sine = rotary_table(config, tokens.shape[1])
    turns = cosine.to(device), sine.to(device)
    states = [source.embedding()[tokens].to(device)]
    with torch.no_grad():
        for index in range(config.layers):
            layer = source.layer(index).to(device)
            project = _Project(config, layer)
            parts = torch.split(states[-1], _SEQUENCES)
            states.append(torch.cat([run_block(config, layer, part, turns, project) for part in parts]))
    upstream = _of_prediction(source, states.pop(), seed)
    found = []
    for index in reversed(range(config.layers)):
        layer = source.layer(index).to(device)
        upstream, sensitivity = _through(config, layer, states.pop(), upstream, turns)
        if not layer.window:
            found.append(sensitivity)
    return found[::-1]


class _Project:
    """Multiplies, and keeps the last keys and values as a tensor of their own."""

    def __init__(self, config: ModelConfig, layer: LayerWeights) -> None:
        self._rows, self._layer = config.heads * config.head_dim, layer
        self.kv = torch.empty(0)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        made = linear(x, self._layer.projections[name])
        if name != "qkv" or not made.requires_grad:
            return made
        self.kv = made[..., self._rows :].contiguous()
        return torch.cat((made[..., : self._rows], self.kv), -1)


def _of_prediction(source: WeightSource, hidden: Tensor, seed: int) -> Tensor:
    """Gradients [sequences, n, hidden] of the log-probability of one drawn token a position."""
    config, device = source.config, hidden.device
    head = (source.embedding() if config.tied_head else source.head()).to(device)
    norm, random = source.norm().to(device), torch.Generator(device).manual_seed(seed)
    made: list[Tensor] = []
    for part in torch.split(hidden.flatten(0, 1), _ROWS):
        state = part.clone().requires_grad_()
        with torch.enable_grad():
            shares = linear(rms_norm(state, (config.hidden,), norm, config.norm_epsilon), head).log_softmax(-1)
            drawn = torch.multinomial(shares.detach().exp(), 1, generator=random)
            total = shares.gather(-1, drawn).sum()
        made.extend(torch.autograd.grad(total, state))
    return torch.cat(made).view_as(hidden)


def _through(
    config: ModelConfig, layer: LayerWeights, hidden: Tensor, upstream: Tensor, turns: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Gradients before ``layer`` [sequences, n, hidden], and its F."""
    size = 2 * config.kv_heads * config.head_dim
    total, before = torch.zeros(size, size, dtype=torch.float64, device=hidden.device), []
    for part, above in zip(torch.split(hidden, _SEQUENCES), torch.split(upstream, _SEQUENCES), strict=True):
        state, project = part.clone().requires_grad_(), _Project(config, layer)
        with torch.enable_grad():
            made = run_block(config, layer, state, turns, project)
            gradient, by_kv = torch.autograd.grad(made, (state, project.kv), above)
        before.append(gradient)
        each = by_kv[:, _FIRST:].flatten(0, 1).double()
        total += each.T @ each
    return torch.cat(before), total / hidden.shape[:2].numel()
