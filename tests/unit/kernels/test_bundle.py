"""Neuron bundles on a CPU against their definition."""

import numpy as np
import pytest
import torch
from torch import Tensor

from strataflux.kernels.bundle import add_bundles, bundle_bytes, bundle_reference, pack_bundles


def bundles(neurons: int, d_model: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(-7, 8, (neurons, 4, d_model), generator=random, dtype=torch.int8)
    return pack_bundles(codes, torch.rand(neurons, 3, generator=random) * 0.02)


def add(
    y: Tensor, x: Tensor, gate_up: Tensor, chosen: list[int], records: Tensor, present: Tensor, scale: Tensor
) -> int:
    raw = records.numpy()
    addresses = np.array([raw[j].ctypes.data if here else 0 for j, here in enumerate(present)], np.uint64)
    sums = np.full(2 * y.numel(), np.nan, np.float32)
    neurons = np.array(chosen, np.int64)
    return int(add_bundles(y.numpy(), x.numpy(), gate_up.numpy(), neurons, addresses, scale.numpy(), sums))


@pytest.mark.parametrize("d_model", [2, 62, 576])
def test_it_is_the_definition(d_model: int) -> None:
    random = torch.Generator().manual_seed(d_model)
    x, y, gate_up = (torch.randn(n, generator=random) for n in (d_model, d_model, 2 * 50))
    chosen = [3, 7, 8, 30, 49]
    present = torch.tensor([True, False, True, True, True])
    # A stride of 64 as in a store; rows begin at a multiple of 4.
    records = torch.zeros(5, -(-bundle_bytes(d_model) // 64) * 64, dtype=torch.uint8)
    records[:, : bundle_bytes(d_model)] = bundles(5, d_model)
    scale = torch.rand(d_model, generator=random)
    there = torch.tensor(chosen)[present]
    kept = records[present, : bundle_bytes(d_model)]
    expected = y.double() + bundle_reference(x, gate_up[there], gate_up[50 + there], kept, scale)
    assert add(y, x, gate_up, chosen, records, present, scale) == 4
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)


def test_nothing_present_changes_nothing() -> None:
    y = torch.ones(64)
    added = add(y, torch.ones(64), torch.ones(20), [1, 2], bundles(2, 64), torch.tensor([False, False]), torch.ones(64))
    assert added == 0
    assert torch.equal(y, torch.ones(64))


def test_codes_that_are_the_residual_give_the_exact_neuron() -> None:
    random = torch.Generator().manual_seed(5)
    d_model, x = 32, torch.randn(32, generator=random)
    codes = torch.randint(-7, 8, (1, 4, d_model), generator=random, dtype=torch.int8)
    g, u = torch.tensor([0.4]), torch.tensor([-1.2])
    exact = codes.double()[0] * 0.125
    added = bundle_reference(x, g, u, pack_bundles(codes, torch.full((1, 3), 0.125)), torch.full((d_model,), 0.125))
    h = torch.nn.functional.silu(g.double()) * u.double()
    refined = torch.nn.functional.silu(g.double() + exact[0] @ x.double()) * (u.double() + exact[1] @ x.double())
    low_down = exact[3] - exact[2]
    torch.testing.assert_close(low_down * h + added, exact[3] * refined)


def test_scales_and_codes_lie_where_the_format_says() -> None:
    codes = torch.zeros(1, 4, 4, dtype=torch.int8)
    codes[0, 1] = torch.tensor([-7, 7, 0, 1])
    record = pack_bundles(codes, torch.tensor([[1.0, 2.0, 4.0]]))[0]
    assert record.numel() == bundle_bytes(4) == 20
    assert record[2:4].tolist() == [1 | 15 << 4, 8 | 9 << 4]
    assert record[8:].numpy().view("<f4").tolist() == [1.0, 2.0, 4.0]


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="even"):
        pack_bundles(torch.zeros(1, 4, 3, dtype=torch.int8), torch.zeros(1, 3))
