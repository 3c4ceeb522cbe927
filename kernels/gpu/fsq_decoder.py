"""A layer's decoder of discrete codes as the GPU's kernels read it.

Keys are rebuilt by products of 8- or 16-bit numbers. A level q of 4 bits becomes such a number by masks alone, so rows
of the decoder are stored for *that* number, each row with a scale of its own, and one multiply-add a channel undoes all
of it. With u the number that q becomes and r the stored row:

    kind   u of levels 0, 2, 4, 6 of a word     of 1, 3, 5, 7               r
    half   1024 + q                             1024 + 16 q (r over 16)     float16
    int8   q                                    q                           int8, rounded to 127ths of the row's largest
    fp8    q / 512, the same bits               q / 512                     e4m3, no scale

``k_d = s_d (r · u) + t_d``, where t holds the bias and what the numbers are off the level's centre. All is scaled so
that keys are near one before their norm: float16 takes over there. e4m3 has room for rows of all sizes, so fp8 has no
s, and its t is a part of the product: whatever is left of a chunk of 32 levels (a chunk more if nothing is) stands for
coordinates that are always 1/8, whose decoder adds up to t. The rounding of int8 and fp8 is the only loss of those
kinds beyond float16's; both are ours, the paper rebuilds in bfloat16.
"""

from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from strataflux.kernels.fsq_attention import BLOCK_TOKENS, FsqHeads

__all__ = ["FsqDecoder", "FsqValues", "RebuildKind", "block_turns"]

RebuildKind = Literal["half", "int8", "fp8"]

_MAGIC: Final = 12582912.0
_LARGEST: Final = {"half": 256.0, "int8": 127.0, "fp8": 448.0}
_LEVELS_A_UNIT: Final = 512  # of fp8
_AFTER: Final = 0.125  # what levels after a code are in fp8
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
        affine: [kv_heads, head_dim, 2] float32: s and t; unused by fp8.
        scalars: [kv_heads, 2] float32: what is added to the mean of squares, and the scale of logits.
        base: [blocks, head_dim / 4, 2, 2] float16: cosines, then sines, of two channels at a block's first position.
        eighth: [head_dim / 4, 2, 2] float16, likewise of position 8.
        inner: [4, 64, head_dim / 2] float16, of a token's place in its block: with w and v the norm's weights of two
            channels that turn together, w · cosine, -v · sine, v · cosine and w · sine.
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
        width = heads.grid.width
        unit = _unit_of(heads)
        if kind == "fp8":
            unit = torch.minimum(unit, _largest_unit(heads, _after(width)))
        stored, scale = _stored_rows(heads.key_decoder.double() * unit[:, None, None], kind)
        numbers = torch.full((width,), 7.5 / (_LEVELS_A_UNIT if kind == "fp8" else 1), dtype=torch.float64)
        if kind == "half":
            numbers = 1024 + numbers * torch.where(_odd(width), 16, 1)
        offset = (stored * numbers).sum(-1) * scale
        added = heads.key_bias.double() * unit[:, None] - offset
        if kind == "int8":
            self._check_sums(stored)
            added = added - scale * _MAGIC
        if kind == "fp8":
            whole_bytes = torch.nn.functional.pad(stored, (0, width % 2))
            stored = torch.cat([whole_bytes, _sum_to(added / _AFTER, _after(width))], -1)
        self.images = _image(_shared_out(stored, shares), kind).to(device)
        self.affine = torch.stack([scale, added], -1).float().to(device)
        self.scalars = _scalars(heads, unit).to(device)
        first, inside = block_turns(heads.frequencies, blocks)
        self.base = _pairs_of(*first).to(device)
        self.eighth = _pairs_of(*(t[8:9] for t in inside))[0].to(device)
        self.inner = _weighted_turns(*inside, heads.key_norm).to(device)
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


def _pairs_of(cosines: Tensor, sines: Tensor) -> Tensor:
    """[rows, head_dim / 4, 2, 2] float16: cosines, then sines, of two channels."""
    return torch.stack([t.view(len(t), -1, 2) for t in (cosines, sines)], -2).half().contiguous()


def _weighted_turns(cosines: Tensor, sines: Tensor, norm: Tensor | None) -> Tensor:
    weights = torch.ones(2 * cosines.shape[-1]) if norm is None else norm
    first, second = weights.double().chunk(2)
    return torch.stack([first * cosines, -second * sines, second * cosines, first * sines]).half()


def _after(width: int) -> int:
    """Levels after a code of this width in fp8: what is left of its last byte has no decoder."""
    taken = -(-width // 2) * 2
    return -taken % _CHUNK_LEVELS or _CHUNK_LEVELS


def _largest_unit(heads: FsqHeads, after: int) -> Tensor:
    """[kv_heads] float64: beyond this a row or what is added to it would not fit e4m3."""
    rows, most = heads.key_decoder.double(), _LARGEST["fp8"]
    added = heads.key_bias.double().abs() + 7.5 * rows.sum(-1).abs()
    by_rows = most / (_LEVELS_A_UNIT * rows.abs().amax((-1, -2)).clamp_min(1e-30))
    return torch.minimum(by_rows, 0.9 * after * most * _AFTER / added.amax(-1).clamp_min(1e-30))


def _sum_to(total: Tensor, count: int) -> Tensor:
    """Numbers [..., count] of e4m3 that add up to ``total``, each the nearest to what is left."""
    parts = []
    for _ in range(count):
        nearest = total.clamp(-_LARGEST["fp8"], _LARGEST["fp8"]).to(torch.float8_e4m3fn).double()
        parts.append(nearest)
        total = total - nearest
    return torch.stack(parts, -1)


def _odd(width: int) -> Tensor:
    return torch.arange(width) % 2 == 1


def _stored_rows(rows: Tensor, kind: RebuildKind) -> tuple[Tensor, Tensor]:
    """Rows [kv_heads, d, width] float64 as they are stored, and their scales [kv_heads, d]."""
    if kind == "fp8":
        return (rows * _LEVELS_A_UNIT).to(torch.float8_e4m3fn).double(), torch.ones_like(rows[..., 0])
    scale = rows.abs().amax(-1).clamp_min(1e-30) / _LARGEST[kind]
    whole = rows / scale[..., None]
    if kind == "int8":
        return whole.round(), scale
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
