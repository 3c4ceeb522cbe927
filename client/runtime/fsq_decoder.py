"""A decoder whose keys and values come out of codes: prompts in chunks, then token by token."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.block import attend_newest, run_block
from strataflux.client.runtime.decoder import ContextFull, Decoder, Refiner
from strataflux.client.runtime.fsq_cache import FsqCache
from strataflux.client.runtime.models import DecoderWeights
from strataflux.kernels.fsq import FsqLayer

__all__ = ["FsqDecoder"]


class FsqDecoder(Decoder):
    """Decodes one sequence with an :class:`FsqCache`. Not safe for use from two threads."""

    def __init__(
        self,
        weights: DecoderWeights,
        codes: Sequence[FsqLayer] | FsqCache,
        context: int,
        refiner: Refiner | None = None,
        shift: Mapping[str, float] | None = None,
    ) -> None:
        """Nothing is decoded yet.

        Args:
            weights: the model's.
            codes: one for each layer that attends to all positions, made over these weights; or a cache of such.
            context: positions of the cache, where it is made here.
            refiner: of the projections; of keys and values there is nothing to refine.
            shift: blocks of fetch lead or lag of each projection set; by default none of any.

        Raises:
            MisuseError: as :class:`Decoder` and :class:`FsqCache`.
        """
        self.codes = codes if isinstance(codes, FsqCache) else FsqCache(weights, codes, context)
        """The cache."""
        super().__init__(weights, context, refiner, self.codes, shift)

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], chunk: int = 512) -> Tensor:
        """Take ``tokens``, ``chunk`` at a time and unrefined, after those that are there; logits [vocabulary] of the
        next one.

        Raises:
            ContextFull: there is no room; nothing has changed.
            MisuseError: there are none.
        """
        if self.position + len(tokens) > self.context:
            found = f"{len(tokens)} tokens at position {self.position}"
            raise ContextFull("prompt", found, f"at most {self.context} in all", "raise --context")
        if not tokens or chunk < 1:
            found = f"{len(tokens)} tokens in chunks of {chunk}"
            raise MisuseError("prefill", found, "at least one, in chunks of one or more", "give some")
        for start in range(0, len(tokens), chunk):
            hidden = self._run_chunk(tokens[start : start + chunk])
        weights = self.weights
        last = rms_norm(hidden[-1], (weights.config.hidden,), weights.norm, weights.config.norm_epsilon)
        return torch.mv(weights.head, last)

    def _run_chunk(self, tokens: Sequence[int]) -> Tensor:
        """Hidden states [n, hidden] after the last layer."""
        weights, start = self.weights, self.position
        end = start + len(tokens)
        turns = self._cosine[start:end], self._sine[start:end]
        hidden = weights.embedding[list(tokens)][None]
        for index, layer in enumerate(weights.layers):
            project, attend = partial(self._project_chunk, index), partial(self._attend_chunk, index)
            hidden = run_block(weights.config, layer, hidden, turns, project, attend)
        self.codes.end_fill(end)
        return hidden[0]

    def _project_chunk(self, layer: int, name: str, x: Tensor) -> Tensor:
        matrix = self.weights.layers[layer].projections[name]
        if name != "qkv" or layer in self.codes.exact:
            return linear(x, matrix)
        self.codes.take(layer, x[0])
        # Attention gets keys and values from the codes; their rows hold its place here.
        queries = self.weights.config.heads * self.weights.config.head_dim
        return torch.cat((linear(x, matrix[:queries]), x.new_zeros(*x.shape[:2], matrix.shape[0] - queries)), -1)

    def _attend_chunk(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if layer in self.codes.exact:
            return self.codes.exact[layer].extend(self.position, queries, keys, values)
        keys, values = self.codes.rebuild(layer, 0, self.position + queries.shape[2])
        return attend_newest(queries, keys[None], values[None])

    def _project(self, layer: int, set_index: int, x: Tensor) -> Tensor:
        if set_index == 0 and layer not in self.codes.exact:
            self.codes.take(layer, x[None])
        return super()._project(layer, set_index, x)
