"""TurboQuant for least squared error: vectors turned at random, each coordinate on the best grid for what that makes of
it (Zandieh et al., 2026).

[P] A vector x [D] is kept as its norm and b bits a coordinate of ``u = R x / |x|``. A turned unit vector is uniform on
the sphere, so a coordinate has density ∝ (1 - t²)^((D - 3)/2) whatever the data, and the grid that distorts it least
(Lloyd and Max: each level the mean of its cell, each border half-way) is computed once. ``x ≈ |x| Rᵀ level``.
[O] R is a Hadamard matrix after random signs, the norm float16, every cached vector is coded at once, keys after
rotation, and a prompt sees codes, too. (The Transformer-FSQ paper ran a min-max grid a vector under this name.)
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from strataflux.client.evaluate.methods.base import KvMethod, Making, MethodSpec
from strataflux.client.evaluate.methods.held import Appended
from strataflux.client.runtime.models import ModelConfig
from strataflux.kernels.hadamard import check_head_dim, turn

__all__ = ["best_levels", "code_vectors", "make_turboquant", "turboquant_bytes"]

_SEED = 20_260
_POINTS = 100_001


@cache
def best_levels(dim: int, bits: int) -> Tensor:
    """The 2^bits levels [levels] float32 that least distort a coordinate of a random unit vector of ``dim``."""
    # The density is even, and so are the levels: the upper half is found, the lower is its mirror.
    points = np.linspace(0, 1, _POINTS)
    density = (1 - points**2).clip(0) ** ((dim - 3) / 2)
    mass, moment = (np.append(0, np.cumsum((part[1:] + part[:-1]) / 2)) for part in (density, density * points))
    wanted = (np.arange(2 ** (bits - 1)) + 0.5) / 2 ** (bits - 1)
    levels, moved = np.interp(wanted * mass[-1], mass, points), 1.0
    while moved > 1e-10:
        borders = np.concatenate(([0], (levels[1:] + levels[:-1]) / 2, [1]))
        better = np.diff(np.interp(borders, points, moment)) / np.diff(np.interp(borders, points, mass))
        moved, levels = float(np.abs(better - levels).max()), better
    return torch.from_numpy(np.concatenate((-levels[::-1], levels))).float()


@cache
def _signs(dim: int) -> Tensor:
    random = torch.Generator().manual_seed(_SEED + dim)
    return torch.randint(0, 2, (dim,), generator=random) * 2.0 - 1


def code_vectors(x: Tensor, bits: int) -> Tensor:
    """``x`` [..., D] as norm and codes give it back."""
    signs, levels = _signs(x.shape[-1]).to(x.device), best_levels(x.shape[-1], bits).to(x.device)
    norms = x.norm(dim=-1, keepdim=True)
    unit = turn(x * signs) / norms.clamp_min(1e-12)
    codes = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2)
    given_back: Tensor = norms.half().float() * turn(levels[codes]) * signs
    return given_back


def turboquant_bytes(config: ModelConfig, bits: int) -> int:
    """Bytes of a token, all layers: codes and a norm for each key and value head."""
    return config.layers * 2 * config.kv_heads * (-(-config.head_dim * bits // 8) + 2)


class _Layer(Appended):
    """All vectors as their codes give them back."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self._bits = bits

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return super().append(code_vectors(keys, self._bits), code_vectors(values, self._bits))


def make_turboquant(spec: MethodSpec, making: Making) -> KvMethod:
    """``turboquant:4``.

    Raises:
        ValueError: heads cannot be turned.
    """
    bits = spec.number or 4
    check_head_dim(making.config.head_dim)
    size = turboquant_bytes(making.config, bits)
    return KvMethod(str(spec), lambda _: _Layer(bits), lambda prompt, further: size * (prompt + further))
