"""The library's cache class over refined low-bit sequences, and the attention that reads them.

The library hands a layer's new keys and values to the cache, and what the cache gives back to an attention function.
Low-bit attention needs the queries, too, so the cache marks the keys that it gives back, and the attention function
finds by that mark whose they are. A first pass over a prompt attends to exact keys and values and fills the cache; each
later token attends through it, as in :class:`~strataflux.client.runtime.decoder.Decoder`.

Sequences of a batch may be padded: padding is not put into the cache, so they differ in length.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from strataflux.client.errors import MisuseError
from strataflux.client.kv import EarlySource, RefinedKVCache
from strataflux.client.kv_blocks import KvBlocks
from strataflux.client.kv_options import blocks_for
from strataflux.client.runtime.decoder import ContextFull
from strataflux.client.weights import RecordSource

__all__ = ["ATTENTION", "KvPool", "StrataFluxCache", "attend"]

ATTENTION: Final = "strataflux"
"""The name of the attention function among the library's."""
_MARK: Final = "_strataflux_sequences"


@dataclass(frozen=True)
class KvPool:
    """Where a model's low-bit sequences come from."""

    blocks: KvBlocks
    context: int
    """Positions of each sequence."""
    fraction: Fraction
    source: RecordSource | None
    table: int
    wait_seconds: float
    early: EarlySource | None = None
    """As of a sequence."""
    kept_steps: int = 1

    def take(self, count: int) -> list[RefinedKVCache]:
        """``count`` empty sequences, which refine nothing until they are told to.

        Raises:
            MisuseError: there is no room for so many.
            RefusedError: the daemon has none for their records. DaemonUnavailableError: it does not answer.
        """
        each = blocks_for(self.context)
        if count * each > self.blocks.free:
            found, expected = f"{count} more sequences of {self.context} tokens", f"at most {self.blocks.free // each}"
            remedy = "attach with more sequences=, drop an earlier cache, or call with use_cache=False"
            raise MisuseError("KV cache", found, expected, remedy)
        taken: list[RefinedKVCache] = []
        settings = self.context, self.fraction, self.source, self.table, self.wait_seconds, self.early, self.kept_steps
        try:
            for _ in range(count):
                taken.append(RefinedKVCache(self.blocks, *settings))
                taken[-1].refining = False
        except BaseException:
            _close_all(taken)
            raise
        return taken


class _Sequences:
    """The sequences of one batch, as the layers of a cache see them.

    A pass is ``hand_over`` and ``attend`` once a layer in order. One that did not reach the last layer leaves all
    lengths as they were.
    """

    def __init__(self, pool: KvPool) -> None:
        # fixed after construction
        self.pool = pool
        self.layers = pool.blocks.config.layers
        # changed by passes and by what selects among sequences
        self.all: list[RefinedKVCache] = []
        self.columns = 0
        """Tokens of each sequence as the library counts them, padding included."""
        self._handed: int | None = None
        self._real: list[Tensor] = []
        """Of a first pass: the columns of each sequence that are no padding."""

    def hand_over(self, layer: int, keys: Tensor) -> None:
        """Mark ``keys``, which the attention function gets next."""
        if layer and self._handed is not None:
            found = f"keys of layer {self._handed} that another attention function took"
            raise MisuseError("KV cache", found, f"attention {ATTENTION!r}", "leave the model's attention, or detach")
        self._handed = layer
        setattr(keys, _MARK, self)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor | None:
        """Mixed values [batch, 1, heads, head_dim] of one more token each; None where the exact ones are to be used.

        Args:
            layer: 0 first.
            queries: [batch, heads, tokens, head_dim], turned by position like the keys.
            keys: [batch, kv_heads, tokens, head_dim].
            values: as ``keys``.
            mask: True where a query [batch, 1, tokens, tokens] sees a key; None: causal. Padding is told by it.

        Raises:
            MisuseError: more tokens at once for sequences that are not empty, or more sequences than there is room for.
            ContextFull: a sequence has no room.
        """
        self._handed = None
        count, tokens = keys.shape[0], keys.shape[2]
        if layer == 0:
            self._prepare(count, tokens)
        if tokens > 1:
            self._fill(layer, keys.detach().float(), values.detach().float(), mask)
            return None
        mixed = [
            sequence.attend(layer, queries[row, :, 0].float(), keys[row, :, 0].float(), values[row, :, 0].float())
            for row, sequence in enumerate(self.all)
        ]
        if layer == self.layers - 1:
            self.columns += 1
            for sequence in self.all:
                sequence.end_step()
        return torch.stack(mixed).to(queries.dtype).view(count, 1, queries.shape[1], queries.shape[3])

    def begin_step(self) -> None:
        """Encode tiles that filled up, outside of any session's step.

        Raises:
            ContextFull: a sequence has no room for another token.
        """
        for sequence in self.all:
            if sequence.length == sequence.context:
                found, most = f"token {sequence.length + 1}", f"at most {sequence.context}"
                raise ContextFull("KV cache", found, most, "attach with a larger context=")
            sequence.begin_step()

    def truncate(self, tokens: int) -> None:
        """Take the last ``tokens`` of each sequence back."""
        for sequence in self.all:
            sequence.truncate(sequence.length - tokens)
        self.columns -= tokens

    def select(self, indices: Sequence[int]) -> None:
        """Go on with the sequences at ``indices``, in that order; one that is named again is forked.

        Raises:
            MisuseError: there is no room for a fork; all sequences are dropped, for some are gone already.
        """
        kept = set(indices)
        for index, sequence in enumerate(self.all):
            if index not in kept:
                sequence.close()
        chosen: list[RefinedKVCache] = []
        try:
            for index in indices:
                chosen.append(self.all[index] if index in kept else self.all[index].fork())
                kept.discard(index)
        except BaseException:
            _close_all(chosen)
            self.clear()
            raise
        self.all[:] = chosen

    def clear(self) -> None:
        """Drop all sequences."""
        _close_all(self.all)
        self.columns = 0

    def _prepare(self, count: int, tokens: int) -> None:
        if self.columns == 0 and len(self.all) != count:
            self.clear()
            self.all[:] = self.pool.take(count)
        if len(self.all) != count:
            raise MisuseError("KV cache", f"a batch of {count}", f"{len(self.all)}, as before", "start a new cache")
        if tokens == 1:
            self.begin_step()
        elif self.columns:
            found, expected = f"{tokens} tokens at once after {self.columns}", "one at a time after the first pass"
            raise MisuseError("KV cache", found, expected, "call the attached model, not its base model")

    def _fill(self, layer: int, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        count, tokens = keys.shape[0], keys.shape[2]
        if layer == 0:
            # The last query of a sequence sees all tokens of it, and no padding.
            seen = torch.ones(count, tokens) if mask is None else mask[:, 0, -1, :].expand(count, -1)
            self._real = [row.nonzero().flatten() for row in seen]
        for row, (sequence, real) in enumerate(zip(self.all, self._real, strict=True)):
            sequence.fill(layer, keys[row, :, real], values[row, :, real])
        if layer == self.layers - 1:
            self.columns = tokens
            for sequence, real in zip(self.all, self._real, strict=True):
                sequence.end_fill(len(real))


class _Layer(CacheLayerMixin):
    """One layer of a cache, in the library's terms."""

    supports_early_init = False
    is_sliding = False

    def __init__(self, sequences: _Sequences, index: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._sequences, self._index = sequences, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values as they are; the attention function takes them in."""
        self._sequences.hand_over(self._index, key_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, offset of the first) for so many queries."""
        return self._sequences.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens so far, padding included."""
        return self._sequences.columns

    def get_max_length(self) -> int:
        """Tokens there is room for."""
        return self._sequences.pool.context

    @property
    def batch_size(self) -> int:
        """Sequences; -1 before the first pass."""
        return len(self._sequences.all) or -1


class StrataFluxCache(Cache):
    """Keys and values of a batch in low bits, refined while a daemon serves them.

    An attached model makes one where the library would make its own; make one yourself to go on with it in a later
    call. Its blocks are free again when it is dropped. After the first pass tokens are taken one by one, whatever their
    number in a call; the newest 1 to 128 tokens can be cropped.
    """

    def __init__(self, model: nn.Module) -> None:
        """An empty cache for ``model``.

        Raises:
            MisuseError: it is not attached with a low-bit KV cache.
        """
        pool = getattr(getattr(model, "strataflux", None), "pool", None)
        if not isinstance(pool, KvPool):
            raise MisuseError("KV cache", "a model without one in low bits", "an attached one", 'attach(…, kv="2/2")')
        sequences = _Sequences(pool)
        super().__init__(layers=[_Layer(sequences, index) for index in range(sequences.layers)])
        self.sequences = sequences
        # Layers and sequences know nothing of this object, so the last reference to it ends it.
        weakref.finalize(self, _close_all, sequences.all)

    def refine(self, on: bool) -> None:
        """Whether groups are selected and looked up from now on; only within a session's step."""
        for sequence in self.sequences.all:
            sequence.refining = on

    def reset(self) -> None:
        """Begin anew, with any number of sequences."""
        self.sequences.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last ``-tokens_to_remove`` tokens back.

        Raises:
            MisuseError: it is above 0, or they are in low bits already.
        """
        if tokens_to_remove > 0:
            raise MisuseError("crop", f"{tokens_to_remove}", "0 or less: how many to take back", "negate it")
        self.sequences.truncate(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with the beams at ``beam_idx`` [beams] int64."""
        self.sequences.select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Go on with the sequences at ``indices`` [n] int64."""
        self.sequences.select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times, one beside the other."""
        self.sequences.select([index for index in range(len(self.sequences.all)) for _ in range(repeats)])


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The library's attention function: through a low-bit cache where keys are marked, else the library's own.

    Returns:
        Mixed values [batch, tokens, heads, head_dim], and no attention weights.
    """
    sequences = getattr(key, _MARK, None)
    if sequences is not None:
        mixed = sequences.attend(module.layer_idx, query, key, value, attention_mask)
        if mixed is not None:
            return mixed, None
    exact: tuple[Tensor, Tensor | None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return exact


def _close_all(sequences: list[RefinedKVCache]) -> None:
    for sequence in sequences:
        sequence.close()
    sequences.clear()


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
