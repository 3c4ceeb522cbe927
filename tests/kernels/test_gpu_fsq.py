"""Attention to discrete codes against the definition in float64: on a Hopper GPU, else on emulated blocks."""

import ctypes
import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.kernels.fsq import FsqGrid
from strataflux.kernels.gpu.fsq_attend import (
    FsqPlan,
    default_plan,
    fsq_attend,
    has_fsq_path,
    join_instance,
    mix_instance,
    scores_instance,
    shared_bytes,
)
from strataflux.kernels.gpu.fsq_decoder import FsqDecoder, RebuildKind
from strataflux.kernels.gpu.fsq_merge import fsq_merge
from strataflux.kernels.gpu.fsq_work import FsqWork
from tests.fakes.emulation import emulated
from tests.fakes.fsq_device import FsqCase, make_fsq_case, random_heads

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "kernels" / "gpu" / "fsq_attend.cu"
CASES: list[tuple[RebuildKind, int, tuple[int, ...], int, int, int, bool, int, int]] = [
    # kind, width, lengths, KV heads, query heads for each, head size, keys normed, shares of a head, stages
    ("half", 84, (65, 1), 2, 2, 64, True, 1, 1),
    ("int8", 84, (200,), 2, 3, 64, True, 1, 2),
    ("fp8", 84, (64,), 1, 1, 64, True, 1, 2),
    ("half", 21, (63,), 3, 8, 64, False, 1, 2),
    ("int8", 70, (130, 300), 1, 4, 128, True, 1, 2),
    ("half", 256, (129,), 1, 2, 128, False, 1, 2),
    ("half", 40, (70, 129), 2, 3, 128, True, 2, 2),
    ("int8", 40, (64,), 1, 1, 128, False, 2, 2),
    ("fp8", 128, (70,), 1, 5, 128, True, 1, 2),
    ("fp8", 21, (900,), 1, 2, 64, False, 1, 1),
    ("fp8", 20, (1500,), 1, 2, 64, True, 1, 2),
]
BOUNDS = {"half": 2e-3, "int8": 2e-2, "fp8": 6e-2}
"""Relative errors: float16 keys; weights of the decoder rounded to 127ths of their row's largest, and to three bits."""

Launch = Callable[[FsqCase, FsqDecoder, FsqWork, FsqPlan], None]


def _work(case: FsqCase, shares: int = 1, score_splits: int | None = None, mix_splits: int | None = None) -> FsqWork:
    batch, heads, _ = case.queries.shape
    sizes, device = (case.heads.grid, case.codes.shape[1]), case.queries.device
    return FsqWork(batch, heads, *sizes, device, shares=shares, score_splits=score_splits, mix_splits=mix_splits)


def _run_name(instance: str) -> str:
    return "run_" + re.sub(r"\W+", "_", instance)


def _case_of(numbers: tuple[Any, ...], device: torch.device) -> FsqCase:
    _, width, lengths, kv_heads, group, d, normed, _, _ = numbers
    return make_fsq_case(FsqGrid.uniform(width, 16), lengths, kv_heads, group, d, normed, device)


def _prepared(case: FsqCase, numbers: tuple[Any, ...]) -> tuple[FsqDecoder, FsqWork, FsqPlan]:
    kind, shares, stages = numbers[0], *numbers[-2:]
    decoder = FsqDecoder(case.heads, case.codes.shape[1], case.queries.device, kind, shares)
    work = _work(case, shares)
    return decoder, work, default_plan(decoder, work.heads)._replace(stages=stages)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The CUDA source with each case's instances, for the host."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the CUDA source for the host with")
    runs: dict[str, str] = {}
    for numbers in CASES:
        case = _case_of(numbers, torch.device("cpu"))
        decoder, work, plan = _prepared(case, numbers)
        scores = scores_instance(decoder, work, plan)
        kinds = ((scores, 11, 3), (join_instance(decoder, work), 5, 2), (mix_instance(work), 6, 3))
        runs |= {name: _run(name, pointers, sizes) for name, pointers, sizes in kinds}
    mix = f'#include "{SOURCE.with_name("fsq_mix.cu")}"\n'
    pointer = "struct Pointer { void* to; template <typename T> operator T*() const { return (T*)to; } };\n"
    folder = tmp_path_factory.mktemp("fsq")
    return emulated(SOURCE, mix + pointer + "\n".join(runs.values()), folder, HERE / "fsq_emulation.h")


def _run(instance: str, pointers: int, sizes: int) -> str:
    declared = "".join(f", void* p{i}" for i in range(pointers)) + "".join(f", int s{i}" for i in range(sizes))
    given = ", ".join([*(f"Pointer{{p{i}}}" for i in range(pointers)), *(f"s{i}" for i in range(sizes))])
    return (
        f'extern "C" void {_run_name(instance)}(int blocks, int threads{declared}) '
        f"{{ run_blocks(blocks, threads, [=] {{ {instance}({given}); }}); }}"
    )


def _on_emulation(library: ctypes.CDLL) -> Launch:
    def launch(case: FsqCase, decoder: FsqDecoder, work: FsqWork, plan: FsqPlan) -> None:
        images, kv_heads = len(decoder.images), case.heads.kv_heads
        splits = work.score_splits(images)
        assert max(shared_bytes(decoder, work.heads, plan), work.mix_shared) <= 16384 * 16

        def run(instance: str, blocks: int, threads: int, *given: Tensor | int) -> None:
            values = [ctypes.c_void_p(v.data_ptr()) if isinstance(v, Tensor) else v for v in given]
            library[_run_name(instance)](blocks, threads, *values)

        prepared = (decoder.images, decoder.affine, decoder.scalars, decoder.base, decoder.eighth, decoder.inner)
        left = (work.scores if decoder.shares == 1 else work.sums, work.squares)
        sizes = (kv_heads, splits, work.blocks)
        instance = scores_instance(decoder, work, plan)
        run(
            instance,
            work.batch * splits * images,
            128 * plan.teams,
            case.codes,
            *prepared,
            case.queries,
            case.lengths,
            *left,
            *sizes,
        )
        if decoder.shares > 1:
            blocks = work.batch * work.heads * -(-work.blocks // 4)
            joined = (work.sums, work.squares, decoder.scalars, case.lengths, work.scores)
            run(join_instance(decoder, work), blocks, 256, *joined, kv_heads, work.blocks)
        tensors = (case.codes, work.scores, case.lengths, work.parts)
        sizes = (work.heads, work.mix_splits, work.blocks)
        run(mix_instance(work), work.mix_blocks, work.mix_threads, *tensors, work.tops, work.totals, *sizes)

    return launch


@pytest.fixture
def launch(request: pytest.FixtureRequest, device: torch.device) -> Launch:
    """The kernels on the GPU, or what stands for them here."""
    if device.type == "cuda":
        if not has_fsq_path(torch.empty(1, device=device)):
            pytest.skip("no GPU of compute capability 9.0")
        return lambda case, decoder, work, plan: fsq_attend(case.queries, case.codes, case.lengths, decoder, work, plan)
    return _on_emulation(request.getfixturevalue("library"))


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("numbers", CASES, ids=lambda numbers: "-".join(map(str, numbers)))
def test_outputs_are_those_of_rebuilt_keys_and_values(
    numbers: tuple[Any, ...], launch: Launch, device: torch.device
) -> None:
    case = _case_of(numbers, device)
    decoder, work, plan = _prepared(case, numbers)
    out = torch.full(case.queries.shape, torch.nan, device=device)
    launch(case, decoder, work, plan)
    fsq_merge(work, decoder.values, out)
    assert _relative(out, case.exactly()) < BOUNDS[numbers[0]]


def test_rows_and_biases_of_any_size_fit_fp8(launch: Launch, device: torch.device) -> None:
    case = _case_of(CASES[2], device)
    keys, bias = case.heads.key_decoder.clone(), case.heads.key_bias.clone()
    keys[:, 3] *= 1000
    keys[:, 5] = keys[:, 5].abs() * 300  # all of one sign: its levels' centre is far from zero
    bias[:, 7] += 20000
    case = case._replace(heads=dataclasses.replace(case.heads, key_decoder=keys, key_bias=bias))
    decoder, work, plan = _prepared(case, CASES[2])
    out = torch.full(case.queries.shape, torch.nan, device=device)
    launch(case, decoder, work, plan)
    fsq_merge(work, decoder.values, out)
    assert _relative(out, case.exactly()) < BOUNDS["fp8"]


@pytest.mark.parametrize(("score_splits", "mix_splits"), [(1, 1), (2, 5), (5, 3)])
def test_splits_change_nothing(score_splits: int, mix_splits: int, launch: Launch, device: torch.device) -> None:
    case = _case_of(CASES[4], device)
    decoder = FsqDecoder(case.heads, case.codes.shape[1], device, "int8")
    outs = []
    for work in (_work(case), _work(case, 1, score_splits, mix_splits)):
        outs.append(torch.full(case.queries.shape, torch.nan, device=device))
        launch(case, decoder, work, default_plan(decoder, work.heads))
        fsq_merge(work, decoder.values, outs[-1])
    assert _relative(outs[1], outs[0].double()) < 1e-3  # weights are rounded relative to other maxima


def test_stages_are_used_again(launch: Launch, device: torch.device) -> None:
    numbers = CASES[10]
    case = _case_of((*numbers[:2], (2400,), *numbers[3:]), device)
    decoder, _, plan = _prepared(case, numbers)
    work = _work(case, 1, 1, 1)
    assert case.codes.shape[1] > 2 * max(work.turns * work.stages, plan.teams * plan.stages)
    out = torch.full(case.queries.shape, torch.nan, device=device)
    launch(case, decoder, work, plan)
    fsq_merge(work, decoder.values, out)
    assert _relative(out, case.exactly()) < BOUNDS[numbers[0]]


@pytest.mark.parametrize(
    ("kind", "width", "heads", "plan"),
    [("fp8", 160, 2, (4, 1)), ("fp8", 292, 2, (4, 2)), ("fp8", 293, 2, (3, 2)), ("int8", 84, 2, (3, 2)),
     ("half", 682, 2, (2, 1)), ("half", 682, 8, (1, 2))],
)  # fmt: skip
def test_a_plan_is_what_fits_and_was_fastest(kind: RebuildKind, width: int, heads: int, plan: tuple[int, int]) -> None:
    cpu = torch.device("cpu")
    made = random_heads(FsqGrid.uniform(width, 16), 1, 128, True, cpu)
    assert default_plan(FsqDecoder(made, 1, cpu, kind), heads) == FsqPlan(*plan)


def test_what_has_no_kernel_is_refused() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match=r"coordinates of \[2, 4\] bits"):
        FsqDecoder(random_heads(FsqGrid((4,) * 8 + (2,) * 8), 1, 64, True, cpu), 1, cpu)
    wide = random_heads(FsqGrid.uniform(1024, 16), 1, 128, True, cpu)
    with pytest.raises(ValueError, match="of shared memory as half, 232448 are there"):
        default_plan(FsqDecoder(wide, 1, cpu, "half"), 2)
    assert default_plan(FsqDecoder(wide, 1, cpu, "int8"), 2) == FsqPlan(2, 1)
    assert default_plan(FsqDecoder(wide, 1, cpu, "half", shares=2), 2) == FsqPlan(2, 1)
    with pytest.raises(ValueError, match="2 shares of 64 channels"):
        FsqDecoder(random_heads(FsqGrid.uniform(8, 16), 1, 64, True, cpu), 1, cpu, shares=2)
    wider = random_heads(FsqGrid.uniform(2300, 16), 1, 64, True, cpu)
    wider = dataclasses.replace(wider, key_decoder=torch.ones_like(wider.key_decoder))
    with pytest.raises(ValueError, match="int8 has room below 4194304"):
        FsqDecoder(wider, 1, cpu, "int8")


def test_what_contradicts_itself_is_refused(device: torch.device) -> None:
    case = _case_of(CASES[0], device)
    decoder = FsqDecoder(case.heads, case.codes.shape[1], device)
    with pytest.raises(ValueError, match="the work memory is for"):
        fsq_attend(case.queries[:1], case.codes, case.lengths, decoder, _work(case))
    with pytest.raises(ValueError, match="the decoder for 1 blocks and 1"):
        fsq_attend(case.queries, case.codes, case.lengths, FsqDecoder(case.heads, 1, device), _work(case))
