"""Cutting, norming and turning of heads against float64: grouped queries, with and without norms and refinement."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.kernels.gpu.heads import Heads, split_heads, split_heads_reference


def form(heads: int, kv_heads: int, d: int, norms: bool, device: torch.device) -> Heads:
    angle = torch.rand(7, d // 2, device=device).repeat(1, 2)
    sine = angle.sin() * torch.tensor([-1.0, 1.0], device=device).repeat_interleave(d // 2)
    norm = torch.rand(2, d, device=device) + 0.5
    query, key = (norm[0], norm[1]) if norms else (None, None)
    return Heads(heads, kv_heads, angle.cos(), sine, query, key, 1e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 2, 16), (3, 3, 24), (9, 3, 64)])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_it_is_the_reference(heads: int, kv_heads: int, d: int, norms: bool, late: bool, device: torch.device) -> None:
    model = form(heads, kv_heads, d, norms, device)
    y = torch.randn((heads + 2 * kv_heads) * d, device=device)
    extra = torch.randn_like(y) if late else None
    expected = split_heads_reference(y, extra, model, 5)
    found = [torch.full((n, d), torch.nan, dtype=torch.float16, device=device) for n in (heads, kv_heads, kv_heads)]
    split_heads(y, extra, model, torch.tensor([5], dtype=torch.int32, device=device), *found)
    for own, right in zip(found, expected, strict=True):
        assert (own.double() - right).norm() <= 5e-4 * right.norm()
    assert extra is None or not extra.any()


def test_shapes_are_checked(device: torch.device) -> None:
    model = form(4, 2, 16, False, device)
    heads, keys = (torch.zeros(n, 16, device=device) for n in (4, 2))
    with pytest.raises(ValueError, match=r"not \(4, 2\)"):
        split_heads(torch.zeros(100, device=device), None, model, torch.zeros(1, device=device), heads, keys, keys)
