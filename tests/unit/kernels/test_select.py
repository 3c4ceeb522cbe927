"""Channel selection against its definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from strataflux.kernels.select import select_channels, select_reference
from strataflux.kernels.topk import largest_mask, selected_count


def select(x: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    count = selected_count(k, x.size)
    indices, scores = np.full(count, -1, np.int64), np.zeros(count, np.uint8)
    assert select_channels(x, k, indices, scores) == count
    return indices, scores


def by_sorting(x: NDArray[np.float32], k: int) -> list[int]:
    """The definition once more, in plain Python, shared with neither implementation."""
    chosen = []
    for start in range(0, x.size, 1024):
        chunk = [0.0 if math.isnan(v) else abs(float(v)) for v in x[start : start + 1024]]
        n = len(chunk)
        wanted = 0 if k == 0 else min(n, max(1, round(k * n / 1024)))
        ranked = sorted(range(n), key=lambda i: (-chunk[i], i))
        chosen += sorted(start + i for i in ranked[:wanted])
    return chosen


special = st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1e-45, 3.4e38])
values = st.floats(width=32) | special
inputs = arrays(np.float32, st.sampled_from([1, 7, 64, 576, 1024, 1030, 1536]), elements=values)


@settings(deadline=None, max_examples=150)
@given(x=inputs, k=st.integers(0, 1024))
def test_both_paths_follow_the_definition(x: NDArray[np.float32], k: int) -> None:
    indices, scores = select(x, k)
    expected, expected_scores = select_reference(torch.from_numpy(x), k)
    assert indices.tolist() == by_sorting(x, k)
    assert indices.tolist() == expected.tolist()
    assert scores.tolist() == expected_scores.tolist()


@pytest.mark.parametrize(
    ("width", "k", "count"),
    [
        (1024, 32, 32),
        (576, 32, 18),
        (1536, 32, 48),
        (16, 1, 1),
        (1040, 1, 2),
        (1024, 0, 0),
        (1536, 1024, 1536),
    ],
)
def test_count_depends_on_shape_alone(width: int, k: int, count: int) -> None:
    assert selected_count(k, width) == count
    assert select(np.zeros(width, np.float32), k)[0].size == count


def test_ties_go_to_the_lower_index() -> None:
    x = np.ones(1024, np.float32)
    x[1000] = -2
    assert select(x, 3)[0].tolist() == [0, 1, 1000]


@settings(deadline=None)
@given(share=st.floats(2**-14, 1.0, width=32))
def test_score_is_the_floor_of_sixteen_logarithms(share: float) -> None:
    x = np.array([1.0, share], np.float32)
    scores = select(x, 1024)[1]
    exact = 16 * (math.log2(share) + 12)
    near_a_step = abs(exact - round(exact)) < 1e-4
    assert scores[0] == 193
    if not near_a_step:
        assert scores[1] == 1 + min(254, max(0, math.floor(exact)))


def test_a_chunk_is_scored_against_its_own_maximum() -> None:
    x = np.zeros(2048, np.float32)
    x[5], x[1030] = 100.0, 0.01
    indices, scores = select(x, 1)
    assert indices.tolist() == [5, 1030]
    assert scores.tolist() == [193, 193]


@pytest.mark.parametrize("k", [0, 1, 32, 100, 1024])
@pytest.mark.parametrize("width", [7, 576, 1030, 2048])
def test_many_inputs_at_once_select_what_each_alone_does(width: int, k: int) -> None:
    x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(width + k))
    mask = largest_mask(x, k)
    for row, chosen in zip(x.view(-1, width), mask.view(-1, width), strict=True):
        assert chosen.nonzero().flatten().tolist() == select(row.numpy(), k)[0].tolist()


def test_many_inputs_rank_nan_as_zero_and_infinity_first() -> None:
    x = torch.tensor([[math.nan, 1.0, -math.inf, 2.0]])
    assert largest_mask(x, 512).tolist() == [[False, False, True, True]]
