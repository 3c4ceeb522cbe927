"""Small low-bit KV caches as kernels see them, and what attention to them is, by definition and in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from strataflux.kernels.gpu.kv_work import KvTiles
from strataflux.kernels.hadamard import turn
from strataflux.kernels.kv_attention import encoded_tiles, exact_spans
from strataflux.kernels.kv_encode import KEY_ROWS, VALUE_ROWS, KvFormat, decode_half, encode_tiles
from strataflux.kernels.kv_pack import TILE_TOKENS

__all__ = ["Case", "Exactly", "attend_exactly", "make_case"]


@dataclass
class Case:
    """A cache, one new token for each sequence, and the records of all blocks [blocks, kv_heads, groups, bytes]."""

    cache: KvTiles
    records: Tensor
    queries: Tensor
    new_keys: Tensor
    new_values: Tensor
    positions: Tensor

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.queries.device


def make_case(
    form: KvFormat,
    kv_heads: int,
    group: int,
    positions: tuple[int, ...],
    tiles: int,
    device: torch.device,
    seed: int = 0,
) -> Case:
    """Random tokens; keys with large channels and large tokens, so that attention is neither flat nor one token's."""
    generator = torch.Generator().manual_seed(seed)
    batch, d = len(positions), form.head_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    blocks = batch * tiles + 1
    keys = random(blocks, kv_heads, TILE_TOKENS, d) * (1 + 3 * (random(1, kv_heads, 1, d) > 1.5))
    values = random(blocks, kv_heads, TILE_TOKENS, d) * (1 + 4 * (random(blocks, kv_heads, TILE_TOKENS, 1) > 2))
    encoded = encode_tiles(keys, values, form)
    table = torch.randperm(blocks, generator=generator)[: batch * tiles].reshape(batch, tiles).int()
    exact = [random(batch, kv_heads, TILE_TOKENS, d).half() for _ in range(4)]
    new = random(batch, (group + 2) * kv_heads, d).half().split([group * kv_heads, kv_heads, kv_heads], 1)  # type: ignore[no-untyped-call]
    for half in (encoded.keys, encoded.values):
        for name in ("codes", "scale", "zero", "other"):
            object.__setattr__(half, name, getattr(half, name).to(device))
    cache = KvTiles(form, encoded.keys, encoded.values, table.to(device), *(t.to(device) for t in exact))
    queries, new_keys, new_values = (t.contiguous().to(device) for t in new)
    position = torch.tensor(positions, dtype=torch.int32, device=device)
    return Case(cache, encoded.records.to(device), queries, new_keys, new_values, position)


@dataclass
class Exactly:
    """Attention of one sequence in float64."""

    output: Tensor
    """[heads, head_dim], turned back."""
    logits: Tensor
    """[heads, tokens]."""
    shares: Tensor
    """[kv_heads, groups of tiles]."""


def attend_exactly(case: Case, index: int, refined: Tensor | None = None) -> Exactly:
    """What sequence ``index`` should come to, its new token being in the cache already.

    ``refined`` [kv_heads, groups] says which groups of tiles are at their refined levels.
    """
    cache, form = case.cache, case.cache.form
    length = int(case.positions[index]) + 1
    tiles, (sink, tail) = encoded_tiles(length), exact_spans(length)
    blocks = cache.table[index, :tiles].long()
    dense = []
    for half, bits, fine, rows, first, last in (
        (cache.keys, form.key_bits, form.refine_key_bits, KEY_ROWS, cache.sink_keys, cache.tail_keys),
        (cache.values, form.value_bits, form.refine_value_bits, VALUE_ROWS, cache.sink_values, cache.tail_values),
    ):
        middle = decode_half(half[blocks], bits, rows).double()
        if refined is not None:
            codes = _refinement(case, blocks, rows)
            better = decode_half(half[blocks], bits, rows, codes, fine).double()
            of_token = refined.reshape(len(refined), tiles, -1).transpose(0, 1).repeat_interleave(form.group_tokens, -1)
            middle = torch.where(of_token[..., None], better, middle)
        parts = (first[index, :, :sink].double(), middle.transpose(0, 1).flatten(1, 2), last[index, :, :tail].double())
        dense.append(torch.cat(parts, 1))
    group = case.queries.shape[1] // cache.kv_heads
    keys, values = (t.repeat_interleave(group, 0) for t in dense)
    queries = turn(case.queries[index]).double()
    logits = torch.einsum("hd,htd->ht", queries, keys) * form.head_dim**-0.5
    weights = logits.softmax(-1)
    output = turn(torch.einsum("ht,htd->hd", weights, values).float()).double()
    of_tiles = weights[:, sink : sink + tiles * TILE_TOKENS]
    summed = of_tiles.reshape(cache.kv_heads, group, -1, form.group_tokens).sum(-1)
    return Exactly(output, logits, summed.amax(1))


def _refinement(case: Case, blocks: Tensor, rows: int) -> Tensor:
    """Refinement codes [tiles, kv_heads, 128, head_dim] of keys or values."""
    from strataflux.kernels.kv_encode import unpack_groups

    codes = unpack_groups(case.records[blocks], case.cache.form)[0 if rows == KEY_ROWS else 1]
    return codes.flatten(2, 3)
