"""The portable path of :mod:`strataflux.kernels.lowbit_gemv`, which gives the formula, the bytes and the reference.

A program computes the 16 rows of one tile for one input. Its block has a row for each g and a column for each nibble
word and t of a strip: 8 × 64. Rows g and g + 8 are summed apart, channel by channel, and folded at the end.
"""

import torch
import triton
import triton.language as tl

from strataflux.kernels.lowbit_gemv import STRIP, LowbitWeights

__all__ = ["gemv_triton"]


@triton.jit
def _nibble_words(words: tl.tensor, at: tl.tensor, word: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Nibble word 0…15 of a strip whose words begin at ``at``; see the module that packs them."""
    i = word % 4
    first = BITS * (word // 4)
    if BITS == 4:
        return tl.load(words + at + 128 * ((first + i) // 4) + (first + i) % 4)
    low = first + i // 2
    codes = (tl.load(words + at + 128 * (low // 4) + low % 4) >> (2 * (i % 2))) & 0x33333333
    if BITS == 3:
        third = first + 2
        bits = tl.load(words + at + 128 * (third // 4) + third % 4) >> i
        codes = codes | ((bits & 0x11111111) << 2)
    return codes


@triton.jit
def _value(
    meta: tl.tensor, code: tl.tensor, pair_at: tl.tensor, row_at: tl.tensor, BITS: tl.constexpr, GROUPS: tl.constexpr
) -> tl.tensor:
    if GROUPS > 0:
        pair = tl.load(meta + pair_at)
        scale = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return scale * (code - (pair >> 16)).to(tl.float32)
    SIZE: tl.constexpr = 1 << BITS  # the table's bytes: four a word, low ones first
    shift = 8 * (code % 4)
    low = (tl.load(meta + row_at + code // 4) >> shift) & 255
    high = (tl.load(meta + row_at + (SIZE + code) // 4) >> shift) & 255
    return (low | high << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _gemv(
    words: tl.tensor,
    meta: tl.tensor,
    x: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    strips: tl.tensor,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    column = tl.program_id(1)
    g = tl.arange(0, 8)[:, None]
    place = tl.arange(0, 64)[None, :]
    t, word = place % 4, place // 4
    channel = 64 * (word // 4) + 32 * (word // 2 % 2) + 8 * t + 4 * (word % 2)
    upper = tl.zeros((8, 64), tl.float32)
    lower = tl.zeros((8, 64), tl.float32)
    for strip in range(strips):
        at = (tile * strips + strip) * (128 * BITS) + 4 * (4 * g + t)
        codes = _nibble_words(words, at, word, BITS)
        for n in tl.static_range(8):
            half = n // 4 if GROUPS == 0 else n % 2
            offset = n % 4 if GROUPS == 0 else n // 2 % 2 * 2 + n // 4
            k = 256 * strip + channel + offset
            activation = tl.load(x + column * inputs + k, mask=k < inputs, other=0.0).to(tl.float32)
            code = (codes >> (4 * n)) & 15
            pair_at = (((tile * strips + strip) * 8 + g) * GROUPS + word * GROUPS // 16) * 2 + half
            row_at = (16 * tile + 8 * half + g) * ((1 << BITS) // 2)
            product = _value(meta, code, pair_at, row_at, BITS, GROUPS) * activation
            if half == 0:
                upper += product
            else:
                lower += product
    row = 16 * tile + tl.arange(0, 8)
    out = y + column * rows + row
    if ADD:
        tl.atomic_add(out, tl.sum(upper, 1), mask=row < rows)
        tl.atomic_add(out + 8, tl.sum(lower, 1), mask=row + 8 < rows)
    else:
        tl.store(out, tl.sum(upper, 1), mask=row < rows)
        tl.store(out + 8, tl.sum(lower, 1), mask=row + 8 < rows)


def gemv_triton(weights: LowbitWeights, x: torch.Tensor, y: torch.Tensor, *, add: bool) -> None:
    """``y = w x`` or ``y += w x``; operands as :func:`~strataflux.kernels.lowbit_gemv.gemv` has checked them."""
    tiles, strips = weights.words.shape[:2]
    groups = STRIP // weights.group if weights.group else 0
    _gemv[(tiles, x.shape[0])](
        weights.words,
        weights.meta,
        x,
        y,
        weights.rows,
        weights.inputs,
        strips,
        BITS=weights.bits,
        GROUPS=groups,
        ADD=add,
        num_warps=4,
    )
