"""Groups selected a step ago: asked for ahead, fetched, and refined by attention's own launch; both paths."""

import shutil
from fractions import Fraction
from pathlib import Path
from typing import Literal

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.client import attach_block as ab
from strataflux.kernels.gpu import kv_attend as kv_attend_module
from strataflux.kernels.gpu import kv_beside as kv_beside_module
from strataflux.kernels.gpu.kv_attend import kv_attend, refined_name
from strataflux.kernels.gpu.kv_beside import Beside, instance_name
from strataflux.kernels.gpu.kv_merge import kv_merge
from strataflux.kernels.gpu.kv_select import select_reference
from strataflux.kernels.gpu.kv_work import Fetched, KvRecords, KvWork, Listed
from strataflux.kernels.gpu.select import score_thresholds
from strataflux.kernels.gpu.step import begin_step, end_step
from strataflux.kernels.kv_encode import KvFormat
from strataflux.proto import layout
from tests.fakes.emulation import EmulatedKernels
from tests.fakes.gpu_side import Side
from tests.fakes.kv_device import attend_exactly, make_case
from tests.fakes.kv_side import LAYER, side_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FORMS = [
    (KvFormat(2, 2, 64, 4, 4, 2), 4),
    (KvFormat(1, 3, 64, 1, 3, 8), 3),
    (KvFormat(4, 1, 128, 2, 0, 16), 1),
    (KvFormat(3, 2, 64, 0, 4, 4), 8),
]
FRACTION = Fraction(1, 5)
POSITIONS, TILES = (400, 300), 3
BOUNDS = {"triton": 2e-5, "cuda": 1e-4}
"""Relative errors, as of attention itself; what refinement takes out has them, too."""
Way = Literal["cuda", "triton"]


@pytest.fixture(scope="module")
def emulations(tmp_path_factory: pytest.TempPathFactory) -> dict[object, EmulatedKernels]:
    """The CUDA sources with the instances of these tests, for the host."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the CUDA source for the host with")
    sources: dict[object, set[str]] = {
        kv_attend_module: {refined_name(form, group) for form, group in FORMS},
        kv_beside_module: {instance_name(form, heads) for form, group in FORMS for heads in (group, 1)},
    }
    return {
        module: EmulatedKernels(
            Path(module.__file__).with_suffix(".cu"),  # type: ignore[attr-defined]
            sorted(instances),
            tmp_path_factory.mktemp("emulated"),
        )
        for module, instances in sources.items()
    }


@pytest.fixture(params=["triton", "cuda"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """Both paths; without a GPU the CUDA sources run in blocks of fibers."""
    if request.param == "cuda" and not torch.cuda.is_available():
        for module, functions in request.getfixturevalue("emulations").items():
            monkeypatch.setattr(module, "load_function", functions)
            monkeypatch.setattr(module, "device_capability", lambda _: (8, 0), raising=False)
    which: Way = request.param
    return which


class Steps:
    """A cache, its records, and the steps that are made with them."""

    def __init__(
        self, form: KvFormat, group: int, missing: set[int], device: torch.device, path: Way, kept: int = 1
    ) -> None:
        self.case = make_case(form, 1, group, POSITIONS, TILES, device, seed=3)
        self.side, self.bases, self.where = side_of(self.case, missing, device)
        self.path, self.device = path, device
        self.work = KvWork(form, 2, group, 1, TILES, device, splits=2, refiners=3)
        room = self.work.selected_groups(FRACTION, TILES)
        groups = TILES * form.groups_per_tile
        self.fetched = Fetched.empty(2, groups, room, kept, form.record_bytes, device)

    def attend(self, errands: Beside | None = None) -> torch.Tensor:
        """Attention with what was fetched; with errands of others beside."""
        case, out = self.case, torch.full_like(self.case.queries, torch.nan, dtype=torch.float32)
        new = case.queries, case.new_keys, case.new_values
        row = None if errands is None else errands.row()
        if errands is not None and self.path == "triton":
            errands.launch(path="triton")
        kv_attend(*new, case.positions, case.cache, self.work, self.fetched, row, path=self.path)
        kv_merge(self.work, out)
        return out.double()

    def errands(self) -> list[Beside]:
        """Ask for what attention just selected, and fetch it at once: in so many launches."""
        listed, first = self.fetched.listed, LAYER * self.case.cache.form.groups_per_tile
        records = KvRecords(self.side.block, score_thresholds(self.device), self.bases, 1)
        common = self.case.positions, self.case.cache, records, FRACTION
        return [
            Beside(*common, shares=self.work),
            Beside(*common, rank=self.work),
            Beside(*common, list=(self.work, listed)),
            Beside(*common, ask=(listed, first)),
            Beside(*common, bring=(self.fetched, first)),
        ]

    def select_and_fetch(self) -> None:
        """Run the errands."""
        for errand in self.errands():
            errand.launch(errand.row(), path=self.path)

    def step(self) -> torch.Tensor:
        """One step; its output."""
        begin_step(self.side.block)
        out = self.attend()
        self.select_and_fetch()
        end_step(self.side.block)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return out

    def refining(self, index: int) -> list[int]:
        """Groups of a sequence that refine the next step."""
        found: list[int] = sorted(self.fetched.numbers[index][self.fetched.numbers[index] >= 0].tolist())
        return found

    def selected(self, index: int, tiles: int) -> list[int]:
        """Groups that a sequence selects, by definition."""
        shares = attend_exactly(self.case, index).shares[0]
        return sorted(select_reference(shares, self.work.selected_groups(FRACTION, tiles)).tolist())

    def oid(self, index: int, group: int) -> int:
        """Its record, below 0 for none."""
        form = self.case.cache.form
        base = int(self.bases[self.case.cache.table[index, group // form.groups_per_tile]])
        return -1 if base < 0 else base + LAYER * form.groups_per_tile + group % form.groups_per_tile


@pytest.mark.parametrize("missing", [set(), {1, 4}])
@pytest.mark.parametrize(("form", "group"), FORMS)
def test_a_step_is_refined_by_what_the_one_before_selected(
    device: torch.device, path: Way, form: KvFormat, group: int, missing: set[int]
) -> None:
    steps = Steps(form, group, missing, device, path)
    if missing:
        steps.bases[int(steps.case.cache.table[0, 1])] = -1
    first, second = steps.step(), steps.step()
    for index, tiles in enumerate((2, 1)):
        plain = attend_exactly(steps.case, index)
        chosen = steps.selected(index, tiles)
        assert steps.fetched.listed.groups[index, : len(chosen)].tolist() == chosen
        assert int(steps.fetched.listed.counts[index]) == len(chosen)
        present = [group for group in chosen if steps.oid(index, group) in steps.where]
        assert steps.refining(index) == present
        refined = torch.zeros_like(plain.shares, dtype=torch.bool)
        refined[0, present] = True
        exactly = attend_exactly(steps.case, index, refined).output
        assert (first[index] - plain.output).norm() < BOUNDS[path] * plain.output.norm()
        moved = (exactly - plain.output).norm()
        assert (second[index] - exactly).norm() < BOUNDS[path] * (exactly.norm() + moved)
        assert not present or moved > 1e-3 * exactly.norm()
    steps.side.close()


def entries(side: Side) -> list[tuple[bool, int]]:
    """Requests in order: whether each is a prefetch, and of what."""
    tail = int(side.session["ring_tail"][0])
    return [(bool(int(e) & layout.PREFETCH), int(e) & layout.OID_MASK) for e in side.ring[:tail]]


def test_what_is_asked_ahead_is_no_look_up(device: torch.device, path: Way) -> None:
    form, group = FORMS[0]
    steps = Steps(form, group, {1, 4}, device, path)
    steps.step()
    every = [steps.oid(i, g) for i, tiles in enumerate((2, 1)) for g in steps.selected(i, tiles)]
    absent = sorted(oid for oid in every if oid not in steps.where)
    found = entries(steps.side)
    assert absent
    assert sorted(oid for ahead, oid in found if ahead) == absent
    assert sorted(oid for ahead, oid in found if not ahead) == absent  # looked up at once here, and missed
    assert int(steps.side.session["kv_lookups"][0]) == len(every)
    assert int(steps.side.session["kv_hits"][0]) == len(every) - len(absent)
    stamped = {steps.where[oid] for oid in every if oid in steps.where}
    assert set(torch.from_numpy(steps.side.stamps == 5).nonzero()[:, 0].tolist()) == stamped
    steps.side.close()


def test_the_rings_second_half_is_for_what_is_missed(device: torch.device, path: Way) -> None:
    form, group = FORMS[0]
    steps = Steps(form, group, set(range(7)), device, path)
    begin_step(steps.side.block)
    half = 1 << (steps.side.cell(ab.RING_LOG2) - 1)
    steps.side.block[ab.TAIL] = steps.side.cell(ab.LIMIT) - half
    before = steps.side.cell(ab.TAIL)
    steps.attend()
    steps.select_and_fetch()
    end_step(steps.side.block)
    missed = entries(steps.side)[before:]
    assert missed
    assert not any(ahead for ahead, _ in missed)
    steps.side.close()


def test_a_fenced_session_fetches_nothing(device: torch.device, path: Way) -> None:
    form, group = FORMS[0]
    steps = Steps(form, group, set(), device, path)
    steps.side.block[ab.ENABLED] = 0
    first, second = steps.step(), steps.step()
    assert torch.equal(first, second)
    assert not steps.side.ring.any()
    assert not steps.side.stamps.any()
    assert not steps.refining(0)
    steps.side.close()


def test_what_is_forgotten_refines_nothing(device: torch.device, path: Way) -> None:
    form, group = FORMS[0]
    steps = Steps(form, group, set(), device, path)
    first, second = steps.step(), steps.step()
    assert not torch.equal(first, second)
    steps.fetched.forget()
    assert torch.equal(steps.step(), first)
    steps.side.close()


def test_what_some_steps_selected_goes_on_refining(device: torch.device, path: Way) -> None:
    form, group = FORMS[0]
    steps = Steps(form, group, {1, 4}, device, path, kept=3)
    generator = torch.Generator().manual_seed(7)
    selected: list[list[set[int]]] = []
    for number in range(6):
        expected = [set().union(*(one[index] for one in selected[-3:])) for index in range(2)]
        present = [{g for g in expected[i] if steps.oid(i, g) in steps.where} for i in range(2)]
        assert [set(steps.refining(i)) for i in range(2)] == present
        before = int(steps.side.session["kv_lookups"][0])
        out = steps.step()
        for index in range(2):
            refined = torch.zeros_like(attend_exactly(steps.case, index).shares, dtype=torch.bool)
            refined[0, list(present[index])] = True
            exactly, plain = attend_exactly(steps.case, index, refined).output, attend_exactly(steps.case, index).output
            # Up to half of all groups are taken out and put back.
            assert (out[index] - exactly).norm() < 2 * BOUNDS[path] * (exactly.norm() + (exactly - plain).norm())
        selected.append([set(steps.selected(index, tiles)) for index, tiles in enumerate((2, 1))])
        # What lies in a row already, even one that refines no longer, is not looked up.
        lying = [set().union(*(one[index] for one in selected[-4:-1])) for index in range(2)]
        now = [(i, g) for i in range(2) for g in selected[-1][i]]
        fetched = [g for i, g in now if g not in lying[i] or steps.oid(i, g) not in steps.where]
        assert int(steps.side.session["kv_lookups"][0]) - before == len(fetched), number
        steps.case.queries.copy_(torch.randn(steps.case.queries.shape, generator=generator))
    steps.side.close()


def test_errands_ride_on_another_layers_attention(device: torch.device, path: Way) -> None:
    form, group = FORMS[0]
    steps, alone, other = (Steps(form, group, {1, 4}, device, path) for _ in range(3))
    expected = other.attend()
    for one in (steps, alone):
        begin_step(one.side.block)
        one.attend()
    for errand in steps.errands():
        assert torch.equal(other.attend(errand), expected)
    alone.select_and_fetch()
    for index in range(2):
        assert steps.refining(index) == alone.refining(index) != []
    assert torch.equal(steps.fetched.rows, alone.fetched.rows)
    assert torch.equal(steps.attend(), alone.attend())
    for one in (steps, alone, other):
        one.side.close()


@pytest.mark.parametrize("tiles", [2, 300])
def test_errands_list_equal_shares_by_lower_number(device: torch.device, path: Way, tiles: int) -> None:
    form, group = FORMS[0]
    steps, groups = Steps(form, group, set(), device, path), tiles * form.groups_per_tile
    cache = steps.case.cache._replace(table=torch.zeros(1, tiles, dtype=torch.int32, device=device))
    work = KvWork(form, 1, group, 1, tiles, device, splits=1, refiners=1)
    work.tops.zero_()
    work.totals.fill_(float(groups))
    positions = torch.tensor([(tiles + 1) * 128], dtype=torch.int32, device=device)
    listed = Listed.empty(1, groups // 16, device)
    records = KvRecords(steps.side.block, score_thresholds(device), steps.bases, 1)
    common = positions, cache, records, Fraction(1, 16)
    strong = torch.ones(groups).index_fill_(0, torch.arange(7, groups, 100), 3.0)
    for shares in (torch.ones(groups), strong, torch.rand(groups, generator=torch.Generator().manual_seed(2))):
        work.sums[0] = shares
        for errand in (Beside(*common, shares=work), Beside(*common, rank=work), Beside(*common, list=(work, listed))):
            errand.launch(errand.row(), path=path)
        expected = select_reference(shares, groups // 16)
        assert listed.groups[0].tolist() == sorted(expected.tolist())
        assert int(listed.counts[0]) == groups // 16
        torch.testing.assert_close(listed.strengths[0].cpu(), shares[listed.groups[0].cpu().long()] / groups)
    steps.side.close()


def test_shares_of_a_vanishing_total_are_listed_like_others(device: torch.device, path: Way) -> None:
    form, group = FORMS[0]
    steps, groups = Steps(form, group, set(), device, path), 2 * form.groups_per_tile
    cache = steps.case.cache._replace(table=torch.zeros(1, 2, dtype=torch.int32, device=device))
    work = KvWork(form, 1, group, 1, 2, device, splits=1, refiners=1)
    work.tops.zero_()
    work.totals.fill_(1e-40)  # as where refined logits are far above all others
    work.sums.fill_(1.0)
    listed = Listed.empty(1, groups, device)
    records = KvRecords(steps.side.block, score_thresholds(device), steps.bases, 1)
    common = torch.tensor([384], dtype=torch.int32, device=device), cache, records, Fraction(1, 16)
    for errand in (Beside(*common, shares=work), Beside(*common, rank=work), Beside(*common, list=(work, listed))):
        errand.launch(errand.row(), path=path)
    assert listed.groups[0, : groups // 16].tolist() == list(range(groups // 16))
    assert listed.counts.tolist() == [groups // 16]
    assert not work.bins.any()
    steps.side.close()
