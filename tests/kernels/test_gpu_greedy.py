"""The most probable token against torch: one block and many, ties, infinities and NaNs, again and again."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.kernels.gpu.greedy import GreedyScratch, take_largest


@pytest.mark.parametrize(
    ("width", "dtype"), [(1, torch.float16), (1000, torch.float32), (3 * 1024, torch.bfloat16), (70_001, torch.float16)]
)
def test_it_is_the_first_of_the_largest(width: int, dtype: torch.dtype, device: torch.device) -> None:
    scratch, token = GreedyScratch(device), torch.zeros(1, dtype=torch.int64, device=device)
    for seed in range(2):
        logits = torch.randn(width, generator=torch.Generator().manual_seed(seed)).to(dtype) - 20 * (seed == 1)
        first = int((logits == logits.max()).nonzero()[0])
        take_largest(logits.to(device), token, scratch)
        assert int(token) == first


def test_what_is_no_number_is_never_taken(device: torch.device) -> None:
    scratch, token = GreedyScratch(device), torch.zeros(1, dtype=torch.int64, device=device)
    for values, expected in (
        ([torch.nan, -torch.inf, -3.0, -3.0, torch.nan], 2),
        ([-torch.inf, torch.nan, torch.inf, torch.inf], 2),
        ([0.0, -0.0], 0),
    ):
        take_largest(torch.tensor(values, device=device), token, scratch)
        assert int(token) == expected


def test_shapes_are_checked(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"expected \[width\], \[1\]"):
        take_largest(torch.zeros(0, device=device), torch.zeros(1, dtype=torch.int64), GreedyScratch(device))
