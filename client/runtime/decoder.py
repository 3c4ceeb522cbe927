"""One decode step of a Llama-architecture model: batch of one, float32, keys and values cached.

Every projection goes through a :class:`Refiner`, which may add what quantization took away; the decoder
knows nothing about where that comes from.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.runtime.rope import rotary_table, rotate

__all__ = ["ContextFull", "Decoder", "Refiner", "Unrefined"]


class Refiner(Protocol):
    """Adds refinement to the output of a projection set."""

    def refine(self, layer: int, set_index: int, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        """Add to ``y`` [outputs], in place, what the resident weights of ``SETS[set_index]`` lack for input
        ``x`` [inputs].

        Both arrays are the decoder's and must not be kept. Doing nothing leaves the resident precision.
        Never raises.
        """


class Unrefined:
    """Leaves every projection at its resident precision."""

    def refine(self, layer: int, set_index: int, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        """Do nothing."""


class ContextFull(MisuseError):
    """A step was asked for at a position the key and value cache has no room for."""


class Decoder:
    """Decodes one sequence, token by token. Not safe for use from two threads."""

    def __init__(self, weights: DecoderWeights, context: int, refiner: Refiner | None = None) -> None:
        """Allocate the cache for ``context`` positions; ``refiner`` defaults to none."""
        config = weights.config
        # fixed after construction
        self.weights = weights
        self.context = context
        self._refiner: Refiner = Unrefined() if refiner is None else refiner
        self._cosine, self._sine = rotary_table(config, context)
        self._outputs = [torch.empty(config.set_shape(name)[0]) for name in SETS]
        cache_shape = (config.layers, config.kv_heads, context, config.head_dim)
        # changed by step and reset
        self._keys, self._values = torch.empty(cache_shape), torch.empty(cache_shape)
        self.position = 0

    def reset(self, position: int = 0) -> None:
        """Forget all tokens from ``position`` on; 0…``self.position``."""
        if not 0 <= position <= self.position:
            raise MisuseError("reset", f"position {position}", f"0 to {self.position}", "go back, not forward")
        self.position = position

    @torch.inference_mode()
    def step(self, token: int) -> Tensor:
        """Append ``token`` and return the logits [vocabulary] float32 of the next one, a new tensor.

        Raises:
            ContextFull: all ``context`` positions are taken; nothing has changed.
            IndexError: no such token; nothing has changed.
        """
        if self.position == self.context:
            raise ContextFull(
                "decoder cache", f"position {self.position}", f"less than {self.context}", "raise --context"
            )
        weights, epsilon = self.weights, self.weights.config.norm_epsilon
        shape = (weights.config.hidden,)
        hidden = weights.embedding[token].clone()
        for index, layer in enumerate(weights.layers):
            x = rms_norm(hidden, shape, layer.attention_norm, epsilon)
            mixed = self._attend(index, self._project(index, 0, x))
            hidden += self._project(index, 1, mixed)
            x = rms_norm(hidden, shape, layer.mlp_norm, epsilon)
            gate, up = self._project(index, 2, x).chunk(2)
            hidden += self._project(index, 3, silu(gate) * up)
        self.position += 1
        return torch.mv(weights.head, rms_norm(hidden, shape, weights.norm, epsilon))

    def _project(self, layer: int, set_index: int, x: Tensor) -> Tensor:
        # The result lies in one buffer a set and holds until the same set of the next layer.
        y = self._outputs[set_index]
        torch.mv(self.weights.layers[layer].projections[SETS[set_index]], x, out=y)
        self._refiner.refine(layer, set_index, x.numpy(), y.numpy())
        return y

    def _attend(self, layer: int, qkv: Tensor) -> Tensor:
        """The heads' mixed values [heads · head_dim]; appends this position's key and value."""
        config, now = self.weights.config, self.position
        heads = qkv.view(-1, config.head_dim)
        turned = rotate(heads[: -config.kv_heads], self._cosine[now], self._sine[now])
        self._keys[layer, :, now] = turned[config.heads :]
        self._values[layer, :, now] = heads[-config.kv_heads :]
        # Query heads that share a key head stand as rows of one small matrix; all see every cached position.
        queries = turned[: config.heads].view(config.kv_heads, -1, config.head_dim)
        keys, values = self._keys[layer, :, : now + 1], self._values[layer, :, : now + 1]
        return scaled_dot_product_attention(queries, keys, values).reshape(-1)
