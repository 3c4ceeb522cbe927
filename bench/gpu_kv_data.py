"""Low-bit KV caches for GPU benchmarks: random tiles of several layers, their records in host memory, and float64."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from gpu_side import BenchSide
from torch import Tensor

from strataflux.client import attach_block as ab
from strataflux.client.bench.replays import microseconds
from strataflux.kernels.gpu.kv_attend import kv_attend
from strataflux.kernels.gpu.kv_merge import kv_merge
from strataflux.kernels.gpu.kv_refine import kv_refine
from strataflux.kernels.gpu.kv_select import kv_select, select_reference
from strataflux.kernels.gpu.kv_work import KvTiles, KvWork
from strataflux.kernels.gpu.select import score_thresholds
from strataflux.kernels.gpu.step import begin_step, end_step
from strataflux.kernels.hadamard import hadamard
from strataflux.kernels.kv_attention import encoded_tiles, exact_spans
from strataflux.kernels.kv_encode import KEY_ROWS, VALUE_ROWS, HalfTiles, KvFormat, decode_half, unpack_groups
from strataflux.kernels.kv_pack import TILE_TOKENS
from strataflux.proto import layout

KV_HEADS = 8


class Layers:
    """``count`` layers of a batch of sequences with one new token each; every tensor random."""

    def __init__(
        self, form: KvFormat, count: int, kv_heads: int, group: int, positions: tuple[int, ...], *,
        exact_layers: bool = False,
    ) -> None:  # fmt: skip
        batch, d = len(positions), form.head_dim
        self.form, self.count, self.kv_heads, self.group = form, count, kv_heads, group
        self.tiles = max(1, encoded_tiles(max(positions) + 1))
        self.blocks = batch * self.tiles
        self.positions = torch.tensor(positions, dtype=torch.int32, device="cuda")
        self.table = torch.randperm(self.blocks, device="cuda").reshape(batch, self.tiles).int()
        leading = (count, self.blocks, kv_heads)
        self.keys = _random_half(leading, form.key_bits, d, KEY_ROWS)
        self.values = _random_half(leading, form.value_bits, d, VALUE_ROWS)
        shape = (count if exact_layers else 1, batch, kv_heads, TILE_TOKENS, d)
        self.exact = [torch.randn(shape, device="cuda").half() for _ in range(4)]
        self._new = [
            torch.randn(count, batch, heads, d, device="cuda").half()
            for heads in (group * kv_heads, kv_heads, kv_heads)
        ]

    def cache(self, layer: int) -> KvTiles:
        """A layer as kernels see it."""
        exact = [t[layer % len(t)] for t in self.exact]
        return KvTiles(self.form, self.keys[layer], self.values[layer], self.table, *exact)

    def new(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, key and value of the new token."""
        return self._new[0][layer], self._new[1][layer], self._new[2][layer]

    @property
    def layer_bytes(self) -> int:
        """What attention must read in one layer, of all sequences."""
        exact = sum(sum(exact_spans(p + 1)) for p in self.positions.tolist())
        tiles = sum(encoded_tiles(p + 1) for p in self.positions.tolist())
        return self.kv_heads * (tiles * self.form.tile_bytes + exact * 4 * self.form.head_dim)


def _random_half(leading: tuple[int, ...], bits: int, d: int, rows: int) -> HalfTiles:
    half = HalfTiles.empty((1,), bits, d, rows)
    sizes = {name: (*leading, getattr(half, name).shape[-1]) for name in ("codes", "scale", "zero", "other")}
    middle = (2**bits - 1) / 2
    scale = (torch.rand(sizes["scale"], device="cuda") + 0.5) * (2.0 / 2**bits)
    return HalfTiles(
        torch.randint(0, 256, sizes["codes"], dtype=torch.uint8, device="cuda"),
        scale.half(),
        (-middle * scale + 0.1 * torch.randn(sizes["zero"], device="cuda")).half(),
        (torch.rand(sizes["other"], device="cuda") + 0.5).half(),
    )


class RefinedLayers(Layers):
    """The same with records of all groups in registered host memory behind a directory."""

    def __init__(self, form: KvFormat, count: int, positions: tuple[int, ...], side: BenchSide, tiles: int) -> None:
        super().__init__(form, count, KV_HEADS, 4, positions)
        assert self.tiles == tiles
        self.side = side
        self.a_block = count * KV_HEADS * form.groups_per_tile
        self.bases = torch.arange(self.blocks, device="cuda") * self.a_block
        self.thresholds = score_thresholds(torch.device("cuda"))
        self.raw = side.slots.array(ctypes.c_uint8, side.slots.size)
        words = side.slots.array(ctypes.c_uint64, side.slots.size // 8)
        words[:] = np.random.default_rng(2).integers(0, 1 << 63, words.size, dtype=np.uint64)
        side.words[:] = side.entries
        side.block[ab.TABLES + 2] = ab.KV_LOOKUPS

    def work(self, refiners: int) -> KvWork:
        """Work memory for one sequence."""
        return KvWork(self.form, 1, 4 * KV_HEADS, KV_HEADS, self.tiles, torch.device("cuda"), refiners=refiners)

    def first_oid(self, layer: int) -> int:
        """Number of a layer's first record within a block."""
        return layer * KV_HEADS * self.form.groups_per_tile

    def chain(self, layer: int, work: KvWork, fraction: Fraction, out: Tensor, *, early: bool) -> None:
        """One layer's attention with refinement; the last two launches may start ``early``, as in a decoder."""
        cache = self.cache(layer)
        kv_attend(*self.new(layer), self.positions, cache, work)
        kv_select(self.positions, work, fraction)
        self.refine(layer, work, early=early)
        kv_merge(work, out, early=early)

    def refine(self, layer: int, work: KvWork, *, early: bool) -> None:
        """The third launch of the chain."""
        kv_refine(self.positions, self.cache(layer), work, self.side.block, self.thresholds, self.bases, 0,
                  self.first_oid(layer), early=early)  # fmt: skip

    def drop(self, share: float) -> None:
        """Let a share of all records be absent."""
        absent = np.random.default_rng(1).random(self.side.words.size) < share
        self.side.words[absent] = layout.ENTRY_ABSENT

    def bring(self) -> None:
        """Let all records lie in device memory instead, as in a hot tier that holds everything."""
        size = self.side.slots.size
        self._near = torch.empty(size + 4096, dtype=torch.uint8, device="cuda")
        begin = -self._near.data_ptr() % 4096
        self._near[begin : begin + size].copy_(torch.from_numpy(self.raw))
        bases = self.side.block[ab.BASES : ab.BASES + size // layout.SEGMENT_MIN_BYTES]
        bases += self._near.data_ptr() + begin - self.side.slots.seen_at

    def lookups(self) -> list[int]:
        """Look-ups and hits so far."""
        found: list[int] = self.side.block[ab.KV_LOOKUPS : ab.KV_LOOKUPS + 2].tolist()
        return found

    def records_of(self, layer: int, place: int, head: int) -> Tensor:
        """Records [groups, record_bytes] of one tile."""
        first = place * self.a_block + self.first_oid(layer) + head * self.form.groups_per_tile
        at = self.side.record_offsets[first : first + self.form.groups_per_tile]
        return torch.from_numpy(np.stack([self.raw[o : o + self.form.record_bytes] for o in at]))

    def times(self, work: KvWork, fraction: Fraction, out: Tensor) -> dict[str, Any]:
        """Microseconds a layer: the whole chain, without refinement, and each launch; and what crosses the link."""
        plain = KvWork(self.form, 1, 4 * KV_HEADS, KV_HEADS, self.tiles, torch.device("cuda"))

        def each(body: Callable[[int], None]) -> float:
            def run() -> None:
                begin_step(self.side.block)
                for i in range(self.count):
                    body(i)
                end_step(self.side.block)

            return microseconds(run, replays=9) / self.count

        def attend(i: int, work: KvWork) -> None:
            kv_attend(*self.new(i), self.positions, self.cache(i), work)

        def without(i: int) -> None:
            attend(i, plain)
            kv_merge(plain, out)

        whole = each(lambda i: self.chain(i, work, fraction, out, early=True))
        base, empty = each(without), each(lambda _: None)
        groups = work.selected_groups(fraction, work.tiles)
        moved = KV_HEADS * groups * self.form.record_bytes
        return {
            "whole": whole, "base": base, "refinement": whole - base, "late": each(
                lambda i: self.chain(i, work, fraction, out, early=False)),
            "attend": each(lambda i: attend(i, work)) - empty,
            "select": each(lambda _: kv_select(self.positions, work, fraction)) - empty,
            "refine": each(lambda i: self.refine(i, work, early=False)) - empty,
            "merge": each(lambda _: kv_merge(work, out)) - empty,
            "groups": groups, "link_bytes": moved, "gigabytes_per_second": moved / (whole - base) / 1e3,
        }  # fmt: skip


@contextlib.contextmanager
def device_cache(form: KvFormat, count: int, positions: tuple[int, ...]) -> Iterator[RefinedLayers]:
    """Layers with their records, given back at the end."""
    tiles = encoded_tiles(max(positions) + 1)
    records = tiles * count * KV_HEADS * form.groups_per_tile
    with BenchSide(records, form.record_bytes) as side:
        yield RefinedLayers(form, count, positions, side, tiles)


# --- by definition ----------------------------------------------------------------------------------------------------


@dataclass
class Exactly:
    """Attention of one sequence in float64: output [heads, D] and shares [kv_heads, groups]."""

    output: Tensor
    shares: Tensor


def attend_exactly(layers: Layers, layer: int, index: int, chosen: list[set[int]] | None = None) -> Exactly:
    """What a sequence should come to, its new token being stored; one KV head at a time."""
    cache, form = layers.cache(layer), layers.form
    length = int(layers.positions[index]) + 1
    tiles, (sink, tail) = encoded_tiles(length), exact_spans(length)
    turned = hadamard(form.head_dim, "cuda").double()
    queries = (layers.new(layer)[0][index].double() @ turned).unflatten(0, (layers.kv_heads, -1))
    outputs, shares = [], []
    for head in range(layers.kv_heads):
        dense = []
        for half, bits, rows, first, last in (
            (cache.keys, form.key_bits, KEY_ROWS, cache.sink_keys, cache.tail_keys),
            (cache.values, form.value_bits, VALUE_ROWS, cache.sink_values, cache.tail_values),
        ):
            mine = half[cache.table[index, :tiles].long(), head]
            middle = decode_half(mine, bits, rows)
            if chosen is not None:
                assert isinstance(layers, RefinedLayers)
                _refine_tiles(middle, mine, layers, layer, head, rows, cache.table[index], chosen[head])
            exact = (t[index, head].double() for t in (first[..., :sink, :], last[..., :tail, :]))
            before, after = exact
            dense.append(torch.cat((before, middle.double().flatten(0, 1), after)))
        logits = queries[head] @ dense[0].T * form.head_dim**-0.5
        weights = logits.softmax(-1)
        outputs.append(weights @ dense[1] @ turned)
        groups = weights[:, sink : sink + tiles * TILE_TOKENS].unflatten(-1, (-1, form.group_tokens)) if tiles else None
        shares.append(torch.zeros(0) if groups is None else groups.sum(-1).amax(0))
    return Exactly(torch.cat(outputs), torch.stack(shares))


def _refine_tiles(
    middle: Tensor, half: HalfTiles, layers: RefinedLayers, layer: int, head: int, rows: int, table: Tensor,
    chosen: set[int],
) -> None:  # fmt: skip
    """Put refined levels of the chosen groups into ``middle`` [tiles, 128, D]."""
    form, per = layers.form, layers.form.groups_per_tile
    bits = (form.key_bits, form.refine_key_bits) if rows == KEY_ROWS else (form.value_bits, form.refine_value_bits)
    by_tile: dict[int, list[int]] = {}
    for group in sorted(chosen):
        by_tile.setdefault(group // per, []).append(group % per)
    numbers = sorted(by_tile)
    records = torch.stack([layers.records_of(layer, int(table[tile]), head) for tile in numbers]).cuda()
    codes = unpack_groups(records, form)[0 if rows == KEY_ROWS else 1].flatten(1, 2)
    better = decode_half(half[torch.tensor(numbers, device="cuda")], bits[0], rows, codes, bits[1])
    for i, tile in enumerate(numbers):
        for group in by_tile[tile]:
            at = slice(group * form.group_tokens, (group + 1) * form.group_tokens)
            middle[tile, at] = better[i, at]


def selected_exactly(shares: Tensor, count: int, layers: Layers, work: KvWork) -> tuple[list[set[int]], dict[str, Any]]:
    """What was selected for each KV head, and how it differs from the definition: numbers of groups that only one of
    both has, and the largest relative distance of such a group's share from the n-th.
    """
    found, apart, furthest = [], 0, 0.0
    for head in range(layers.kv_heads):
        groups = shares.shape[1]
        bits = work.shares[head, :groups].view(torch.int32).long()
        keys = (bits << 32) | (0x7FFFFFFF - torch.arange(groups, device="cuda"))
        found.append(set((keys >= work.floors[head]).nonzero().flatten().tolist()))
        ranked = select_reference(shares[head], count)
        differ = found[-1] ^ set(ranked.tolist())
        apart += len(differ)
        last = float(shares[head, ranked[-1]])
        furthest = max([furthest, *(abs(float(shares[head, g]) / last - 1) for g in differ)])
    return found, {"wanted": count, "found": sorted({len(f) for f in found}), "apart": apart, "furthest": furthest}
