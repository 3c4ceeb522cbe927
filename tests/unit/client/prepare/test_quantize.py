"""The low-bit base and the residual, against their definitions."""

import pytest
import torch

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.bases.rtn import RtnSettings, quantize_rtn
from strataflux.client.prepare.errors import DamagedModel
from strataflux.client.prepare.residual import residual_codes, residual_scales


def random_weight(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.02


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [64, 128])
def test_rtn_rounds_to_the_nearest_level(bits: int, group: int) -> None:
    weight = random_weight(5, 256)
    low = quantize_rtn("w", weight, RtnSettings(bits, group))
    restored = low.dequantized()
    for row in range(5):
        for start in range(0, 256, group):
            scale, zero = float(low.scales[row, start // group]), int(low.zeros[row, start // group])
            levels = torch.tensor([scale * (code - zero) for code in range(1 << bits)])
            for i in range(start, start + group):
                nearest = levels[(levels - weight[row, i]).abs().argmin()]
                assert abs(float(restored[row, i] - weight[row, i])) <= abs(float(nearest - weight[row, i])) + 1e-8


def test_the_scale_is_the_best_of_seven() -> None:
    weight = random_weight(3, 128, seed=4)
    weight[1, 7] = 0.4
    low = quantize_rtn("w", weight, RtnSettings(3, 64))
    for row in range(3):
        for start in (0, 64):
            values = weight[row, start : start + 64]
            spread, errors = float(values.max() - values.min()), []
            for step in range(7):
                shrink = 1 - step * 0.05
                scale = float(torch.tensor(spread * shrink / 7).half())
                zero = round(-float(values.min()) * shrink / scale)
                codes = ((values / scale).round() + zero).clamp(0, 7)
                errors.append(float(((codes - zero) * scale - values).abs().pow(2.5).sum()))
            restored = low.dequantized()[row, start : start + 64]
            assert float((restored - values).abs().pow(2.5).sum()) == pytest.approx(min(errors), rel=1e-4)


def test_groups_on_one_side_of_zero_keep_their_range() -> None:
    weight = torch.linspace(1.0, 2.0, 64).repeat(2, 1) * torch.tensor([[1.0], [-1.0]])
    low = quantize_rtn("w", weight, RtnSettings(4, 64))
    assert float((low.dequantized() - weight).abs().max()) <= 2.0 / 15 / 2 + 1e-3


def test_zeros_and_tiny_weights_become_zero() -> None:
    weight = torch.zeros(2, 64)
    weight[1, 5] = 1e-12
    assert torch.equal(quantize_rtn("w", weight, RtnSettings()).dequantized(), torch.zeros(2, 64))


def test_rtn_refusals() -> None:
    with pytest.raises(MisuseError, match="5"):
        RtnSettings(bits=5)
    with pytest.raises(MisuseError, match="32"):
        RtnSettings(group=32)
    with pytest.raises(MisuseError, match=r"128 for layers\.0\.o with 192 inputs"):
        quantize_rtn("layers.0.o", random_weight(2, 192), RtnSettings(3, 128))
    with pytest.raises(DamagedModel, match=r"layers\.0\.o"):
        quantize_rtn("layers.0.o", random_weight(2, 64) * 1e9, RtnSettings())


def test_residual_scale_is_the_best_of_thirty_two() -> None:
    residual = random_weight(6, 300, seed=1)
    residual[2] *= torch.linspace(0, 3, 300)
    scales = residual_scales(residual)
    for row, scale in zip(residual.double(), scales.double(), strict=True):
        candidates = row.abs().max() / 7 * torch.arange(1, 33) / 32
        errors = [float(((row / c).round().clamp(-7, 7) * c - row).square().sum()) for c in candidates]
        error = float(((row / scale).round().clamp(-7, 7) * scale - row).square().sum())
        assert error == pytest.approx(min(errors), rel=1e-5)


def test_residual_codes_restore_the_residual() -> None:
    residual = random_weight(8, 512, seed=2)
    scales = residual_scales(residual)
    codes = residual_codes(residual, scales)
    assert codes.dtype == torch.int8
    assert int(codes.abs().max()) == 7
    relative = (codes * scales[:, None] - residual).square().mean() / residual.square().mean()
    assert float(relative) < 0.02


def test_rows_of_zeros_have_scale_and_codes_zero() -> None:
    residual = torch.zeros(3, 64)
    residual[1, 1] = 0.5
    scales = residual_scales(residual)
    assert scales.tolist() == [0.0, pytest.approx(0.5 / 7), 0.0]
    assert residual_codes(residual, scales).abs().sum() == 7
