"""Attention of a new token over a low-bit KV cache, its strongest token groups refined; nothing here is compiled.

Everything is in the rotated frame (:mod:`strataflux.kernels.hadamard`): queries are turned before, outputs after. A
sequence of L tokens, the newest being the query's own, is

    tokens 0 … 127 in float16 (the *sink*) · tiles 1, 2, … in low bits · 1 to 128 newest tokens in float16 (the *tail*)

Formulas, for one query head h of a KV head j. Resident keys give logits ``l_t``, their maximum m, the sum
``Z = Σ e^(l_t - m)`` and the output ``o = Σ e^(l_t - m) v_t / Z``.

Selection: a group's share is ``max over the heads h of j of Σ_{t in group} e^(l_t - m) / Z``, over *all* tokens; the n
groups of tiles with the largest share are refined, ``n = max(1, floor(fraction · groups))``.

Refinement of the selected tokens S that are present, with refined logits l' and values v', and m' the larger of m and
all l' (a refined logit may exceed every resident one):

    o' = (Z e^(m-m') o + Σ_S (e^(l'-m') v' - e^(l-m') v)) / (Z e^(m-m') + Σ_S (e^(l'-m') - e^(l-m')))

in float32, since it subtracts. It equals attention computed anew with the refined keys and values in place.

This module defines the operations; :mod:`strataflux.kernels.kv_attention_cpu` has the same signatures, compiled.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from strataflux.kernels.kv_encode import KEY_ROWS, VALUE_ROWS, HalfTiles, KvFormat, decode_half, unpack_groups
from strataflux.kernels.kv_pack import TILE_TOKENS

__all__ = [
    "KvLayer",
    "Resident",
    "attend_reference",
    "encoded_tiles",
    "exact_spans",
    "expected_shares_reference",
    "group_shares",
    "refine_reference",
    "select_groups",
    "selected_groups",
]


@dataclass(frozen=True)
class KvLayer:
    """What attention of one layer reads. Blocks are physical: sequences name theirs in ``table``."""

    form: KvFormat
    keys: HalfTiles
    """[blocks, kv_heads, ...]"""
    values: HalfTiles
    table: Tensor
    """[batch, tiles] int64: the block of tile 1, 2, … of each sequence; only the first ``encoded_tiles`` are read."""
    sink_keys: Tensor
    """[batch, kv_heads, 128, D] float16, as are the next three."""
    sink_values: Tensor
    tail_keys: Tensor
    tail_values: Tensor
    lengths: tuple[int, ...]
    """Tokens of each sequence, the newest included; at least 1."""

    @property
    def kv_heads(self) -> int:
        """KV heads of the layer."""
        return self.sink_keys.shape[1]


@dataclass(frozen=True)
class Resident:
    """Attention with resident precision: all that selection and refinement need of it."""

    logits: Tensor
    """[batch, heads, tiles · 128] float32, of the tokens in tiles; -inf where a sequence has fewer tiles."""
    maximum: Tensor
    """[batch, heads] float32, over all tokens."""
    total: Tensor
    """[batch, heads] float32: Z."""
    output: Tensor
    """[batch, heads, D] float32."""


def encoded_tiles(length: int) -> int:
    """Tiles in low bits in a sequence of ``length`` tokens: whole ones, but for the first and the newest token's."""
    return max(0, (length - 1) // TILE_TOKENS - 1)


def exact_spans(length: int) -> tuple[int, int]:
    """(tokens in the sink, tokens in the tail) of a sequence of ``length`` tokens."""
    sink = min(length, TILE_TOKENS)
    return sink, length - sink - TILE_TOKENS * encoded_tiles(length)


def attend_reference(queries: Tensor, layer: KvLayer) -> Resident:
    """Attention of ``queries`` [batch, heads, D] float32 over resident keys and values, by definition."""
    width = max((encoded_tiles(n) for n in layer.lengths), default=0) * TILE_TOKENS
    logits = queries.new_full((*queries.shape[:2], width), -math.inf)
    maximum, total, output = [], [], []
    for index, query in enumerate(queries):
        keys, values, (start, end) = _dense(layer, index)
        scores = _scores(query, keys)
        logits[index, :, : end - start] = scores[:, start:end]
        maximum.append(scores.amax(-1))
        weights = (scores - maximum[-1][:, None]).exp()
        total.append(weights.sum(-1))
        output.append(_mix(weights, values) / total[-1][:, None])
    return Resident(logits, torch.stack(maximum), torch.stack(total), torch.stack(output))


def _dense(layer: KvLayer, index: int) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Resident keys and values [kv_heads, tokens, D] of a sequence, and where the tokens of tiles lie among them."""
    length = layer.lengths[index]
    tiles = encoded_tiles(length)
    sink, tail = exact_spans(length)
    blocks = layer.table[index, :tiles]
    parts = []
    for half, bits, rows, first, last in (
        (layer.keys, layer.form.key_bits, KEY_ROWS, layer.sink_keys, layer.tail_keys),
        (layer.values, layer.form.value_bits, VALUE_ROWS, layer.sink_values, layer.tail_values),
    ):
        middle = decode_half(half[blocks], bits, rows).transpose(0, 1).flatten(1, 2)
        parts.append(torch.cat((first[index, :, :sink].float(), middle, last[index, :, :tail].float()), 1))
    return parts[0], parts[1], (sink, sink + tiles * TILE_TOKENS)


def _scores(query: Tensor, keys: Tensor) -> Tensor:
    """Logits [heads, tokens] of a query [heads, D] over keys [kv_heads, tokens, D]."""
    shared = query.reshape(keys.shape[0], -1, query.shape[-1])
    return (shared @ keys.transpose(1, 2)).flatten(0, 1) / math.sqrt(query.shape[-1])


def _mix(weights: Tensor, values: Tensor) -> Tensor:
    """Weighted sums [heads, D] of values [kv_heads, tokens, D] with weights [heads, tokens]."""
    shared = weights.reshape(values.shape[0], -1, weights.shape[-1])
    return (shared @ values).flatten(0, 1)


def selected_groups(fraction: Fraction, groups: int) -> int:
    """How many of ``groups`` eligible groups of a KV head are refined: at least one, if there are any."""
    return min(groups, max(1, math.floor(fraction * groups)))


def group_shares(logits: Tensor, maximum: Tensor, total: Tensor, kv_heads: int, group_tokens: int) -> Tensor:
    """Each group's share [..., kv_heads, groups] float32 of logits [..., heads, tokens], the formula's first half."""
    weights = (logits - maximum[..., None]).exp().div_(total[..., None])
    summed = weights.reshape(*weights.shape[:-1], weights.shape[-1] // group_tokens, group_tokens).sum(-1)
    return summed.reshape(*summed.shape[:-2], kv_heads, summed.shape[-2] // kv_heads, summed.shape[-1]).amax(-2)


def select_groups(resident: Resident, layer: KvLayer, fraction: Fraction) -> tuple[Tensor, Tensor]:
    """The groups to refine, the strongest first.

    Returns:
        Groups [batch, kv_heads, n] int64, counted from the first token of tile 1, and their shares, float32. A sequence
        that has fewer groups than another fills up with -1 and 0.
    """
    tokens = layer.form.group_tokens
    shares = group_shares(resident.logits, resident.maximum, resident.total, layer.kv_heads, tokens)
    counts = [selected_groups(fraction, encoded_tiles(n) * layer.form.groups_per_tile) for n in layer.lengths]
    top = shares.topk(max(counts, default=0), -1)
    beyond = torch.arange(top.values.shape[-1])[None] >= torch.tensor(counts)[:, None]
    beyond = beyond[:, None].to(shares.device)
    return top.indices.masked_fill(beyond, -1), top.values.masked_fill(beyond, 0.0)


def expected_shares_reference(queries: Tensor, layer: KvLayer) -> Tensor:
    """The shares that ``queries`` [batch, heads, D] would give to groups before the newest token's key is there.

    Returns:
        [batch, kv_heads, groups] float32, of the groups of tiles; 0 where a sequence has fewer. Shares are of all
        tokens but the newest.
    """
    width = max((encoded_tiles(n) for n in layer.lengths), default=0) * layer.form.groups_per_tile
    shares = queries.new_zeros(queries.shape[0], layer.kv_heads, width)
    for index, query in enumerate(queries):
        keys, _, (start, end) = _dense(layer, index)
        scores = _scores(query, keys[:, :-1])
        maximum = scores.amax(-1)
        total = (scores - maximum[:, None]).exp().sum(-1)
        found = group_shares(scores[:, start:end], maximum, total, layer.kv_heads, layer.form.group_tokens)
        shares[index, :, : found.shape[-1]] = found
    return shares


def refine_reference(
    queries: Tensor, layer: KvLayer, resident: Resident, groups: Tensor, records: Tensor, present: Tensor
) -> Tensor:
    """Refine the selected groups that are present.

    Args:
        queries: [batch, heads, D] float32, as given to :func:`attend_reference`.
        layer: the same.
        resident: what came of it.
        groups: [batch, kv_heads, n] int64 of :func:`select_groups`.
        records: [batch, kv_heads, n, record_bytes] uint8; those of absent groups are not looked at.
        present: [batch, kv_heads, n] bool.

    Returns:
        Outputs [batch, heads, D] float32; new.
    """
    output = resident.output.clone()
    heads = queries.shape[1] // layer.kv_heads
    for index, head in ((i, j) for i in range(len(layer.lengths)) for j in range(layer.kv_heads)):
        chosen = present[index, head]
        if bool(chosen.any()):
            rows = slice(head * heads, (head + 1) * heads)
            kept = groups[index, head][chosen]
            old, new = _tokens(layer, layer.table[index], head, kept, records[index, head][chosen])
            of_group = kept[:, None] * layer.form.group_tokens + torch.arange(
                layer.form.group_tokens, device=kept.device
            )
            state = (resident.maximum[index, rows], resident.total[index, rows], resident.output[index, rows])
            before = resident.logits[index, rows][:, of_group.flatten()]
            output[index, rows] = _updated(queries[index, rows], before, state, old, new)
    return output


def _tokens(
    layer: KvLayer, table: Tensor, head: int, groups: Tensor, records: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(keys, values) [tokens, D] of ``groups`` at their resident and at their refined levels."""
    form = layer.form
    tiles, within = groups // form.groups_per_tile, groups % form.groups_per_tile
    codes = unpack_groups(records, form)
    found: list[tuple[Tensor, Tensor]] = []
    for half, bits, rows, code, width in (
        (layer.keys, form.key_bits, KEY_ROWS, codes[0], form.refine_key_bits),
        (layer.values, form.value_bits, VALUE_ROWS, codes[1], form.refine_value_bits),
    ):
        mine = half[table[tiles], head]
        spread = code.new_zeros(len(groups), form.groups_per_tile, form.group_tokens, form.head_dim)
        every = torch.arange(len(groups), device=groups.device)
        spread[every, within] = code
        whole = (decode_half(mine, bits, rows), decode_half(mine, bits, rows, spread.flatten(1, 2), width))
        old, new = (t.reshape(spread.shape)[every, within].flatten(0, 1) for t in whole)
        found.append((old, new))
    return (found[0][0], found[1][0]), (found[0][1], found[1][1])


def _updated(
    query: Tensor,
    before: Tensor,
    state: tuple[Tensor, Tensor, Tensor],
    old: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
) -> Tensor:
    """The module's last formula for the heads [heads, D] of one KV head; ``before`` are their resident logits."""
    maximum, total, output = state
    after = query @ new[0].T / math.sqrt(query.shape[-1])
    shift = torch.maximum(maximum, after.amax(-1))
    whole = total * (maximum - shift).exp()
    gone, come = (before - shift[:, None]).exp(), (after - shift[:, None]).exp()
    numerator = whole[:, None] * output + come @ new[1] - gone @ old[1]
    return numerator / (whole + (come - gone).sum(-1))[:, None]
