"""Codes in bit planes, and residuals by definition."""

import pytest
import torch

from strataflux.client.prepare.residual import residual_codes, residual_scales
from strataflux.kernels.codebook import dequantize_codebook, pack_planes, unpack_planes
from strataflux.kernels.residual import residual_scales_reference, round_residual


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_planes_hold_the_codes_most_significant_first(bits: int) -> None:
    random = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (5, 48), generator=random, dtype=torch.uint8)
    planes = pack_planes(codes, bits)
    assert planes.shape == (bits, 5, 6)
    for row, i, plane in ((0, 0, 0), (4, 47, bits - 1), (2, 13, 1)):
        bit = int(planes[plane, row, i // 8]) >> i % 8 & 1
        assert bit == int(codes[row, i]) >> (bits - 1 - plane) & 1
    assert torch.equal(unpack_planes(planes), codes)
    assert torch.equal(unpack_planes(planes[:-1]), codes >> 1)


def test_weights_are_looked_up_in_their_rows_codebook() -> None:
    codes = torch.tensor([[0, 3, 1, 1, 2, 0, 0, 3]] * 2, dtype=torch.uint8)
    codebook = torch.tensor([[-1.0, 0.0, 0.5, 2.0], [1.0, 2.0, 3.0, 4.0]]).half()
    weights = dequantize_codebook(pack_planes(codes, 2), codebook)
    assert weights[0].tolist() == [-1.0, 2.0, 0.0, 0.0, 0.5, -1.0, -1.0, 2.0]
    assert weights[1].tolist() == [1.0, 4.0, 2.0, 2.0, 3.0, 1.0, 1.0, 4.0]


def test_planes_refuse_what_they_cannot_hold() -> None:
    with pytest.raises(ValueError, match="12 codes"):
        pack_planes(torch.zeros(1, 12, dtype=torch.uint8), 3)
    with pytest.raises(ValueError, match="up to 4 do not fit 2"):
        pack_planes(torch.full((1, 8), 4, dtype=torch.uint8), 2)
    with pytest.raises(ValueError, match="do not belong"):
        dequantize_codebook(torch.zeros(2, 3, 1, dtype=torch.uint8), torch.zeros(3, 8).half())


def test_the_compiled_residual_search_finds_what_the_definition_does() -> None:
    residual = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 40)[:, None]
    residual[7] = 0
    scales = residual_scales(residual)
    torch.testing.assert_close(residual_scales_reference(residual), scales, rtol=1e-5, atol=0)
    restored = residual_codes(residual, scales) * scales[:, None]
    torch.testing.assert_close(round_residual(residual), restored, rtol=1e-5, atol=1e-7)
