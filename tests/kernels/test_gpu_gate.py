"""The MLP's gate against float64: odd widths, refinement added and cleared, and float16's range kept."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.kernels.gpu.gate import gate, gate_reference


@pytest.mark.parametrize("width", [1, 1024, 1543])
@pytest.mark.parametrize("late", [False, True])
def test_it_is_the_reference(width: int, late: bool, device: torch.device) -> None:
    y = torch.randn(2 * width, device=device) * 3
    extra = torch.randn_like(y) if late else None
    expected = gate_reference(y, extra)
    x = torch.full((width,), torch.nan, device=device)
    gate(y, extra, x)
    assert (x.double() - expected).norm() <= 1e-6 * expected.norm()
    assert extra is None or not extra.any()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # as it should: silu is 0 there
def test_what_float16_cannot_hold_is_held_at_its_limit(device: torch.device) -> None:
    x = torch.zeros(2, dtype=torch.float16, device=device)
    gate(torch.tensor([900.0, -900.0, 900.0, 900.0], device=device), None, x)
    assert x.tolist() == [65504.0, 0.0]
    gate(torch.tensor([900.0, 900.0, -900.0, 1.0], device=device), None, x)
    assert x.tolist() == [-65504.0, 900.0]


def test_shapes_are_checked(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"expected \[2 · width\]"):
        gate(torch.zeros(9, device=device), None, torch.zeros(4, device=device))
