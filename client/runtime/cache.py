"""Keys and values of past positions: what a decoder asks of a cache, and the one that keeps them exact.

A step is ``begin_step``, ``attend`` once a layer in order, ``end_step``. A step that was begun and not ended leaves
``length`` as it was and may be begun again. A prefill is ``fill`` once a layer in order, then ``end_fill``.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.models import ModelConfig

__all__ = ["ExactCache", "KvCache", "check_truncation"]


class KvCache(Protocol):
    """Keys and values of one sequence; one thread at a time."""

    @property
    def length(self) -> int:
        """Positions whose steps have ended."""

    @property
    def context(self) -> int:
        """Positions there is room for."""

    def begin_step(self) -> None:
        """Get ready for position ``length``. Never raises for a daemon's sake."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Take this position's ``keys`` and ``values`` [kv_heads, head_dim] and let ``queries`` [heads, head_dim]
        attend to all positions so far; mixed values [heads · head_dim]. Keys and queries are turned by position.
        """

    def end_step(self) -> None:
        """Count the position."""

    def fill(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Take a layer's keys and values [kv_heads, n, head_dim] of the first n positions, of an empty sequence."""

    def end_fill(self, count: int) -> None:
        """All layers were filled with ``count`` positions."""

    def truncate(self, length: int) -> None:
        """Forget positions from ``length`` on.

        Raises:
            MisuseError: there are not as many, or this cache cannot go back so far.
        """


def check_truncation(length: int, held: int) -> None:
    """Refuse to go forward.

    Raises:
        MisuseError: ``length`` is not within 0…``held``.
    """
    if not 0 <= length <= held:
        raise MisuseError("reset", f"position {length}", f"0 to {held}", "go back, not forward")


class ExactCache:
    """Keeps everything in float32."""

    def __init__(self, config: ModelConfig, context: int) -> None:
        """Allocate ``context`` positions."""
        shape = (config.layers, config.kv_heads, context, config.head_dim)
        # fixed after construction
        self.context = context
        # changed by steps and fills
        self._keys, self._values = torch.empty(shape), torch.empty(shape)
        self.length = 0

    def begin_step(self) -> None:
        """Nothing to do."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """As :class:`KvCache`."""
        now = self.length
        self._keys[layer, :, now] = keys
        self._values[layer, :, now] = values
        # Query heads that share a key head stand as rows of one small matrix; all see every cached position.
        shared = queries.view(keys.shape[0], -1, keys.shape[1])
        past = self._keys[layer, :, : now + 1], self._values[layer, :, : now + 1]
        return scaled_dot_product_attention(shared, *past).reshape(-1)

    def end_step(self) -> None:
        """As :class:`KvCache`."""
        self.length += 1

    def fill(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """As :class:`KvCache`."""
        self._keys[layer, :, : keys.shape[1]] = keys
        self._values[layer, :, : values.shape[1]] = values

    def end_fill(self, count: int) -> None:
        """As :class:`KvCache`."""
        self.length = count

    def truncate(self, length: int) -> None:
        """As :class:`KvCache`; any position."""
        check_truncation(length, self.length)
        self.length = length
