"""Keys and values of past positions: what a decoder asks of a cache, and the one that keeps them exact.

A step is ``begin_step``, ``attend`` once a layer in order, ``end_step``. A step that was begun and not ended leaves
``length`` as it was and may be begun again. A prefill is ``fill`` once a layer in order, then ``end_fill``.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.block import attend_newest
from strataflux.client.runtime.models import ModelConfig

__all__ = ["ExactCache", "ExactLayer", "KvCache", "Ring", "check_truncation", "require_all_seen", "require_no_windows"]


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


def require_all_seen(config: ModelConfig, context: int, subject: str) -> None:
    """Refuse a context in which some layer does not attend to all positions, for what keeps no windows.

    Raises:
        MisuseError: naming ``subject``, the first such layer, its window and the context.
    """
    for layer in config.sliding:
        if config.window(layer) < context:
            found = f"layer {layer}, which attends to {config.window(layer)} positions"
            remedy = f"stay within {min(config.window(one) for one in config.sliding)} tokens, or leave it away"
            raise MisuseError(subject, found, f"attention to all {context} in every layer", remedy)


def require_no_windows(config: ModelConfig, subject: str) -> None:
    """Refuse a model some of whose layers attend to a window, for what has no place for such layers.

    Raises:
        MisuseError: naming ``subject`` and how many they are.
    """
    if config.sliding:
        found = f"{len(config.sliding)} of {config.layers} layers that attend to a window of positions"
        raise MisuseError(subject, found, "attention to all positions in every layer", "leave it away")


class Ring:
    """Which of a sequence's positions lie in so many rows: position p in row p mod rows, until a later one takes that.

    A position sees rows - 1 before it. So the last step can always be taken again; those before it only until rows are
    used a second time.
    """

    def __init__(self, rows: int) -> None:
        """``rows`` without a position."""
        self.rows = rows
        self._oldest = 0
        """The first position whose row no later one has taken."""

    def wrote(self, end: int) -> None:
        """All positions below ``end`` have had their rows."""
        self._oldest = max(self._oldest, end - self.rows)

    def truncate(self, length: int) -> None:
        """Forget positions from ``length`` on.

        Raises:
            MisuseError: what position ``length`` attends to is not held any more.
        """
        if not length:
            self._oldest = 0
        elif (first := max(0, length - self.rows + 1)) < self._oldest:
            found, least = f"position {length}, which attends to {first} and on", self._oldest + self.rows - 1
            raise MisuseError("reset", found, f"0, or {least} and on: {self._oldest} is held", "begin a new sequence")


class ExactLayer:
    """Keys and values of one layer in float32, all or those of a window: what its positions see and nothing beside."""

    def __init__(self, config: ModelConfig, context: int, window: int = 0) -> None:
        """Allocate ``context`` positions, or ``window`` if that is less and not 0."""
        # fixed after construction
        self._window = window
        rows = min(window, context) if window else context
        # changed by steps and fills
        self._keys, self._values = (torch.empty(config.kv_heads, rows, config.head_dim) for _ in range(2))
        self._ring = Ring(rows)

    @property
    def rows(self) -> int:
        """Positions there is room for."""
        return self._keys.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both allocations."""
        return self._keys.nbytes + self._values.nbytes

    def attend(self, now: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One position, as :meth:`KvCache.attend`, at ``now``."""
        rows = self.rows
        self._keys[:, now % rows] = keys
        self._values[:, now % rows] = values
        self._ring.wrote(now + 1)
        # Query heads that share a key head stand as rows of one small matrix; all see every position that is held.
        shared = queries.view(keys.shape[0], -1, keys.shape[1])
        past = self._keys[:, : now + 1], self._values[:, : now + 1]
        return scaled_dot_product_attention(shared, *past).reshape(-1)

    def extend(self, start: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Take n positions from ``start`` on and let them attend; mixed values [1, heads, n, head_dim] of queries
        [1, heads, n, head_dim], keys and values [1, kv_heads, n, head_dim].
        """
        rows = self.rows
        order = torch.arange(max(0, start - rows), start) % rows
        held = [torch.cat((past[None, :, order], new), 2) for past, new in ((self._keys, keys), (self._values, values))]
        mixed = attend_newest(queries, held[0], held[1], self._window)
        self.fill(start, keys[0], values[0])
        return mixed

    def fill(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Take keys and values [kv_heads, n, head_dim] of n positions from ``start`` on."""
        rows, end = self.rows, start + keys.shape[1]
        kept = min(rows, keys.shape[1])
        places = torch.arange(end - kept, end) % rows
        self._keys[:, places] = keys[:, -kept:]
        self._values[:, places] = values[:, -kept:]
        self._ring.wrote(end)

    def truncate(self, length: int) -> None:
        """As :meth:`Ring.truncate`."""
        self._ring.truncate(length)


class ExactCache:
    """Keeps everything that is attended to in float32."""

    def __init__(self, config: ModelConfig, context: int) -> None:
        """Allocate ``context`` positions, in layers with a window no more than that."""
        # fixed after construction
        self.context = context
        self._layers = [ExactLayer(config, context, config.window(layer)) for layer in range(config.layers)]
        # changed by steps and fills
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all allocations."""
        return sum(layer.nbytes for layer in self._layers)

    def begin_step(self) -> None:
        """Nothing to do."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """As :class:`KvCache`."""
        return self._layers[layer].attend(self.length, queries, keys, values)

    def end_step(self) -> None:
        """As :class:`KvCache`."""
        self.length += 1

    def fill(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """As :class:`KvCache`."""
        self._layers[layer].fill(0, keys, values)

    def end_fill(self, count: int) -> None:
        """As :class:`KvCache`."""
        self.length = count

    def truncate(self, length: int) -> None:
        """As :class:`KvCache`; any position, but with windows only the last one once they are full."""
        check_truncation(length, self.length)
        for layer in self._layers:
            layer.truncate(length)
        self.length = length
