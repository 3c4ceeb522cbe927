"""The compiled descent over a block against its definition."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from strataflux.client.prepare.bases.descent import block_descent
from strataflux.client.prepare.bases.lnq import descend_block


def block(rows: int, width: int, entries: int, groups: int, seed: int = 0) -> list[Tensor]:
    """Arguments of a descent: weights on their codebooks, the slopes that go with them."""
    random = torch.Generator().manual_seed(seed)
    codebook = torch.randn(rows, entries, generator=random).sort(-1).values
    low = codebook.gather(1, torch.randint(0, entries, (rows, width), generator=random))
    x = torch.randn(groups, 2 * width, width, generator=random)
    among = x.transpose(1, 2) @ x
    owner = torch.randint(0, groups, (rows,), generator=random)
    error = low - torch.randn(rows, width, generator=random)
    slope = (error[:, None] @ among[owner])[:, 0]
    return [low, slope, among, owner, among.diagonal(dim1=1, dim2=2)[owner].contiguous(), codebook]


@pytest.mark.parametrize(
    ("rows", "width", "entries", "groups"), [(1, 1, 4, 1), (7, 128, 8, 3), (64, 65, 16, 4), (5, 64, 4, 5)]
)
def test_compiled_rows_move_as_the_definition_says(rows: int, width: int, entries: int, groups: int) -> None:
    expected, found = (block(rows, width, entries, groups) for _ in range(2))
    before = expected[0].clone()
    descend_block(*expected)
    block_descent(torch.device("cpu"))(*found)
    assert torch.equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-4)
    assert rows * width == 1 or not torch.equal(before, expected[0])


def test_a_step_never_raises_the_cost() -> None:
    low, slope, among, owner, diagonal, codebook = block(20, 64, 8, 2, seed=3)
    weight = low - torch.linalg.solve(among[owner], slope[..., None])[..., 0]

    def cost(values: Tensor) -> Tensor:
        error = values - weight
        costs: Tensor = ((error[:, None] @ among[owner])[:, 0] * error).sum(-1)
        return costs

    seen = [cost(low)]
    for _ in range(3):
        block_descent(torch.device("cpu"))(low, slope, among, owner, diagonal, codebook)
        seen.append(cost(low))
    assert bool((seen[1] < seen[0]).all())
    assert all(bool((later <= earlier * (1 + 1e-4)).all()) for earlier, later in pairwise(seen))
