"""Make something that stands in for each layer's key and value projections from text that runs through the model."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from strataflux.client.errors import InputError
from strataflux.client.evaluate.methods.base import Making, MethodSpec, Rebuild
from strataflux.client.evaluate.methods.sequences import project_rebuilt
from strataflux.client.runtime.block import multiply, run_block
from strataflux.client.runtime.rope import rotary_table

__all__ = ["Fit", "fit_layers", "kv_rows", "moments", "require_tokens"]

Fit = Callable[[Tensor, Tensor, Tensor], Rebuild]
"""Of the matrix [keys and values, hidden] of a layer, its inputs [tokens, hidden] in the model as it is, and in the
model whose earlier layers stand rebuilt."""

_SEQUENCES = 4
_BATCH = 8192


def require_tokens(spec: MethodSpec, given: Tensor, needed: int) -> None:
    """Refuse too little text.

    Raises:
        InputError: it is less than ``needed`` tokens.
    """
    if given.numel() < needed:
        raise InputError(str(spec), f"{given.numel()} tokens", f"at least {needed}", "give more calibration text")


@torch.no_grad()
def fit_layers(making: Making, given: Tensor, fit: Fit, *, sequential: bool) -> list[Rebuild]:
    """One after the other; without ``sequential`` all see the model as it is."""
    weights, config = making.weights, making.config
    cosine, sine = (table.to(given.device) for table in rotary_table(config, given.shape[1]))
    exact = fed = weights.embedding[given]
    made = list[Rebuild]()

    def through(hidden: Tensor, index: int, rebuild: Rebuild | None) -> Tensor:
        layer = weights.layers[index]

        def project(name: str, x: Tensor) -> Tensor:
            return multiply(layer, name, x) if rebuild is None else project_rebuilt(config, layer, rebuild)(name, x)

        parts = torch.split(hidden, _SEQUENCES)
        return torch.cat([run_block(config, layer, part, (cosine, sine), project) for part in parts])

    for index, layer in enumerate(weights.layers):
        inputs = [
            rms_norm(hidden, (config.hidden,), layer.attention_norm, config.norm_epsilon).flatten(0, 1)
            for hidden in (exact, fed)
        ]
        made.append(fit(kv_rows(making, index), inputs[0], inputs[1]))
        making.on_layer()
        exact = through(exact, index, None)
        fed = through(fed, index, made[-1]) if sequential else exact
    return made


def kv_rows(making: Making, index: int) -> Tensor:
    """The matrix [keys and values, hidden] of layer ``index``."""
    return making.weights.layers[index].projections["qkv"][making.config.heads * making.config.head_dim :]


def moments(left: Tensor, right: Tensor) -> Tensor:
    """``E[left rightᵀ]`` [a, b] float64 of tokens [n, a] and [n, b]."""
    total = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64, device=left.device)
    for one, other in zip(torch.split(left, _BATCH), torch.split(right, _BATCH), strict=True):
        total += one.double().T @ other.double()
    return total / left.shape[0]
