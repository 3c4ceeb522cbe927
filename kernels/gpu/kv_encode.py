"""Tiles that filled up into low bits, with the refinement of each group: what :mod:`strataflux.kernels.kv_encode` does.

Formula: there. A program handles the keys or the values of one tile: 128 tokens of one KV head, which lie in registers
from the first look to the last bit. Scales come from float16, as decoders will see them.

The reference's sums run in another order and its exponentials have other last bits, so a scale may differ in float16's
last place, and a code that lies at a boundary by one; of two rounds of balancing with the same spread either may win.
What is decoded is as near to the original.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from strataflux.kernels.gpu.early import early_options
from strataflux.kernels.gpu.kv_work import HEAD_DIMS
from strataflux.kernels.kv_encode import HalfTiles, KvFormat
from strataflux.kernels.kv_pack import TILE_TOKENS

__all__ = ["kv_encode"]

_WARPS: Final = 16  # with eight a tile does not fit into their registers

_TILE = tl.constexpr(TILE_TOKENS)
_EIGHT = tl.constexpr(8)
_LOG_FLOOR, _LOG_CEILING = tl.constexpr(-0.3), tl.constexpr(10.0)
_STD_FLOOR, _STD_CEILING = tl.constexpr(1e-3), tl.constexpr(1e3)
_STEP_FLOOR = tl.constexpr(1e-10)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 · 2^23: what is added to it is rounded to an integer, half to even


@triton.jit
def _deviation(x: tl.tensor, AXIS: tl.constexpr, COUNT: tl.constexpr) -> tl.tensor:
    """Sample standard deviation along an axis of ``COUNT``."""
    mean = tl.sum(x, AXIS) / COUNT
    rest = x - tl.expand_dims(mean, AXIS)
    return tl.sqrt_rn(tl.sum(rest * rest, AXIS) / (COUNT - 1))


@triton.jit
def _ratio(deviation: tl.tensor) -> tl.tensor:
    return tl.max(deviation, 0) / tl.maximum(tl.min(deviation, 0), 1e-8)


@triton.jit
def _moved(log_scale: tl.tensor, deviation: tl.tensor) -> tl.tensor:
    moved = log_scale + tl.log(tl.minimum(tl.maximum(deviation, _STD_FLOOR), _STD_CEILING))
    return tl.minimum(tl.maximum(moved, _LOG_FLOOR), _LOG_CEILING)


@triton.jit
def _balance(
    x: tl.tensor, ROWS: tl.constexpr, COUNT: tl.constexpr, ACROSS: tl.constexpr, ROUNDS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Logarithms of scales, one a row and one a column; rows run along axis ``ROWS`` of ``COUNT``, columns along the
    other of ``ACROSS``.
    """
    column, row = tl.zeros((COUNT,), tl.float32), tl.zeros((ACROSS,), tl.float32)
    of_rows, of_columns = _deviation(x, ROWS, COUNT), _deviation(x, 1 - ROWS, ACROSS)
    spread = _ratio(of_rows) + _ratio(of_columns)
    best, best_column, best_row = spread, column, row
    for _ in range(ROUNDS):
        column = _moved(column, of_columns)
        scaled = x * tl.exp(-tl.expand_dims(column, 1 - ROWS) - tl.expand_dims(row, ROWS))
        row = _moved(row, _deviation(scaled, ROWS, COUNT))
        scaled = x * tl.exp(-tl.expand_dims(column, 1 - ROWS) - tl.expand_dims(row, ROWS))
        of_rows, of_columns = _deviation(scaled, ROWS, COUNT), _deviation(scaled, 1 - ROWS, ACROSS)
        spread = _ratio(of_rows) + _ratio(of_columns)
        better = spread <= best
        best = tl.where(better, spread, best)
        best_column, best_row = tl.where(better, column, best_column), tl.where(better, row, best_row)
    return best_row, best_column


@triton.jit
def _store_plane(to: tl.tensor, code: tl.tensor, WIDTH: tl.constexpr, D: tl.constexpr) -> None:
    """A plane of ``WIDTH`` bits of codes [128, D]: a byte holds neighbouring tokens of one channel."""
    per: tl.constexpr = 8 // WIDTH
    rows: tl.constexpr = _TILE // per
    shifted = tl.reshape(code, (rows, per, D)) << (WIDTH * tl.arange(0, per))[None, :, None]
    at = tl.arange(0, rows)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(to + at, tl.sum(shifted, 1).to(tl.uint8))


@triton.jit
def _store_codes(to: tl.tensor, code: tl.tensor, BITS: tl.constexpr, D: tl.constexpr) -> None:
    if BITS == 3:
        _store_plane(to, code & 3, 2, D)
        _store_plane(to + _TILE * D // 4, code >> 2, 1, D)
    else:
        _store_plane(to, code, BITS, D)


@triton.jit
def _store_records(
    to: tl.tensor, part: tl.tensor, FINE: tl.constexpr, RECORD: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr
) -> None:
    """One half of all groups' records, token by token: eight codes fill ``FINE`` bytes. ``to`` is an address."""
    eights: tl.constexpr = D // 8
    words = tl.sum(tl.reshape(part, (_TILE, eights, _EIGHT)) << (FINE * tl.arange(0, _EIGHT))[None, None, :], 2)
    t, eight = tl.arange(0, _TILE)[:, None], tl.arange(0, eights)[None, :]
    at = to + t // GROUP * RECORD + t % GROUP * (D * FINE // 8) + eight * FINE
    if FINE == 4:
        tl.store(at.to(tl.pointer_type(tl.int32)), words)
    elif FINE == 2:
        tl.store(at.to(tl.pointer_type(tl.int16)), words.to(tl.int16))
    else:
        for byte in tl.static_range(FINE):
            tl.store((at + byte).to(tl.pointer_type(tl.uint8)), (words >> (8 * byte)).to(tl.uint8))


@triton.jit
def _encode_tile(
    x: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    other: tl.tensor,
    record: tl.tensor,
    ROWS: tl.constexpr,
    COUNT: tl.constexpr,
    ACROSS: tl.constexpr,
    D: tl.constexpr,
    BITS: tl.constexpr,
    FINE: tl.constexpr,
    RECORD: tl.constexpr,
    GROUP: tl.constexpr,
    ROUNDS: tl.constexpr,
    PRENORMALIZE: tl.constexpr,
) -> None:
    norm = 1.0
    raw = x
    if PRENORMALIZE:
        norm = tl.maximum(tl.sqrt_rn(tl.sum(tl.sum(x * x, 1), 0) / (COUNT * ACROSS)), 1e-12)
        raw = x / norm
    log_row, log_column = _balance(raw, ROWS, COUNT, ACROSS, ROUNDS)
    row, column = tl.exp(log_row) * norm, tl.exp(log_column)
    y = x / tl.expand_dims(column, 1 - ROWS) / tl.expand_dims(row, ROWS)
    low = tl.min(y, ROWS)
    last: tl.constexpr = (1 << BITS) - 1
    step = tl.maximum((tl.max(y, ROWS) - low) / last, _STEP_FLOOR)
    level = (y - tl.expand_dims(low, ROWS)) / tl.expand_dims(step, ROWS)
    level = tl.minimum(tl.maximum((level + _ROUNDER) - _ROUNDER, 0.0), last)
    _store_codes(codes, level.to(tl.int32), BITS, D)
    kept_scale, kept_zero, kept_other = (row * step).to(tl.float16), (row * low).to(tl.float16), column.to(tl.float16)
    tl.store(scale + tl.arange(0, ACROSS), kept_scale)
    tl.store(zero + tl.arange(0, ACROSS), kept_zero)
    tl.store(other + tl.arange(0, COUNT), kept_other)
    if FINE and record != 0:
        stored = tl.expand_dims(kept_scale.to(tl.float32), ROWS)
        u = x / tl.expand_dims(kept_other.to(tl.float32), 1 - ROWS) - tl.expand_dims(kept_zero.to(tl.float32), ROWS)
        # A scale that float16 rounds to zero leaves nothing to refine.
        u = u / tl.where(stored == 0.0, 1.0, stored)
        begin, width = tl.maximum(level - 0.5, 0.0), tl.where((level == 0.0) | (level == last), 0.5, 1.0)
        part = tl.floor((u - begin) / width * (1 << FINE))
        part = tl.minimum(tl.maximum(tl.where(stored == 0.0, 0.0, part), 0.0), (1 << FINE) - 1.0)
        _store_records(record, part.to(tl.int32), FINE, RECORD, GROUP, D)


@triton.jit
def _encode(
    positions: tl.tensor,
    tail_keys: tl.tensor,
    tail_values: tl.tensor,
    key_codes: tl.tensor,
    key_scale: tl.tensor,
    key_zero: tl.tensor,
    key_other: tl.tensor,
    value_codes: tl.tensor,
    value_scale: tl.tensor,
    value_zero: tl.tensor,
    value_other: tl.tensor,
    table: tl.tensor,
    staging: tl.tensor,
    batch: tl.tensor,
    kv_heads: tl.tensor,
    blocks: tl.tensor,
    most_tiles: tl.tensor,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_FINE: tl.constexpr,
    VALUE_FINE: tl.constexpr,
    GROUP: tl.constexpr,
    ROUNDS: tl.constexpr,
    PRENORMALIZE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    number, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sequence, head = number // kv_heads, number % kv_heads
    record: tl.constexpr = GROUP * D * (KEY_FINE + VALUE_FINE) // 8
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions + sequence)
    # The tail is full, and this step begins the next one.
    if (position % _TILE == 0) & (position >= 2 * _TILE):
        place = tl.load(table + sequence * most_tiles + position // _TILE - 2).to(tl.int64)
        tile = (layer * blocks + place) * kv_heads + head
        at = ((layer * batch + sequence) * kv_heads + head) * _TILE * D
        at += tl.arange(0, _TILE)[:, None] * D + tl.arange(0, D)[None, :]
        to = tl.load(staging + sequence)
        of_tile: tl.constexpr = _TILE // GROUP * record
        to = tl.where(to != 0, tl.multiple_of(to + (layer * kv_heads + head) * of_tile, 16), 0)
        if tl.program_id(2) == 0:
            _encode_tile(
                tl.load(tail_keys + at).to(tl.float32), key_codes + tile * (_TILE * D * KEY_BITS // 8),
                key_scale + tile * D, key_zero + tile * D, key_other + tile * _TILE, to, 0, _TILE, D, D, KEY_BITS,
                KEY_FINE, record, GROUP, ROUNDS, PRENORMALIZE,
            )  # fmt: skip
        else:
            to = tl.where(to != 0, to + GROUP * D * KEY_FINE // 8, 0)
            _encode_tile(
                tl.load(tail_values + at).to(tl.float32), value_codes + tile * (_TILE * D * VALUE_BITS // 8),
                value_scale + tile * _TILE, value_zero + tile * _TILE, value_other + tile * D, to, 1, D, _TILE, D,
                VALUE_BITS, VALUE_FINE, record, GROUP, ROUNDS, PRENORMALIZE,
            )  # fmt: skip


def kv_encode(
    positions: Tensor,
    form: KvFormat,
    keys: HalfTiles,
    values: HalfTiles,
    table: Tensor,
    tail_keys: Tensor,
    tail_values: Tensor,
    staging: Tensor,
    *,
    early: bool = False,
) -> None:
    """At the beginning of a step: encode the tails that are full, of all layers. Queued on the current stream; no
    allocation. Where none is full it ends at once.

    Args:
        positions: [batch] int32 on the device, of this step's tokens.
        form: of the cache.
        keys: [layers, blocks, kv_heads, ...], changed; ``values`` likewise.
        values: see there.
        table: [batch, tiles] int32: the block of tile 1, 2, … of each sequence.
        tail_keys: [layers, batch, kv_heads, 128, head_dim] float16; ``tail_values`` likewise.
        tail_values: see there.
        staging: [batch] int64 on the device: address of the memory for each block's records (a multiple of 16), as they
            are put: [layers, kv_heads, groups, record_bytes]; 0: they are not made.
        early: start while the kernel before still runs.

    Raises:
        ValueError: such heads have no kernel, or shapes contradict each other.
    """
    layers, batch, kv_heads, _, d = tail_keys.shape
    if d not in HEAD_DIMS or d != form.head_dim or keys.codes.shape[0] != layers or staging.shape != (batch,):
        raise ValueError(
            f"tails {list(tail_keys.shape)}, codes {list(keys.codes.shape)}, staging {list(staging.shape)}: heads of "
            f"{HEAD_DIMS} have a kernel, and all must be of as many layers and sequences"
        )
    halves = [t for half in (keys, values) for t in (half.codes, half.scale, half.zero, half.other)]
    _encode[(batch * kv_heads, layers, 2)](
        positions,
        tail_keys,
        tail_values,
        *halves,
        table,
        staging,
        batch,
        kv_heads,
        keys.codes.shape[1],
        table.shape[1],
        D=d,
        KEY_BITS=form.key_bits,
        VALUE_BITS=form.value_bits,
        KEY_FINE=form.refine_key_bits,
        VALUE_FINE=form.refine_value_bits,
        GROUP=form.group_tokens,
        ROUNDS=form.iterations,
        PRENORMALIZE=form.prenormalize,
        num_warps=_WARPS,
        **early_options(positions, early),
    )
