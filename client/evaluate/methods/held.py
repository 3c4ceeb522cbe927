"""What is held of a layer when every token stays, and attention to it."""

import torch
from torch import Tensor

from strataflux.client.runtime.block import attend_newest

__all__ = ["Appended"]


class Appended:
    """Every token's keys and values as they came: a :class:`~strataflux.client.evaluate.methods.base.Held`."""

    def __init__(self, window: int = 0) -> None:
        """Hold nothing yet. Positions attend to the newest ``window``; 0: to all."""
        self._window = window
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Take all; exact attention."""
        return self.decode(queries, keys, values)

    def decode(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Append; exact attention."""
        return attend_newest(queries, *self.append(keys, values), window=self._window)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, these included."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat((self.keys, keys), 2), torch.cat((self.values, values), 2)
        self.keys, self.values = keys, values
        return keys, values
