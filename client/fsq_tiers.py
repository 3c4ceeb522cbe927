"""A cache of codes in two tiers: the resident one here, what refines it at a daemon, fetched for what matters now.

A step of a layer, with coarse the codes as they are resident and fine the whole ones (exclude, then add):

    s = logits of coarse keys of all positions whose refinement is with the daemon
    S(G) = max over query heads of Σ_{i in G} softmax(s)_i           the share of a group of tokens
    the strongest f · N / g groups are looked up; what is absent is asked for, and stays coarse in this step
    (m, Z, A)_coarse over the positions that were not found, (m, Z, A)_fine over those found, with keys built anew
    o = (D_coarse A_coarse + b_coarse Z_coarse + D_fine A_fine + b_fine Z_fine) / (Z_coarse + Z_fine)

each relative to the larger m. Positions whose refinement is still at hand, 1 to 128 as a rule, are fine at no cost. A
prompt is held whole until the step after it, and attends to whole codes.

Ours: the paper coarsens codes in place, and does not refine them.
"""

import ctypes
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strataflux.client.fsq_blocks import BLOCK_TOKENS, FsqBlocks
from strataflux.client.runtime.cache import check_truncation, require_no_windows
from strataflux.client.runtime.fsq_cache import FsqCache, LatentSum, with_biases
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.weights import RecordSource, SetStatistics
from strataflux.kernels.fsq import FsqLayer
from strataflux.kernels.fsq_nested import FsqTier
from strataflux.kernels.kv_attention import selected_groups
from strataflux.kernels.select import SCORE_THRESHOLDS

__all__ = ["TieredFsqCache"]

_TILE: Final = 1024
"""Positions whose keys exist at a time."""


class TieredFsqCache(FsqCache):
    """An :class:`FsqCache` of resident codes, a part of them refined at each step. One thread at a time."""

    def __init__(
        self,
        weights: DecoderWeights,
        tiers: Sequence[FsqTier],
        context: int,
        fraction: Fraction,
        blocks: FsqBlocks,
        source: RecordSource,
        table: int = 0,
        wait_seconds: float = 0.0,
    ) -> None:
        """Allocate ``context`` positions of resident codes.

        Args:
            weights: the model's.
            tiers: one for each layer, made over these weights.
            context: positions.
            fraction: of the groups with the daemon, how many are refined at each step; at least one, 0 for none.
            blocks: of this sequence, empty.
            source: where records are looked up, under ``table``.
            table: number of the KV table.
            wait_seconds: how long a step waits for the block that it put to be taken, where ``source`` waits for what
                is absent.

        Raises:
            MisuseError: there are more or fewer tiers than layers, or a layer attends to a window.
        """
        require_no_windows(weights.config, "codes in two tiers")
        super().__init__(weights, [tier.coarse for tier in tiers], context)
        # fixed after construction
        self.blocks = blocks
        self._fine = [with_biases(tier.whole, layer) for tier, layer in zip(tiers, weights.layers, strict=True)]
        self._grids = [tier.grid for tier in tiers]
        self._fraction = fraction
        self._group = BLOCK_TOKENS // blocks.groups
        self._source = source
        self._table = table
        self._wait_seconds = wait_seconds
        # changed by whoever runs steps
        self.refining = True
        """Off: groups are neither selected nor looked up."""
        self._lookups = self._hits = 0

    def statistics(self) -> SetStatistics:
        """Groups selected, and those that were found."""
        return SetStatistics(self._lookups, self._hits)

    def begin_step(self) -> None:
        """Hand full blocks over. Idempotent."""
        self.blocks.hand_over(self.length)
        self.blocks.settle(self._wait_seconds)

    def take(self, layer: int, x: Tensor) -> None:
        """As :class:`FsqCache`: the resident part into the buffer, the rest to what is at hand."""
        grid, now = self._grids[layer], self.length
        resident, pieces = grid.split(self._fine[layer].encode(x))
        self.buffer.layers[layer][now : now + x.shape[0]] = grid.resident.pack(resident)
        self.blocks.write(layer, now, grid.refinement.pack(pieces))

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """As :class:`FsqCache`."""
        del keys, values
        near, fine = self.blocks.start, self._near(layer, queries)
        if near == 0:
            return self._mixed((self._fine[layer], fine))
        logits = torch.cat([self._coarse_logits(layer, queries, *tile) for tile in _tiles(0, near)], -1)
        groups, addresses = self._look_up(layer, logits, fine)
        places = (groups[:, None] * self._group + torch.arange(self._group)).flatten()
        if len(places):
            fine = fine.merged(self._fetched(layer, queries, places, addresses))
        return self._mixed((self._codes[layer], self._excluding(layer, logits, places)), (self._fine[layer], fine))

    def rebuild(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """As :class:`FsqCache`: whole where refinement is at hand."""
        near = min(max(start, self.blocks.start), stop)
        coarse = super().rebuild(layer, start, near)
        fine = self._heads(layer, self._fine[layer], self._whole(layer, near, stop), slice(near, stop))
        return torch.cat((coarse[0], fine[0]), 1), torch.cat((coarse[1], fine[1]), 1)

    def truncate(self, length: int) -> None:
        """As :class:`~strataflux.client.runtime.cache.KvCache`: back to nothing, or within what was not handed over.

        Raises:
            MisuseError: those positions are with the daemon, or there are not as many.
        """
        check_truncation(length, self.length)
        self.blocks.truncate(length)
        self.length = length

    # --- the coarse part ---------------------------------------------------------------------------------------------

    def _coarse_logits(self, layer: int, queries: Tensor, start: int, stop: int) -> Tensor:
        centres = self._centres(layer, start, stop)
        return self._logits(layer, self._codes[layer], queries, centres, slice(start, stop))

    def _excluding(self, layer: int, logits: Tensor, places: Tensor) -> LatentSum:
        """Attention by coarse ``logits`` [heads, n] to all positions but ``places``; Z is 0 if none is left."""
        maximum = logits.amax(-1)
        shares = (logits - maximum[:, None]).exp()
        shares[:, places] = 0
        summed = sum(
            shares[:, start:stop] @ self._centres(layer, start, stop) for start, stop in _tiles(0, shares.shape[1])
        )
        assert isinstance(summed, Tensor)
        return LatentSum(maximum, shares.sum(-1), summed)

    # --- the fine part -----------------------------------------------------------------------------------------------

    def _near(self, layer: int, queries: Tensor) -> LatentSum:
        """Attention to the positions at hand, this one among them."""
        sums = []
        for start, stop in _tiles(self.blocks.start, self.length + 1):
            centres = self._whole(layer, start, stop)
            logits = self._logits(layer, self._fine[layer], queries, centres, slice(start, stop))
            sums.append(LatentSum.of(logits, centres))
        found = sums[0]
        for other in sums[1:]:
            found = found.merged(other)
        return found

    def _look_up(self, layer: int, logits: Tensor, near: LatentSum) -> tuple[Tensor, NDArray[np.uint64]]:
        """The strongest groups that are present [n], and where their records lie."""
        if not (self.refining and self._fraction):
            return torch.empty(0, dtype=torch.int64), np.empty(0, np.uint64)
        total = torch.logaddexp(logits.logsumexp(-1), near.maximum + near.total.log())
        shares = (logits - total[:, None]).exp().view(len(logits), -1, self._group).sum(-1).amax(0)
        strongest = shares.argsort(descending=True, stable=True)[: selected_groups(self._fraction, len(shares))]
        chosen, per = strongest.numpy(), self.blocks.groups
        bases = self.blocks.bases[chosen // per]
        known = bases >= 0
        oids = (bases + layer * per + chosen % per)[known]
        scores = np.searchsorted(SCORE_THRESHOLDS, shares[strongest].numpy()[known], side="right").clip(1, 255)
        addresses = np.zeros(oids.shape, np.uint64)
        if oids.size:
            self._hits += self._source.lookup(self._table, oids, scores.astype(np.uint8), addresses)
        self._lookups += chosen.size
        present = addresses != 0
        return strongest[torch.from_numpy(known)][torch.from_numpy(present)], addresses[present]

    def _fetched(self, layer: int, queries: Tensor, places: Tensor, addresses: NDArray[np.uint64]) -> LatentSum:
        """Attention to positions ``places`` with the records of their groups, which are copied at once."""
        grid = self._grids[layer]
        size = self._group * grid.refinement.nbytes
        records = bytearray(b"".join(ctypes.string_at(int(address), size) for address in addresses))
        pieces = torch.frombuffer(records, dtype=torch.uint8).view(len(places), -1)
        resident = grid.resident.unpack(self.buffer.layers[layer][places])
        centres = grid.whole.centres(grid.join(resident, grid.refinement.unpack(pieces)))
        return LatentSum.of(self._logits(layer, self._fine[layer], queries, centres, places), centres)

    def _whole(self, layer: int, start: int, stop: int) -> Tensor:
        """Centres [n, width] of whole codes of positions at hand."""
        grid = self._grids[layer]
        resident = grid.resident.unpack(self.buffer.layers[layer][start:stop])
        pieces = grid.refinement.unpack(self.blocks.read(layer, start, stop))
        return grid.whole.centres(grid.join(resident, pieces))

    def _mixed(self, *parts: tuple[FsqLayer, LatentSum]) -> Tensor:
        """Mixed values [heads · head_dim] of attention to codes of different decoders."""
        kv_heads, size = self._config.kv_heads, self._config.head_dim
        maximum = torch.stack([part.maximum for _, part in parts]).amax(0)
        values, total = torch.zeros(kv_heads, len(maximum) // kv_heads, size), torch.zeros_like(maximum)
        for code, part in parts:
            scale = (part.maximum - maximum).exp()
            weight, latent = part.total * scale, part.codes * scale[:, None]
            matrix = code.decoder[kv_heads * size :].view(kv_heads, size, -1)
            bias = code.decoder_bias[kv_heads * size :].view(kv_heads, 1, size)
            shape = (kv_heads, -1, matrix.shape[2])
            values += latent.view(shape) @ matrix.transpose(1, 2) + bias * weight.view(kv_heads, -1, 1)
            total += weight
        return (values.flatten(0, 1) / total[:, None]).flatten()


def _tiles(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """``start`` … ``stop`` in pieces."""
    return ((first, min(first + _TILE, stop)) for first in range(start, stop, _TILE))
