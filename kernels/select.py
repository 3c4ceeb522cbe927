"""Which input channels matter now: the exact top-k of ``|x|`` in each chunk of 1,024 channels.

Formula. A chunk of n channels gives ``quota(k, n)`` of them: k for a full chunk, ``max(1, round(k·n/1024))`` (half to
even, never more than n) for a shorter one, none for k = 0. Within a chunk channels rank by ``|x|``, equal ones by lower
index first. A NaN ranks as zero, an infinity above every number, so the number selected depends on shapes alone.

Each selected channel carries a score for the reader's queue. With ``v = |x_i| / max |x|`` of its chunk it is
``1 + clip(floor(16·(log2 v + 12)), 0, 254)``; 0 is kept for "unknown". Logarithms of different processors disagree in
the last bit, so the floor is taken by comparing v with 255 float32 thresholds ``2^(j/16 - 12)``: the same score
everywhere. Infinities have v = 1 and make every finite v of their chunk 0; in a chunk of zeros v is 0.

Indices are ascending over the whole input, as one projection's records lie on disk.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strataflux.kernels.topk import CHUNK, quota
from strataflux.proto.compiled import compiled

__all__ = ["SCORE_THRESHOLDS", "select_channels", "select_reference"]

SCORE_THRESHOLDS: NDArray[np.float32] = np.exp2(np.arange(255) / 16 - 12).astype(np.float32)
"""``v`` from which the score is at least ``1 + j``; ascending."""


def select_reference(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select by definition: the oracle the fast paths are tested against.

    Args:
        x: [width] float32 activations.
        k: channels per 1,024, 0…1,024.

    Returns:
        Indices [selected] int64, ascending, and scores [selected] uint8. New tensors.
    """
    thresholds = torch.from_numpy(SCORE_THRESHOLDS)
    indices, scores = [], []
    for start in range(0, x.numel(), CHUNK):
        magnitude = torch.nan_to_num(x[start : start + CHUNK].abs(), nan=0.0, posinf=torch.inf)
        order = torch.argsort(magnitude, descending=True, stable=True)
        chosen = order[: quota(k, magnitude.numel())].sort().values
        share = magnitude[chosen] / magnitude.max()
        share = torch.where(magnitude[chosen].isinf(), 1.0, torch.nan_to_num(share, nan=0.0))
        score = torch.searchsorted(thresholds, share, right=True).clamp(1, 255)
        indices.append(chosen + start)
        scores.append(score.to(torch.uint8))
    return torch.cat(indices), torch.cat(scores)


@compiled
def select_channels(x: NDArray[np.float32], k: int, indices: NDArray[np.int64], scores: NDArray[np.uint8]) -> int:
    """Select channels of ``x`` [width] into ``indices`` and ``scores``; no allocation.

    Args:
        x: [width] float32, contiguous.
        k: channels per 1,024, 0…1,024.
        indices: at least ``selected_count(k, width)`` entries, overwritten with ascending channel
            numbers.
        scores: as long, overwritten with the scores.

    Returns:
        How many entries were written.
    """
    bits = x.view(np.uint32)
    written = 0
    for start in range(0, x.size, CHUNK):
        chunk = bits[start : start + CHUNK]
        wanted = _quota(k, chunk.size)
        if wanted > 0:
            _select_chunk(chunk, start, indices[written : written + wanted], scores[written : written + wanted])
            written += wanted
    return written


@compiled
def _quota(k: int, channels: int) -> int:
    # Rounded in integers, half to even, as Python's round() does in quota().
    if k == 0:
        return 0
    whole, rest = divmod(k * channels, CHUNK)
    if rest > CHUNK // 2 or (rest == CHUNK // 2 and whole % 2 == 1):
        whole += 1
    return min(channels, max(1, whole))


_INFINITY = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_ZERO = np.uint32(0)


@compiled
def _magnitude(pattern: np.uint32) -> np.uint32:
    # The bits of |x| order as integers just as the numbers do; a NaN lies above infinity and becomes zero.
    magnitude = np.uint32(pattern & _MAGNITUDE)
    return _ZERO if magnitude > _INFINITY else magnitude


@compiled
def _select_chunk(chunk: NDArray[np.uint32], start: int, indices: NDArray[np.int64], scores: NDArray[np.uint8]) -> None:
    floor = _kth_largest(chunk, indices.size)
    ties = indices.size - _count_from(chunk, np.uint32(floor + np.uint32(1)))
    largest = _ZERO
    for i in range(chunk.size):
        largest = max(largest, _magnitude(chunk[i]))
    written = 0
    for i in range(chunk.size):
        magnitude = _magnitude(chunk[i])
        if magnitude > floor or (magnitude == floor and ties > 0):
            if magnitude == floor:
                ties -= 1
            indices[written] = start + i
            scores[written] = _score(magnitude, largest)
            written += 1


@compiled
def _kth_largest(chunk: NDArray[np.uint32], wanted: int) -> np.uint32:
    # Bisection on the bit pattern: 31 counting passes over at most 4 KiB, each of them vectorised.
    low, high = _ZERO, np.uint32(_INFINITY + np.uint32(1))
    while high - low > np.uint32(1):
        middle = np.uint32(low + (high - low) // np.uint32(2))
        if _count_from(chunk, middle) >= wanted:
            low = middle
        else:
            high = middle
    return low


@compiled
def _count_from(chunk: NDArray[np.uint32], floor: np.uint32) -> int:
    # A 32-bit counter keeps as many lanes as the comparison has.
    count = _ZERO
    for i in range(chunk.size):
        count += np.uint32(_magnitude(chunk[i]) >= floor)
    return int(count)


@compiled
def _score(magnitude: np.uint32, largest: np.uint32) -> int:
    if magnitude == _ZERO:
        return 1
    share = np.float32(1.0)
    if magnitude < _INFINITY:
        share = _as_float(magnitude) / _as_float(largest)
    return min(255, max(1, int(np.searchsorted(SCORE_THRESHOLDS, share, side="right"))))


@compiled
def _as_float(pattern: np.uint32) -> np.float32:
    return np.float32(np.uint32(pattern).view(np.float32))
