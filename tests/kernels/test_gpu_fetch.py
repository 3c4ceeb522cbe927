"""Fetching ahead: what refines from the staging area gives what refining in place gives."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.kernels.gpu.fetch import Staging, fetch
from strataflux.kernels.gpu.refine import RefinePlan, refine
from strataflux.kernels.refine import pack_records, record_bytes
from tests.fakes.gpu_side import Side
from tests.kernels.test_gpu_refine import place

WIDTH = 1500


@pytest.fixture
def side(device: torch.device) -> Iterator[Side]:
    made = Side(16, device)
    yield made
    made.close()


@pytest.mark.parametrize(("outputs", "programs"), [(256, 64), (77, 1), (9000, 3)])
def test_refining_what_was_fetched_is_refining_in_place(side: Side, outputs: int, programs: int) -> None:
    staging = Staging(16, WIDTH, record_bytes(outputs), side.device)
    selection, count = staging.selection, staging.selection.channels.numel()
    selection.channels.copy_(torch.randperm(WIDTH)[:count])
    records = pack_records(torch.randint(-7, 8, (outputs, count), dtype=torch.int8))
    place(side, records, selection, torch.rand(count) > 0.3)
    staging.fetched.addresses.fill_(1)  # of an earlier step: an absent record must not keep it
    fetch(staging, programs)
    assert torch.equal(staging.fetched.addresses != 0, selection.addresses != 0)

    x, scale = torch.randn(WIDTH, device=side.device), torch.rand(outputs, device=side.device)
    in_place, staged = torch.zeros(2, outputs, device=side.device)
    refine(in_place, x, selection, scale, RefinePlan(programs))
    refine(staged, x, staging.fetched, scale, RefinePlan(programs))
    assert in_place.any()
    assert torch.equal(staged, in_place)
