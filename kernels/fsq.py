"""Finite scalar quantization of a token's keys and values: grid, packing and decoding; nothing here is compiled.

One code a token and layer stands for the keys and values of all heads (Transformer-FSQ). Formulas, with x the input of
the key and value projections, w the width of the code and L the levels of a coordinate:

    z = E x + e                                      encoder [w, d]
    q = level of z, 0 … L - 1                        all that is cached
    c = q - (L - 1) / 2                              the level's centre
    [k; v] = D c + b                                 decoder [m, w]: keys and values before norm and rotation

Bounds (tanh from the paper, the others ours):

    tanh   q = round((L - 1)/2 · (1 + tanh z))       the published form, made symmetric: its shift belongs into e
    floor  q = floor(L/2 · (1 + tanh z))             equal cells, so fewer bits are the high bits of more
    clamp  q = floor(L/2 · (1 + z)), clipped         a plain uniform grid; nests like floor

A code lies in memory as one string of bits, coordinate after coordinate, least significant bit first. Widths divide
eight and never grow along the code, so no coordinate straddles a byte; ``⌈Σ bits / 8⌉`` bytes a token, nothing beside.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

__all__ = ["Bound", "FsqGrid", "FsqLayer", "bits_of_levels", "quantize_straight_through"]

Bound = Literal["tanh", "floor", "clamp"]

_BITS = (1, 2, 4, 8)


def bits_of_levels(levels: int) -> int:
    """Bits of a coordinate with ``levels`` levels.

    Raises:
        ValueError: it is none of 2, 4, 16 and 256.
    """
    found = {2**bits: bits for bits in _BITS}
    if levels not in found:
        raise ValueError(f"{levels} levels asked for; {', '.join(map(str, found))} fill whole bytes and are supported")
    return found[levels]


@dataclass(frozen=True)
class FsqGrid:
    """The levels of a code's coordinates.

    Raises:
        ValueError: on construction, if widths are not 1, 2, 4 or 8, grow along the code, or there are none.
    """

    bits: tuple[int, ...]
    """Of each coordinate, the widest first."""
    bound: Bound = "tanh"

    def __post_init__(self) -> None:
        if not self.bits or set(self.bits) - set(_BITS) or list(self.bits) != sorted(self.bits, reverse=True):
            raise ValueError(f"widths {self.bits[:8]} …: expected some of {_BITS} bits, the widest first")
        if self.bound not in ("tanh", "floor", "clamp"):
            raise ValueError(f"bound {self.bound!r}: tanh, floor and clamp are supported")

    @classmethod
    def uniform(cls, width: int, levels: int, bound: Bound = "tanh") -> "FsqGrid":
        """``width`` coordinates of ``levels`` levels each."""
        return cls((bits_of_levels(levels),) * width, bound)

    @property
    def width(self) -> int:
        """Coordinates."""
        return len(self.bits)

    @property
    def nbytes(self) -> int:
        """Bytes of one token's code."""
        return -(-sum(self.bits) // 8)

    @cached_property
    def levels(self) -> Tensor:
        """[width] float32."""
        return 2.0 ** torch.tensor(self.bits)

    def quantize(self, z: Tensor) -> Tensor:
        """Levels [..., width] uint8 of ``z`` [..., width] float32."""
        return _levels_of(z, _levels_on(self, z.device), self.bound).to(torch.uint8)

    def centres(self, codes: Tensor) -> Tensor:
        """Centres c [..., width] float32 of levels [..., width]."""
        return codes.float() - (_levels_on(self, codes.device) - 1) / 2

    def pack(self, codes: Tensor) -> Tensor:
        """Levels [..., width] uint8 as [..., nbytes] uint8."""
        byte, shift = (t.to(codes.device) for t in self._places)
        packed = codes.new_zeros((*codes.shape[:-1], self.nbytes))
        # Bits of different coordinates do not meet, so adding them is putting them together.
        return packed.index_add_(-1, byte, codes << shift)

    def unpack(self, packed: Tensor) -> Tensor:
        """Levels [..., width] uint8; undoes :meth:`pack`.

        Raises:
            ValueError: ``packed`` has another length than a code.
        """
        if packed.shape[-1] != self.nbytes:
            raise ValueError(f"{packed.shape[-1]} bytes of a code; {self.width} coordinates take {self.nbytes}")
        byte, shift = (t.to(packed.device) for t in self._places)
        mask = (_levels_on(self, packed.device) - 1).to(torch.uint8)
        return (packed[..., byte] >> shift) & mask

    def first(self, width: int) -> "FsqGrid":
        """The grid of the first ``width`` coordinates alone: a width tier's resident part."""
        return FsqGrid(self.bits[:width], self.bound)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """The byte of each coordinate [width] int64, and its lowest bit there [width] uint8."""
        bits = torch.tensor(self.bits)
        at = bits.cumsum(0) - bits
        return at // 8, (at % 8).to(torch.uint8)


@lru_cache(maxsize=1024)
def _levels_on(grid: FsqGrid, device: torch.device) -> Tensor:
    """A copy to a device waits for all that was launched there, so each is made once, and fit for training."""
    with torch.inference_mode(False):
        return 2.0 ** torch.tensor(grid.bits, device=device)


def _levels_of(z: Tensor, levels: Tensor, bound: Bound) -> Tensor:
    if bound == "tanh":
        return ((levels - 1) / 2 * (1 + z.tanh())).round()
    y = z.tanh() if bound == "floor" else z
    return torch.minimum((levels / 2 * (1 + y)).floor().clamp_min(0), levels - 1)


def quantize_straight_through(z: Tensor, grid: FsqGrid) -> Tensor:
    """Centres c [..., width] float32 of ``z``, for training: rounding counts as the identity (the paper, 3.2).

    The derivative is the bound's: ``(L-1)/2 · (1 - tanh² z)``, ``L/2 · (1 - tanh² z)`` for ``floor``, and for ``clamp``
    ``L/2``, where beyond the range only gradients pass that lead back into it (ours).
    """
    levels = _levels_on(grid, z.device)
    centres: Tensor = _levels_of(z.detach(), levels, grid.bound) - (levels - 1) / 2
    if grid.bound == "clamp":
        smooth: Tensor = levels / 2 * _Returning.apply(z)  # type: ignore[no-untyped-call]
    else:
        smooth = (levels - 1 if grid.bound == "tanh" else levels) / 2 * z.tanh()
    return smooth + (centres - smooth).detach()


class _Returning(torch.autograd.Function):
    """The identity; beyond -1 … 1 a gradient passes only if a step against it leads back."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors  # type: ignore[attr-defined]
        leaving = ((z > 1) & (gradient < 0)) | ((z < -1) & (gradient > 0))
        return gradient.masked_fill(leaving, 0)


@dataclass(frozen=True)
class FsqLayer:
    """What replaces a layer's key and value projections."""

    grid: FsqGrid
    encoder: Tensor
    """E, [width, hidden] float32."""
    encoder_bias: Tensor
    """e, [width] float32."""
    decoder: Tensor
    """D, [keys and values, width] float32: rows of all key heads, then of all value heads."""
    decoder_bias: Tensor
    """b, [keys and values] float32."""

    def encode(self, x: Tensor) -> Tensor:
        """Levels [..., width] uint8 of inputs [..., hidden] float32."""
        return self.grid.quantize(linear(x, self.encoder, self.encoder_bias))

    def decode(self, codes: Tensor) -> Tensor:
        """Keys and values [..., m] float32, before norm and rotation, of levels [..., width]."""
        return linear(self.grid.centres(codes), self.decoder, self.decoder_bias)

    def first(self, width: int, decoder_bias: Tensor) -> "FsqLayer":
        """The layer that its first ``width`` coordinates are; ``decoder_bias`` has what the others add on average."""
        return FsqLayer(
            self.grid.first(width),
            self.encoder[:width],
            self.encoder_bias[:width],
            self.decoder[:, :width],
            decoder_bias,
        )

    def to(self, device: torch.device) -> "FsqLayer":
        """The same layer on ``device``."""
        tensors = (self.encoder, self.encoder_bias, self.decoder, self.decoder_bias)
        return FsqLayer(self.grid, *(t.to(device) for t in tensors))
