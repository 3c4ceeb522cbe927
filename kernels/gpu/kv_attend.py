"""Attention of one new token a sequence to a low-bit KV cache, its own key and value included: resident precision.

Formula. Everything is in the rotated frame (:mod:`strataflux.kernels.kv_attention`): this token's query, key and value
are turned here, and the key and value stored in float16. Scales are folded, codes meet the tensor core as they are:

    l_t = scale · B_K[t] · (Σ_d (Q_d A_K[d]) code[t, d] + Σ_d Q_d Z_K[d])
    o_d = B_V[d] · (Σ_t (p_t A_V[t]) code[t, d] + Σ_t p_t Z_V[t])        p_t = 2^(l_t - maximum), summed a tile

Folded queries and weights are split into a high and a low float16, so that products keep 22 bits. Sums are float32, but
the tensor core of the fast path cuts what it adds: about 15 bits are kept, and outputs were within 6e-5 on an H200.
The maximum runs: parts are relative to their own. Each group's sum of weights comes out of the same pass, relative to
the maximum as it was then.

The fast path is CUDA C++ (kv_attend.cu, kv_tiles.cuh), the portable one the Triton below; both leave the same.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from strataflux.kernels.cuda_build import CudaFunction, device_capability, has_fast_path, load_function
from strataflux.kernels.gpu.early import early_options
from strataflux.kernels.gpu.kv_correct_triton import correct_portable, tile_codes
from strataflux.kernels.gpu.kv_turn import turn_head
from strataflux.kernels.gpu.kv_work import Fetched, KvTiles, KvWork, check_heads, halves_of
from strataflux.kernels.kv_encode import KvFormat
from strataflux.kernels.kv_pack import TILE_TOKENS

__all__ = ["ERRAND_BLOCKS", "instance_name", "kv_attend", "refined_name", "shared_bytes"]

_SOURCE: Final = Path(__file__).with_suffix(".cu")
_WARPS: Final = 4
ERRAND_BLOCKS: Final = 5
"""Blocks of each KV head that run a launch's errands: two make shares; one each ranks, lists, and asks and brings."""

_ROWS = tl.constexpr(16)
_TILE = tl.constexpr(TILE_TOKENS)
_HALF = tl.constexpr(TILE_TOKENS // 2)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _absorb(
    most: tl.tensor, total: tl.tensor, mixed: tl.tensor, logits: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Weights of logits [16, tokens], and the state scaled to the new maximum, these weights counted."""
    new = tl.maximum(most, tl.max(logits, 1))
    keep = tl.exp2(most - new)
    weights = tl.exp2(logits - new[:, None])
    return new, total * keep + tl.sum(weights, 1), mixed * keep[:, None], weights


@triton.jit
def _exact(
    most: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    count: tl.tensor,
    own: tl.tensor,
    own_key: tl.tensor,
    own_value: tl.tensor,
    i: tl.tensor,
    D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Up to 128 tokens in float16, of which ``own`` (if it is one) is the newest."""
    for start in range(0, count, 32):
        at = start + tl.arange(0, 32)
        there = (at < count) & (at != own)
        where = at[:, None] * D + i[None, :]
        key = tl.load(keys + where, mask=there[:, None], other=0.0).to(tl.float32)
        value = tl.load(values + where, mask=there[:, None], other=0.0).to(tl.float32)
        key = tl.where((at == own)[:, None], own_key.to(tl.float32)[None, :], key)
        value = tl.where((at == own)[:, None], own_value.to(tl.float32)[None, :], value)
        logits = tl.dot(q, tl.trans(key), input_precision="tf32x3")
        logits = tl.where((at < count)[None, :], logits, float("-inf"))
        most, total, mixed, weights = _absorb(most, total, mixed, logits)
        mixed += tl.dot(weights, value, input_precision="tf32x3")
    return most, total, mixed


@triton.jit
def _turned(at: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """A new key or value [D], rotated, as it is stored."""
    return tl.reshape(turn_head(tl.load(at).to(tl.float32)[None, :], 1, D), (D,)).to(tl.float16)


@triton.jit
def _exact_of(
    split: tl.tensor,
    splits: tl.tensor,
    position: tl.tensor,
    first: tl.tensor,
    q: tl.tensor,
    own_key: tl.tensor,
    own_value: tl.tensor,
    sink_keys: tl.tensor,
    sink_values: tl.tensor,
    tail_keys: tl.tensor,
    tail_values: tl.tensor,
    i: tl.tensor,
    D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The state after what this split has of float16: the sink is the first one's, the tail the last one's."""
    most = tl.full((_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((_ROWS,), tl.float32)
    mixed = tl.zeros((_ROWS, D), tl.float32)
    own = position % _TILE
    if split == 0:
        newest = position < _TILE
        held, at = tl.where(newest, own + 1, _TILE), tl.where(newest, own, -1)
        keys, values = sink_keys + first, sink_values + first
        most, total, mixed = _exact(most, total, mixed, q, keys, values, held, at, own_key, own_value, i, D)
        if newest:
            tl.store(keys + own * D + i, own_key)
            tl.store(values + own * D + i, own_value)
    if (split == splits - 1) & (position >= _TILE):
        keys, values = tail_keys + first, tail_values + first
        most, total, mixed = _exact(most, total, mixed, q, keys, values, own + 1, own, own_key, own_value, i, D)
        tl.store(keys + own * D + i, own_key)
        tl.store(values + own * D + i, own_value)
    return most, total, mixed


@triton.jit
def _half_logits(
    folded: tl.tensor,
    constant: tl.tensor,
    codes: tl.tensor,
    other: tl.tensor,
    token: tl.tensor,
    i: tl.tensor,
    BITS: tl.constexpr,
    D: tl.constexpr,
) -> tl.tensor:
    """Logits [16, 64] of half a tile."""
    sums = tl.dot(folded, tl.trans(tile_codes(codes, token, i, BITS, D)), input_precision="tf32x3")
    return (sums + constant[:, None]) * tl.load(other).to(tl.float32)[None, :]


@triton.jit
def _half_values(
    weights: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    token: tl.tensor,
    i: tl.tensor,
    BITS: tl.constexpr,
    D: tl.constexpr,
) -> tl.tensor:
    """Weighted values [16, D] of half a tile, each channel's scale B still to come."""
    folded = weights * tl.load(scale).to(tl.float32)[None, :]
    constant = tl.sum(weights * tl.load(zero).to(tl.float32)[None, :], 1)
    return tl.dot(folded, tile_codes(codes, token, i, BITS, D), input_precision="tf32x3") + constant[:, None]


@triton.jit
def _grouped(weights: tl.tensor, TOKENS: tl.constexpr) -> tl.tensor:
    """Sums [16, groups] over groups of tokens."""
    return tl.sum(tl.reshape(weights, (_ROWS, _HALF // TOKENS, TOKENS)), 2)


@triton.jit
def _attend(
    queries: tl.tensor,
    new_keys: tl.tensor,
    new_values: tl.tensor,
    positions: tl.tensor,
    key_codes: tl.tensor,
    key_scale: tl.tensor,
    key_zero: tl.tensor,
    key_other: tl.tensor,
    value_codes: tl.tensor,
    value_scale: tl.tensor,
    value_zero: tl.tensor,
    value_other: tl.tensor,
    table: tl.tensor,
    sink_keys: tl.tensor,
    sink_values: tl.tensor,
    tail_keys: tl.tensor,
    tail_values: tl.tensor,
    turned: tl.tensor,
    parts: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    tile_tops: tl.tensor,
    kv_heads: tl.tensor,
    splits: tl.tensor,
    pieces: tl.tensor,
    most_tiles: tl.tensor,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    split, owner = tl.program_id(0) % splits, tl.program_id(0) // splits
    row, i, token = tl.arange(0, _ROWS), tl.arange(0, D), tl.arange(0, _HALF)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions + owner // kv_heads)
    tiles = tl.maximum(position // _TILE - 1, 0)
    head, inside = (owner * HEADS + row).to(tl.int64), row < HEADS
    q = tl.load(queries + head[:, None] * D + i[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    q = turn_head(q, _ROWS, D) * (_LOG2_E * D**-0.5)
    own_key, own_value = _turned(new_keys + owner * D + i, D), _turned(new_values + owner * D + i, D)

    if split == 0:
        tl.store(turned + head[:, None] * D + i[None, :], q, mask=inside[:, None])
    most, total, mixed = _exact_of(
        split, splits, position, owner.to(tl.int64) * _TILE * D, q, own_key, own_value, sink_keys, sink_values,
        tail_keys, tail_values, i, D,
    )  # fmt: skip
    for tile in range(split, tiles, splits):
        block = tl.load(table + owner // kv_heads * most_tiles + tile).to(tl.int64) * kv_heads + owner % kv_heads
        codes, channel, of_token = key_codes + block * (_TILE * D * KEY_BITS // 8), block * D + i, block * _TILE + token
        folded = q * tl.load(key_scale + channel).to(tl.float32)[None, :]
        constant = tl.sum(q * tl.load(key_zero + channel).to(tl.float32)[None, :], 1)
        # In halves, so that their codes as float32 fit into the shared memory of smaller devices.
        first = _half_logits(folded, constant, codes, key_other + of_token, token, i, KEY_BITS, D)
        second = _half_logits(folded, constant, codes, key_other + of_token + _HALF, token + _HALF, i, KEY_BITS, D)
        new = tl.maximum(most, tl.maximum(tl.max(first, 1), tl.max(second, 1)))
        first, second, keep = tl.exp2(first - new[:, None]), tl.exp2(second - new[:, None]), tl.exp2(most - new)
        most = new
        total = total * keep + tl.sum(first + second, 1)
        if TOKENS:
            at = (head * most_tiles + tile)[:, None] * (_TILE // TOKENS) + tl.arange(0, _HALF // TOKENS)[None, :]
            tl.store(sums + at, _grouped(first, TOKENS), mask=inside[:, None])
            tl.store(sums + at + _HALF // TOKENS, _grouped(second, TOKENS), mask=inside[:, None])
            tl.store(tile_tops + head * most_tiles + tile, most, mask=inside)
        codes, scale, zero = value_codes + block * (_TILE * D * VALUE_BITS // 8), value_scale, value_zero
        value = _half_values(first, codes, scale + of_token, zero + of_token, token, i, VALUE_BITS, D)
        of_token += _HALF
        value += _half_values(second, codes, scale + of_token, zero + of_token, token + _HALF, i, VALUE_BITS, D)
        mixed = mixed * keep[:, None] + value * tl.load(value_other + channel).to(tl.float32)[None, :]

    at = head * pieces + split
    tl.store(parts + at[:, None] * D + i[None, :], mixed, mask=inside[:, None])
    tl.store(tops + at, most, mask=inside)
    tl.store(totals + at, total, mask=inside)


def instance_name(form: KvFormat, group: int, group_tokens: int) -> str:
    """The fast path's template instance."""
    return f"kv_attend<{form.head_dim}, {form.key_bits}, {form.value_bits}, {group}, {group_tokens}>"


def refined_name(form: KvFormat, group: int) -> str:
    """The template instance that refines as well."""
    bits = f"{form.key_bits}, {form.value_bits}, {form.refine_key_bits}, {form.refine_value_bits}"
    return f"kv_attend_refined<{form.head_dim}, {bits}, {group}, {form.group_tokens}>"


def shared_bytes(form: KvFormat, group: int) -> int:
    """Shared memory of one of its blocks: queries, and for each warp a tile, which is more than all heads' output."""
    sets = 2 if group > 4 else 1
    return _WARPS * form.tile_bytes + 4 * 4 * sets * (form.head_dim + 1)


def _changed_bytes(form: KvFormat, group: int) -> int:
    """And for what each warp changes: an output of all heads, or a record before, and two numbers of each head."""
    return _WARPS * (max(4 * group * form.head_dim, form.record_bytes + 16) + 8 * group)


def kv_attend(
    queries: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    positions: Tensor,
    cache: KvTiles,
    work: KvWork,
    fetched: Fetched | None = None,
    errands: Tensor | None = None,
    *,
    path: Literal["cuda", "triton"] | None = None,
    early: bool = False,
) -> None:
    """Store each sequence's new key and value, and leave parts of its attention. Queued on the current stream; no
    allocation.

    Args:
        queries: [batch, heads, head_dim] float16, turned by position, not rotated; contiguous, as all of these.
        new_keys: [batch, kv_heads, head_dim] float16, likewise; ``new_values`` too.
        new_values: see there.
        positions: [batch] int32 on the device: where these tokens come; at most ``(work.tiles + 2) · 128 - 1``.
        cache: all tiles before the newest 1 to 128 tokens are encoded.
        work: of the same sizes; overwritten.
        fetched: records that refine beside; ``work`` has refiners then, which only the portable path needs. None: their
            parts are left alone.
        errands: run beside on the fast path, with ``fetched`` only:
            :meth:`Beside.row <strataflux.kernels.gpu.kv_beside.Beside.row>` of other layers.
        path: ``"cuda"`` or ``"triton"``; where None the first that this machine has.
        early: start while the kernel before still runs.

    Raises:
        ValueError: shapes that contradict each other or have no kernel. CudaError: the fast path cannot be.
    """
    form, (batch, heads, d) = cache.form, queries.shape
    group = check_heads(d, heads, cache.kv_heads)
    expected = (work.batch, work.heads, work.form, (batch, work.tiles))
    if (batch, heads, form, cache.table.shape) != expected or new_keys.shape != (batch, cache.kv_heads, d):
        raise ValueError(
            f"queries {list(queries.shape)}, new keys {list(new_keys.shape)}, table {list(cache.table.shape)}: the "
            f"work memory is for {work.batch} sequences, {work.heads} heads, {work.tiles} tiles and {work.form}"
        )
    left = (work.queries, work.parts, work.tops, work.totals, work.sums, work.tile_tops)
    tensors = (queries, new_keys, new_values, positions, *halves_of(cache), cache.table, *cache[4:], *left)
    sizes = (cache.kv_heads, work.splits, work.splits + work.refiners, work.tiles)
    blocks = batch * cache.kv_heads * work.splits
    if path == "triton" or (path is None and not has_fast_path(queries)):
        _attend[(blocks,)](
            *tensors,
            *sizes,
            D=d,
            KEY_BITS=form.key_bits,
            VALUE_BITS=form.value_bits,
            HEADS=group,
            TOKENS=work.group_tokens,
            num_warps=8,
            num_stages=1,
            **early_options(queries, early),
        )
        if fetched is not None:
            correct_portable(cache, work, fetched)
        return
    _launch(tensors, sizes, blocks, work, (fetched, errands), early=early)


def _launch(
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    blocks: int,
    work: KvWork,
    beside: tuple[Fetched | None, Tensor | None],
    *,
    early: bool,
) -> None:
    """The fast path."""
    fetched, errands = beside
    form, group, device = work.form, work.heads // sizes[0], work.queries.get_device()
    size, name = shared_bytes(form, group), instance_name(form, group, work.group_tokens)
    arguments: list[np.generic] = [np.uint64(tensor.data_ptr()) for tensor in tensors]
    arguments += [np.int32(value) for value in sizes]
    if fetched is not None:
        size, name = size + _changed_bytes(form, group), refined_name(form, group)
        owners, room, stride = fetched.rows.shape
        arguments += [np.uint64(t.data_ptr()) for t in (work.changes, fetched.rows, fetched.numbers)]
        arguments.append(np.uint64(0 if errands is None else errands.data_ptr()))
        arguments += [np.int32(value) for value in (owners, room, stride)]
        blocks += 0 if errands is None else ERRAND_BLOCKS * owners
    starts_early = early and device_capability(device) >= (9, 0)
    function = _function(name, size, device)
    function.launch(blocks, 32 * _WARPS, arguments, early=starts_early, shared_bytes=size)


def _function(instance: str, size: int, device: int) -> CudaFunction:
    function = load_function(_SOURCE, instance, device)
    function.allow_shared(size)
    return function
