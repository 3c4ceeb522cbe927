"""Low-bit products: bytes against the definition, the portable path, and the CUDA source itself on an emulated warp."""

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from strataflux.kernels import lowbit_gemv, lowbit_gemv_stream
from strataflux.kernels.lowbit_gemv import (
    LowbitWeights,
    Plan,
    StreamPlan,
    block_plan,
    default_plan,
    gemv,
    gemv_reference,
    instance_name,
    pack_codebook,
    pack_scaled,
    unpack,
)
from strataflux.kernels.lowbit_gemv_stream import gemv_stream, shared_bytes, stream_instance
from tests.fakes.emulation import EmulatedKernels, emulated

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

SOURCE = Path(__file__).parents[2] / "kernels" / "lowbit_gemv.cu"

# rows, inputs, group, batch: odd numbers of rows, short strips, more than one strip, padding in both directions.
SHAPES = ((17, 128, 128, 1), (24, 320, 64, 2), (33, 512, 128, 1), (20, 64, 64, 5))


def scaled(bits: int, rows: int, inputs: int, group: int, device: torch.device) -> tuple[LowbitWeights, Tensor]:
    """Packed weights, and the float64 weights they stand for."""
    codes = torch.randint(0, 1 << bits, (rows, inputs), dtype=torch.uint8)
    scales = (torch.rand(rows, inputs // group) * 0.02 + 0.001).half()
    zeros = torch.randint(0, 1 << bits, scales.shape, dtype=torch.uint8)
    values = (codes.double().view(rows, -1, group) - zeros.double()[..., None]) * scales.double()[..., None]
    packed = pack_scaled(codes.to(device), scales.to(device), zeros.to(device), bits, group)
    return packed, values.view(rows, inputs)


def codebook(bits: int, rows: int, inputs: int, device: torch.device) -> tuple[LowbitWeights, Tensor]:
    codes = torch.randint(0, 1 << bits, (rows, inputs), dtype=torch.uint8)
    tables = torch.randn(rows, 1 << bits).half()
    return pack_codebook(codes.to(device), tables.to(device), bits), tables.double().gather(1, codes.long())


def close(found: Tensor, expected: Tensor) -> bool:
    """To float32's rounding of a sum; a NaN is never close."""
    return bool((found.double().cpu() - expected).norm() <= 1e-6 * expected.norm())


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_weights_are_the_weights(bits: int, shape: tuple[int, int, int, int], device: torch.device) -> None:
    rows, inputs, group, _ = shape
    packed, values = scaled(bits, rows, inputs, group, device)
    assert torch.equal(unpack(packed).cpu(), values)
    packed, values = codebook(bits, rows, inputs, device)
    assert torch.equal(unpack(packed).cpu(), values)


def test_size_is_what_the_format_says() -> None:
    packed, _ = scaled(3, 32, 512, 128, torch.device("cpu"))
    assert packed.bytes == 32 * 512 * 3 // 8 + 32 * 4 * 4
    packed, _ = codebook(4, 32, 512, torch.device("cpu"))
    assert packed.bytes == 32 * 512 // 2 + 32 * 32


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_portable_path(bits: int, shape: tuple[int, int, int, int], device: torch.device) -> None:
    rows, inputs, group, batch = shape
    x = torch.randn(batch, inputs).half()
    packed, values = scaled(bits, rows, inputs, group, device)
    y = torch.full((batch, rows), torch.nan, device=device)
    gemv(packed, x.to(device), y, path="triton")
    assert close(y, x.double() @ values.t())
    packed, values = codebook(bits, rows, inputs, device)
    y = torch.ones(batch, rows, device=device)
    gemv(packed, x.to(device), y, path="triton", add=True)
    assert close(y, 1 + x.double() @ values.t())


CASES = (
    # kind, bits, group, rows, inputs, batch, plan, add
    ("scaled", 4, 128, 33, 640, 1, Plan(1, 2, 2, ahead=1), False),
    ("scaled", 3, 64, 17, 576, 2, Plan(2, 2, 1), True),
    ("scaled", 2, 128, 20, 256, 9, Plan(1, 1, 1), False),
    ("codebook", 4, 0, 33, 264, 1, Plan(1, 2, 1), True),
    ("codebook", 3, 0, 40, 520, 16, Plan(2, 1, 2), False),
    ("codebook", 2, 0, 16, 768, 3, Plan(1, 2, 1, ahead=32), False),
)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the CUDA source for the host with")
@pytest.mark.parametrize("case", CASES)
def test_cuda_source_on_an_emulated_warp(case: tuple[str, int, int, int, int, int, Plan, bool], tmp_path: Path) -> None:
    kind, bits, group, rows, inputs, batch, plan, add = case
    host = torch.device("cpu")
    make = scaled(bits, rows, inputs, group, host) if kind == "scaled" else codebook(bits, rows, inputs, host)
    packed, values = make
    x = torch.randn(batch, inputs).half()
    y = torch.full((batch, rows), 1.0 if add else torch.nan)
    tiles, strips = packed.words.shape[:2]
    library = emulated(
        SOURCE,
        f"""extern "C" void run(const uint4* words, const uint4* meta, const u16* x, float* y) {{
          run_blocks({tiles // plan.tiles}, {32 * plan.warps}, [=] {{
            {instance_name(packed, plan, batch, add=add)}(
              words, meta, x, y, {rows}, {inputs}, {strips}, {batch}, {plan.ahead}, 0, 0, 0);
          }});
        }}""",
        tmp_path,
    )
    library.run(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in (packed.words, packed.meta, x, y)))
    assert close(y, x.double() @ values.t() + int(add))


STREAMS = (
    # bits, group, rows, inputs, blocks, plan, add: odd strips, padding in both directions, blocks of unequal work
    (4, 128, 49, 640, 3, StreamPlan(2, 3), False),
    (4, 64, 17, 576, 1, StreamPlan(3, 1), True),
    (3, 64, 33, 320, 2, StreamPlan(1, 4, ahead=32), False),
    (3, 128, 80, 512, 5, StreamPlan(2, 2), False),
    (2, 128, 64, 1024, 2, StreamPlan(4, 4, ahead=3), True),
    (4, 0, 90, 520, 2, StreamPlan(2, 2), False),
    (3, 0, 49, 1280, 2, StreamPlan(2, 3, ahead=2), True),
    (2, 0, 100, 256, 1, StreamPlan(1, 3), False),
)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the CUDA source for the host with")
@pytest.mark.parametrize("case", STREAMS)
def test_streamed_source_on_an_emulated_block(
    case: tuple[int, int, int, int, int, StreamPlan, bool], tmp_path: Path
) -> None:
    bits, group, rows, inputs, blocks, plan, add = case
    host = torch.device("cpu")
    packed, values = scaled(bits, rows, inputs, group, host) if group else codebook(bits, rows, inputs, host)
    x = torch.randn(1, inputs).half()
    y = torch.full((1, rows), 1.0 if add else torch.nan)
    tiles, strips = packed.words.shape[:2]
    assert shared_bytes(packed, plan, blocks) <= 16 * 16384  # what the emulation has
    library = emulated(
        SOURCE.with_name("lowbit_gemv_stream.cu"),
        f"""extern "C" void run(const uint4* words, const uint4* meta, const u16* x, float* y) {{
          run_blocks({blocks}, {32 * plan.warps}, [=] {{
            {stream_instance(packed, plan, add=add)}(
              words, meta, x, y, {rows}, {inputs}, {strips}, {tiles}, {blocks}, {plan.ahead});
          }});
        }}""",
        tmp_path,
    )
    library.run(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in (packed.words, packed.meta, x, y)))
    assert close(y, x.double() @ values.t() + int(add))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the CUDA source for the host with")
def test_a_stream_is_launched_over_the_multiprocessors_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, values = scaled(3, 100, 768, 128, torch.device("cpu"))
    plan, source = StreamPlan(3, 2, share=2, ahead=1), SOURCE.with_name("lowbit_gemv_stream.cu")
    kernels = EmulatedKernels(source, [stream_instance(packed, plan, add=True)], tmp_path)
    monkeypatch.setattr(lowbit_gemv_stream, "load_function", kernels)
    monkeypatch.setattr(lowbit_gemv_stream, "multiprocessors", lambda _: 2)
    monkeypatch.setattr(lowbit_gemv_stream, "device_capability", lambda _: (9, 0))
    monkeypatch.setattr(lowbit_gemv_stream, "device_attribute", lambda *_: 100_000)
    x, y = torch.randn(1, 768).half(), torch.ones(1, 100)
    gemv(packed, x, y, add=True, plan=plan, path="cuda")
    assert close(y, 1 + x.double() @ values.t())


def test_what_shared_memory_does_not_hold_goes_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = scaled(4, 32, 512, 128, torch.device("cpu"))
    launched: list[Plan] = []
    monkeypatch.setattr(lowbit_gemv_stream, "multiprocessors", lambda _: 2)
    monkeypatch.setattr(lowbit_gemv, "_launch", lambda *arguments: launched.append(arguments[4]))
    wanted = shared_bytes(packed, StreamPlan(2, 2), 2)
    for has in (wanted, wanted - 1):
        monkeypatch.setattr(lowbit_gemv_stream, "device_attribute", lambda *_, has=has: has)
        assert lowbit_gemv_stream.fits(packed, StreamPlan(2, 2), 0) == (has == wanted)
    gemv(packed, torch.zeros(1, 512).half(), torch.zeros(1, 32), plan=StreamPlan(2, 2), path="cuda")
    assert launched == [block_plan(packed)]


@pytest.mark.parametrize(("batch", "warps"), [(2, 1), (1, 3)])
def test_streams_are_refused_where_there_is_no_kernel(batch: int, warps: int) -> None:
    packed, _ = scaled(4, 32, 512, 128, torch.device("cpu"))
    x, y = torch.zeros(batch, 512).half(), torch.zeros(batch, 32)
    with pytest.raises(ValueError, match="one input and no more warps than strips"):
        gemv_stream(packed, x, y, add=False, plan=StreamPlan(warps, 2))


def test_reference_is_the_definition() -> None:
    packed, values = scaled(3, 24, 192, 64, torch.device("cpu"))
    x = torch.randn(3, 192).half()
    assert torch.equal(gemv_reference(packed, x), x.double() @ values.t())


@pytest.mark.parametrize(
    ("rows", "inputs", "bits", "group", "message"),
    [
        (8, 256, 5, 128, "codes of 5 bits"),
        (8, 256, 4, 32, "groups of 32"),
        (8, 192, 4, 128, "groups of 128 in 192"),
        (8, 12, 4, 64, "12 inputs"),
    ],
)
def test_what_has_no_kernel_is_refused(rows: int, inputs: int, bits: int, group: int, message: str) -> None:
    codes = torch.zeros(rows, inputs, dtype=torch.uint8)
    pairs = torch.zeros(rows, max(1, inputs // group))
    with pytest.raises(ValueError, match=message):
        pack_scaled(codes, pairs.half(), pairs.byte(), bits, group)


@pytest.mark.parametrize(
    ("rows", "inputs", "bits", "group", "batch", "plan"),
    [
        (28672, 4096, 4, 128, 2, Plan(2, 4, 1)),
        (6144, 4096, 3, 128, 16, Plan(2, 8, 1)),
        (28672, 4096, 4, 128, 1, StreamPlan(16, 2)),
        (64, 576, 3, 64, 1, StreamPlan(2, 2)),
        (4096, 14336, 3, 0, 1, StreamPlan(16, 2)),
        (4096, 14336, 2, 0, 2, Plan(2, 16, 1)),
        (28672, 4096, 4, 0, 1, Plan(1, 4, 2)),
        (6144, 4096, 4, 0, 1, Plan(1, 4, 4)),
        (4096, 4096, 4, 0, 1, Plan(1, 8, 2)),
        (64, 576, 4, 64, 2, Plan(2, 2, 1)),
    ],
)
def test_plans_are_what_was_measured(
    rows: int, inputs: int, bits: int, group: int, batch: int, plan: Plan | StreamPlan
) -> None:
    words = torch.empty(2 * -(-rows // 32), -(-inputs // 256), bits, 32, 4, dtype=torch.int32, device="meta")
    assert default_plan(LowbitWeights(words, words, rows, inputs, bits, group), batch) == plan


def test_operands_are_checked() -> None:
    packed, _ = scaled(4, 32, 128, 128, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"expected \[batch, 128\]"):
        gemv(packed, torch.zeros(17, 128).half(), torch.zeros(17, 32))
    with pytest.raises(ValueError, match="expected contiguous float16 and float32"):
        gemv(packed, torch.zeros(1, 128), torch.zeros(1, 32))
