"""Attention of one new token a sequence to discrete codes, in Triton: any widths of coordinates, any positions.

Formula (:mod:`strataflux.kernels.fsq_attention`). The same two steps as the CUDA source's, for what that has no kernel
for: other GPUs, coordinates of 8, 4, 2 and 1 bits in one code, and caches from which tokens were evicted, each token
with a position of its own. Keys are rebuilt 64 tokens at a time by products of float16 numbers (centres are exact,
rows of the decoder scaled to their largest), turned and scored in float32; keys and values never reach device memory.

The first kernel's programs share a KV head's blocks, the second's have 64 coordinates of a part each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from strataflux.kernels.fsq_attention import BLOCK_TOKENS, FsqHeads
from strataflux.kernels.gpu.fsq_decoder import FsqValues, block_turns
from strataflux.kernels.gpu.fsq_work import FsqWork
from strataflux.kernels.gpu.kv_work import check_heads

__all__ = ["FsqRows", "fsq_attend_triton"]

_TOKENS = tl.constexpr(BLOCK_TOKENS)
_SPAN = tl.constexpr(64)
_HEADS = tl.constexpr(16)


class FsqRows:
    """Device memory of one layer's decoder; never changed after construction.

    Attributes:
        rows: [kv_heads, head_dim, width to the next multiple of 64] float16, keys' decoder over ``scale``.
        scale: [kv_heads, head_dim] float32; ``bias`` and ``gamma`` likewise, the latter ones where keys are not normed.
        places: [4, padded width] int32: the byte of a coordinate in a block for its first token, from one token to the
            next, the lowest bit, and the mask; ``middle`` [padded width] float16, half the highest level.
        base: [2, blocks, head_dim / 2] float32, cosines and sines of blocks' first positions; ``inner`` [2, 64, ...].
        values: for the merge.
    """

    def __init__(self, heads: FsqHeads, blocks: int, device: torch.device) -> None:
        """Prepare ``heads`` for positions below ``64 · blocks``."""
        # fixed after construction
        self.heads, self.blocks = heads, blocks
        wide = -heads.grid.width % 64
        scale = heads.key_decoder.abs().amax(-1).clamp_min(1e-30)
        self.rows = pad(heads.key_decoder / scale[..., None], (0, wide)).half().to(device)
        self.scale, self.bias = scale.float().to(device), heads.key_bias.float().to(device)
        norm = torch.ones(heads.head_dim) if heads.key_norm is None else heads.key_norm
        self.gamma = norm.float().to(device)
        self.places = pad(_places(heads), (0, wide)).to(device)
        self.middle = pad((heads.grid.levels - 1) / 2, (0, wide)).half().to(device)
        first, inside = block_turns(heads.frequencies, blocks)
        self.base, self.inner = torch.stack(first).float().to(device), torch.stack(inside).float().to(device)
        self.values = FsqValues.of_heads(heads, device)


def _places(heads: FsqHeads) -> Tensor:
    bits = torch.tensor(heads.grid.bits)
    at = bits.cumsum(0) - bits
    chunk, inside = at // 8 // 16, at // 8 % 16
    stride = (heads.grid.nbytes - 16 * chunk).clamp_max(16)
    return torch.stack([BLOCK_TOKENS * 16 * chunk + inside, stride, at % 8, (1 << bits) - 1]).int()


@triton.jit
def _centres(
    block: tl.tensor, places: tl.tensor, middle: tl.tensor, token: tl.tensor, i: tl.tensor, width: tl.tensor
) -> tl.tensor:
    """Centres [64, coordinates] float16 of the block of codes at ``block``."""
    stride, shift = tl.load(places + width + i), tl.load(places + 2 * width + i)
    byte = tl.load(block + tl.load(places + i)[None, :] + token[:, None] * stride[None, :]).to(tl.int32)
    level = (byte >> shift[None, :]) & tl.load(places + 3 * width + i)[None, :]
    return level.to(tl.float16) - tl.load(middle + i)[None, :]


@triton.jit
def _turns(
    positions: tl.tensor, base: tl.tensor, inner: tl.tensor, blocks: tl.tensor, H: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Cosines and sines [64, H] at ``positions``: those of a block's start and of a place in it, added as angles."""
    i = tl.arange(0, H)[None, :]
    at, inside = (positions // _TOKENS)[:, None] * H + i, (positions % _TOKENS)[:, None] * H + i
    c0, s0 = tl.load(base + at), tl.load(base + blocks * H + at)
    c1, s1 = tl.load(inner + inside), tl.load(inner + _TOKENS * H + inside)
    return c0 * c1 - s0 * s1, s0 * c1 + c0 * s1


@triton.jit
def _half_key(sums: tl.tensor, scale: tl.tensor, bias: tl.tensor, at: tl.tensor) -> tl.tensor:
    return sums * tl.load(scale + at)[None, :] + tl.load(bias + at)[None, :]


@triton.jit
def _scores(
    codes: tl.tensor,
    rows: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    gamma: tl.tensor,
    places: tl.tensor,
    middle: tl.tensor,
    base: tl.tensor,
    inner: tl.tensor,
    positions: tl.tensor,
    queries: tl.tensor,
    lengths: tl.tensor,
    scores: tl.tensor,
    kv_heads: tl.tensor,
    splits: tl.tensor,
    blocks: tl.tensor,
    most_blocks: tl.tensor,
    width: tl.tensor,
    nbytes: tl.tensor,
    epsilon: tl.tensor,
    logit_scale: tl.tensor,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    PLACED: tl.constexpr,
) -> None:
    head, split = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    sequence = tl.program_id(1).to(tl.int64)
    i, token, row = tl.arange(0, H), tl.arange(0, _TOKENS), tl.arange(0, _HEADS)
    tiles = (tl.load(lengths + sequence) + _TOKENS - 1) // _TOKENS
    query = ((sequence * kv_heads + head) * GROUP + row)[:, None] * (2 * H) + i[None, :]
    q0 = tl.load(queries + query, mask=(row < GROUP)[:, None], other=0.0).to(tl.float32)
    q1 = tl.load(queries + query + H, mask=(row < GROUP)[:, None], other=0.0).to(tl.float32)
    first = head * 2 * H + i
    for tile in range(split, tiles, splits):
        block = codes + (sequence * blocks + tile) * (_TOKENS * nbytes)
        k0, k1 = tl.zeros((_TOKENS, H), tl.float32), tl.zeros((_TOKENS, H), tl.float32)
        for start in range(0, width, _SPAN):
            j = start + tl.arange(0, _SPAN)
            centres = _centres(block, places, middle, token, j, width)
            k0 += tl.dot(centres, tl.load(rows + first[None, :].to(tl.int64) * width + j[:, None]))
            k1 += tl.dot(centres, tl.load(rows + (first + H)[None, :].to(tl.int64) * width + j[:, None]))
        k0, k1 = _half_key(k0, scale, bias, first), _half_key(k1, scale, bias, first + H)
        if NORM:
            mean = (tl.sum(k0 * k0, 1) + tl.sum(k1 * k1, 1)) / (2 * H)
            factor = tl.rsqrt(mean + epsilon)[:, None]
            k0, k1 = k0 * factor * tl.load(gamma + i)[None, :], k1 * factor * tl.load(gamma + H + i)[None, :]
        at = tile * _TOKENS + token
        if PLACED:
            at = tl.load(positions + sequence * blocks * _TOKENS + at)
        cosine, sine = _turns(at, base, inner, most_blocks, H)
        logits = tl.dot(q0, tl.trans(k0 * cosine - k1 * sine), input_precision="tf32x3")
        logits += tl.dot(q1, tl.trans(k1 * cosine + k0 * sine), input_precision="tf32x3")
        to = ((sequence * kv_heads + head) * GROUP + row)[:, None] * (blocks * _TOKENS) + tile * _TOKENS
        tl.store(scores + to + token[None, :], logits * logit_scale, mask=(row < GROUP)[:, None])


@triton.jit
def _mix(
    codes: tl.tensor,
    places: tl.tensor,
    middle: tl.tensor,
    lengths: tl.tensor,
    scores: tl.tensor,
    parts: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    heads: tl.tensor,
    blocks: tl.tensor,
    width: tl.tensor,
    nbytes: tl.tensor,
) -> None:
    piece, pieces, span = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    rounds = (heads + _HEADS - 1) // _HEADS
    sequence, part = (tl.program_id(2) // rounds).to(tl.int64), tl.program_id(2) % rounds
    row, token, j = part * _HEADS + tl.arange(0, _HEADS), tl.arange(0, _TOKENS), span * _SPAN + tl.arange(0, _SPAN)
    length = tl.load(lengths + sequence)
    inside, owner = row < heads, sequence * heads + row
    most, total = tl.full((_HEADS,), float("-inf"), tl.float32), tl.zeros((_HEADS,), tl.float32)
    mixed = tl.zeros((_HEADS, _SPAN), tl.float32)
    for tile in range(piece, (length + _TOKENS - 1) // _TOKENS, pieces):
        at = tile * _TOKENS + token
        there = inside[:, None] & (at < length)[None, :]
        logits = tl.load(scores + owner[:, None] * (blocks * _TOKENS) + at[None, :], mask=there, other=float("-inf"))
        new = tl.maximum(most, tl.max(tl.where(inside[:, None], logits, 0.0), 1))
        keep, weights = tl.exp2(most - new), tl.exp2(logits - new[:, None])
        centres = _centres(codes + (sequence * blocks + tile) * (_TOKENS * nbytes), places, middle, token, j, width)
        most, total = new, total * keep + tl.sum(weights, 1)
        mixed = mixed * keep[:, None] + tl.dot(weights, centres.to(tl.float32), input_precision="tf32x3")
    to = owner * pieces + piece
    tl.store(parts + to[:, None] * width + j[None, :], mixed, mask=inside[:, None])
    if span == 0:
        tl.store(tops + to, most, mask=inside)
        tl.store(totals + to, total, mask=inside)


def fsq_attend_triton(
    queries: Tensor, codes: Tensor, lengths: Tensor, rows: FsqRows, work: FsqWork, positions: Tensor | None = None
) -> None:
    """Leave parts of each sequence's attention. Queued on the current stream; no allocation.

    Args:
        queries: [batch, heads, head_dim] floats, normed and rotated; contiguous, as all of these.
        codes: [batch, blocks, 64 · bytes] uint8, as :func:`~strataflux.kernels.fsq_attention.block_codes` leaves them.
        lengths: [batch] int32 on the device: tokens of each sequence; at least 1.
        rows: of this layer.
        work: of the same sizes; overwritten.
        positions: [batch, blocks · 64] int32 below ``64 · rows.blocks`` on the device, of every token there is room
            for; None: token i has position i.

    Raises:
        ValueError: shapes that contradict each other or have no kernel.
    """
    heads, grid, (batch, count, d) = rows.heads, rows.heads.grid, queries.shape
    group = check_heads(d, count, heads.kv_heads)
    expected = (work.batch, work.heads, heads.head_dim), (work.batch, work.blocks, BLOCK_TOKENS * grid.nbytes)
    room = (work.batch, work.blocks * BLOCK_TOKENS)
    if (
        (queries.shape, codes.shape) != expected
        or work.grid != grid
        or (positions is None and rows.blocks < work.blocks)
    ):
        raise ValueError(
            f"queries {list(queries.shape)} and codes {list(codes.shape)}: the work memory is for {list(expected[0])} "
            f"and {list(expected[1])}, codes of {work.grid.nbytes} bytes; the decoder for {rows.blocks} blocks"
        )
    if positions is not None and positions.shape != room:
        raise ValueError(f"positions {list(positions.shape)}: one for each token there is room for, {list(room)}")
    splits, width = work.score_splits(heads.kv_heads), rows.rows.shape[-1]
    prepared = (rows.rows, rows.scale, rows.bias, rows.gamma, rows.places, rows.middle, rows.base, rows.inner)
    _scores[(splits * heads.kv_heads, batch)](
        codes, *prepared, lengths if positions is None else positions, queries, lengths, work.scores,
        heads.kv_heads, splits, work.blocks, rows.blocks, width, grid.nbytes,
        heads.epsilon, d**-0.5 * 1.4426950408889634,
        H=d // 2, GROUP=group, NORM=heads.key_norm is not None, PLACED=positions is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    _mix[(work.mix_splits, work.spans, -(-count // 16) * batch)](
        codes, rows.places, rows.middle, lengths, work.scores, work.parts, work.tops, work.totals,
        count, work.blocks, width, grid.nbytes, num_warps=4, num_stages=2,
    )  # fmt: skip
