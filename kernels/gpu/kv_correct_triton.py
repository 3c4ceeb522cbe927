"""What refinement changes of attention, in Triton: the portable path of kv_correct.cuh.

:mod:`strataflux.kernels.gpu.kv_refine` gives the formula. Groups come as a list with the addresses of their records,
wherever those lie.
"""

from typing import Final

import triton
import triton.language as tl

from strataflux.kernels.gpu.kv_work import Fetched, KvTiles, KvWork, halves_of
from strataflux.kernels.kv_pack import TILE_TOKENS

__all__ = ["correct_portable", "correct_round", "tile_codes"]

_TOKENS: Final = 16

_TILE = tl.constexpr(TILE_TOKENS)
_ROWS = tl.constexpr(16)
_EIGHT = tl.constexpr(8)


@triton.jit
def tile_codes(codes: tl.tensor, token: tl.tensor, i: tl.tensor, BITS: tl.constexpr, D: tl.constexpr) -> tl.tensor:
    """Codes [tokens, D] float32 of ``token`` [tokens] of the tile at ``codes``, channels ``i``."""
    FIRST: tl.constexpr = 2 if BITS == 3 else BITS
    at = codes + (token * FIRST // 8)[:, None] * D + i[None, :]
    found = (tl.load(at).to(tl.int32) >> (token * FIRST % 8)[:, None]) & ((1 << FIRST) - 1)
    if BITS == 3:
        high = tl.load(codes + 4 * 8 * D + (token // 8)[:, None] * D + i[None, :]).to(tl.int32)
        found |= ((high >> (token % 8)[:, None]) & 1) << 2
    return found.to(tl.float32)


@triton.jit
def _refinement(
    address: tl.tensor, eight: tl.tensor, there: tl.tensor, BITS: tl.constexpr, TOKENS: tl.constexpr, D: tl.constexpr
) -> tl.tensor:
    """Refinement codes [TOKENS, D] of tokens whose ``eight``-th run of eight codes [TOKENS, D/8] begins at
    ``address + BITS · eight``.
    """
    at, mask = address[:, None] + BITS * eight, there[:, None]
    if BITS == 4:
        word = tl.load(at.to(tl.pointer_type(tl.int32)), mask=mask, other=0)
    elif BITS == 2:
        word = tl.load(at.to(tl.pointer_type(tl.int16)), mask=mask, other=0).to(tl.int32) & 0xFFFF
    else:
        word = tl.load(at.to(tl.pointer_type(tl.uint8)), mask=mask, other=0).to(tl.int32)
        if BITS == 3:
            word |= tl.load((at + 1).to(tl.pointer_type(tl.uint8)), mask=mask, other=0).to(tl.int32) << 8
            word |= tl.load((at + 2).to(tl.pointer_type(tl.uint8)), mask=mask, other=0).to(tl.int32) << 16
    codes = (word[:, :, None] >> (BITS * tl.arange(0, _EIGHT))[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(codes, (TOKENS, D)).to(tl.float32)


@triton.jit
def _moved(code: tl.tensor, part: tl.tensor, BITS: tl.constexpr, FINE: tl.constexpr) -> tl.tensor:
    """How far refinement moves a code: to the middle of its part of the code's interval."""
    last: tl.constexpr = (1 << BITS) - 1
    middle = (part + 0.5) * (1.0 / (1 << FINE))
    width = tl.where((code == 0.0) | (code == last), 0.5, 1.0)
    return middle * width - tl.where(code == 0.0, 0.0, 0.5)


@triton.jit
def _tokens_of(
    address: tl.tensor,
    base: tl.tensor,
    token: tl.tensor,
    there: tl.tensor,
    BITS: tl.constexpr,
    FINE: tl.constexpr,
    TOKENS: tl.constexpr,
    D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Codes [TOKENS, D] of tokens in the tiles at ``base`` [TOKENS, 1], and how far each is moved."""
    i = tl.arange(0, D)
    code = tile_codes(base, token, i, BITS, D)
    if FINE == 0:
        return code, tl.zeros_like(code)
    part = _refinement(address, tl.arange(0, D // 8)[None, :], there, FINE, TOKENS, D)
    return code, _moved(code, part, BITS, FINE)


@triton.jit
def correct_round(
    top: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    q: tl.tensor,
    start: tl.tensor,
    found: tl.tensor,
    blocks: tl.tensor,
    listed: tl.tensor,
    addresses: tl.tensor,
    kv_heads: tl.tensor,
    kv_head: tl.tensor,
    key_codes: tl.tensor,
    key_scale: tl.tensor,
    key_zero: tl.tensor,
    key_other: tl.tensor,
    value_codes: tl.tensor,
    value_scale: tl.tensor,
    value_zero: tl.tensor,
    value_other: tl.tensor,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_FINE: tl.constexpr,
    VALUE_FINE: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The state after ``TOKENS`` tokens more, of the groups listed from ``start`` on."""
    i, t = tl.arange(0, D), tl.arange(0, TOKENS)
    at = start + t // GROUP
    group = tl.load(listed + at, mask=at < found, other=-1)
    there = group >= 0
    group = tl.maximum(group, 0)
    tile = tl.load(blocks + group * GROUP // _TILE).to(tl.int64) * kv_heads + kv_head
    token = group * GROUP % _TILE + t % GROUP
    channel, of_token = tile[:, None] * D + i[None, :], tile * _TILE + token
    # Slots begin at multiples of 256 bytes, which the compiler cannot know.
    record = tl.multiple_of(tl.load(addresses + at, mask=there, other=0), 256)
    of_keys, of_values = record + t % GROUP * (D * KEY_FINE // 8), record + GROUP * D * KEY_FINE // 8
    of_values += t % GROUP * (D * VALUE_FINE // 8)
    # Both halves of the records are asked for before any is used.
    base = value_codes + tile[:, None] * (_TILE * D * VALUE_BITS // 8)
    value, value_move = _tokens_of(of_values, base, token, there, VALUE_BITS, VALUE_FINE, TOKENS, D)
    base = key_codes + tile[:, None] * (_TILE * D * KEY_BITS // 8)
    key, key_move = _tokens_of(of_keys, base, token, there, KEY_BITS, KEY_FINE, TOKENS, D)

    scale = tl.load(key_scale + channel).to(tl.float32)
    other = tl.load(key_other + of_token).to(tl.float32)[:, None]
    key = (key * scale + tl.load(key_zero + channel).to(tl.float32)) * other
    before = tl.dot(q, tl.trans(key), input_precision="tf32x3")
    after = before + tl.dot(q, tl.trans(key_move * scale * other), input_precision="tf32x3")
    before = tl.where(there[None, :], before, float("-inf"))
    after = tl.where(there[None, :], after, float("-inf"))
    new = tl.maximum(top, tl.max(tl.maximum(before, after), 1))
    keep, come, gone = tl.exp2(top - new), tl.exp2(after - new[:, None]), tl.exp2(before - new[:, None])

    scale = tl.load(value_scale + of_token).to(tl.float32)[:, None]
    other = tl.load(value_other + channel).to(tl.float32)
    value = (value * scale + tl.load(value_zero + of_token).to(tl.float32)[:, None]) * other
    mixed = mixed * keep[:, None] + tl.dot(come - gone, value, input_precision="tf32x3")
    mixed += tl.dot(come, value_move * scale * other, input_precision="tf32x3")
    return new, total * keep + tl.sum(come - gone, 1), mixed


@triton.jit
def _correct(
    queries: tl.tensor,
    key_codes: tl.tensor,
    key_scale: tl.tensor,
    key_zero: tl.tensor,
    key_other: tl.tensor,
    value_codes: tl.tensor,
    value_scale: tl.tensor,
    value_zero: tl.tensor,
    value_other: tl.tensor,
    tile_blocks: tl.tensor,
    numbers: tl.tensor,
    places: tl.tensor,
    parts: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    kv_heads: tl.tensor,
    splits: tl.tensor,
    most_tiles: tl.tensor,
    room: tl.tensor,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_FINE: tl.constexpr,
    VALUE_FINE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    owner, refiner, refiners = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    row, i = tl.arange(0, _ROWS), tl.arange(0, D)
    blocks, kv_head = tile_blocks + owner // kv_heads * most_tiles, owner % kv_heads
    numbers += owner.to(tl.int64) * room
    places += owner.to(tl.int64) * room
    head = (owner * HEADS + row).to(tl.int64)
    inside = row < HEADS
    top = tl.full((_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((_ROWS,), tl.float32)
    mixed = tl.zeros((_ROWS, D), tl.float32)
    q = tl.load(queries + head[:, None] * D + i[None, :], mask=inside[:, None], other=0.0)
    for start in range(refiner * (TOKENS // GROUP), room, refiners * (TOKENS // GROUP)):
        entry = start + tl.arange(0, TOKENS) // GROUP
        # Where none of them was there and none before, nothing is known yet to be relative to.
        if tl.max(tl.load(numbers + entry, mask=entry < room, other=-1), 0) >= 0:
            top, total, mixed = correct_round(
                top, total, mixed, q, start, room, blocks, numbers, places, kv_heads, kv_head, key_codes, key_scale,
                key_zero, key_other, value_codes, value_scale, value_zero, value_other, D, KEY_BITS, VALUE_BITS,
                KEY_FINE, VALUE_FINE, GROUP, TOKENS,
            )  # fmt: skip
    at = head * (splits + refiners) + splits + refiner
    tl.store(tops + at, top, mask=inside)
    tl.store(totals + at, total, mask=inside)
    tl.store(parts + at[:, None] * D + i[None, :], mixed, mask=inside[:, None])


def correct_portable(cache: KvTiles, work: KvWork, fetched: Fetched) -> None:
    """Leave parts that correct what attention left, by records that were fetched."""
    form, owners = cache.form, work.shares.shape[0]
    _correct[(work.refiners, owners)](
        work.queries,
        *halves_of(cache),
        cache.table,
        fetched.numbers,
        fetched.places,
        work.parts,
        work.tops,
        work.totals,
        cache.kv_heads,
        work.splits,
        work.tiles,
        fetched.numbers.shape[1],
        D=form.head_dim,
        KEY_BITS=form.key_bits,
        VALUE_BITS=form.value_bits,
        KEY_FINE=form.refine_key_bits,
        VALUE_FINE=form.refine_value_bits,
        HEADS=work.heads // cache.kv_heads,
        GROUP=form.group_tokens,
        TOKENS=max(_TOKENS, form.group_tokens),
        num_warps=4,
    )
