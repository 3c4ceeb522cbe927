"""Codes in two tiers: what is resident is the coarser grid's level, and nothing is lost between the tiers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strataflux.kernels.fsq import FsqGrid, FsqLayer
from strataflux.kernels.fsq_nested import FsqTier, NestedGrid

WHOLE = FsqGrid((8, 8, 8, 4, 4, 2, 2, 1), "clamp")


@st.composite
def grids(draw: st.DrawFn) -> NestedGrid:
    width = draw(st.integers(2, 12))
    bits = sorted(draw(st.lists(st.sampled_from((1, 2, 4, 8)), min_size=width, max_size=width)), reverse=True)
    resident = sorted((draw(st.sampled_from([n for n in (0, 1, 2, 4, 8) if n <= most])) for most in bits), reverse=True)
    resident = [min(few, most) for few, most in zip(resident, bits, strict=True)]
    resident[0] = max(1, resident[0])
    resident[-1] = 0
    return NestedGrid(FsqGrid(tuple(bits), draw(st.sampled_from(("floor", "clamp")))), tuple(resident))


@given(grids(), st.integers(0, 2**31))
def test_tiers_hold_every_bit(grid: NestedGrid, seed: int) -> None:
    z = 2 * torch.randn(7, grid.whole.width, generator=torch.Generator().manual_seed(seed))
    codes = grid.whole.quantize(z)
    resident, pieces = grid.split(codes)
    assert grid.join(resident, pieces).equal(codes)
    packed = grid.refinement.pack(pieces)
    assert grid.join(resident, grid.refinement.unpack(packed)).equal(codes)
    assert sum(grid.resident.bits) + sum(grid.refinement.bits) == sum(grid.whole.bits)


@given(grids(), st.integers(0, 2**31))
def test_what_is_resident_is_the_coarser_grids_level(grid: NestedGrid, seed: int) -> None:
    z = 2 * torch.randn(50, grid.whole.width, generator=torch.Generator().manual_seed(seed))
    resident, _ = grid.split(grid.whole.quantize(z))
    assert resident.equal(grid.resident.quantize(z[:, : grid.resident.width]))


def test_the_resident_tier_is_a_layer_of_its_own() -> None:
    generator = torch.Generator().manual_seed(5)
    grid = NestedGrid(WHOLE, (8, 4, 2, 2, 1, 0, 0, 0))
    whole = FsqLayer(WHOLE, torch.randn(8, 6, generator=generator), torch.zeros(8), torch.eye(8), torch.zeros(8))
    tier = FsqTier(grid, whole, torch.randn(8, 5, generator=generator), torch.ones(8))
    x = torch.randn(9, 6, generator=generator) / 3
    assert tier.coarse.encode(x).equal(grid.split(whole.encode(x))[0])
    assert tier.coarse.decode(tier.coarse.encode(x)).shape == (9, 8)


@pytest.mark.parametrize(
    ("whole", "resident", "said"),
    [
        (FsqGrid((4, 4)), (2, 2), "do not nest"),
        (FsqGrid((4, 4), "clamp"), (4, 8), "more resident bits"),
        (FsqGrid((4, 4), "clamp"), (0, 0), "nothing is resident"),
        (FsqGrid((4, 4), "clamp"), (4, 4), "nothing else"),
        (FsqGrid((4, 4), "clamp"), (2, 4), "widest first"),
    ],
)
def test_divisions_that_cannot_be(whole: FsqGrid, resident: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        NestedGrid(whole, resident)
