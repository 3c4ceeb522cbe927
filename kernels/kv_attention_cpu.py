"""The operations of :mod:`strataflux.kernels.kv_attention`, compiled for a CPU: codes are used as they lie.

Scales are folded: per tile the query is multiplied by A once, codes give dot products as they are, and one product a
token with B ends it; for values the weights take A and the sums take B. Where a sum is of one row it runs in 16 lanes,
which the compiler turns into vectors without being allowed to reorder additions. Records are read at their addresses,
in place.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numba.np.numpy_support import carray
from numpy.typing import NDArray
from torch import Tensor

from strataflux.kernels.kv_attention import KvLayer, Resident, encoded_tiles, exact_spans, group_shares
from strataflux.kernels.kv_encode import HalfTiles, KvFormat, code_offsets, encode_tiles
from strataflux.kernels.kv_pack import TILE_TOKENS, planes_of
from strataflux.kernels.pointer import bytes_at
from strataflux.proto.compiled import compiled

__all__ = ["attend", "compile_all", "expected_shares", "refine"]

_LANES = 16
_TILE = TILE_TOKENS

_Floats = NDArray[np.float32]
_Bytes = NDArray[np.uint8]
_Integers = NDArray[np.int64]


def compile_all() -> None:
    """Compile everything here, on a cache of one tile: no step may wait for that."""
    form = KvFormat(2, 2, _LANES, 4, 4)
    shape = (1, 1, TILE_TOKENS, form.head_dim)
    tiles = encode_tiles(torch.zeros(shape), torch.zeros(shape), form)
    exact = torch.zeros(shape, dtype=torch.float16)
    table = torch.zeros(1, 1, dtype=torch.int64)
    layer = KvLayer(form, tiles.keys, tiles.values, table, exact, exact, exact, exact, (2 * TILE_TOKENS + 1,))
    queries, groups = torch.zeros(1, 1, form.head_dim), torch.zeros(1, 1, 1, dtype=torch.int64)
    record = torch.tensor([[[tiles.records.data_ptr()]]]).to(torch.uint64)
    refine(queries, layer, attend(queries, layer), groups, record)


def attend(queries: Tensor, layer: KvLayer) -> Resident:
    """As :func:`~strataflux.kernels.kv_attention.attend_reference`."""
    batch, heads, head_dim = queries.shape
    width = max((encoded_tiles(n) for n in layer.lengths), default=0) * _TILE
    logits = torch.full((batch, heads, width), -math.inf)
    maximum, total = torch.empty(batch, heads), torch.empty(batch, heads)
    output = torch.empty(batch, heads, head_dim)
    for i in range(batch):
        tokens = encoded_tiles(layer.lengths[i]) * _TILE
        maximum[i], total[i], output[i] = _attend_one(queries[i], layer, i, logits[i, :, :tokens])
    return Resident(logits, maximum, total, output)


def _attend_one(query: Tensor, layer: KvLayer, index: int, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    form, kv_heads = layer.form, layer.kv_heads
    length = layer.lengths[index]
    sink, tail = exact_spans(length)
    blocks = layer.table[index, : encoded_tiles(length)]
    shared = query.reshape(kv_heads, -1, query.shape[-1])
    tiled = _tile_logits(shared, layer, blocks)
    logits.copy_(tiled.flatten(0, 1))
    exact_keys = torch.cat((layer.sink_keys[index, :, :sink], layer.tail_keys[index, :, :tail]), 1).float()
    exact_values = torch.cat((layer.sink_values[index, :, :sink], layer.tail_values[index, :, :tail]), 1).float()
    exact = shared @ exact_keys.transpose(1, 2) / math.sqrt(form.head_dim)
    maximum = exact.amax(-1)
    if tiled.shape[-1]:
        maximum = torch.maximum(maximum, tiled.amax(-1))
    exact_weights, weights = (exact - maximum[..., None]).exp(), (tiled - maximum[..., None]).exp()
    mixed = exact_weights @ exact_values
    value_scales = _scales(layer.values, blocks)
    planes = _planes(form.value_bits)
    _mix_values(layer.values.codes.numpy(), planes, blocks.numpy(), weights.numpy(), *value_scales, mixed.numpy())
    total = exact_weights.sum(-1) + weights.sum(-1)
    return maximum.flatten(), total.flatten(), (mixed / total[..., None]).flatten(0, 1)


def _tile_logits(shared: Tensor, layer: KvLayer, blocks: Tensor) -> Tensor:
    """[kv_heads, heads, tokens] of queries [kv_heads, heads, D] over the keys of ``blocks``."""
    form = layer.form
    tiled = torch.empty(*shared.shape[:2], len(blocks) * _TILE)
    _key_logits(
        layer.keys.codes.numpy(),
        _planes(form.key_bits),
        blocks.numpy(),
        (shared / math.sqrt(form.head_dim)).numpy(),
        *_scales(layer.keys, blocks),
        tiled.numpy(),
    )
    return tiled


def expected_shares(queries: Tensor, layer: KvLayer) -> Tensor:
    """As :func:`~strataflux.kernels.kv_attention.expected_shares_reference`; about half of the work of :func:`attend`,
    since values are not touched.
    """
    form = layer.form
    width = max((encoded_tiles(n) for n in layer.lengths), default=0) * form.groups_per_tile
    shares = queries.new_zeros(queries.shape[0], layer.kv_heads, width)
    for i, length in enumerate(layer.lengths):
        sink, tail = exact_spans(length)
        blocks = layer.table[i, : encoded_tiles(length)]
        shared = queries[i].reshape(layer.kv_heads, -1, form.head_dim)
        tiled = _tile_logits(shared, layer, blocks)
        near = torch.cat((layer.sink_keys[i, :, :sink], layer.tail_keys[i, :, :tail]), 1)[:, :-1].float()
        logits = torch.cat((tiled, shared @ near.transpose(1, 2) / math.sqrt(form.head_dim)), -1).flatten(0, 1)
        maximum = logits.amax(-1)
        total = (logits - maximum[:, None]).exp_().sum(-1)
        of_tiles = logits[:, : tiled.shape[-1]]
        found = group_shares(of_tiles, maximum, total, layer.kv_heads, form.group_tokens)
        shares[i, :, : found.shape[-1]] = found
    return shares


def _planes(bits: int) -> _Integers:
    return np.array(planes_of(bits), np.int64)


def _scales(half: HalfTiles, blocks: Tensor) -> tuple[_Floats, _Floats, _Floats]:
    # Compiled code has no float16 on a CPU; this is a fraction of the codes' bytes.
    return half.scale[blocks].float().numpy(), half.zero[blocks].float().numpy(), half.other[blocks].float().numpy()


@compiled
def _code_row(tile: _Bytes, planes: _Integers, token: int, row: _Floats) -> None:
    """Codes of one token of a tile, all channels, as floats."""
    row[:] = 0
    at = 0
    for p in range(planes.shape[0]):
        width, low = planes[p, 0], planes[p, 1]
        per = 8 // width
        shift = np.int32(width * (token % per))
        mask, weight = np.int32((1 << width) - 1), np.float32(1 << low)
        line = tile[at + token // per * row.size : at + (token // per + 1) * row.size]
        for d in range(row.size):
            row[d] += weight * np.float32((np.int32(line[d]) >> shift) & mask)
        at += _TILE * row.size * width // 8


@compiled
def _dot(a: _Floats, b: _Floats, lanes: _Floats) -> np.float32:
    lanes[:] = 0
    for start in range(0, a.size, _LANES):
        for lane in range(_LANES):
            lanes[lane] += a[start + lane] * b[start + lane]
    for lane in range(8):
        lanes[lane] += lanes[lane + 8]
    for lane in range(4):
        lanes[lane] += lanes[lane + 4]
    return np.float32((lanes[0] + lanes[2]) + (lanes[1] + lanes[3]))


@compiled
def _key_logits(
    codes: _Bytes,
    planes: _Integers,
    blocks: _Integers,
    queries: _Floats,
    scale: _Floats,
    zero: _Floats,
    other: _Floats,
    logits: _Floats,
) -> None:
    """Fill ``logits`` [kv_heads, heads, tokens] for scaled ``queries`` [kv_heads, heads, D]; scales: [tiles, ...]."""
    kv_heads, heads, head_dim = queries.shape
    lanes, sums = np.empty(_LANES, np.float32), np.empty(_TILE, np.float32)
    # Channel by channel, all tokens of a tile are summed side by side: no sum of a row has to be taken apart in lanes.
    columns, folded = np.empty((head_dim, _TILE), np.float32), np.empty(head_dim, np.float32)
    for i in range(blocks.size):
        for j in range(kv_heads):
            _code_columns(codes[blocks[i], j], planes, columns)
            for h in range(heads):
                sums[:] = _dot(queries[j, h], zero[i, j], lanes)
                for d in range(head_dim):
                    folded[d] = queries[j, h, d] * scale[i, j, d]
                for d in range(0, head_dim, 4):
                    for t in range(_TILE):
                        low = folded[d] * columns[d, t] + folded[d + 1] * columns[d + 1, t]
                        high = folded[d + 2] * columns[d + 2, t] + folded[d + 3] * columns[d + 3, t]
                        sums[t] += low + high
                for t in range(_TILE):
                    logits[j, h, i * _TILE + t] = sums[t] * other[i, j, t]


@compiled
def _code_columns(tile: _Bytes, planes: _Integers, columns: _Floats) -> None:
    """Codes of a tile as floats, [channels, tokens]."""
    columns[:] = 0
    at, head_dim = 0, columns.shape[0]
    for p in range(planes.shape[0]):
        width, low = planes[p, 0], planes[p, 1]
        per = 8 // width
        mask, weight = np.int32((1 << width) - 1), np.float32(1 << low)
        for d in range(head_dim):
            for line in range(_TILE // per):
                byte, t = np.int32(tile[at + line * head_dim + d]), per * line
                if per == 4:  # written out, four tokens are one vector
                    columns[d, t] += weight * np.float32(byte & mask)
                    columns[d, t + 1] += weight * np.float32((byte >> np.int32(2)) & mask)
                    columns[d, t + 2] += weight * np.float32((byte >> np.int32(4)) & mask)
                    columns[d, t + 3] += weight * np.float32((byte >> np.int32(6)) & mask)
                else:
                    for s in range(per):
                        columns[d, t + s] += weight * np.float32((byte >> np.int32(width * s)) & mask)
        at += _TILE * head_dim * width // 8


@compiled
def _mix_values(
    codes: _Bytes,
    planes: _Integers,
    blocks: _Integers,
    weights: _Floats,
    scale: _Floats,
    zero: _Floats,
    other: _Floats,
    mixed: _Floats,
) -> None:
    """Add to ``mixed`` [kv_heads, heads, D] the values of all tiles, weighted by [kv_heads, heads, tiles · 128]."""
    kv_heads, heads, head_dim = mixed.shape
    row, part = np.empty(head_dim, np.float32), np.empty((heads, head_dim), np.float32)
    for i in range(blocks.size):
        for j in range(kv_heads):
            part[:] = 0
            for t in range(_TILE):
                _code_row(codes[blocks[i], j], planes, t, row)
                for h in range(heads):
                    weight = weights[j, h, i * _TILE + t]
                    level, floor = weight * scale[i, j, t], weight * zero[i, j, t]
                    for d in range(head_dim):
                        part[h, d] += level * row[d] + floor
            for h in range(heads):
                for d in range(head_dim):
                    mixed[j, h, d] += part[h, d] * other[i, j, d]


class _Side(NamedTuple):
    """Keys or values as :func:`_refine_head` needs them; scales are [kv_heads, n, ...], one a selected group."""

    codes: _Bytes
    planes: _Integers
    offsets: _Floats
    bits: int
    scale: _Floats
    zero: _Floats
    other: _Floats


def refine(queries: Tensor, layer: KvLayer, resident: Resident, groups: Tensor, addresses: Tensor) -> Tensor:
    """As :func:`~strataflux.kernels.kv_attention.refine_reference`, with each record's address in this process.

    Args:
        queries: [batch, heads, D] float32.
        layer: as given to :func:`attend`.
        resident: what came of it.
        groups: [batch, kv_heads, n] int64.
        addresses: [batch, kv_heads, n] uint64; 0 where a record is absent. The caller keeps every record mapped and
            unchanged until this returns.

    Returns:
        Outputs [batch, heads, D] float32; new.
    """
    form = layer.form
    output = resident.output.clone()
    for i in range(len(layer.lengths)):
        shared = queries[i].reshape(layer.kv_heads, -1, form.head_dim) / math.sqrt(form.head_dim)
        heads = shared.shape[:2]
        # An empty place has address 0 and is skipped, whatever block it seems to be in.
        blocks = layer.table[i][groups[i].clamp_min(0) // form.groups_per_tile]
        _refine(
            _side(layer.keys, blocks, form.key_bits, form.refine_key_bits),
            _side(layer.values, blocks, form.value_bits, form.refine_value_bits),
            blocks.numpy(),
            groups[i].numpy(),
            form.group_tokens,
            addresses[i].numpy(),
            shared.numpy(),
            resident.logits[i].reshape(*heads, -1).numpy(),
            resident.maximum[i].reshape(heads).numpy(),
            resident.total[i].reshape(heads).numpy(),
            output[i].view(*heads, -1).numpy(),
        )
    return output


def _side(half: HalfTiles, blocks: Tensor, bits: int, refine_bits: int) -> _Side:
    heads = torch.arange(blocks.shape[0])[:, None]
    scales = (part[blocks, heads].float().numpy() for part in (half.scale, half.zero, half.other))
    offsets = code_offsets(bits, refine_bits).numpy()
    return _Side(half.codes.numpy(), _planes(bits), offsets, refine_bits, *scales)


@compiled
def _refine(
    keys: _Side,
    values: _Side,
    blocks: _Integers,
    groups: _Integers,
    group_tokens: int,
    addresses: NDArray[np.uint64],
    queries: _Floats,
    logits: _Floats,
    maximum: _Floats,
    total: _Floats,
    output: _Floats,
) -> None:
    """Change ``output`` [kv_heads, heads, D]; logits are [kv_heads, heads, tokens], groups [kv_heads, n]."""
    kv_heads, heads, head_dim = queries.shape
    count = groups.shape[1]
    row, fine = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    after = np.empty((heads, count * group_tokens), np.float32)
    for j in range(kv_heads):
        shift = maximum[j].copy()
        for i in range(count):
            if addresses[j, i] != 0:
                _refined_logits(keys, blocks[j, i], j, i, groups[j, i], addresses[j, i], queries[j], logits[j], after)
                for h in range(heads):
                    for t in range(group_tokens):
                        shift[h] = max(shift[h], after[h, i * group_tokens + t])
        change = np.zeros(heads, np.float32)
        for h in range(heads):
            rest = total[j, h] * np.exp(maximum[j, h] - shift[h])
            change[h] = rest
            output[j, h] *= rest
        key_bytes = group_tokens * head_dim * keys.bits // 8
        for i in range(count):
            if addresses[j, i] == 0:
                continue
            for t in range(group_tokens):
                token = groups[j, i] * group_tokens + t
                at = addresses[j, i] + np.uint64(key_bytes + t * head_dim * values.bits // 8)
                _levels(values, blocks[j, i], j, token % _TILE, at, row, fine)
                scale, zero = values.scale[j, i, token % _TILE], values.zero[j, i, token % _TILE]
                for h in range(heads):
                    come = np.exp(after[h, i * group_tokens + t] - shift[h])
                    more = come - np.exp(logits[j, h, token] - shift[h])
                    change[h] += more
                    for d in range(head_dim):
                        resident = row[d] * scale + zero
                        output[j, h, d] += (more * resident + come * fine[d] * scale) * values.other[j, i, d]
        for h in range(heads):
            output[j, h] /= change[h]


@compiled
def _refined_logits(
    keys: _Side,
    block: int,
    head: int,
    place: int,
    group: int,
    address: np.uint64,
    queries: _Floats,
    logits: _Floats,
    after: _Floats,
) -> None:
    """Logits of one group's tokens with refined keys into their columns of ``after`` [heads, n · group_tokens]."""
    heads, head_dim = queries.shape
    tokens = after.shape[1] // keys.scale.shape[1]
    row, fine = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    lanes = np.empty(_LANES, np.float32)
    for t in range(tokens):
        token = group * tokens + t
        _levels(keys, block, head, token % _TILE, address + np.uint64(t * head_dim * keys.bits // 8), row, fine)
        for d in range(head_dim):
            fine[d] *= keys.scale[head, place, d]
        for h in range(heads):
            delta = _dot(queries[h], fine, lanes) * keys.other[head, place, token % _TILE]
            after[h, place * tokens + t] = logits[h, token] + delta


@compiled
def _levels(side: _Side, block: int, head: int, token: int, address: np.uint64, row: _Floats, fine: _Floats) -> None:
    """A token's codes into ``row`` and how far refinement moves each into ``fine``."""
    _code_row(side.codes[block, head], side.planes, token, row)
    if side.bits == 0:
        fine[:] = 0
        return
    record = carray(bytes_at(address), row.size * side.bits // 8)
    mask = np.uint32((1 << side.bits) - 1)
    for eight in range(row.size // 8):
        word = np.uint32(0)
        for byte in range(side.bits):
            word |= np.uint32(record[eight * side.bits + byte]) << np.uint32(8 * byte)
        for k in range(8):
            d = eight * 8 + k
            part = np.int64((word >> np.uint32(k * side.bits)) & mask)
            fine[d] = side.offsets[(np.int64(row[d]) << side.bits) | part]
