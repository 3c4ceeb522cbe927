"""Which records are asked for, in which order."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["hot_batches", "scattered", "shuffled", "zipf_steps"]

_MULTIPLIER = 2_654_435_761
"""A prime above any number of records: multiplying by it, modulo the records, scatters neighbours."""


def scattered(ranks: NDArray[np.int64], records: int) -> NDArray[np.int64]:
    """Record numbers of ranks of popularity: what is popular lies anywhere in the file, as hot channels do."""
    return (ranks * _MULTIPLIER) % records


def zipf_steps(records: int, skew: float, steps: int, width: int, seed: int) -> NDArray[np.int64]:
    """[steps, width] record numbers, the popularity of rank r going as (r + 1) ** -skew."""
    random = np.random.default_rng(seed).random((steps, width))
    top = float(records)
    # The inverse of the continuous distribution over 1 … records.
    ranks = top**random if skew == 1 else ((top ** (1 - skew) - 1) * random + 1) ** (1 / (1 - skew))
    return scattered(np.minimum(ranks.astype(np.int64), records) - 1, records)


def hot_batches(hot: int, batches: int, width: int, seed: int) -> NDArray[np.int64]:
    """[batches, width] of the first ``hot`` records, all as likely."""
    return np.random.default_rng(seed).integers(0, hot, (batches, width), np.int64)


def shuffled(first: int, records: int, seed: int) -> NDArray[np.int64]:
    """Every record from ``first`` on once, in random order; of very many, the first two million of that."""
    order = np.random.default_rng(seed)
    if records - first <= 2_000_000:
        return first + order.permutation(records - first).astype(np.int64)
    return first + order.choice(records - first, 2_000_000, replace=False).astype(np.int64)
