"""Codes in bytes: round trips of every width, and where each code lies."""

import pytest
import torch

from strataflux.kernels.kv_pack import (
    CODE_BITS,
    REFINE_BITS,
    code_bytes,
    pack_codes,
    pack_stream,
    stream_bytes,
    unpack_codes,
    unpack_stream,
)


def some(bits: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_resident_codes_round_trip_without_padding(bits: int, head_dim: int) -> None:
    codes = some(bits, 3, 2, 128, head_dim)
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, 2, 128 * head_dim * bits // 8)
    assert packed.shape[-1] == code_bytes(bits, head_dim)
    assert torch.equal(unpack_codes(packed, bits, head_dim), codes)


@pytest.mark.parametrize("bits", CODE_BITS)
def test_each_resident_code_lies_where_the_formula_says(bits: int) -> None:
    head_dim = 16
    packed = pack_codes(codes := some(bits, 128, head_dim), bits)
    planes = {3: ((2, 0), (1, 2))}.get(bits, ((bits, 0),))
    for token, channel in ((0, 0), (1, 3), (5, 15), (126, 7), (127, 15)):
        found, start = 0, 0
        for width, low in planes:
            per = 8 // width
            byte = int(packed[start + token // per * head_dim + channel])
            found |= (byte >> width * (token % per) & (1 << width) - 1) << low
            start += 128 * head_dim * width // 8
        assert found == int(codes[token, channel])


@pytest.mark.parametrize("bits", REFINE_BITS)
@pytest.mark.parametrize("count", [8, 16, 256])
def test_strings_of_bits_round_trip(bits: int, count: int) -> None:
    codes = some(bits, 5, count)
    packed = pack_stream(codes, bits)
    assert packed.shape == (5, stream_bytes(bits, count))
    assert torch.equal(unpack_stream(packed, bits, count), codes)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_a_string_is_one_number_least_significant_first(bits: int) -> None:
    codes = some(bits, 24)
    number = sum(int(code) << bits * i for i, code in enumerate(codes))
    assert bytes(pack_stream(codes, bits).tolist()) == number.to_bytes(24 * bits // 8, "little")


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(ValueError, match="5 bits"):
        code_bytes(5, 64)
    with pytest.raises(ValueError, match="5 bits"):
        stream_bytes(5, 64)
    with pytest.raises(ValueError, match="12 codes"):
        stream_bytes(2, 12)
    with pytest.raises(ValueError, match="7 bytes"):
        unpack_codes(torch.zeros(7, dtype=torch.uint8), 2, 64)
    with pytest.raises(ValueError, match="take 16"):
        unpack_stream(torch.zeros(7, dtype=torch.uint8), 2, 64)
