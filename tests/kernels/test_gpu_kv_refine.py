"""Selection and refinement of token groups: against the definition in float64, and through a directory."""

import shutil
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.client import attach_block as ab
from strataflux.kernels.gpu import kv_refine as kv_refine_module
from strataflux.kernels.gpu import kv_select as kv_select_module
from strataflux.kernels.gpu.kv_attend import kv_attend
from strataflux.kernels.gpu.kv_merge import kv_merge
from strataflux.kernels.gpu.kv_refine import kv_refine
from strataflux.kernels.gpu.kv_select import kv_select, select_reference
from strataflux.kernels.gpu.kv_work import KvWork, Listed
from strataflux.kernels.gpu.select import score_thresholds
from strataflux.kernels.gpu.step import begin_step, end_step
from strataflux.kernels.kv_encode import KvFormat
from strataflux.kernels.select import SCORE_THRESHOLDS
from tests.fakes.emulation import EmulatedKernels
from tests.fakes.gpu_side import Side
from tests.fakes.kv_device import Case, attend_exactly, make_case
from tests.fakes.kv_side import LAYER, side_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FORMS = [
    (KvFormat(2, 2, 64, 4, 4, 2), 4),
    (KvFormat(1, 3, 64, 1, 3, 8), 3),
    (KvFormat(4, 1, 128, 2, 0, 16), 1),
    (KvFormat(3, 2, 64, 0, 4, 4), 8),
]
Way = Literal["cuda", "triton"]


@pytest.fixture(scope="module")
def emulations(tmp_path_factory: pytest.TempPathFactory) -> dict[object, EmulatedKernels]:
    """Both CUDA sources with the instances of these tests, for the host."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the CUDA source for the host with")
    selecting = [*(f"kv_shares<{heads}, 256>" for heads in (1, 2, 3, 4, 8)), "kv_choose<1024>"]
    cases = [*FORMS, (KvFormat(2, 2, 64, 4, 4, 4), 2)]
    refining = [kv_refine_module.instance_name(form, heads) for form, heads in cases]
    folder = Path(kv_select_module.__file__).parent
    return {
        module: EmulatedKernels(folder / source, instances, tmp_path_factory.mktemp(source))
        for module, source, instances in (
            (kv_select_module, "kv_select.cu", selecting),
            (kv_refine_module, "kv_refine.cu", refining),
        )
    }


@pytest.fixture(params=["triton", "cuda"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """Both paths; without a GPU the CUDA source runs in blocks of fibers."""
    if request.param == "cuda" and not torch.cuda.is_available():
        for module, functions in request.getfixturevalue("emulations").items():
            monkeypatch.setattr(module, "load_function", functions)
            monkeypatch.setattr(module, "device_capability", lambda _: (8, 0))
    which: Way = request.param
    return which


def keys_at_or_above(work: KvWork, owner: int, groups: int) -> set[int]:
    """What the floor of a KV head selects."""
    bits = work.shares[owner, :groups].contiguous().view(torch.int32).long()
    keys = (bits << 32) | (0x7FFFFFFF - torch.arange(groups, device=bits.device))
    return set((keys >= work.floors[owner]).nonzero().flatten().tolist())


def listed(among: Listed, owner: int) -> list[int]:
    """The groups of a KV head in a list."""
    chosen: list[int] = among.groups[owner, : int(among.counts[owner])].tolist()
    return chosen


def test_the_strongest_groups_are_selected(device: torch.device, path: Way) -> None:
    form = KvFormat(2, 2, 64, 4, 4, 2)
    positions = (1290, 127, 384)
    case = make_case(form, 2, 2, positions, 10, device)
    work = KvWork(form, 3, 4, 2, 10, device, splits=2, refiners=3)
    for fraction in (Fraction(1, 128), Fraction(1, 3), Fraction(1)):
        kv_attend(case.queries, case.new_keys, case.new_values, case.positions, case.cache, work, path="triton")
        own = Listed.empty(6, 640, device)
        kv_select(case.positions, work, fraction, path=path)
        kv_attend(case.queries, case.new_keys, case.new_values, case.positions, case.cache, work, path="triton")
        kv_select(case.positions, work, fraction, own, path=path)
        for index, tiles in enumerate((9, 0, 2)):
            groups = tiles * 64
            count = work.selected_groups(fraction, tiles)
            exactly = attend_exactly(case, index).shares
            for head in range(2):
                found = keys_at_or_above(work, 2 * index + head, groups)
                assert found == set(select_reference(exactly[head], count).tolist()), (fraction, index, head)
                assert listed(own, 2 * index + head) == sorted(found)
                if path == "cuda":
                    assert listed(work.listed, 2 * index + head) == sorted(found)
        assert not work.bins.any()
        assert not work.counts.any()


@pytest.mark.parametrize(
    ("path", "tiles"), [("triton", 40), ("cuda", 40), ("cuda", 1030)], indirect=["path"]
)  # the largest number is more than the fast path holds at once
def test_equal_shares_go_by_lower_number(device: torch.device, path: Way, tiles: int) -> None:
    form = KvFormat(1, 1, 64, 4, 4, 4)
    work = KvWork(form, 1, 1, 1, tiles, device, splits=1, refiners=1)
    groups = tiles * 32
    positions = torch.tensor([(tiles + 1) * 128], dtype=torch.int32, device=device)
    work.tops.zero_()
    work.totals.fill_(float(groups))
    for shares in (torch.ones(groups), torch.ones(groups).index_fill_(0, torch.arange(7, groups, 100), 3.0)):
        work.sums[0, 0] = shares
        kv_select(positions, work, Fraction(1, 64), path=path)
        expected = sorted(select_reference(shares, groups // 64).tolist())
        assert sorted(keys_at_or_above(work, 0, groups)) == expected
        assert path == "triton" or listed(work.listed, 0) == expected


@pytest.mark.parametrize("missing", [set(), {1, 4}])
@pytest.mark.parametrize(("form", "group"), FORMS)
def test_it_is_attention_with_refined_groups(
    device: torch.device, path: Way, form: KvFormat, group: int, missing: set[int]
) -> None:
    fraction = Fraction(1, 5)
    case = make_case(form, 1, group, (400, 300), 3, device, seed=3)
    side, bases, where = side_of(case, missing, device)
    no_records = int(case.cache.table[0, 1])
    if missing:
        bases[no_records] = -1
    work = KvWork(form, 2, group, 1, 3, device, splits=2, refiners=3)
    begin_step(side.block)
    kv_attend(case.queries, case.new_keys, case.new_values, case.positions, case.cache, work, path="triton")
    kv_select(case.positions, work, fraction, path=path)
    first = LAYER * form.groups_per_tile
    kv_refine(case.positions, case.cache, work, side.block, score_thresholds(device), bases, 1, first, path=path)
    out = torch.full_like(case.queries, torch.nan, dtype=torch.float32)
    kv_merge(work, out)
    end_step(side.block)
    if device.type == "cuda":
        torch.cuda.synchronize()

    expected = Expected()
    for index, tiles in enumerate((2, 1)):
        expected.check(case, index, work.selected_groups(fraction, tiles), bases, where, out[index].double())
    expected.check_session(side, missing)
    side.close()


class Expected:
    """What a step should leave in the session's memory, gathered as outputs are checked."""

    def __init__(self) -> None:
        self.requested: set[tuple[int, int]] = set()
        self.stamped: set[int] = set()
        self.hits = self.wanted = 0

    def check(
        self, case: Case, index: int, count: int, bases: torch.Tensor, where: dict[int, int], out: torch.Tensor
    ) -> None:
        """Compare one sequence's output with attention to its refined groups."""
        form = case.cache.form
        plain = attend_exactly(case, index)
        refined = torch.zeros_like(plain.shares, dtype=torch.bool)
        for number in select_reference(plain.shares[0], count).tolist():
            base = int(bases[case.cache.table[index, number // form.groups_per_tile]])
            if base < 0:
                continue
            oid = base + LAYER * form.groups_per_tile + number % form.groups_per_tile
            self.wanted += 1
            if oid in where:
                refined[0, number] = True
                self.stamped.add(where[oid])
            else:
                share = np.float32(float(plain.shares[0, number]))
                score = int(np.searchsorted(SCORE_THRESHOLDS, share, side="right"))
                self.requested.add((max(score, 1), oid))
        self.hits += int(refined.sum())
        exactly = attend_exactly(case, index, refined).output
        assert (out - exactly).norm() < 2e-5 * exactly.norm()
        if refined.any():
            assert (out - plain.output).norm() > 1e-3 * exactly.norm()

    def check_session(self, side: Side, missing: set[int]) -> None:
        """Compare requests, counters and stamps."""
        assert self.hits or missing
        tail = int(side.session["ring_tail"][0])
        found = {((int(e) >> 48) & 255, int(e) & ((1 << 40) - 1)) for e in side.ring[:tail]}
        assert tail == len(self.requested)
        assert {oid for _, oid in found} == {oid for _, oid in self.requested}
        assert all((int(e) >> 40) & 255 == 1 for e in side.ring[:tail])
        # A share at a threshold's very edge may come out on its other side in float32.
        assert len(found - self.requested) <= len(self.requested) // 10
        assert int(side.session["kv_lookups"][0]) == self.wanted
        assert int(side.session["kv_hits"][0]) == self.hits
        assert set(np.flatnonzero(side.stamps == 5).tolist()) == self.stamped


def test_a_fenced_session_refines_nothing(device: torch.device, path: Way) -> None:
    form = KvFormat(2, 2, 64, 4, 4, 4)
    case = make_case(form, 1, 2, (400,), 3, device)
    side, bases, _ = side_of(case, set(), device)
    side.block[ab.ENABLED] = 0
    work = KvWork(form, 1, 2, 1, 3, device, splits=1, refiners=2)
    begin_step(side.block)
    kv_attend(case.queries, case.new_keys, case.new_values, case.positions, case.cache, work, path="triton")
    kv_select(case.positions, work, Fraction(1, 8), path=path)
    kv_refine(case.positions, case.cache, work, side.block, score_thresholds(device), bases, 1, 32, path=path)
    out = torch.zeros(2, 64, device=device)
    kv_merge(work, out)
    end_step(side.block)
    assert (out.double() - attend_exactly(case, 0).output).norm() < 2e-5 * out.norm()
    assert side.cell(ab.DROPPED) == work.selected_groups(Fraction(1, 8), 2)
    assert not side.ring.any()
    assert not side.stamps.any()
    side.close()


def test_what_cannot_be_selected_is_refused(device: torch.device) -> None:
    form = KvFormat(2, 2, 64, 4, 4, 4)
    positions = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="fraction of 0"):
        kv_select(positions, KvWork(form, 1, 2, 1, 3, device, refiners=2), Fraction(0))
    with pytest.raises(ValueError, match="0 refiners"):
        kv_select(positions, KvWork(form, 1, 2, 1, 3, device), Fraction(1, 8))
