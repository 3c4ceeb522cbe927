"""Errands beside a product: what is fetched and added is what the definition adds, however blocks share the work."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.kernels.gpu.errands import Add, Errands, Fetch, Select
from strataflux.kernels.gpu.fetch import Staging
from strataflux.kernels.gpu.select import Selection
from strataflux.kernels.refine import pack_records, record_bytes
from tests.fakes.errands import run_beside
from tests.fakes.gpu_side import Side
from tests.kernels.test_gpu_refine import place

Run = Callable[[Errands, int], None]


@pytest.fixture
def side(device: torch.device) -> Iterator[Side]:
    made = Side(16, device)
    yield made
    made.close()


@pytest.fixture(params=["launches of their own", 32, 128, 512])
def run(request: pytest.FixtureRequest) -> Run:
    """Errands on one path; the fast one with that much room."""
    if isinstance(request.param, str):
        return lambda errands, _: errands.run()

    def library() -> ctypes.CDLL:
        found: Any = request.getfixturevalue("errand_library")
        assert isinstance(found, ctypes.CDLL)
        return found

    return lambda errands, room: run_beside(errands, request.param, library, room)


@pytest.mark.parametrize(
    ("outputs", "k", "room"), [(256, 16, 72), (1000, 16, 2), (77, 20, 72), (4104, 200, 72), (2048, 1, 1)]
)
def test_fetched_and_added_it_is_the_definition(side: Side, run: Run, outputs: int, k: int, room: int) -> None:
    width = 1500
    staging = Staging(k, width, record_bytes(outputs), side.device)
    count = staging.selection.channels.numel()
    channels, present = torch.randperm(width)[:count], torch.rand(count) > 0.3
    staging.selection.channels.copy_(channels)
    distinct = min(count, 100)  # of records; the others are found in the same slots
    codes = torch.randint(-7, 8, (outputs, distinct), dtype=torch.int8)
    of_slots = Selection(distinct, 1024, side.device)
    place(side, pack_records(codes), of_slots, torch.ones(distinct, dtype=torch.bool))
    which = torch.arange(count) % distinct
    staging.selection.addresses.copy_(torch.where(present, of_slots.addresses.cpu()[which], 0))
    staging.rows.fill_(0x37373737)  # of an earlier step

    x, scale, y = torch.randn(width).half(), torch.rand(outputs) * 0.01, torch.randn(outputs)
    used = codes[:, which[present]].double() @ x[channels[present]].double()
    expected = y.double() + scale.double() * used
    x[channels[~present]] = torch.inf  # an absent record's input does nothing
    cut = staging.pieces // 3
    parts = (
        [Fetch(staging, 0, cut), Fetch(staging, cut, staging.pieces)] if cut else [Fetch(staging, 0, staging.pieces)]
    )
    for part in parts:
        run(Errands([part]), room)
    found = y.to(side.device)
    run(Errands([Add(x.to(side.device), staging, scale.to(side.device), found)]), room)
    assert (found.double().cpu() - expected).norm() <= 1e-6 * expected.norm()


def test_errands_of_one_launch_share_its_blocks(side: Side, run: Run) -> None:
    """Three sets' errands at once, with room for each and with less."""
    for room in (72, 3):
        stagings, errands, expected, sums = [], [], [], []
        for outputs in (256, 700, 1030):
            staging = Staging(8, 1024, record_bytes(outputs), side.device)
            codes = torch.randint(-7, 8, (outputs, 8), dtype=torch.int8)
            place(side, pack_records(codes), staging.selection, torch.ones(8, dtype=torch.bool))
            staging.selection.channels.copy_(torch.arange(8))
            run(Errands([Fetch(staging, 0, staging.pieces)]), room)  # before the next one's records take the slots
            x, y = torch.randn(1024).half(), torch.zeros(outputs, device=side.device)
            expected.append(codes.float() @ x[:8].float())
            errands.append(Add(x.to(side.device), staging, torch.ones_like(y), y))
            stagings.append(staging)
            sums.append(y)
        run(Errands(errands), room)
        for found, right in zip(sums, expected, strict=True):
            assert torch.allclose(found.cpu(), right, rtol=1e-5, atol=1e-4)


def test_a_table_is_for_one_layout(device: torch.device) -> None:
    staging = Staging(8, 1024, 64, device)
    errands = Errands([Fetch(staging, 0, staging.pieces)])
    table, blocks = errands.table(128, 4, device)
    assert blocks == 4
    assert errands.table(128, 4, device)[0] is table
    with pytest.raises(ValueError, match=r"laid out for \(128, 4\)"):
        errands.table(256, 4, device)


def test_operands_are_checked(device: torch.device) -> None:
    staging, x = Staging(8, 1024, 64, device), torch.zeros(1024, device=device)
    with pytest.raises(ValueError, match="pieces 3 to 3"):
        Fetch(staging, 3, 3)
    with pytest.raises(ValueError, match="expected float16"):
        Add(x, staging, x, x)
    with pytest.raises(ValueError, match=r"expected \[1024\] torch.float16"):
        Select(x, None, x, x, staging.selection, 0, 0)
