"""The library's cache class over packed codes: what an attached model keeps of past tokens, and nothing beside.

The library hands a layer's new keys and values to the cache and attends to what it gets back. Those handed over came
out of codes that the projections left for the cache; it keeps the codes, and gives back the keys and values of all
tokens, built anew: decoded, normed and turned as the model does it. Positions are 4 bytes a token, once for all layers.
Layers that attend to a window have no codes, and the library's own cache of the window's length.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.decoder import ContextFull
from strataflux.kernels.fsq import FsqLayer

__all__ = ["CodedLayer", "CodedModel", "CodesCache"]


class CodedLayer:
    """One layer's keys and values out of codes; what its projections share with its cache."""

    def __init__(self, code: FsqLayer, attention: nn.Module, rows: Sequence[slice]) -> None:
        """``rows`` of the decoder are those of keys, and of values."""
        # fixed after construction
        self.code = code
        self._attention: Any = attention
        self._rows = tuple(rows)
        # changed by calls
        self.pending: Tensor | None = None
        """[batch, tokens, bytes] uint8 that the projections made last and no cache took."""
        self._input: Tensor | None = None
        self._centres = torch.empty(0)

    def project(self, x: Tensor, rows: slice) -> Tensor:
        """``rows`` of the decoder for inputs ``x`` [batch, tokens, hidden], in its dtype; encoded once for both."""
        if self._input is not x:
            levels = self.code.encode(x.detach().float())
            self._input, self._centres = x, self.code.grid.centres(levels)
            self.pending = self.code.grid.pack(levels)
        return self._decoded(self._centres, rows).to(x.dtype)

    def rebuild(self, packed: Tensor, turns: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys, turned, and values [batch, kv_heads, n, head_dim] of ``packed`` [batch, n, bytes]; ``turns`` are
        cosines and sines [batch, n, head_dim] of the tokens' positions.
        """
        centres, attention = self.code.grid.centres(self.code.grid.unpack(packed)), self._attention
        keys, values = (
            self._decoded(centres, rows, projection.bias).to(dtype).unflatten(-1, (-1, attention.head_dim))  # type: ignore[no-untyped-call]
            for rows, projection in zip(self._rows, (attention.k_proj, attention.v_proj), strict=True)
        )
        norm = getattr(attention, "k_norm", None)
        keys = (keys if norm is None else norm(keys)).transpose(1, 2)
        cosine, sine = (part[:, None] for part in turns)
        halves = keys.chunk(2, -1)
        return keys * cosine + torch.cat((-halves[1], halves[0]), -1) * sine, values.transpose(1, 2)

    def take(self) -> Tensor:
        """What is pending, which is then not.

        Raises:
            MisuseError: nothing is.
        """
        if self.pending is None:
            found = "keys and values that came from elsewhere"
            raise MisuseError("codes", found, "an attached model's own", "call the attached model")
        packed, self.pending, self._input = self.pending, None, None
        return packed

    def _decoded(self, centres: Tensor, rows: slice, bias: Tensor | None = None) -> Tensor:
        decoded = linear(centres, self.code.decoder[rows], self.code.decoder_bias[rows])
        return decoded if bias is None else decoded + bias.float()


class CodedModel:
    """The layers of one attached model, and the positions of the pass that it is in."""

    def __init__(self, layers: Sequence[CodedLayer | None], rotary: nn.Module, windows: Sequence[int] = ()) -> None:
        """``layers`` has None where a layer has no code; ``windows`` has how many positions that attends to."""
        self.layers = tuple(layer for layer in layers if layer is not None)
        """Those with codes."""
        self.windows = tuple(windows) or (0,) * len(layers)
        """Of all layers; 0: it has a code."""
        self._rotary = rotary
        self.positions = torch.empty(0)
        """[batch or 1, tokens] int64 of the newest pass."""

    @property
    def nbytes(self) -> int:
        """Bytes of a token's codes."""
        return sum(layer.code.grid.nbytes for layer in self.layers)

    def note(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A hook before rotary embedding is computed, which is told all positions."""
        self.positions = named["position_ids"] if "position_ids" in named else args[1]

    def turns(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [batch, n, head_dim] of ``positions`` [batch, n], as the model makes them."""
        noted = self.positions
        cosine, sine = self._rotary(torch.empty(0, dtype=dtype, device=positions.device), position_ids=positions)
        self.positions = noted
        return cosine, sine


class _Layer(CacheLayerMixin):
    """One layer of a cache, in the library's terms."""

    supports_early_init = False
    is_croppable = True
    is_sliding = False

    def __init__(self, batch: "_Batch", index: int) -> None:
        super().__init__()
        self.is_initialized = True
        self.length = 0
        self._batch, self._index = batch, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep the codes behind the new keys and values; those of all tokens."""
        start, self.length = self.length, self.length + key_states.shape[2]
        past = self._batch.append(self._index, start, key_states)
        if past is None:
            return key_states, value_states
        return torch.cat((past[0], key_states), 2), torch.cat((past[1], value_states), 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, offset of the first) for so many queries."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens so far, padding included."""
        return self.length

    def get_max_length(self) -> int:
        """Tokens there is room for."""
        return self._batch.context

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last ``-tokens_to_remove`` tokens back."""
        if not -self.length <= tokens_to_remove <= 0:
            found = f"{tokens_to_remove} after {self.length} tokens"
            raise MisuseError("crop", found, f"{-self.length} to 0: how many to take back", "negate it, or reset")
        self.length += tokens_to_remove

    def reset(self) -> None:
        """Forget all tokens."""
        self.length = 0
        self._batch.buffers.clear()


class _Batch:
    """Codes of the sequences of one batch: a buffer a layer, made when the first pass tells how many they are."""

    def __init__(self, model: CodedModel, context: int) -> None:
        # fixed after construction
        self.model = model
        self.context = context
        # changed by passes
        self.buffers: dict[int, Tensor] = {}
        """By layer [batch, context, bytes] uint8."""
        self.positions = torch.empty(0)
        """[batch, context] int32."""

    def append(self, index: int, start: int, keys: Tensor) -> tuple[Tensor, Tensor] | None:
        """Keep a layer's pending codes from token ``start`` on; keys and values of those before, None without any."""
        layer, stop = self.model.layers[index], start + keys.shape[2]
        if stop > self.context:
            found, most = f"token {stop}", f"at most {self.context}"
            raise ContextFull("codes", found, most, "make the cache with a larger context=")
        packed = layer.take()
        shape = (packed.shape[0], self.context, packed.shape[2])
        if index not in self.buffers:
            self.buffers[index] = packed.new_zeros(shape)
        buffer = self.buffers[index]
        if buffer.shape != shape:
            found, expected = f"a batch of {shape[0]}", f"{buffer.shape[0]}, as before"
            raise MisuseError("codes", found, expected, "start a new cache")
        if index == 0:
            if start == 0:
                self.positions = torch.zeros(shape[:2], dtype=torch.int32, device=packed.device)
            self.positions[:, start:stop] = self.model.positions
        buffer[:, start:stop] = packed
        if start == 0:
            return None
        turns = self.model.turns(self.positions[:, :start].long(), keys.dtype)
        return layer.rebuild(buffer[:, :start], turns, keys.dtype)

    def select(self, indices: Tensor) -> None:
        """Go on with the sequences at ``indices`` [n] int64."""
        self.buffers = {index: buffer[indices.to(buffer.device)] for index, buffer in self.buffers.items()}
        self.positions = self.positions[indices.to(self.positions.device)]


class CodesCache(Cache):
    """Keys and values of a batch as packed codes, ``batch · context · Σ_layers B`` bytes; in layers without codes those
    of the newest positions as they are.
    """

    def __init__(self, model: nn.Module, context: int) -> None:
        """An empty cache of ``context`` tokens for each sequence.

        Raises:
            MisuseError: codes are not attached to ``model``.
        """
        coded = getattr(model, "strataflux_codes", None)
        coded = getattr(coded, "coded", None)
        if not isinstance(coded, CodedModel):
            raise MisuseError("codes", "a model without any", "one with codes attached", "attach_codes(model, …) first")
        self.batch = _Batch(coded, context)
        numbers = count()
        self._sliding = [DynamicSlidingWindowLayer(window) for window in coded.windows if window]
        windows = iter(self._sliding)
        super().__init__(
            layers=[next(windows) if window else _Layer(self.batch, next(numbers)) for window in coded.windows]
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all codes' buffers; 0 before the first pass."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self.batch.buffers.values())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with the beams at ``beam_idx`` [beams] int64."""
        self.batch.select(beam_idx)
        for layer in self._sliding:
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Go on with the sequences at ``indices`` [n] int64."""
        self.batch.select(indices)
        for layer in self._sliding:
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times, one beside the other."""
        sequences = next(iter(self.batch.buffers.values())).shape[0]
        self.batch.select(torch.arange(sequences).repeat_interleave(repeats))
        for layer in self._sliding:
            layer.batch_repeat_interleave(repeats)
