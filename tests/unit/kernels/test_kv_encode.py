"""Tiles and their refinement: published sizes, regression numbers on Gaussian tiles, and the traps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from strataflux.kernels.hadamard import turn
from strataflux.kernels.kv_encode import (
    KEY_ROWS,
    VALUE_ROWS,
    HalfTiles,
    KvFormat,
    balance,
    code_offsets,
    decode_half,
    encode_half,
    encode_tiles,
    pack_groups,
    refinement_codes,
    unpack_groups,
)

ROWS = {"K": KEY_ROWS, "V": VALUE_ROWS}


def gaussian(head_dim: int = 128, tiles: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(tiles, 128, head_dim, generator=torch.Generator().manual_seed(seed))


def relative(found: Tensor, right: Tensor) -> float:
    return float((found - right).square().sum() / right.square().sum())


def refined(x: Tensor, half: HalfTiles, bits: int, rows: int, refine_bits: int) -> Tensor:
    codes = refinement_codes(x, half, bits, rows, refine_bits)
    return decode_half(half, bits, rows, codes, refine_bits)


@pytest.mark.parametrize(
    ("head_dim", "side", "expected"),
    [
        (128, "K", (0.247, 0.0577, 0.0145, 0.00091)),
        (128, "V", (0.246, 0.0575, 0.0144, 0.00090)),
        (64, "K", (0.241, 0.0563, 0.0141, 0.00089)),
        (64, "V", (0.200, 0.0463, 0.0116, 0.00072)),
    ],
)
def test_error_of_two_bits_and_of_each_refinement(head_dim: int, side: str, expected: tuple[float, ...]) -> None:
    x = turn(gaussian(head_dim))
    half = encode_half(x, 2, ROWS[side])
    found = [relative(refined(x, half, 2, ROWS[side], bits), x) for bits in (0, 1, 2, 4)]
    assert found == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("bits", "base", "one"), [(1, 3.52, 0.144), (3, 0.0452, 0.0113), (4, 0.0098, 0.00245)])
def test_error_of_other_widths_of_keys(bits: int, base: float, one: float) -> None:
    x = turn(gaussian())
    half = encode_half(x, bits, KEY_ROWS)
    assert relative(decode_half(half, bits, KEY_ROWS), x) == pytest.approx(base, rel=0.03)
    # Clipped edges: with whole edge bins one bit on one bit would reach 0.607 only.
    assert relative(refined(x, half, bits, KEY_ROWS, 1), x) == pytest.approx(one, rel=0.04)


@pytest.mark.parametrize("rows", [KEY_ROWS, VALUE_ROWS])
def test_balanced_gaussian_tiles_have_equal_deviations(rows: int) -> None:
    x = gaussian()
    row, column = balance(x, rows, 8)
    even = x / row / column
    for axis in (-2, -1):
        deviation = even.std(axis)
        assert float((deviation.amax(-1) / deviation.amin(-1)).max()) < 1.01


@pytest.mark.parametrize(
    ("head_dim", "bits", "key_bytes", "value_bytes"),
    [
        (128, (2, 2), 4864, 4864),
        (128, (3, 2), 6912, 4864),
        (128, (3, 3), 6912, 6912),
        (128, (4, 2), 8960, 4864),
        (128, (2, 1), 4864, 2816),
        (64, (2, 2), 2560, 2688),
        (64, (3, 3), 3584, 3712),
        (256, (2, 2), 9472, 9216),
    ],
)
def test_sizes_are_the_published_ones_and_what_is_allocated(
    head_dim: int, bits: tuple[int, int], key_bytes: int, value_bytes: int
) -> None:
    form = KvFormat(*bits, head_dim)
    assert (form.key_bytes, form.value_bytes) == (key_bytes, value_bytes)
    encoded = encode_tiles(gaussian(head_dim, 3), gaussian(head_dim, 3, 1), form)
    assert (encoded.keys.nbytes, encoded.values.nbytes) == (3 * key_bytes, 3 * value_bytes)
    for side, half, width in (("K", encoded.keys, bits[0]), ("V", encoded.values, bits[1])):
        assert HalfTiles.empty((3,), width, head_dim, ROWS[side]).nbytes == half.nbytes


@pytest.mark.parametrize(
    ("head_dim", "group", "refine", "record"),
    [(64, 2, (4, 4), 128), (64, 4, (4, 4), 256), (128, 4, (4, 4), 512), (64, 4, (0, 1), 32), (128, 2, (3, 1), 128)],
)
def test_records_have_the_published_sizes_and_round_trip(
    head_dim: int, group: int, refine: tuple[int, int], record: int
) -> None:
    form = KvFormat(2, 2, head_dim, *refine, group)
    generator = torch.Generator().manual_seed(3)
    keys, values = (
        torch.randint(0, 1 << bits, (2, 128, head_dim), dtype=torch.uint8, generator=generator) for bits in refine
    )
    records = pack_groups(keys, values, form)
    assert records.shape == (2, form.groups_per_tile, record)
    assert form.record_bytes == record
    found_keys, found_values = unpack_groups(records, form)
    assert torch.equal(found_keys.flatten(1, 2), keys)
    assert torch.equal(found_values.flatten(1, 2), values)


def test_a_record_is_token_major_nibbles_low_first_keys_then_values() -> None:
    form = KvFormat(2, 2, 16, 4, 4, 2)
    keys, values = torch.zeros(2, 128, 16, dtype=torch.uint8)
    keys[0, 0], keys[0, 1], keys[1, 2], values[0, 15] = 5, 9, 3, 7
    record = pack_groups(keys, values, form)[0]
    expected = {0: 5 | 9 << 4, 8 + 1: 3, 16 + 7: 7 << 4}
    assert {i: int(b) for i, b in enumerate(record) if b} == expected


def test_fewer_bits_are_the_high_bits_of_more() -> None:
    x = turn(gaussian(64, 4))
    for side, rows in ROWS.items():
        half = encode_half(x, 2, rows)
        four = refinement_codes(x, half, 2, rows, 4)
        for bits in (1, 2, 3):
            assert torch.equal(four >> 4 - bits, refinement_codes(x, half, 2, rows, bits)), side


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_refined_levels_lie_inside_their_code_and_never_on_it(bits: int) -> None:
    offsets = code_offsets(bits, 4).view(1 << bits, 16)
    assert float(offsets.abs().min()) > 0
    assert float(offsets.abs().max()) <= 0.5
    levels = (offsets + torch.arange(1 << bits)[:, None]).flatten()
    assert bool((levels.diff() > 0).all())
    assert 0 < float(levels[0]) < float(levels[-1]) < (1 << bits) - 1
    assert not code_offsets(bits, 0).any()


def test_small_tiles_stay_unbalanced_unless_prenormalized() -> None:
    x = 0.05 * gaussian(128, 8)
    x[:, ::50] *= 8
    plain = encode_half(x, 2, KEY_ROWS)
    mended = encode_half(x, 2, KEY_ROWS, prenormalize=True)
    assert relative(decode_half(plain, 2, KEY_ROWS), x) > 0.6
    assert relative(decode_half(mended, 2, KEY_ROWS), x) < 0.27
    assert relative(refined(x, mended, 2, KEY_ROWS, 4), x) < 0.001


def test_constant_and_empty_tiles_are_finite_and_exact() -> None:
    for value in (0.0, 1.5):
        x = torch.full((1, 128, 16), value)
        for rows in (KEY_ROWS, VALUE_ROWS):
            half = encode_half(x, 2, rows)
            assert not refinement_codes(x, half, 2, rows, 4)[half.along(rows)[0].expand(x.shape) == 0].any()
            torch.testing.assert_close(refined(x, half, 2, rows, 4), x, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((5, 2, 64), "5 bits"),
        ((2, 0, 64), "0 bits"),
        ((2, 2, 96), "head_dim is 96"),
        ((2, 2, 64, 5, 4), "5 bits"),
        ((2, 2, 64, 4, 4, 3), "groups of 3"),
    ],
)
def test_what_cannot_be_is_named(arguments: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        KvFormat(*arguments)
