"""Refinement from slots against its reference: odd widths, absent records, every way to spread the work."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.kernels.gpu.refine import RefinePlan, refine
from strataflux.kernels.gpu.select import Selection
from strataflux.kernels.refine import pack_records
from strataflux.proto import layout
from tests.fakes.gpu_side import Side


@pytest.fixture
def side(device: torch.device) -> Iterator[Side]:
    made = Side(16, device)
    yield made
    made.close()


def place(side: Side, records: torch.Tensor, selection: Selection, present: torch.Tensor) -> None:
    """Lay records into slots, and list the present ones; an absent record's address is 0."""
    stride = layout.slot_bytes(records.shape[1])
    addresses = torch.zeros(records.shape[0], dtype=torch.int64)
    for i, record in enumerate(records):
        side.slots[i * stride : i * stride + record.numel()] = record.numpy()
        side.slots[i * stride + record.numel() : (i + 1) * stride] = 0xEE  # what follows a record must not count
        addresses[i] = side.slots.ctypes.data + i * stride
    selection.addresses.copy_(torch.where(present, addresses, 0))


@pytest.mark.parametrize(
    ("outputs", "k", "plan"),
    [
        (256, 16, RefinePlan(programs=64)),
        (1000, 16, RefinePlan(programs=3, rows=8, words=16)),
        (77, 20, RefinePlan(programs=1, rows=16, words=32)),
        (520, 24, RefinePlan(programs=64, rows=4, words=32, split=3)),
        (2048, 1, RefinePlan(programs=2, rows=32, words=64)),
    ],
)
def test_it_is_the_reference(side: Side, outputs: int, k: int, plan: RefinePlan) -> None:
    width = 1500
    selection = Selection(k, width, side.device)
    count = selection.channels.numel()
    channels = torch.randperm(width)[:count]
    selection.channels.copy_(channels)
    present = torch.rand(count) > 0.3
    codes = torch.randint(-7, 8, (outputs, count), dtype=torch.int8)
    records = pack_records(codes)
    place(side, records, selection, present)
    x, scale, y = torch.randn(width), torch.rand(outputs) * 0.01, torch.randn(outputs)
    expected = y.double() + scale.double() * (codes[:, present].double() @ x[channels[present]].double())

    x[channels[~present]] = torch.inf  # an absent record's input does nothing
    found = y.to(side.device)
    refine(found, x.to(side.device), selection, scale.to(side.device), plan)
    assert (found.double().cpu() - expected).norm() <= 1e-6 * expected.norm()
    if plan.split == 1:
        again = y.to(side.device)
        refine(again, x.to(side.device), selection, scale.to(side.device), plan)
        assert torch.equal(again, found)


def test_nothing_present_changes_nothing(side: Side) -> None:
    selection = Selection(16, 1024, side.device)
    y = torch.randn(100, device=side.device)
    before = y.clone()
    refine(y, torch.full((1024,), torch.nan, device=side.device), selection, torch.ones_like(y), RefinePlan(8))
    assert torch.equal(y, before)


def test_shapes_are_checked(device: torch.device) -> None:
    selection = Selection(16, 1024, device)
    with pytest.raises(ValueError, match=r"expected \[1024\] and twice"):
        refine(torch.zeros(10), torch.zeros(1024), selection, torch.zeros(9), RefinePlan(8))
