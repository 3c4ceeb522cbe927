"""The rotation of keys, values and queries: the normalised Sylvester Hadamard matrix of a whole head.

``H_1 = 1``, ``H_2n = [[H_n, H_n], [H_n, -H_n]] / sqrt 2``: entries ±1/sqrt(D), symmetric and its own inverse. Scores do
not change when queries and keys are turned by it, and it spreads what single channels hold over all of them, which
codes of a few bits need. Being its own inverse is also its trap: what was turned twice is not turned at all, and no
test that compares packed with packed notices.
"""

import math
from functools import cache

import torch
from torch import Tensor

__all__ = ["HEAD_DIMS", "check_head_dim", "hadamard", "turn"]

HEAD_DIMS = (16, 32, 64, 128, 256, 512)
"""Head sizes that can be rotated and packed."""


def check_head_dim(head_dim: int) -> None:
    """Refuse a head that cannot be rotated.

    Raises:
        ValueError: ``head_dim`` is not a power of two from 16 to 512.
    """
    if head_dim not in HEAD_DIMS:
        expected = f"a power of two from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
        raise ValueError(f"head_dim is {head_dim}; a low-bit KV cache rotates whole heads and needs {expected}")


def hadamard(head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """The matrix [head_dim, head_dim] float32, made once a size and device; not to be changed.

    Raises:
        ValueError: as :func:`check_head_dim`.
    """
    check_head_dim(head_dim)
    return _matrix(head_dim, torch.device(device))


@cache
def _matrix(head_dim: int, device: torch.device) -> Tensor:
    # Signs first, one division last: every entry is the same float, and so exactly symmetric.
    signs = torch.ones(1, 1)
    while signs.shape[0] < head_dim:
        signs = torch.cat((torch.cat((signs, signs), 1), torch.cat((signs, -signs), 1)))
    return (signs / math.sqrt(head_dim)).to(device)


def turn(heads: Tensor) -> Tensor:
    """``heads`` [..., head_dim] rotated, float32; a new tensor. Turning again undoes it.

    Raises:
        ValueError: as :func:`check_head_dim`.
    """
    return heads.float() @ hadamard(heads.shape[-1], heads.device)
