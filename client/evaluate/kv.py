"""Evaluate a low-bit KV cache as if no refinement ever missed: many positions at once, on the weights' device.

A window is prefilled with uncompressed keys and values, which are then encoded; its last tokens are scored one after
the other. When every record is resident, what a step does depends on the text alone: positions between two multiples of
128 see the same tiles, so they run together, each selecting for itself, and the tile that filled up is encoded before
the next ones. Sums run in another order than token by token; divergences agree to better than 1e-4.

The exact cache keeps everything in float16, and is what divergences are from. All is in the rotated frame.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from strataflux.client.evaluate.scoring import Reference, Score, score, score_reference
from strataflux.client.runtime.block import Attend, attend_causally, multiply, run_block
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.runtime.rope import rotary_table
from strataflux.kernels.hadamard import turn
from strataflux.kernels.kv_attention import encoded_tiles, group_shares, selected_groups
from strataflux.kernels.kv_encode import (
    KEY_ROWS,
    VALUE_ROWS,
    KvFormat,
    decode_half,
    encode_tiles,
    unpack_groups,
)
from strataflux.kernels.kv_pack import TILE_TOKENS

__all__ = ["DenseKv", "Prefilled", "prefill", "score_exact", "score_low_bit"]


@dataclass(frozen=True)
class Prefilled:
    """A text's first tokens, and the uncompressed keys and values they left."""

    tokens: tuple[int, ...]
    keys: tuple[Tensor, ...]
    """A layer each: [kv_heads, n, head_dim] float16, rotated."""
    values: tuple[Tensor, ...]


@dataclass(frozen=True)
class _Levels:
    """Tiles 1, 2, … of one layer at both precisions: [kv_heads, tokens, head_dim] float32 each."""

    keys: Tensor
    values: Tensor
    fine_keys: Tensor
    fine_values: Tensor

    def followed_by(self, other: "_Levels") -> "_Levels":
        pairs = zip(self._parts(), other._parts(), strict=True)
        return _Levels(*(torch.cat(pair, 1) for pair in pairs))

    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.keys, self.values, self.fine_keys, self.fine_values


@torch.inference_mode()
def prefill(weights: DecoderWeights, tokens: Sequence[int], on_layer: Callable[[], object] = lambda: None) -> Prefilled:
    """Run ``tokens`` in one pass with exact attention and keep their keys and values."""
    keys, values = list[Tensor](), list[Tensor]()

    def attend(queries: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys.append(turn(key[0]).half())
        values.append(turn(value[0]).half())
        on_layer()
        return attend_causally(queries, key, value)

    _run(weights, tokens, 0, lambda _: attend, logits=False)
    return Prefilled(tuple(tokens), tuple(keys), tuple(values))


def _run(
    weights: DecoderWeights, tokens: Sequence[int], start: int, attend: Callable[[int], Attend], *, logits: bool = True
) -> Tensor:
    """Logits [n, vocabulary] after ``tokens`` at positions ``start`` …; ``attend`` gives what each layer does."""
    config, device = weights.config, weights.embedding.device
    cosine, sine = rotary_table(config, start + len(tokens))
    turns = cosine[start:].to(device), sine[start:].to(device)
    hidden = weights.embedding[torch.tensor(tokens, device=device)][None]
    for index, layer in enumerate(weights.layers):
        hidden = run_block(config, layer, hidden, turns, partial(multiply, layer), attend(index))
    if not logits:
        return hidden
    return linear(rms_norm(hidden[0], (config.hidden,), weights.norm, config.norm_epsilon), weights.head)


def score_exact(weights: DecoderWeights, prefilled: Prefilled, scored: Sequence[int]) -> Reference:
    """Score ``scored`` [n + 1] after the prefilled tokens with keys and values in float16; the first is given."""
    rows = iter(_exact_logits(weights, prefilled, scored[:-1]))
    return score_reference(lambda _: next(rows), scored)


@torch.inference_mode()
def _exact_logits(weights: DecoderWeights, prefilled: Prefilled, tokens: Sequence[int]) -> Tensor:
    start = len(prefilled.tokens)

    def attend_in(index: int) -> Attend:
        def attend(queries: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys = torch.cat((prefilled.keys[index], turn(key[0]).half()), 1).float()
            values = torch.cat((prefilled.values[index], turn(value[0]).half()), 1).float()
            logits = _logits(turn(queries[0]), keys, start)
            return turn(_mixed(logits.softmax(-1), values))[None]

        return attend

    return _run(weights, tokens, start, attend_in)


def _logits(queries: Tensor, keys: Tensor, start: int) -> Tensor:
    """[heads, n, tokens] of queries [heads, n, D] at ``start`` … over the keys [kv_heads, tokens, D] so far."""
    shared = queries.reshape(keys.shape[0], -1, queries.shape[-1])
    logits = (shared @ keys.transpose(1, 2) / math.sqrt(queries.shape[-1])).view(*queries.shape[:2], -1)
    positions = torch.arange(keys.shape[1], device=keys.device)
    now = torch.arange(start, start + queries.shape[1], device=keys.device)
    return logits.masked_fill_(positions > now[:, None], -math.inf)


def _mixed(weights: Tensor, values: Tensor) -> Tensor:
    """[heads, n, D] of weights [heads, n, tokens] and values [kv_heads, tokens, D]."""
    shared = weights.reshape(values.shape[0], -1, weights.shape[-1])
    return (shared @ values).view(*weights.shape[:2], -1)


class DenseKv:
    """The prefilled tokens of one text encoded in one format; any fraction and size of groups can then be scored."""

    @torch.inference_mode()
    def __init__(
        self, weights: DecoderWeights, prefilled: Prefilled, form: KvFormat, encode_scored: bool = True
    ) -> None:
        """Encode all whole tiles but the first. Without ``encode_scored`` tiles that fill up while scoring stay exact,
        as no cache would keep them: for comparison with figures made so.
        """
        # fixed after construction
        self._weights = weights
        self._prefilled = prefilled
        self._form = form
        self._encode_scored = encode_scored
        tiles = encoded_tiles(len(prefilled.tokens) + 1)
        span = slice(TILE_TOKENS, (1 + tiles) * TILE_TOKENS)
        pairs = zip(prefilled.keys, prefilled.values, strict=True)
        self._levels = [_encode(key[:, span], value[:, span], form) for key, value in pairs]

    def rows(
        self, tokens: Sequence[int], fraction: Fraction, group_tokens: int, kept_steps: int = 0
    ) -> Iterator[Tensor]:
        """Logits [vocabulary] after each of ``tokens``, refined; with ``fraction`` 0 at resident precision. Where
        ``kept_steps`` is not 0, each token refines what so many before it selected, and the first one nothing.
        """
        levels = list(self._levels)
        before: dict[int, Tensor] = {}
        keys, values = list(self._prefilled.keys), list(self._prefilled.values)
        done = 0
        while done < len(tokens):
            start = len(self._prefilled.tokens) + done
            count = min(TILE_TOKENS - start % TILE_TOKENS, len(tokens) - done)
            with torch.inference_mode():
                if self._encode_scored:
                    self._encode_filled(levels, keys, values, encoded_tiles(start + 1))
                chunk = _Chunk(levels, keys, values, start, fraction, group_tokens, kept_steps, before)
                logits = _run(self._weights, tokens[done : done + count], start, chunk.attend_in)
            yield from logits
            done += count

    def _encode_filled(self, levels: list[_Levels], keys: list[Tensor], values: list[Tensor], tiles: int) -> None:
        for index, level in enumerate(levels):
            span = slice(TILE_TOKENS + level.keys.shape[1], (1 + tiles) * TILE_TOKENS)
            if span.start < span.stop:
                levels[index] = level.followed_by(_encode(keys[index][:, span], values[index][:, span], self._form))


@dataclass(frozen=True)
class _Chunk:
    """Positions ``start`` … that see the same tiles; appends their keys and values."""

    levels: list[_Levels]
    keys: list[Tensor]
    values: list[Tensor]
    start: int
    fraction: Fraction
    group_tokens: int
    kept_steps: int
    before: dict[int, Tensor]
    """By layer, which groups [kept_steps, kv_heads, groups] the last positions before these selected."""

    def attend_in(self, index: int) -> Attend:
        def attend(queries: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.keys[index] = torch.cat((self.keys[index], turn(key[0]).half()), 1)
            self.values[index] = torch.cat((self.values[index], turn(value[0]).half()), 1)
            return turn(self._attend(index, turn(queries[0])))[None]

        return attend

    def _attend(self, index: int, queries: Tensor) -> Tensor:
        level = self.levels[index]
        span = slice(TILE_TOKENS, TILE_TOKENS + level.keys.shape[1])
        keys, values = self.keys[index].float(), self.values[index].float()
        keys[:, span], values[:, span] = level.keys, level.values
        logits = _logits(queries, keys, self.start)
        if not self.fraction or span.start == span.stop:
            return _mixed(logits.softmax(-1), values)
        chosen = self._chosen(index, logits, span, keys.shape[0])
        keys[:, span] = level.fine_keys
        logits[..., span] = torch.where(chosen, _logits(queries, keys, self.start)[..., span], logits[..., span])
        weights = logits.softmax(-1)
        delta = level.fine_values - level.values
        return _mixed(weights, values) + _mixed(weights[..., span] * chosen, delta)

    def _chosen(self, index: int, logits: Tensor, span: slice, kv_heads: int) -> Tensor:
        """Which tokens of tiles are refined: [heads, n, tokens] bool."""
        maximum, total = logits.amax(-1), logits.logsumexp(-1).sub(logits.amax(-1)).exp()
        by_query = logits[..., span].transpose(0, 1), maximum.T, total.T
        shares = group_shares(*by_query, kv_heads, self.group_tokens)
        count = selected_groups(self.fraction, shares.shape[-1])
        mask = torch.zeros_like(shares, dtype=torch.bool).scatter_(-1, shares.topk(count, -1).indices, True)
        if self.kept_steps:
            mask = self._late(index, mask)
        tokens = mask.repeat_interleave(self.group_tokens, -1)
        return tokens.repeat_interleave(logits.shape[0] // kv_heads, 1).transpose(0, 1)

    def _late(self, index: int, mask: Tensor) -> Tensor:
        """What the positions before each one selected [n, kv_heads, groups]."""
        kept, count = self.kept_steps, mask.shape[0]
        first = mask.new_zeros(kept, *mask.shape[1:])
        if (last := self.before.get(index)) is not None:
            first[..., : last.shape[-1]] = last  # tiles may have come since
        every = torch.cat((first, mask))
        self.before[index] = every[count:]
        return torch.stack([every[i : i + count] for i in range(kept)]).any(0)


def _encode(keys: Tensor, values: Tensor, form: KvFormat) -> _Levels:
    """Both precisions of tokens [kv_heads, tokens, D], whole tiles of them."""
    if keys.shape[1] == 0:
        return _Levels(keys.float(), values.float(), keys.float(), values.float())
    shape = (keys.shape[0], keys.shape[1] // TILE_TOKENS, TILE_TOKENS, keys.shape[2])
    encoded = encode_tiles(keys.float().reshape(shape), values.float().reshape(shape), form)
    key_codes, value_codes = (codes.flatten(-3, -2) for codes in unpack_groups(encoded.records, form))
    sides = (
        (encoded.keys, form.key_bits, KEY_ROWS, key_codes, form.refine_key_bits),
        (encoded.values, form.value_bits, VALUE_ROWS, value_codes, form.refine_value_bits),
    )
    coarse = [decode_half(half, bits, rows).flatten(1, 2) for half, bits, rows, _, _ in sides]
    fine = [decode_half(half, bits, rows, codes, width).flatten(1, 2) for half, bits, rows, codes, width in sides]
    return _Levels(coarse[0], coarse[1], fine[0], fine[1])


def score_low_bit(
    dense: DenseKv, reference: Reference, fraction: Fraction, group_tokens: int, kept_steps: int = 0
) -> Score:
    """Score the reference's text as it goes on after the prefilled tokens, by a low-bit cache without misses; arguments
    as of :meth:`DenseKv.rows`.
    """
    rows = dense.rows(reference.tokens[:-1], fraction, group_tokens, kept_steps)
    return score(lambda _: next(rows), reference)
