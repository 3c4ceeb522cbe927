"""Packing of low-bit codes and the weights they stand for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strataflux.kernels.lowbit import dequantize, matvec_reference, pack_codes, packed_bytes, unpack_codes


@settings(deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4]),
    rows=st.integers(1, 5),
    eights=st.integers(1, 20),
    seed=st.integers(0, 2**31),
)
def test_packing_round_trip(bits: int, rows: int, eights: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (rows, 8 * eights), generator=generator, dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (rows, eights * bits)
    assert torch.equal(unpack_codes(packed, bits, 8 * eights), codes)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_row_is_one_little_endian_bit_string(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (1, 64), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    number = int.from_bytes(bytes(pack_codes(codes, bits)[0].tolist()), "little")
    assert [number >> i * bits & (1 << bits) - 1 for i in range(64)] == codes[0].tolist()


def test_weights_are_scaled_distances_from_the_zero_point() -> None:
    codes = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7, 0, 0, 0, 0]])
    scales = torch.tensor([[0.5, 2.0]], dtype=torch.float16)
    zeros = torch.tensor([[3, 7]], dtype=torch.uint8)
    weights = dequantize(pack_codes(codes, 3), scales, zeros, bits=3, group=8)
    first = [0.5 * (code - 3) for code in range(8)]
    assert weights.tolist() == [first + [0.0] * 4 + [-14.0] * 4]
    product = matvec_reference(pack_codes(codes, 3), scales, zeros, 3, 8, torch.ones(16))
    assert product.tolist() == [sum(first) - 56.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: packed_bytes(64, 5), "5 bits"),
        (lambda: packed_bytes(12, 4), "multiple of 8"),
        (lambda: pack_codes(torch.full((1, 8), 4), 2), "do not fit 2 bits"),
        (lambda: unpack_codes(torch.zeros(1, 3, dtype=torch.uint8), 3, 16), "3 bytes"),
    ],
)
def test_contradictions_are_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
