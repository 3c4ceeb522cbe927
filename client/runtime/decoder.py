"""One decode step of a Llama-architecture model: batch of one, float32, keys and values cached.

Every projection goes through a :class:`Refiner`, which may add what quantization took away; attention belongs to a
:class:`~strataflux.client.runtime.cache.KvCache`. The decoder knows nothing about where either has its precision from.

With fetch lead and lag (:mod:`strataflux.client.runtime.schedule`) a projection's refinement is begun before its input
is there, or added after its output was: a :class:`ShiftingRefiner` does that. Prefill is not refined and knows neither.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.block import attention_of, multiply, norm_heads, norm_queries, run_block
from strataflux.client.runtime.cache import ExactCache, KvCache
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.runtime.rope import rotary_table, rotate
from strataflux.client.runtime.schedule import make_foresight, make_schedule

__all__ = ["ContextFull", "Decoder", "Foresight", "Refiner", "ShiftingRefiner", "Unrefined"]


class Refiner(Protocol):
    """Adds refinement to the output of a projection set."""

    def refine(self, layer: int, set_index: int, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        """Add to ``y`` [outputs], in place, what the resident weights of ``SETS[set_index]`` lack for input
        ``x`` [inputs].

        Both arrays are the decoder's and must not be kept. Doing nothing leaves the resident precision.
        Never raises.
        """


@runtime_checkable
class ShiftingRefiner(Refiner, Protocol):
    """A refiner that can select before it multiplies.

    Pairs: :meth:`begin` / :meth:`refine` of one layer and set in one step; ``refine`` alone does both.
    """

    def begin(self, layer: int, set_index: int, x: NDArray[np.float32]) -> None:
        """Select by the magnitudes of ``x`` [inputs], which is not kept; the next ``refine`` of this layer and set
        takes that selection, whatever its input. Up to three layers of a set may have begun. Never raises.
        """


class Unrefined:
    """Leaves every projection at its resident precision."""

    def begin(self, layer: int, set_index: int, x: NDArray[np.float32]) -> None:
        """Do nothing."""

    def refine(self, layer: int, set_index: int, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        """Do nothing."""


class Foresight(Protocol):
    """Is told early what a layer's input will be like. It changes no result but by what is there in time."""

    @property
    def blocks(self) -> float:
        """How many blocks early."""

    @property
    def channels_wanted(self) -> bool:
        """Whether :meth:`channels` is worth calling in this step."""

    @property
    def groups_wanted(self) -> bool:
        """Whether :meth:`groups` is."""

    def begin_layer(self, layer: int) -> None:
        """``layer`` begins: nothing that was looked up for those before it is read any more. Never raises."""

    def channels(self, layer: int, set_index: int, x: NDArray[np.float32]) -> None:
        """``x`` [inputs] is about what ``SETS[set_index]`` of ``layer`` will read. Not kept. Never raises."""

    def groups(self, layer: int, queries: Tensor) -> None:
        """``queries`` [heads, head_dim], turned by position, are about those that ``layer`` will have. Never raises."""


class ContextFull(MisuseError):
    """A step was asked for at a position the key and value cache has no room for."""


class Decoder:
    """Decodes one sequence, token by token. Not safe for use from two threads."""

    def __init__(
        self,
        weights: DecoderWeights,
        context: int,
        refiner: Refiner | None = None,
        cache: KvCache | None = None,
        shift: Mapping[str, float] | None = None,
        foresight: Foresight | None = None,
    ) -> None:
        """Nothing is decoded yet.

        Args:
            weights: the model's.
            context: positions of the cache.
            refiner: of the projections; by default none.
            cache: of keys and values; by default an exact one of ``context`` positions.
            shift: blocks of fetch lead or lag of each projection set; by default none of any.
            foresight: told what layers will read; by default nobody is.

        Raises:
            MisuseError: a shift or the distance of foresight is not supported, or ``refiner`` is no
                :class:`ShiftingRefiner` and needs to be.
        """
        config = weights.config
        # fixed after construction
        self.weights = weights
        self._refiner: Refiner = Unrefined() if refiner is None else refiner
        self._schedule = make_schedule(config.layers, dict.fromkeys(SETS, 0.0) if shift is None else shift)
        self._shifting = _shifting(self._refiner) if self._schedule.shifted else Unrefined()
        self._foresight = foresight
        self._guesses = make_foresight(config.layers, 0.0 if foresight is None else foresight.blocks)
        self._norms = [norm for layer in weights.layers for norm in (layer.attention_norm, layer.mlp_norm)]
        # written by steps
        self._outputs = [torch.empty(config.set_shape(name)[0]) for name in SETS]
        self._late: dict[tuple[int, int], Tensor] = {}
        self.cache: KvCache = ExactCache(config, context) if cache is None else cache
        self.context = self.cache.context
        self._cosine, self._sine = rotary_table(config, self.context)

    @property
    def position(self) -> int:
        """Tokens in the cache."""
        return self.cache.length

    def reset(self, position: int = 0) -> None:
        """Forget all tokens from ``position`` on.

        Raises:
            MisuseError: it is not within 0…``self.position``, or the cache cannot go back so far.
        """
        self.cache.truncate(position)

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> Tensor:
        """Take ``tokens``, all in one pass and unrefined, into an empty cache; logits [vocabulary] of the next one.

        Attention is to uncompressed keys and values, whatever the cache makes of them.

        Raises:
            ContextFull: there are more than ``context``; nothing has changed.
            MisuseError: there are none, or the cache is not empty.
        """
        if len(tokens) > self.context:
            raise ContextFull("prompt", f"{len(tokens)} tokens", f"at most {self.context}", "raise --context")
        if not tokens or self.position:
            found = f"{len(tokens)} tokens at position {self.position}"
            raise MisuseError("prefill", found, "at least one at position 0", "reset first")
        weights, count = self.weights, len(tokens)
        turns = self._cosine[:count], self._sine[:count]
        hidden = weights.embedding[list(tokens)][None]
        for index, layer in enumerate(weights.layers):
            attend = partial(self._attend_and_fill, index)
            hidden = run_block(weights.config, layer, hidden, turns, partial(multiply, layer), attend)
        self.cache.end_fill(count)
        last = rms_norm(hidden[0, -1], (weights.config.hidden,), weights.norm, weights.config.norm_epsilon)
        return torch.mv(weights.head, last)

    def _attend_and_fill(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.cache.fill(layer, keys[0], values[0])
        return attention_of(self.weights.layers[layer])(queries, keys, values)

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
        weights = self.weights
        hidden = weights.embedding[token].clone()
        self.cache.begin_step()
        for layer in range(weights.config.layers):
            if self._foresight is not None:
                self._foresight.begin_layer(layer)
            x = self._read(hidden, 2 * layer)
            mixed = self._attend(layer, self._project(layer, 0, x))
            self._write(hidden, 2 * layer + 1, mixed)
            x = self._read(hidden, 2 * layer + 1)
            gate, up = self._project(layer, 2, x).chunk(2)
            self._write(hidden, 2 * layer + 2, silu(gate) * up)
        self.cache.end_step()
        return torch.mv(weights.head, self._normed(hidden, weights.norm))

    def _read(self, hidden: Tensor, position: int) -> Tensor:
        """The input of what reads the stream at ``position``, after the selections that are made there."""
        for layer, set_index in self._schedule.selects[position]:
            ranks = self._normed(hidden, self._norms[2 * layer + set_index // 2])
            self._shifting.begin(layer, set_index, ranks.numpy())
        if self._foresight is not None:
            for layer, set_index in self._guesses[position]:
                self._foresee(self._foresight, hidden, layer, set_index)
        return self._normed(hidden, self._norms[position])

    def _foresee(self, foresight: Foresight, hidden: Tensor, layer: int, set_index: int) -> None:
        """Guess the input of a layer's set from the stream as it is now."""
        groups = set_index == 0 and foresight.groups_wanted
        if not groups and not foresight.channels_wanted:
            return
        x = self._normed(hidden, self._norms[2 * layer + set_index // 2])
        if foresight.channels_wanted:
            foresight.channels(layer, set_index, x.numpy())
        if groups:
            foresight.groups(layer, self._queries(layer, x))

    def _queries(self, layer: int, x: Tensor) -> Tensor:
        """The query heads [heads, head_dim] alone, at resident precision, turned by position."""
        config, weights, now = self.weights.config, self.weights.layers[layer], self.position
        rows = weights.projections["qkv"][: config.heads * config.head_dim]
        queries = norm_queries(config, weights, torch.mv(rows, x).view(-1, config.head_dim))
        return rotate(queries, self._cosine[now], self._sine[now])

    def _write(self, hidden: Tensor, position: int, x: Tensor) -> None:
        """Make ``hidden`` the state at ``position``: the product of ``x``, and refinement that is added there."""
        layer, half = divmod(position - 1, 2)
        hidden += self._project(layer, 2 * half + 1, x)
        for place in self._schedule.adds[position]:
            added = torch.zeros_like(hidden)
            self._shifting.refine(*place, self._late.pop(place).numpy(), added.numpy())
            hidden += added

    def _normed(self, hidden: Tensor, norm: Tensor) -> Tensor:
        return rms_norm(hidden, (self.weights.config.hidden,), norm, self.weights.config.norm_epsilon)

    def _project(self, layer: int, set_index: int, x: Tensor) -> Tensor:
        # The result lies in one buffer a set and holds until the same set of the next layer.
        y = self._outputs[set_index]
        torch.mv(self.weights.layers[layer].projections[SETS[set_index]], x, out=y)
        if self._schedule.lags[set_index]:
            self._shifting.begin(layer, set_index, x.numpy())
            self._late[layer, set_index] = x.clone()  # a cache may reuse what it gave out
        else:
            self._refiner.refine(layer, set_index, x.numpy(), y.numpy())
        return y

    def _attend(self, layer: int, qkv: Tensor) -> Tensor:
        """The heads' mixed values [heads · head_dim]; appends this position's key and value."""
        config, now = self.weights.config, self.position
        heads = norm_heads(config, self.weights.layers[layer], qkv.view(-1, config.head_dim))
        turned = rotate(heads[: -config.kv_heads], self._cosine[now], self._sine[now])
        return self.cache.attend(layer, turned[: config.heads], turned[config.heads :], heads[-config.kv_heads :])


def _shifting(refiner: Refiner) -> ShiftingRefiner:
    if not isinstance(refiner, ShiftingRefiner):
        raise MisuseError("shift", f"a {type(refiner).__name__}", "a refiner that can begin early", "shift nothing")
    return refiner
