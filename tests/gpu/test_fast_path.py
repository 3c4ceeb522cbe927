"""What only a GPU can show: the compiled CUDA instances, launches in a captured graph, registered host memory."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.kernels.cuda_build import CudaError, cuda_available
from strataflux.kernels.gpu.errands import Errands, Fetch
from strataflux.kernels.gpu.fetch import Staging
from strataflux.kernels.gpu.host_memory import Access, HostRegistration
from strataflux.kernels.lowbit_gemv import (
    LowbitWeights,
    Plan,
    StreamPlan,
    gemv,
    gemv_reference,
    pack_codebook,
    pack_scaled,
)
from strataflux.proto.segment import create, map_descriptor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_available(), reason="no CUDA device, or no cuda.bindings")]

PLANS = (None, Plan(1, 4, 1), Plan(2, 8, 2), Plan(1, 16, 1, early=False))


def weights(kind: str, bits: int, rows: int, inputs: int) -> LowbitWeights:
    codes = torch.randint(0, 1 << bits, (rows, inputs), dtype=torch.uint8)
    if kind == "codebook":
        return pack_codebook(codes.cuda(), torch.randn(rows, 1 << bits).half().cuda(), bits)
    scales = (torch.rand(rows, inputs // 64) * 0.01 + 0.001).half()
    zeros = torch.randint(0, 1 << bits, scales.shape, dtype=torch.uint8)
    return pack_scaled(codes.cuda(), scales.cuda(), zeros.cuda(), bits, 64)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["scaled", "codebook"])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("rows", "inputs", "batch"), [(1000, 1088, 1), (129, 576, 7), (64, 4096, 16)])
def test_fast_path_is_the_reference(
    rows: int, inputs: int, batch: int, bits: int, kind: str, plan: Plan | None
) -> None:
    packed = weights(kind, bits, rows, inputs)
    x = torch.randn(batch, inputs).half().cuda()
    y = torch.full((batch, rows), torch.nan, device="cuda")
    gemv(packed, x, y, path="cuda", plan=plan)
    expected = gemv_reference(packed, x)
    assert (y - expected).norm() <= 1e-5 * expected.norm()
    again = torch.full_like(y, torch.nan)
    gemv(packed, x, again, path="cuda", plan=plan)
    assert torch.equal(again, y)


@pytest.mark.parametrize(
    "plan", [StreamPlan(), StreamPlan(4, 6, 2, ahead=9), StreamPlan(16, 3), StreamPlan(2, 1, early=False)]
)
@pytest.mark.parametrize("kind", ["scaled", "codebook"])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("rows", "inputs"), [(1000, 4160), (129, 4096), (4096, 14336)])
def test_streams_are_the_reference_with_errands_or_without(
    rows: int, inputs: int, bits: int, kind: str, plan: StreamPlan
) -> None:
    packed = weights(kind, bits, rows, inputs)
    x = torch.randn(1, inputs).half().cuda()
    expected = gemv_reference(packed, x)
    staging, records = Staging(20, 1024, 2000, x.device), torch.randint(0, 99, (20, 512), dtype=torch.int32).cuda()
    staging.selection.addresses[:] = torch.tensor([record.data_ptr() for record in records])
    found = []
    for errands in (None, Errands([Fetch(staging, 0, staging.pieces)]), None):
        y = torch.full((1, rows), torch.nan, device="cuda")
        gemv(packed, x, y, plan=plan, errands=errands)
        assert (y - expected).norm() <= 1e-5 * expected.norm()
        found.append(y)
    assert torch.equal(found[0], found[2])  # beside errands nothing streams: sums of another order
    assert torch.equal(staging.rows[:, :500], records[:, :500])
    gemv(packed, x, y, plan=plan, add=True)
    assert (y - 2 * expected).norm() <= 2e-5 * expected.norm()


def test_a_captured_chain_sees_what_came_before() -> None:
    """Products that start early read inputs that the product before them wrote."""
    packed = [weights("scaled", 4, 4096, 4096) for _ in range(6)]
    x = torch.randn(1, 4096).half().cuda()
    states = [x, *(torch.zeros_like(x) for _ in packed)]
    y = torch.zeros(1, 4096, device="cuda")

    def chain() -> None:
        for i, layer in enumerate(packed):
            gemv(layer, states[i], y, path="cuda")
            states[i + 1].copy_(y / y.norm() * 64)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        chain()
    for _ in range(50):
        x.copy_(torch.randn(1, 4096))
        graph.replay()
        expected = x.double()
        for layer, state in zip(packed, states[1:], strict=True):
            expected = gemv_reference(layer, expected)
            expected = (expected / expected.norm() * 64).half().double()
            assert (state.double() - expected).norm() <= 2e-3 * expected.norm()
            expected = state.double()


def test_read_only_memory_is_registered_read_only() -> None:
    torch.zeros(1, device="cuda")
    owner = create("gpu-test", 1 << 20, reserve=False)
    client = map_descriptor(owner.read_only_descriptor(), 1 << 20, writable=False)
    registration = HostRegistration(client.address, client.size, writable=False)
    assert registration.access in (Access.REGISTERED_READ_ONLY, Access.PAGEABLE)
    registration.close()
    registration.close()
    client.close()
    owner.close()


def test_an_instance_that_does_not_exist_says_so() -> None:
    packed = weights("scaled", 4, 32, 256)
    x, y = torch.zeros(1, 256).half().cuda(), torch.zeros(1, 32).cuda()
    with pytest.raises(CudaError, match="did not compile"):
        gemv(packed, x, y, path="cuda", plan=Plan(1, 0, 1))
