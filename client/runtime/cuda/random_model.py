"""Models of well-known shapes with random weights, made on the device: for speed, not for text.

Codes are drawn as they are packed (every bit pattern is a code), so a model of eight billion weights takes seconds.
"""

from dataclasses import replace
from typing import Final, Literal

import torch
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.cuda.linear import DenseLinear, Linear, LowbitLinear
from strataflux.client.runtime.cuda.model import DeviceLayer, DeviceModel
from strataflux.client.runtime.models import SETS, ModelConfig
from strataflux.client.runtime.rope import llama3_divisors
from strataflux.kernels.lowbit_gemv import STRIP, LowbitWeights

__all__ = ["BASES", "SHAPES", "Base", "random_lowbit", "random_model", "shape_of"]

Base = Literal["bf16", "3-bit", "4-bit", "codebook-2", "codebook-3", "codebook-4"]
BASES: Final[dict[Base, tuple[int, int]]] = {
    "3-bit": (3, 128),
    "4-bit": (4, 128),
    "codebook-2": (2, 0),
    "codebook-3": (3, 0),
    "codebook-4": (4, 0),
}
"""Bits and group of each low-bit base; group 0: codebooks."""

_LLAMA3: Final = llama3_divisors(128, 500000.0, 8.0, 1.0, 4.0, 8192)
_LLAMA_8B: Final = ModelConfig(
    vocabulary=128256,
    hidden=4096,
    intermediate=14336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    context=131072,
    rope_theta=500000.0,
    norm_epsilon=1e-5,
    tied_head=False,
    rope_divisors=_LLAMA3,
)
_QWEN_8B: Final = replace(
    _LLAMA_8B,
    vocabulary=151936,
    intermediate=12288,
    layers=36,
    context=40960,
    rope_theta=1e6,
    norm_epsilon=1e-6,
    rope_divisors=(),
    architecture="qwen3",
)
SHAPES: Final = {
    "llama-3.1-8b": _LLAMA_8B,
    "llama-3.2-1b": replace(
        _LLAMA_8B,
        hidden=2048,
        intermediate=8192,
        layers=16,
        head_dim=64,
        tied_head=True,
        rope_divisors=llama3_divisors(64, 500000.0, 32.0, 1.0, 4.0, 8192),
    ),
    "qwen3-0.6b": replace(_QWEN_8B, hidden=1024, intermediate=3072, layers=28, heads=16, tied_head=True),
    "qwen3-8b": _QWEN_8B,
}
"""Dimensions by the name that ``--random`` takes."""


def shape_of(name: str) -> ModelConfig:
    """The dimensions of a named shape.

    Raises:
        MisuseError: there is none of this name.
    """
    if name not in SHAPES:
        raise MisuseError("--random", repr(name), ", ".join(SHAPES), "choose one of these")
    return SHAPES[name]


def random_lowbit(rows: int, inputs: int, bits: int, group: int, device: torch.device) -> LowbitWeights:
    """Packed weights of random codes with values of about ±0.02; ``group`` 0 makes codebooks."""
    tiles, strips = 2 * -(-rows // 32), -(-inputs // STRIP)
    words = torch.randint(-(1 << 31), 1 << 31, (tiles, strips, bits, 32, 4), dtype=torch.int32, device=device)
    if group:
        shape = (tiles, strips, 8, STRIP // group, 2)
        scales = (torch.rand(shape, device=device) * 0.02 / (1 << bits) + 0.001).half().view(torch.int16).int()
        # Zero-points in the middle: with any others all outputs would share one large mean.
        meta = scales | (1 << (bits - 1)) << 16
    else:
        halves = (torch.randn(16 * tiles, 1 << bits, device=device) * 0.02).half().view(torch.int16).int() & 0xFFFF
        meta = torch.cat((halves & 255, halves >> 8), dim=1).to(torch.uint8).view(torch.int32)
    return LowbitWeights(words, meta.contiguous(), rows, inputs, bits, group)


def random_model(config: ModelConfig, base: Base, device: torch.device, seed: int = 0) -> DeviceModel:
    """A model of these dimensions: ``bf16`` matrices, or low-bit weights with scales for refinement."""
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if base == "bf16" else torch.float16
    embedding = _noise(config.vocabulary, config.hidden, dtype, device)
    head = embedding if config.tied_head else _noise(config.vocabulary, config.hidden, dtype, device)
    layers = [_layer(config, base, device) for _ in range(config.layers)]
    return DeviceModel(config, embedding, torch.ones(config.hidden, device=device), head, layers)


def _layer(config: ModelConfig, base: Base, device: torch.device) -> DeviceLayer:
    linears: list[Linear] = []
    for outputs, inputs in map(config.set_shape, SETS):
        if base == "bf16":
            linears.append(DenseLinear(_noise(outputs, inputs, torch.bfloat16, device)))
        else:
            linears.append(LowbitLinear(random_lowbit(outputs, inputs, *BASES[base], device)))
    scales = [torch.rand(config.set_shape(name)[0], device=device) * 1e-4 for name in SETS]
    norm = torch.ones(config.hidden, device=device)
    heads = torch.ones(config.head_dim, device=device) if config.head_norms else None
    return DeviceLayer(norm, norm, linears, None if base == "bf16" else scales, heads, heads)


def _noise(rows: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, inputs, dtype=dtype, device=device).mul_(0.02)
