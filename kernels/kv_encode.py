"""KVarN tiles of keys and values, and the nested refinement of their codes; nothing here is compiled.

A tile is 128 tokens of one KV head of one layer, rotated (:mod:`strataflux.kernels.hadamard`). Formula, with the
*rows* of a tile being channels for keys and tokens for values, and its *columns* the other axis:

    M / (exp v_row · exp u_column)                  variances balanced, at most `iterations` rounds, the best one kept
    code = clamp(round((y - lo) / s), 0, 2^b - 1)   a row's minimum lo and step s = (max - lo) / (2^b - 1)
    value = (code · A + Z) · B                      A = s · exp v, Z = lo · exp v, B = exp u, stored as float16

Refinement splits the interval of a code into 2^r equal parts. On the code axis, ``u = (X / B - Z) / A`` with the
*stored* A, Z and B, code q owns ``[max(q - ½, 0), min(q + ½, 2^b - 1)]``: data lie nowhere else, so the outermost
codes own half a step. The refinement code is the part that u lies in, the refined value its middle. Fewer bits are the
high bits of more: ``r >> 1`` refines with one bit less. A refined level never equals the resident one.

The floor of the balancing, -0.3 on the logarithm of each scale, is KVarN's: a tile whose standard deviations lie far
below 1 stays unbalanced. ``prenormalize`` divides by the tile's RMS first and folds it into A and Z: same format, same
decoder, but not the published encoder.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from strataflux.kernels.hadamard import check_head_dim
from strataflux.kernels.kv_pack import (
    TILE_TOKENS,
    code_bytes,
    pack_codes,
    pack_stream,
    stream_bytes,
    unpack_codes,
    unpack_stream,
)

__all__ = [
    "GROUP_TOKENS",
    "KEY_ROWS",
    "VALUE_ROWS",
    "EncodedTiles",
    "HalfTiles",
    "KvFormat",
    "balance",
    "code_offsets",
    "decode_half",
    "encode_half",
    "encode_tiles",
    "pack_groups",
    "refinement_codes",
    "unpack_groups",
]

KEY_ROWS = -2
VALUE_ROWS = -1
"""The axis of [tokens, channels] along which a row runs: keys have a scale a channel, values one a token."""
GROUP_TOKENS = (2, 4, 8, 16)
"""Sizes of a token group."""

_LOG_FLOOR, _LOG_CEILING = -0.3, 10.0
_STD_FLOOR, _STD_CEILING = 1e-3, 1e3
_STEP_FLOOR = 1e-10


@dataclass(frozen=True)
class KvFormat:
    """Widths and sizes of one low-bit KV cache with its refinement.

    Raises:
        ValueError: on construction, naming what cannot be.
    """

    key_bits: int
    value_bits: int
    head_dim: int
    refine_key_bits: int = 0
    refine_value_bits: int = 0
    group_tokens: int = 4
    prenormalize: bool = False
    iterations: int = 8

    def __post_init__(self) -> None:
        check_head_dim(self.head_dim)
        if self.group_tokens not in GROUP_TOKENS:
            raise ValueError(f"groups of {self.group_tokens} tokens asked for; one of {GROUP_TOKENS} is supported")
        for bits in (self.key_bits, self.value_bits):
            code_bytes(bits, self.head_dim)
        for bits in (self.refine_key_bits, self.refine_value_bits):
            stream_bytes(bits, self.head_dim)

    @property
    def key_bytes(self) -> int:
        """A tile's keys: codes, A and Z (a channel each), B (a token each)."""
        return code_bytes(self.key_bits, self.head_dim) + 2 * (2 * self.head_dim + TILE_TOKENS)

    @property
    def value_bytes(self) -> int:
        """A tile's values: codes, B (a channel each), A and Z (a token each)."""
        return code_bytes(self.value_bits, self.head_dim) + 2 * (self.head_dim + 2 * TILE_TOKENS)

    @property
    def tile_bytes(self) -> int:
        """All that stays resident of a tile."""
        return self.key_bytes + self.value_bytes

    @property
    def groups_per_tile(self) -> int:
        """Token groups of a tile."""
        return TILE_TOKENS // self.group_tokens

    @property
    def record_bytes(self) -> int:
        """Refinement of one group, keys and values; 0 where nothing is refined."""
        return self.group_tokens * self.head_dim * (self.refine_key_bits + self.refine_value_bits) // 8


@dataclass(frozen=True)
class HalfTiles:
    """Keys or values of tiles [...]: codes [..., bytes] uint8; A and Z, one a row; B, one a column; float16."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    other: Tensor

    @classmethod
    def empty(
        cls, leading: tuple[int, ...], bits: int, head_dim: int, rows: int, device: torch.device | str = "cpu"
    ) -> "HalfTiles":
        """Room for tiles, zeroed."""
        row_count, column_count = (head_dim, TILE_TOKENS) if rows == KEY_ROWS else (TILE_TOKENS, head_dim)
        return cls(
            torch.zeros((*leading, code_bytes(bits, head_dim)), dtype=torch.uint8, device=device),
            torch.zeros((*leading, row_count), dtype=torch.float16, device=device),
            torch.zeros((*leading, row_count), dtype=torch.float16, device=device),
            torch.zeros((*leading, column_count), dtype=torch.float16, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes allocated for these tiles."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scale, self.zero, self.other))

    def __getitem__(self, index: object) -> "HalfTiles":
        parts = (t[index] for t in (self.codes, self.scale, self.zero, self.other))  # type: ignore[index]
        return HalfTiles(*parts)

    def store(self, index: object, tiles: "HalfTiles") -> None:
        """Overwrite the tiles at ``index``."""
        for mine, given in zip(
            (self.codes, self.scale, self.zero, self.other),
            (tiles.codes, tiles.scale, tiles.zero, tiles.other),
            strict=True,
        ):
            mine[index] = given  # type: ignore[index]

    def along(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """A, Z and B as float32 that broadcast over [..., tokens, channels]."""
        columns = _across(rows)
        a, z, b = self.scale.float(), self.zero.float(), self.other.float()
        return a.unsqueeze(rows), z.unsqueeze(rows), b.unsqueeze(columns)


@dataclass(frozen=True)
class EncodedTiles:
    """What :func:`encode_tiles` makes of tiles [...]."""

    keys: HalfTiles
    values: HalfTiles
    records: Tensor
    """[..., groups_per_tile, record_bytes] uint8: the refinement of each group in order."""


def _across(rows: int) -> int:
    return KEY_ROWS + VALUE_ROWS - rows


def balance(tiles: Tensor, rows: int, iterations: int, prenormalize: bool = False) -> tuple[Tensor, Tensor]:
    """Scales that even out the standard deviations of rows and columns of ``tiles`` [..., 128, D] float32.

    Returns:
        Row scales and column scales, shaped to broadcast over ``tiles``. Those of the round with the smallest spread,
        each tile for itself; the raw tile counts as a round.
    """
    columns = _across(rows)
    norm = tiles.square().mean((-2, -1), keepdim=True).sqrt().clamp_min(1e-12) if prenormalize else None
    x = tiles if norm is None else tiles / norm
    log_column, log_row = x.new_zeros(_kept(x, columns)), x.new_zeros(_kept(x, rows))
    current = x
    best, best_column, best_row = _spread(current), log_column, log_row
    for _ in range(iterations):
        log_column = _moved(log_column, current, columns)
        current = x * torch.exp(-log_column - log_row)
        log_row = _moved(log_row, current, rows)
        current = x * torch.exp(-log_column - log_row)
        spread = _spread(current)
        better = spread <= best
        best = torch.where(better, spread, best)
        best_column = torch.where(better, log_column, best_column)
        best_row = torch.where(better, log_row, best_row)
    row = best_row.exp()
    return (row if norm is None else row * norm), best_column.exp()


def _kept(tiles: Tensor, axis: int) -> list[int]:
    shape = list(tiles.shape)
    shape[axis] = 1
    return shape


def _moved(log_scale: Tensor, current: Tensor, axis: int) -> Tensor:
    deviation = current.std(axis, keepdim=True).clamp(_STD_FLOOR, _STD_CEILING)
    return (log_scale + deviation.log()).clamp(_LOG_FLOOR, _LOG_CEILING)


def _spread(tiles: Tensor) -> Tensor:
    """Largest over smallest standard deviation, rows' and columns' added, [..., 1, 1]; 2 is ideal."""
    ratios = []
    for axis in (-2, -1):
        deviation = tiles.std(axis, keepdim=True)
        ratios.append(deviation.amax((-2, -1), keepdim=True) / deviation.amin((-2, -1), keepdim=True).clamp_min(1e-8))
    return ratios[0] + ratios[1]


def encode_half(tiles: Tensor, bits: int, rows: int, iterations: int = 8, prenormalize: bool = False) -> HalfTiles:
    """Quantize keys (``rows`` = KEY_ROWS) or values [..., 128, D] float32, rotated."""
    row, column = balance(tiles, rows, iterations, prenormalize)
    y = tiles / column / row
    low = y.amin(rows, keepdim=True)
    step = ((y.amax(rows, keepdim=True) - low) / (2**bits - 1)).clamp_min(_STEP_FLOOR)
    codes = ((y - low) / step).round().clamp(0, 2**bits - 1).to(torch.uint8)
    stored = ((row * step).squeeze(rows), (row * low).squeeze(rows), column.squeeze(_across(rows)))
    return HalfTiles(pack_codes(codes, bits), *(t.half() for t in stored))


def code_offsets(bits: int, refine_bits: int, device: torch.device | str = "cpu") -> Tensor:
    """How far each refined level lies from its code, on the code axis: [2^bits · 2^refine_bits] float32 at
    ``code << refine_bits | refinement``; zeros for ``refine_bits`` = 0.
    """
    code = torch.arange(2**bits, dtype=torch.float32)[:, None]
    if refine_bits == 0:
        return torch.zeros(2**bits, device=device)
    low, width = _interval(code, bits)
    part = (torch.arange(2**refine_bits) + 0.5) / 2**refine_bits
    offsets: Tensor = (low + width * part - code).flatten()
    return offsets.to(device)


def _interval(code: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    low = (code - 0.5).clamp_min(0)
    return low, (code + 0.5).clamp_max(2**bits - 1) - low


def refinement_codes(tiles: Tensor, half: HalfTiles, bits: int, rows: int, refine_bits: int) -> Tensor:
    """Which part of its code's interval each element of ``tiles`` [..., 128, D] lies in: uint8."""
    code = unpack_codes(half.codes, bits, tiles.shape[-1]).float()
    scale, zero, other = half.along(rows)
    low, width = _interval(code, bits)
    part = (((tiles / other - zero) / scale - low) / width * 2**refine_bits).floor()
    # A scale that float16 rounds to zero leaves nothing to refine.
    part = torch.where(scale == 0, 0.0, part)
    return part.clamp(0, 2**refine_bits - 1).to(torch.uint8)


def decode_half(
    half: HalfTiles, bits: int, rows: int, refinement: Tensor | None = None, refine_bits: int = 0
) -> Tensor:
    """Keys or values [..., 128, D] float32, rotated; with ``refinement`` [..., 128, D] at their refined levels."""
    head_dim = half.scale.shape[-1] if rows == KEY_ROWS else half.other.shape[-1]
    code = unpack_codes(half.codes, bits, head_dim)
    scale, zero, other = half.along(rows)
    level = code.float()
    if refinement is not None and refine_bits:
        offsets = code_offsets(bits, refine_bits, code.device)
        level = level + offsets[(code.int() << refine_bits) | refinement.int()]
    return (level * scale + zero) * other


def encode_tiles(keys: Tensor, values: Tensor, form: KvFormat) -> EncodedTiles:
    """Encode rotated keys and values [..., 128, D] float32 with the refinement of every group."""
    key_half = encode_half(keys, form.key_bits, KEY_ROWS, form.iterations, form.prenormalize)
    value_half = encode_half(values, form.value_bits, VALUE_ROWS, form.iterations, form.prenormalize)
    key_codes = refinement_codes(keys, key_half, form.key_bits, KEY_ROWS, form.refine_key_bits)
    value_codes = refinement_codes(values, value_half, form.value_bits, VALUE_ROWS, form.refine_value_bits)
    return EncodedTiles(key_half, value_half, pack_groups(key_codes, value_codes, form))


def pack_groups(key_codes: Tensor, value_codes: Tensor, form: KvFormat) -> Tensor:
    """Records [..., groups, record_bytes] of refinement codes [..., tokens, D], tokens a multiple of a group."""
    grouped = (t.reshape(*t.shape[:-2], t.shape[-2] // form.group_tokens, -1) for t in (key_codes, value_codes))
    widths = (form.refine_key_bits, form.refine_value_bits)
    return torch.cat([pack_stream(t, bits) for t, bits in zip(grouped, widths, strict=True)], -1)


def unpack_groups(records: Tensor, form: KvFormat) -> tuple[Tensor, Tensor]:
    """Refinement codes of keys and values [..., group_tokens, D] of ``records`` [..., record_bytes]."""
    count = form.group_tokens * form.head_dim
    edge = stream_bytes(form.refine_key_bits, count)
    shape = (*records.shape[:-1], form.group_tokens, form.head_dim)
    keys = unpack_stream(records[..., :edge], form.refine_key_bits, count)
    values = unpack_stream(records[..., edge:], form.refine_value_bits, count)
    return keys.reshape(shape), values.reshape(shape)
