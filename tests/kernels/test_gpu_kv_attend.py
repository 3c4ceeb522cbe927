"""Attention to a low-bit cache and its merge against the definition in float64; both paths.

Triton runs in its interpreter and the CUDA source on emulated blocks, or each on the GPU where there is one.
"""

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.kernels.gpu.kv_attend import instance_name, kv_attend, shared_bytes
from strataflux.kernels.gpu.kv_merge import kv_merge, merge_reference
from strataflux.kernels.gpu.kv_work import KvWork
from strataflux.kernels.hadamard import turn
from strataflux.kernels.kv_encode import KvFormat
from tests.fakes.emulation import FIBERS, emulated
from tests.fakes.kv_device import Case, attend_exactly, make_case

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SOURCE = Path(__file__).parents[2] / "kernels" / "gpu" / "kv_attend.cu"
FORMS = [
    # key bits, value bits, head size, group of tokens, query heads for a KV head
    (2, 2, 64, 2, 4),
    (3, 1, 64, 8, 3),
    (1, 3, 64, 16, 8),
    (4, 4, 128, 4, 1),
    (3, 2, 128, 2, 5),
]
CASES = [
    (FORMS[0], (0, 300), 2),
    (FORMS[1], (127, 256), 1),
    (FORMS[2], (511,), 3),
    (FORMS[3], (512,), 2),
    (FORMS[4], (385,), 1),
]
"""Positions of the sequences, and splits."""

Launch = Callable[[Case, KvWork], None]

BOUNDS = {"triton": 2e-5, "cuda": 1e-4}
"""Relative errors. Products of the fast path are cut 25 bits below their largest exponent, and codes are denormal
numbers, up to 2^10 below theirs: sums keep 15 bits, 3e-5 of their largest term, and cuts of one sign add up. At the
steep logits of these cases 5.9e-5 are seen, on an H200 as in the emulation.
"""


def form_of(numbers: tuple[int, ...]) -> KvFormat:
    key, value, d, tokens, _ = numbers
    return KvFormat(key, value, d, 4, 4, tokens)


def _on_device(path: str) -> Launch:
    def launch(case: Case, work: KvWork) -> None:
        kv_attend(case.queries, case.new_keys, case.new_values, case.positions, case.cache, work, path=path)  # type: ignore[arg-type]

    return launch


def _on_emulation(library: ctypes.CDLL) -> Launch:
    def launch(case: Case, work: KvWork) -> None:
        cache = case.cache
        halves = [t for h in (cache.keys, cache.values) for t in (h.codes, h.scale, h.zero, h.other)]
        left = (work.queries, work.parts, work.tops, work.totals, work.sums, work.tile_tops)
        given = (case.queries, case.new_keys, case.new_values, case.positions)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*given, *halves, cache.table, *cache[4:], *left)]
        sizes = (cache.kv_heads, work.splits, work.splits + work.refiners, work.tiles)
        group = work.heads // cache.kv_heads
        name = run_name(instance_name(cache.form, group, work.group_tokens))
        library[name](work.batch * cache.kv_heads * work.splits, *pointers, *sizes)

    return launch


def run_name(instance: str) -> str:
    return "run_" + "_".join(part.strip(" <>") for part in instance.removeprefix("kv_attend").split(","))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The CUDA source with each form's instance, for the host."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the CUDA source for the host with")
    pointers = "u16 u16 u16 int u8 u16 u16 u16 u8 u16 u16 u16 int u16 u16 u16 u16 float float float float float float"
    types = [f"{kind}*" for kind in pointers.split()] + 4 * ["int"]
    declared = ", ".join(f"{kind} a{i}" for i, kind in enumerate(types))
    given = ", ".join(f"a{i}" for i in range(len(types)))
    instances = [instance_name(form_of(f), f[4], tokens) for f in FORMS for tokens in (0, f[3])]
    runs = [
        f'extern "C" void {run_name(name)}(int blocks, {declared}) '
        f"{{ run_blocks(blocks, 128, [=] {{ {name}({given}); }}); }}"
        for name in instances
    ]
    return emulated(SOURCE, "\n".join(runs), tmp_path_factory.mktemp("kv_attend"), FIBERS)


@pytest.fixture(params=["triton", "cuda"])
def path(request: pytest.FixtureRequest) -> str:
    """One of both."""
    return str(request.param)


@pytest.fixture
def launch(request: pytest.FixtureRequest, path: str) -> Launch:
    """A path on the GPU, or what stands for it here."""
    if path == "triton" or torch.cuda.is_available():
        return _on_device(path)
    return _on_emulation(request.getfixturevalue("library"))


@pytest.fixture
def bound(path: str) -> float:
    """The largest relative error."""
    return BOUNDS[path]


@pytest.mark.parametrize(("numbers", "positions", "splits"), CASES)
def test_it_is_attention(
    device: torch.device,
    launch: Launch,
    bound: float,
    numbers: tuple[int, ...],
    positions: tuple[int, ...],
    splits: int,
) -> None:
    form = form_of(numbers)
    kv_heads = 2 if numbers[2] == 64 else 1
    case = make_case(form, kv_heads, numbers[4], positions, 3, device, seed=numbers[0])
    work = KvWork(form, len(positions), kv_heads * numbers[4], kv_heads, 3, device, splits=splits, refiners=1)
    launch(case, work)
    out = torch.full_like(case.queries, torch.nan, dtype=torch.float32)
    kv_merge(work, out)
    for index, position in enumerate(positions):
        exactly = attend_exactly(case, index)
        error = (out[index].double() - exactly.output).norm() / exactly.output.norm()
        assert error < bound, (position, float(error))
        check_shares(work, index, exactly.shares, bound)


def check_shares(work: KvWork, index: int, expected: torch.Tensor, bound: float) -> None:
    """Shares that the group sums and parts come to."""
    kv_heads, groups = expected.shape
    tops, totals = work.tops[index].double(), work.totals[index].double()
    most = tops.amax(-1)
    whole = (totals * torch.exp2(tops - most[:, None])).sum(-1)
    of_tile = torch.exp2(work.tile_tops[index].double() - most[:, None]).repeat_interleave(work.form.groups_per_tile, 1)
    shares = (work.sums[index].double() * of_tile / whole[:, None])[:, :groups]
    found = shares.unflatten(0, (kv_heads, -1)).amax(1)  # type: ignore[no-untyped-call]
    assert torch.allclose(found, expected, rtol=bound, atol=1e-12)


def test_the_new_token_is_stored_rotated(device: torch.device, launch: Launch) -> None:
    form = form_of(FORMS[0])
    for position, (place, at) in {5: (4, 5), 128: (6, 0), 500: (6, 116)}.items():
        case = make_case(form, 2, 4, (position,), 3, device)
        before = [t.clone() for t in case.cache[4:]]
        launch(case, KvWork(form, 1, 8, 2, 3, device, splits=2))
        after = case.cache[4:]
        for which, given in ((place - 4, case.new_keys), (place - 3, case.new_values)):
            stored = after[which][0, :, at]
            assert torch.allclose(stored.float(), turn(given[0]), rtol=1e-3, atol=1e-4)
            before[which][0, :, at] = stored
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_without_refinement_no_groups_are_told(device: torch.device, launch: Launch, bound: float) -> None:
    form = form_of(FORMS[3])
    case = make_case(form, 2, 1, (500,), 3, device)
    work = KvWork(form, 1, 2, 2, 3, device, splits=2)
    launch(case, work)
    assert not work.sums.any()
    out = torch.zeros(2, 128, device=device)
    kv_merge(work, out)
    assert (out.double() - attend_exactly(case, 0).output).norm() < bound * out.norm()


def test_merging_follows_its_reference(device: torch.device) -> None:
    work = KvWork(form_of(FORMS[0]), 1, 3, 1, 1, device, splits=37)
    work.parts.copy_(torch.randn(work.parts.shape))
    work.tops.copy_(torch.randn(work.tops.shape) * 20)
    work.tops[:, :, ::5] = -torch.inf
    work.parts[:, :, ::5] = torch.nan
    work.totals.copy_(torch.rand(work.totals.shape))
    out = torch.empty(3, 64, device=device)
    kv_merge(work, out)
    expected = turn(merge_reference(work.parts.nan_to_num(), work.tops, work.totals)[0].float())
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_heads_without_a_kernel_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="have a kernel"):
        KvWork(KvFormat(2, 2, 32), 1, 4, 1, 3, device)
    with pytest.raises(ValueError, match="have a kernel"):
        KvWork(KvFormat(2, 2, 64), 1, 9, 1, 3, device)
    with pytest.raises(ValueError, match="without refinement bits"):
        KvWork(KvFormat(2, 2, 64), 1, 4, 1, 3, device, refiners=4)
    form = form_of(FORMS[0])
    case = make_case(form, 2, 4, (5,), 3, device)
    with pytest.raises(ValueError, match="work memory is for"):
        kv_attend(
            case.queries, case.new_keys, case.new_values, case.positions, case.cache, KvWork(form, 2, 8, 2, 3, device)
        )
    assert shared_bytes(KvFormat(2, 2, 128), 4) == 4 * 9728 + 4 * 4 * 129
