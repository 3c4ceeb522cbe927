"""How the codes of a low-bit KV cache lie in bytes; nothing here is compiled.

*Resident codes* of a tile [128 tokens, D channels] are planes of 1, 2 or 4 bits; 3 bits are a plane of their low two
bits and one of their high bit, so every width is truly dense: ``128 · D · bits / 8`` bytes. In a plane of p bits a byte
holds ``8 / p`` consecutive tokens of one channel, the first in the low bits, and bytes go channel by channel:

    byte (t // (8/p)) · D + d,  shift p · (t mod (8/p))

so the tokens of a group are D neighbouring bytes for all channels, for keys as for values.

*Refinement codes* of a group [tokens, D] are the record of proto/FORMAT.md, "Records": token-major, a dense string of
bits, least significant first; keys' half, then values' half.
"""

from functools import cache

import torch
from torch import Tensor

__all__ = [
    "CODE_BITS",
    "REFINE_BITS",
    "TILE_TOKENS",
    "code_bytes",
    "pack_codes",
    "pack_stream",
    "planes_of",
    "stream_bytes",
    "unpack_codes",
    "unpack_stream",
]

TILE_TOKENS = 128
"""Tokens of a tile, the unit that is quantized together."""
CODE_BITS = (1, 2, 3, 4)
"""Widths of resident codes."""
REFINE_BITS = (0, 1, 2, 3, 4)
"""Widths of refinement codes; 0 is none."""

_PLANES = {1: ((1, 0),), 2: ((2, 0),), 3: ((2, 0), (1, 2)), 4: ((4, 0),)}


def planes_of(bits: int) -> tuple[tuple[int, int], ...]:
    """(width, lowest bit of the code) of each plane of codes of ``bits``, in the order in which they lie.

    Raises:
        ValueError: ``bits`` is not 1, 2, 3 or 4.
    """
    if bits not in CODE_BITS:
        raise ValueError(f"resident codes of {bits} bits asked for; 1, 2, 3 and 4 are supported")
    return _PLANES[bits]


def code_bytes(bits: int, head_dim: int) -> int:
    """Bytes of one tile's codes."""
    return sum(TILE_TOKENS * head_dim * width // 8 for width, _ in planes_of(bits))


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack ``codes`` [..., 128, D] uint8 (0…2^bits - 1) into [..., :func:`code_bytes`] uint8."""
    parts = []
    for width, low in planes_of(bits):
        plane = (codes >> low) & ((1 << width) - 1)
        sharing = plane.reshape(*plane.shape[:-2], TILE_TOKENS * width // 8, 8 // width, plane.shape[-1])
        shifted = sharing << _shifts(width, codes.device)[:, None]
        parts.append(shifted.sum(-2, dtype=torch.uint8).flatten(-2))
    return torch.cat(parts, -1)


def unpack_codes(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """Codes [..., 128, D] uint8; undoes :func:`pack_codes`.

    Raises:
        ValueError: ``packed`` has another length than such a tile.
    """
    if packed.shape[-1] != code_bytes(bits, head_dim):
        raise ValueError(f"{packed.shape[-1]} bytes of codes; a tile takes {code_bytes(bits, head_dim)}")
    codes = packed.new_zeros((*packed.shape[:-1], TILE_TOKENS, head_dim))
    at = 0
    for width, low in planes_of(bits):
        size = TILE_TOKENS * head_dim * width // 8
        rows = packed[..., at : at + size].reshape(*packed.shape[:-1], TILE_TOKENS * width // 8, 1, head_dim)
        plane = (rows >> _shifts(width, packed.device)[:, None]) & ((1 << width) - 1)
        codes |= plane.flatten(-3, -2) << low
        at += size
    return codes


@cache
def _shifts(width: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, width, dtype=torch.uint8, device=device)


def stream_bytes(bits: int, count: int) -> int:
    """Bytes of ``count`` codes as a string of bits.

    Raises:
        ValueError: ``bits`` is not 0…4, or the string does not end on a byte.
    """
    if bits not in REFINE_BITS:
        raise ValueError(f"refinement codes of {bits} bits asked for; 0 to 4 are supported")
    if count % 8:
        raise ValueError(f"{count} codes do not fill whole bytes; their number must be a multiple of 8")
    return count * bits // 8


def pack_stream(codes: Tensor, bits: int) -> Tensor:
    """Pack ``codes`` [..., n] uint8 (n a multiple of 8) into [..., n · bits / 8] uint8."""
    if stream_bytes(bits, codes.shape[-1]) == 0:
        return codes.new_empty((*codes.shape[:-1], 0))
    # Eight codes fill exactly `bits` bytes: at most 32 bits, which an int64 word holds.
    eights = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 8, 8).long()
    words = (eights << (bits * torch.arange(8, device=codes.device))).sum(-1, keepdim=True)
    return ((words >> (8 * torch.arange(bits, device=codes.device))) & 255).to(torch.uint8).flatten(-2)


def unpack_stream(packed: Tensor, bits: int, count: int) -> Tensor:
    """``count`` codes [..., count] uint8; undoes :func:`pack_stream`.

    Raises:
        ValueError: as :func:`stream_bytes`, or ``packed`` has another length.
    """
    if packed.shape[-1] != stream_bytes(bits, count):
        raise ValueError(f"{packed.shape[-1]} bytes; {count} codes of {bits} bits take {stream_bytes(bits, count)}")
    if bits == 0:
        return packed.new_zeros((*packed.shape[:-1], count))
    bytes_ = packed.reshape(*packed.shape[:-1], count // 8, bits).long()
    words = (bytes_ << (8 * torch.arange(bits, device=packed.device))).sum(-1, keepdim=True)
    return ((words >> (bits * torch.arange(8, device=packed.device))) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)
