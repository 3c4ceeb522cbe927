"""The rotation: what it is, and what it refuses."""

import math

import pytest
import torch

from strataflux.kernels.hadamard import HEAD_DIMS, hadamard, turn


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_symmetric_orthonormal_and_of_one_magnitude(head_dim: int) -> None:
    matrix = hadamard(head_dim)
    assert torch.equal(matrix, matrix.T)
    assert torch.equal(matrix.abs(), torch.full_like(matrix, 1 / math.sqrt(head_dim)))
    torch.testing.assert_close(matrix.double() @ matrix.double(), torch.eye(head_dim).double(), atol=1e-6, rtol=0)


def test_entries_are_signs_by_shared_bits() -> None:
    matrix = hadamard(16) * 4
    for i in range(16):
        for j in range(16):
            assert matrix[i, j] == (-1) ** (i & j).bit_count()


def test_scores_stay_and_turning_twice_undoes() -> None:
    queries, keys = torch.randn(3, 64), torch.randn(5, 64)
    torch.testing.assert_close(turn(queries) @ turn(keys).T, queries @ keys.T, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(turn(turn(keys)), keys, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(turn(keys), keys)


@pytest.mark.parametrize("head_dim", [0, 8, 96, 80, 1024])
def test_other_heads_are_named(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim is {head_dim}"):
        hadamard(head_dim)
