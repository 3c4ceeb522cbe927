"""The residual state and its norm in one launch against float64: odd widths, parts missing, parts cleared."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.kernels.gpu.norm import add_norm, add_norm_reference

# bfloat16: a whole last place, since the interpreter truncates.
ROUNDING = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("width", [64, 577, 4096])
@pytest.mark.parametrize(("added", "late"), [(False, 0), (True, 0), (False, 1), (True, 1), (True, 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_it_is_the_reference(width: int, added: bool, late: int, dtype: torch.dtype, device: torch.device) -> None:
    before, weight = torch.randn(2, width, device=device) + 1
    y = torch.randn(width, device=device).to(dtype) if added else None
    extra = list(torch.randn(late, width, device=device))
    state, x = add_norm_reference(before, y, extra, weight, 1e-5)
    after, found = torch.full_like(before, torch.nan), torch.full_like(before, torch.nan).to(dtype)
    kept = before.clone()
    add_norm(before, y, extra, weight, after, found, 1e-5)
    assert torch.equal(before, kept)
    assert (after.double() - state).norm() <= 1e-6 * state.norm()
    assert (found.double() - x).norm() <= ROUNDING[dtype] * x.norm()
    assert not any(part.any() for part in extra)


def test_the_state_need_not_be_kept(device: torch.device) -> None:
    before, weight, x = torch.randn(3, 100, device=device)
    kept = before.clone()
    add_norm(before, None, (), weight, None, x, 1e-5)
    assert torch.equal(before, kept)
    assert (x.double() - add_norm_reference(before, None, (), weight, 1e-5)[1]).norm() <= 1e-5


def test_shapes_are_checked(device: torch.device) -> None:
    before = torch.zeros(8, device=device)
    with pytest.raises(ValueError, match=r"expected the same \[width\]"):
        add_norm(before, None, (), before, None, torch.zeros(9, device=device), 1e-5)
    with pytest.raises(ValueError, match="4 late parts"):
        add_norm(before, None, [before] * 4, before, None, before, 1e-5)
