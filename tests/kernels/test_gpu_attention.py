"""Attention over a float16 cache against float64: one position after another, any split of the positions."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.kernels.gpu.attention import AttentionScratch, attend, attend_reference

CONTEXT = 300


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 4, 16), (6, 2, 32)])
def test_each_position_sees_itself_and_those_before(
    heads: int, kv_heads: int, d: int, splits: int, device: torch.device
) -> None:
    all_keys, all_values = torch.randn(2, kv_heads, CONTEXT, d, device=device).half()
    keys, values = torch.full_like(all_keys, torch.nan), torch.full_like(all_values, torch.nan)
    scratch = AttentionScratch(kv_heads, d, splits, device)
    position = torch.zeros(1, dtype=torch.int32, device=device)
    previous = 0
    for now in (0, 1, 63, 64, CONTEXT - 1):
        keys[:, previous:now] = all_keys[:, previous:now]
        values[:, previous:now] = all_values[:, previous:now]
        previous = now
        position.fill_(now)
        queries = (torch.randn(heads, d, device=device) * 2).half()
        out = torch.full((heads * d,), torch.nan, dtype=torch.float16, device=device)
        attend(queries, all_keys[:, now].clone(), all_values[:, now].clone(), keys, values, position, out, scratch)
        expected = attend_reference(queries, all_keys[:, : now + 1], all_values[:, : now + 1]).flatten()
        assert (out.double() - expected).norm() <= 1e-3 * expected.norm()
        assert torch.equal(keys[:, now], all_keys[:, now])
        assert torch.equal(values[:, now], all_values[:, now])
        assert not scratch.tickets.any()


@pytest.mark.parametrize(("window", "splits"), [(1, 1), (70, 1), (70, 3), (128, 4)])
def test_a_ring_holds_what_is_attended_to(window: int, splits: int, device: torch.device) -> None:
    heads, kv_heads, d = 4, 2, 16
    all_keys, all_values = torch.randn(2, kv_heads, CONTEXT, d, device=device).half()
    keys, values = torch.full((2, kv_heads, window, d), torch.nan, dtype=torch.float16, device=device)
    scratch = AttentionScratch(kv_heads, d, splits, device)
    position = torch.zeros(1, dtype=torch.int32, device=device)
    for now in (0, 1, 64, 69, 70, 127, 128, CONTEXT - 1):
        for past in range(max(0, now - window), now):  # one that has left the window lies where this one will
            keys[:, past % window], values[:, past % window] = all_keys[:, past], all_values[:, past]
        position.fill_(now)
        queries = (torch.randn(heads, d, device=device) * 2).half()
        out = torch.full((heads * d,), torch.nan, dtype=torch.float16, device=device)
        own = (all_keys[:, now].clone(), all_values[:, now].clone())
        attend(queries, *own, keys, values, position, out, scratch, ring=True)
        span = slice(max(0, now - window + 1), now + 1)
        expected = attend_reference(queries, all_keys[:, span], all_values[:, span]).flatten()
        assert (out.double() - expected).norm() <= 1e-3 * expected.norm()
        assert torch.equal(keys[:, now % window], own[0])
        assert torch.equal(values[:, now % window], own[1])
        assert not scratch.tickets.any()


def test_a_head_without_a_kernel_is_named(device: torch.device) -> None:
    cache = torch.zeros(2, 8, 24, device=device).half()
    heads = torch.zeros(2, 24, device=device).half()
    with pytest.raises(ValueError, match="heads of 24"):
        attend(heads, heads, heads, cache, cache, heads, heads.flatten(), AttentionScratch(2, 24, 1, device))
