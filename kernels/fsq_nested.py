"""A code in two tiers: a prefix of every coordinate's bits is resident, the rest refines it.

On a grid of equal cells fewer bits are the high bits of more: ``q_c = q >> (bits - resident bits)`` is the level that
the coarser grid gives the same z, so that one encoder serves both tiers and nothing is encoded twice. A coordinate may
be resident in part, whole, or not at all. What is not resident is cut into pieces of 4, 2 and 1 bits, the widest first,
so that pieces pack like coordinates do.

The tiers are ours: the paper coarsens codes in place, and does not refine them.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from strataflux.kernels.fsq import FsqGrid, FsqLayer

__all__ = ["FsqTier", "NestedGrid"]

_PIECES = (8, 4, 2, 1)


@dataclass(frozen=True)
class NestedGrid:
    """How the bits of a code's coordinates are divided.

    Raises:
        ValueError: on construction, if the bound has unequal cells, or resident widths are more than the whole, grow
            along the code, or leave nothing resident or nothing else.
    """

    whole: FsqGrid
    resident_bits: tuple[int, ...]
    """Of each coordinate of ``whole``, 0 for those that are not resident at all."""

    def __post_init__(self) -> None:
        if self.whole.bound == "tanh":
            raise ValueError("bound 'tanh': its cells are unequal and do not nest; floor and clamp do")
        pairs = list(zip(self.resident_bits, self.whole.bits, strict=True))
        if any(few > all_bits for few, all_bits in pairs):
            raise ValueError("a coordinate has more resident bits than bits")
        if not any(self.resident_bits) or all(few == all_bits for few, all_bits in pairs):
            raise ValueError("nothing is resident, or nothing else: give a code of one tier")
        _ = self.resident  # which refuses widths that grow

    @cached_property
    def resident(self) -> FsqGrid:
        """The resident tier's grid: of the first coordinates."""
        return FsqGrid(tuple(bits for bits in self.resident_bits if bits), self.whole.bound)

    @cached_property
    def refinement(self) -> FsqGrid:
        """How pieces lie in a record; their levels are bits, not places on an axis."""
        return FsqGrid(tuple(width for width, _, _ in self._pieces), self.whole.bound)

    def split(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Resident levels [..., resident width] and pieces [..., n] of levels [..., width], all uint8."""
        coordinate, shift = (t.to(codes.device) for t in self._places)
        mask = (self.refinement.levels.to(codes.device) - 1).to(torch.uint8)
        pieces = (codes[..., coordinate] >> shift) & mask
        return codes[..., : self.resident.width] >> self._left.to(codes.device), pieces

    def join(self, resident: Tensor, pieces: Tensor) -> Tensor:
        """Undoes :meth:`split`."""
        coordinate, shift = (t.to(resident.device) for t in self._places)
        codes = resident.new_zeros((*resident.shape[:-1], self.whole.width))
        codes[..., : self.resident.width] = resident << self._left.to(resident.device)
        # Bits of different pieces do not meet, so adding them is putting them together.
        return codes.index_add_(-1, coordinate, pieces << shift)

    @cached_property
    def _left(self) -> Tensor:
        """Bits that the resident coordinates lack [resident width] uint8."""
        pairs = zip(self.resident_bits, self.whole.bits, strict=True)
        return torch.tensor([bits - few for few, bits in pairs if few], dtype=torch.uint8)

    @cached_property
    def _pieces(self) -> list[tuple[int, int, int]]:
        """(bits, coordinate, lowest bit there) of each piece, the widest first."""
        found = []
        for coordinate, (few, bits) in enumerate(zip(self.resident_bits, self.whole.bits, strict=True)):
            left = bits - few
            for width in _PIECES:
                if left & width:
                    left -= width
                    found.append((width, coordinate, left))
        return sorted(found, key=lambda piece: -piece[0])

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Coordinate of each piece [n] int64, and its lowest bit there [n] uint8."""
        coordinates, shifts = zip(*((at, shift) for _, at, shift in self._pieces), strict=True)
        return torch.tensor(coordinates), torch.tensor(shifts, dtype=torch.uint8)


@dataclass(frozen=True)
class FsqTier:
    """A layer's code in two tiers: one encoder, a decoder for whole codes, another for what is resident."""

    grid: NestedGrid
    whole: FsqLayer
    coarse_decoder: Tensor
    """[keys and values, resident width] float32, of the centres of the resident grid."""
    coarse_bias: Tensor
    """[keys and values] float32."""

    @cached_property
    def coarse(self) -> FsqLayer:
        """The layer that the resident tier alone is."""
        width = self.grid.resident.width
        return FsqLayer(
            self.grid.resident,
            self.whole.encoder[:width],
            self.whole.encoder_bias[:width],
            self.coarse_decoder,
            self.coarse_bias,
        )

    def to(self, device: torch.device) -> "FsqTier":
        """The same on ``device``."""
        return FsqTier(self.grid, self.whole.to(device), self.coarse_decoder.to(device), self.coarse_bias.to(device))
