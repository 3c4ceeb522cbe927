"""What the last steps selected of each layer: groups that the next step refines, each of them once."""

from collections import deque

import torch
from torch import Tensor

__all__ = ["EarlierSelections"]


class EarlierSelections:
    """Of one sequence. One thread."""

    def __init__(self, steps: int) -> None:
        """Nothing was selected yet; ``steps`` of each layer's selections are kept, 1 or more."""
        self._steps = steps
        self._layers: dict[int, deque[tuple[Tensor, Tensor]]] = {}

    def replace(self, layer: int, groups: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Keep this step's selection, and give out those of the steps before.

        Args:
            layer: whose.
            groups: [1, kv_heads, n] int64, each once for a head, -1 for none.
            shares: likewise, float32.

        Returns:
            Groups and shares as of their last selection, those of a head first and then -1 and 0.
        """
        kept = self._layers.setdefault(layer, deque(maxlen=self._steps))
        found = _joined(list(kept)) if kept else (groups[..., :0], shares[..., :0])
        kept.append((groups, shares))
        return found

    def clear(self) -> None:
        """Forget all: another sequence begins."""
        self._layers.clear()

    def copy(self) -> "EarlierSelections":
        """The same so far."""
        other = EarlierSelections(self._steps)
        other._layers = {layer: kept.copy() for layer, kept in self._layers.items()}
        return other


def _joined(kept: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Each group once, by its newest selection."""
    groups, shares = (torch.cat(parts[::-1], -1) for parts in zip(*kept, strict=True))
    order = groups.argsort(dim=-1, stable=True)
    ascending = groups.gather(-1, order)
    again = torch.zeros_like(ascending, dtype=torch.bool)
    again[..., 1:] = ascending[..., 1:] == ascending[..., :-1]
    # Stable: the newest of equal ones is the first.
    groups = groups.scatter(-1, order, ascending.masked_fill(again, -1))
    first = (groups < 0).to(torch.uint8).argsort(dim=-1, stable=True)
    most = int((groups >= 0).sum(-1).max())
    groups, shares = groups.gather(-1, first)[..., :most], shares.gather(-1, first)[..., :most]
    return groups, shares.masked_fill(groups < 0, 0.0)
