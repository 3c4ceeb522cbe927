"""Neuron bundles on the device against their definition."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.kernels.gpu.bundle import bundle_reference, bundle_scratch, record_bytes, refine_bundles
from strataflux.kernels.gpu.select import Selection
from strataflux.proto import layout
from tests.fakes.gpu_side import Side


def make_records(count: int, d_model: int) -> torch.Tensor:
    """[count, record_bytes] of random codes and scales; no nibble is 0, as in a store."""
    nibbles = torch.randint(1, 16, (count, 2 * d_model, 2), dtype=torch.uint8)
    scales = torch.rand(count, 3) * 0.01 + 0.001
    return torch.cat((nibbles[..., 0] | nibbles[..., 1] << 4, scales.view(torch.uint8).view(count, 12)), dim=1)


@pytest.mark.parametrize(("d_model", "neurons", "k"), [(64, 1024, 12), (264, 1400, 8), (2304, 300, 16)])
def test_it_is_the_definition(d_model: int, neurons: int, k: int, device: torch.device) -> None:
    side = Side(16, device)
    selection = Selection(k, neurons, device)
    count = selection.channels.numel()
    chosen = torch.randperm(neurons)[:count]
    present = torch.rand(count) > 0.3
    records = make_records(count, d_model)
    stride = layout.slot_bytes(record_bytes(d_model))
    addresses = torch.zeros(count, dtype=torch.int64)
    for i, record in enumerate(records):
        side.slots[i * stride : i * stride + record.numel()] = record.numpy()
        addresses[i] = side.slots.ctypes.data + i * stride
    selection.channels.copy_(chosen)
    selection.addresses.copy_(torch.where(present, addresses, 0))
    x, g, u, y = torch.randn(d_model), torch.randn(neurons), torch.randn(neurons), torch.randn(d_model)
    scale = torch.rand(d_model) * 0.01
    kept = chosen[present]
    expected = y.double() + bundle_reference(x, g[kept], u[kept], records[present], scale)
    found = y.to(device)
    there = x.to(device), g.to(device), u.to(device)
    refine_bundles(found, there[0], there[1], there[2], selection, scale.to(device), bundle_scratch(selection))
    assert (found.double().cpu() - expected).norm() <= 2e-6 * expected.norm()
    side.close()


def test_exact_residuals_give_the_exact_neuron() -> None:
    """With codes that stand for the residual itself the neuron's output becomes that of the unquantized weights."""
    d_model = 64
    residual = torch.randint(-7, 8, (3, d_model)).double()
    copy = torch.randint(-7, 8, (d_model,)).double()
    nibbles = (torch.cat((residual, copy[None])).to(torch.uint8) + 8).view(-1, 2)
    scales = torch.tensor([0.01, 0.02, 0.03])
    record = torch.cat((nibbles[:, 0] | nibbles[:, 1] << 4, scales.view(torch.uint8))).unsqueeze(0)
    base = torch.randn(3, d_model, dtype=torch.float64)
    x, down_scale = torch.randn(d_model, dtype=torch.float64), torch.full((d_model,), 0.03)
    whole = base[:2] + residual[:2] * scales[:2, None].double()
    # The resident down column is the copy less its residual.
    down = scales[2].double() * copy - down_scale.double() * residual[2]
    g, u = (base[:2] @ x).unbind()
    h = torch.nn.functional.silu(g) * u
    exact = torch.nn.functional.silu(whole[0] @ x) * (whole[1] @ x) * scales[2].double() * copy
    added = bundle_reference(x, g[None], u[None], record, down_scale)
    assert torch.allclose(down * h + added, exact, rtol=1e-6, atol=1e-9)


def test_what_has_no_kernel_is_refused(device: torch.device) -> None:
    selection = Selection(4, 1024, device)
    x, wide = torch.zeros(12), torch.zeros(1024)
    with pytest.raises(ValueError, match="multiple of 8"):
        refine_bundles(x, x, wide, wide, selection, x, bundle_scratch(selection))
    with pytest.raises(ValueError, match=r"\[1024\] twice"):
        refine_bundles(wide, wide, x, wide, selection, wide, bundle_scratch(selection))
