"""A layer's decoder of discrete codes as the GPU's kernels read it.

Keys are rebuilt by products of 8- or 16-bit numbers. A level q of 4 bits becomes such a number by masks alone, so rows
of the decoder are stored for *that* number, each row with a scale of its own, and one multiply-add a channel undoes all
of it. With u the number that q becomes and r the stored row:

    kind   u of levels 0, 2, 4, 6 of a word     of 1, 3, 5, 7               r
    half   1024 + q                             1024 + 16 q (r over 16)     float16
    int8   q                                    q                           int8, rounded to 127ths of the row's largest
    fp8    q / 512, the same bits               q / 512                     e4m3, rounded to fit 448

``k_d = s_d (r · u) + t_d``, where t holds the bias and what the numbers are off the level's centre. All is scaled so
that keys are near one before their norm: float16 takes over there. The rounding of int8 and fp8 is the only loss of
those kinds beyond float16's; both are ours, the paper rebuilds in bfloat16.
"""

from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from strataflux.kernels.fsq_attention import BLOCK_TOKENS, FsqHeads

__all__ = ["FsqDecoder", "FsqValues", "RebuildKind", "block_turns"]

RebuildKind = Literal["half", "int8", "fp8"]

_MAGIC: Final = 12582912.0
_LARGEST: Final = {"half": 256.0, "int8": 127.0, "fp8": 448.0}
_CHUNK_LEVELS: Final = 32
_WHOLE_SUMS: Final = 1 << 22


def block_turns(frequencies: Tensor, blocks: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Cosines and sines [blocks, head_dim / 2] of first positions, and [64, head_dim / 2] of places; all float64."""
    first = torch.arange(blocks, dtype=torch.float64)[:, None] * BLOCK_TOKENS * frequencies.double().cpu()
    inside = torch.arange(BLOCK_TOKENS, dtype=torch.float64)[:, None] * frequencies.double().cpu()
    return (first.cos(), first.sin()), (inside.cos(), inside.sin())


class FsqValues(NamedTuple):
    """The half of a decoder that comes after the sums."""

    decoder: Tensor
    """D_V, [kv_heads, head_dim, width to the next multiple of 64] float32."""
    bias: Tensor
    """[kv_heads, head_dim] float32."""

    @classmethod
    def of_heads(cls, heads: FsqHeads, device: torch.device, off: float = 0.0) -> "FsqValues":
        """The values of ``heads`` where kernels sum centres less ``off``."""
        padded = torch.nn.functional.pad(heads.value_decoder, (0, -heads.grid.width % 64))
        return cls(padded.float().to(device), (heads.value_bias + off * heads.value_decoder.sum(-1)).float().to(device))


class FsqDecoder:
    """Device memory of one layer's decoder; never changed after construction.

    Attributes:
        images: [kv_heads · shares, steps · head_dim / shares · 32] uint8, keys' decoders in the order of shared memory.
        affine: [kv_heads, head_dim, 2] float32: s and t.
        gamma: [head_dim] float16, the norm's weights; ones where keys are not normed.
        scalars: [kv_heads, 2] float32: what is added to the mean of squares, and the scale of logits.
        base: [blocks, head_dim / 4, 2, 2] float16: cosines, then sines, of two channels at a block's first position.
        inner: [2, 64, head_dim / 2] float16: cosines, then sines, of a token's place in its block.
        values: for the merge.
    """

    def __init__(
        self, heads: FsqHeads, blocks: int, device: torch.device, kind: RebuildKind = "half", shares: int = 1
    ) -> None:
        """Prepare ``heads`` for sequences of up to ``blocks`` blocks.

        Args:
            heads: the layer's.
            blocks: the most of a sequence.
            device: of everything.
            kind: numbers that keys are rebuilt with.
            shares: parts of a head's channels that are rebuilt apart: 2 where a whole head's decoder is too large for
                shared memory; heads of 64 channels have one.

        Raises:
            ValueError: coordinates are not all of 4 bits, sums of int8 products leave 23 bits, or such shares have no
                kernel.
        """
        if set(heads.grid.bits) != {4}:
            raise ValueError(f"coordinates of {sorted(set(heads.grid.bits))} bits: this kernel takes 4 bits each")
        # fixed after construction
        self.heads, self.kind, self.blocks, self.shares = heads, kind, blocks, shares
        heads = heads.to(torch.device("cpu"))
        d, width = heads.head_dim, heads.grid.width
        unit = _unit_of(heads)
        stored, scale = _stored_rows(heads.key_decoder.double() * unit[:, None, None], kind)
        numbers = torch.full((width,), 7.5, dtype=torch.float64)
        if kind == "half":
            numbers = 1024 + numbers * torch.where(_odd(width), 16, 1)
        offset = (stored * numbers).sum(-1) * scale
        added = heads.key_bias.double() * unit[:, None] - offset
        if kind == "int8":
            self._check_sums(stored)
            added = added - scale * _MAGIC
        factor = scale * 512 if kind == "fp8" else scale
        self.images = _image(_shared_out(stored, shares), kind).to(device)
        self.affine = torch.stack([factor, added], -1).float().to(device)
        norm = torch.ones(d) if heads.key_norm is None else heads.key_norm
        self.gamma = norm.half().to(device)
        self.scalars = _scalars(heads, unit).to(device)
        first, inside = block_turns(heads.frequencies, blocks)
        self.base = torch.stack([t.view(blocks, -1, 2) for t in first], -2).half().contiguous().to(device)
        self.inner = torch.stack(inside).half().to(device)
        self.values = FsqValues.of_heads(heads, device, off=0.5)  # kernels sum q - 8, centres are q - 7.5

    def _check_sums(self, stored: Tensor) -> None:
        most = int(stored.abs().sum(-1).max()) * 15
        if most >= _WHOLE_SUMS:
            raise ValueError(f"sums of products up to {most}: int8 has room below {_WHOLE_SUMS}; use half")


def _unit_of(heads: FsqHeads) -> Tensor:
    """[kv_heads] float64: what makes a head's keys one in the mean of squares, levels taken as equally likely."""
    variance = (2.0**8 - 1) / 12
    power = variance * heads.key_decoder.double().square().sum(-1) + heads.key_bias.double().square()
    return power.mean(-1).clamp_min(1e-30).rsqrt()


def _odd(width: int) -> Tensor:
    return torch.arange(width) % 2 == 1


def _stored_rows(rows: Tensor, kind: RebuildKind) -> tuple[Tensor, Tensor]:
    """Rows [kv_heads, d, width] float64 as they are stored, and their scales [kv_heads, d]."""
    scale = rows.abs().amax(-1).clamp_min(1e-30) / _LARGEST[kind]
    whole = rows / scale[..., None]
    if kind == "int8":
        return whole.round(), scale
    if kind == "fp8":
        return whole.to(torch.float8_e4m3fn).double(), scale
    return (whole * torch.where(_odd(rows.shape[-1]), 1 / 16, 1)).half().double(), scale


def _order(kind: RebuildKind) -> Tensor:
    """For each number of a chunk of 32 levels as products take them, which level it is."""
    if kind == "half":
        return torch.tensor(
            [8 * c + 2 * step + odd + 4 * i for step in (0, 1) for odd in (0, 1) for c in range(4) for i in (0, 1)]
        )
    return torch.tensor([8 * c + 2 * i + odd for odd in (0, 1) for c in range(4) for i in range(4)])


def _shared_out(stored: Tensor, shares: int) -> Tensor:
    """Rows [kv_heads · shares, d / shares, width]: channels that turn together stay together."""
    kv_heads, d, width = stored.shape
    if shares not in (1, d // 64):
        raise ValueError(f"{shares} shares of {d} channels: one or {d // 64} have a kernel")
    halves = stored.view(kv_heads, 2, shares, d // 2 // shares, width)
    return halves.transpose(1, 2).reshape(kv_heads * shares, d // shares, width)


def _image(stored: Tensor, kind: RebuildKind) -> Tensor:
    kv_heads, d, width = stored.shape
    chunks = -(-width // _CHUNK_LEVELS)
    padded = torch.nn.functional.pad(stored, (0, chunks * _CHUNK_LEVELS - width))
    ordered = padded.view(kv_heads, d, chunks, _CHUNK_LEVELS)[..., _order(kind)].flatten(-2)
    numbers = {"half": torch.float16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[kind]
    raw = ordered.to(numbers).contiguous().view(torch.uint8)
    return raw.view(kv_heads, d // 8, 8, -1, 2, 16).permute(0, 3, 4, 1, 2, 5).reshape(kv_heads, -1).contiguous()


def _scalars(heads: FsqHeads, unit: Tensor) -> Tensor:
    scale = heads.head_dim**-0.5 / torch.log(torch.tensor(2.0, dtype=torch.float64))
    if heads.key_norm is None:
        return torch.stack([torch.zeros_like(unit), scale / unit], -1).float()
    return torch.stack([heads.epsilon * unit**2, scale.expand_as(unit)], -1).float()
