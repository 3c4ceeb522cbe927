"""What a step asks of attention, and the cache that keeps keys and values in float16."""

from typing import Protocol

import torch
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.cache import Ring
from strataflux.client.runtime.models import ModelConfig
from strataflux.kernels.gpu.attention import HEAD_DIMS, MAX_GROUP, AttentionScratch, attend

__all__ = ["Attention", "HalfCache"]

_POSITIONS_A_SPLIT = 256
_MOST_SPLITS = 16


class Attention(Protocol):
    """Keys and values of one sequence, and attention to them; all of it in device memory that never moves."""

    context: int
    """Positions there is room for."""

    def begin_step(self, position: int) -> None:
        """Called by the host before it queues the step at ``position``; queues what is due. Idempotent."""

    def truncate(self, length: int) -> None:
        """The tokens from ``length`` on are to be forgotten.

        Raises:
            MisuseError: that cannot be done; nothing has changed.
        """

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, position: Tensor, out: Tensor, *, early: bool
    ) -> None:
        """Take this position's ``keys`` and ``values`` [kv_heads, head_dim] and let ``queries`` [heads, head_dim]
        attend to all positions so far, into ``out`` [heads · head_dim]. All float16 but ``out``, turned by position.

        ``position`` [1] int32 is read on the device: one captured launch serves all. Queued on the current stream; it
        may start ``early``, while the kernel before still runs.
        """

    def join(self) -> None:
        """The step's end may come: let the current stream go on after all that was queued beside it."""


class HalfCache:
    """Keeps everything that is attended to in float16."""

    def __init__(self, config: ModelConfig, context: int, device: torch.device) -> None:
        """Allocate ``context`` positions, in layers with a window no more than that.

        Raises:
            MisuseError: this model's heads have no kernel.
        """
        group = config.heads // config.kv_heads
        if config.head_dim not in HEAD_DIMS or group > MAX_GROUP:
            found = f"head_dim {config.head_dim}, {group} query heads for a key head"
            expected = f"head_dim of {', '.join(map(str, HEAD_DIMS))} and at most {MAX_GROUP}"
            raise MisuseError("attention on a GPU", found, expected, "use --device cpu")
        shapes = [(config.kv_heads, rows, config.head_dim) for rows in _rows(config, context)]
        splits = min(_MOST_SPLITS, -(-context // _POSITIONS_A_SPLIT))
        self.context = context
        self._keys = [torch.zeros(shape, dtype=torch.float16, device=device) for shape in shapes]
        self._values = [torch.zeros_like(keys) for keys in self._keys]
        self._rings = [Ring(rows) for rows in {rows for _, rows, _ in shapes if rows < context}]
        self._scratch = AttentionScratch(config.kv_heads, config.head_dim, splits, device)

    @staticmethod
    def bytes_for(config: ModelConfig, context: int) -> int:
        """Device memory of a cache of ``context`` positions."""
        return 4 * config.kv_heads * config.head_dim * sum(_rows(config, context))

    def begin_step(self, position: int) -> None:
        """Nothing is due at any position."""
        for ring in self._rings:
            ring.wrote(position + 1)

    def truncate(self, length: int) -> None:
        """As :class:`Attention`: what lies behind is overwritten, but what has left a window does not come back."""
        for ring in self._rings:
            ring.truncate(length)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, position: Tensor, out: Tensor, *, early: bool
    ) -> None:
        """As :class:`Attention`."""
        past = self._keys[layer], self._values[layer]
        ring = past[0].shape[1] < self.context
        attend(queries, keys, values, *past, position, out, self._scratch, early=early, ring=ring)

    def join(self) -> None:
        """Nothing is queued beside."""


def _rows(config: ModelConfig, context: int) -> list[int]:
    """Positions that each layer attends to."""
    return [min(config.window(layer) or context, context) for layer in range(config.layers)]
