"""Attention to discrete codes by the portable kernel against the definition in float64."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.kernels.fsq import FsqGrid
from strataflux.kernels.fsq_attention import attend_codes
from strataflux.kernels.gpu.fsq_attend_triton import FsqRows, fsq_attend_triton
from strataflux.kernels.gpu.fsq_merge import fsq_merge
from strataflux.kernels.gpu.fsq_work import FsqWork
from tests.fakes.fsq_device import FsqCase, make_fsq_case

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MIXED = FsqGrid((8,) * 21 + (4,) * 30 + (2,) * 26 + (1,) * 13)
CASES = [
    # grid, lengths, KV heads, query heads for each, head size, keys normed
    (FsqGrid.uniform(84, 16), (65, 1), 2, 2, 64, True),
    (MIXED, (130,), 1, 3, 64, True),
    (FsqGrid.uniform(40, 256), (64,), 3, 8, 64, False),
    (FsqGrid.uniform(130, 4), (63,), 1, 1, 128, True),
]


def _attended(case: FsqCase, positions: Tensor | None = None, splits: int | None = None) -> Tensor:
    batch, heads, _ = case.queries.shape
    blocks, device = case.codes.shape[1], case.queries.device
    rows = FsqRows(case.heads, max(blocks, 100 if positions is not None else 0), device)
    work = FsqWork(batch, heads, case.heads.grid, blocks, device, score_splits=splits, mix_splits=splits)
    out = torch.full(case.queries.shape, torch.nan, device=device)
    fsq_attend_triton(case.queries, case.codes, case.lengths, rows, work, positions)
    fsq_merge(work, rows.values, out)
    return out


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("numbers", CASES, ids=["uniform", "mixed", "bytes", "crumbs"])
def test_outputs_are_those_of_rebuilt_keys_and_values(
    numbers: tuple[FsqGrid, tuple[int, ...], int, int, int, bool], device: torch.device
) -> None:
    case = make_fsq_case(*numbers, device)
    assert _relative(_attended(case), case.exactly()) < 1e-3


def test_tokens_keep_their_positions_where_others_were_evicted(device: torch.device) -> None:
    case = make_fsq_case(FsqGrid.uniform(20, 16), (100,), 2, 2, 64, True, device)
    kept = torch.randperm(6400, generator=torch.Generator().manual_seed(0))[:128].sort().values
    found = _attended(case, kept[None].int().to(device))
    kept = kept[:100].to(device)
    expected = attend_codes(case.queries[0], case.levels[0, :100], kept, case.heads)
    assert _relative(found[0], expected) < 1e-3
    assert _relative(found[0], case.exactly()[0]) > 1e-2  # where they are matters


@pytest.mark.parametrize("splits", [1, 3])
def test_splits_change_nothing(splits: int, device: torch.device) -> None:
    case = make_fsq_case(FsqGrid.uniform(20, 16), (200, 65), 1, 2, 64, True, device)
    assert _relative(_attended(case, splits=splits), _attended(case).double()) < 1e-6


def test_what_contradicts_itself_is_refused(device: torch.device) -> None:
    case = make_fsq_case(FsqGrid.uniform(20, 16), (65,), 1, 2, 64, True, device)
    with pytest.raises(ValueError, match="one for each token there is room for"):
        _attended(case, torch.zeros(1, 64, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="the work memory is for"):
        _attended(case._replace(codes=case.codes[:, :, :-64]))
