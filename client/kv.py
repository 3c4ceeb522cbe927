"""The KV cache with refinement: one sequence in low bits, its strongest token groups refined at each step.

The first 128 tokens and the newest 1 to 128 are float16; between them lie tiles in low bits, in blocks that forks
share. A tile is encoded at the beginning of the step after it filled up, and its refinement handed over. Where that
cannot be done at once it is tried again at each step until the next tile fills up; then the tile stays unrefined for
good and is counted. No step waits for a write.

What is refined is selected by the step itself, or by some steps before it (``early``): then each record is asked for as
soon as its group was selected, and looked up from the next step on. A sequence's first step refines nothing so.

Records are found by a :class:`~strataflux.client.weights.RecordSource`: what is absent is skipped or waited for by its
policy. Object ids: ``block id · records a block + (layer · kv_heads + head) · groups a tile + group``.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.kv_blocks import KvBlocks
from strataflux.client.kv_options import blocks_for
from strataflux.client.kv_selections import EarlierSelections
from strataflux.client.runtime.cache import check_truncation, require_all_seen
from strataflux.client.runtime.models import ModelConfig
from strataflux.client.weights import MORE, RecordSource, SetStatistics
from strataflux.kernels import kv_attention_cpu
from strataflux.kernels.hadamard import turn
from strataflux.kernels.kv_attention import KvLayer, Resident, encoded_tiles, select_groups, selected_groups
from strataflux.kernels.kv_encode import EncodedTiles, encode_tiles
from strataflux.kernels.kv_pack import TILE_TOKENS
from strataflux.kernels.select import SCORE_THRESHOLDS

__all__ = ["EarlySource", "RefinedKVCache"]

_LOG: Final = logging.getLogger(__name__)
_PUT_SECONDS: Final = 10.0
"""The most a prefill waits for staging memory, for each block."""
_SMALL_RMS: Final = 0.55
"""Below this KVarN's balancing is held at its floor."""


class EarlySource(Protocol):
    """Where records are asked for before they are looked up: a session, or a stand-in."""

    def prefetch(self, table: int, oids: NDArray[np.int64], scores: NDArray[np.uint8], most: int) -> int:
        """Ask for those of ``oids`` [n] that are absent, the first ``most`` of them at most; how many."""


@dataclass
class _Exact:
    """Tokens in float16: [layers, kv_heads, 128, head_dim] each, rotated."""

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, config: ModelConfig) -> "_Exact":
        shape = (config.layers, config.kv_heads, TILE_TOKENS, config.head_dim)
        return cls(torch.zeros(shape, dtype=torch.float16), torch.zeros(shape, dtype=torch.float16))

    def copy(self) -> "_Exact":
        return _Exact(self.keys.clone(), self.values.clone())

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values))


class RefinedKVCache:
    """One sequence; a :class:`~strataflux.client.runtime.cache.KvCache`.

    Pairs: construction / :meth:`close`, :meth:`fork` / :meth:`close`.
    """

    def __init__(
        self,
        blocks: KvBlocks,
        context: int,
        fraction: Fraction = Fraction(0),
        source: RecordSource | None = None,
        table: int = 0,
        wait_seconds: float = 0.0,
        early: EarlySource | None = None,
        kept_steps: int = 1,
    ) -> None:
        """An empty sequence.

        Args:
            blocks: the pool; all blocks of ``context`` tokens are taken now, so that no step asks for one.
            context: positions there is room for.
            fraction: how many of a KV head's groups are refined at each step; 0 for none.
            source: where records are looked up, under ``table``; without it nothing is refined.
            table: number of the KV table.
            wait_seconds: how long a step waits for the block that it put to be taken, where ``source`` waits for what
                is absent: a block's records can be looked up only then.
            early: where records are asked for that later steps will look up; None: each step selects for itself.
            kept_steps: with ``early``: how many steps' selections a step refines.

        Raises:
            MisuseError: the pool has fewer free blocks, or a layer attends to a window shorter than ``context``.
            RefusedError: the daemon has no room for the records of so many. DaemonUnavailableError: nobody answers.
        """
        config = blocks.config
        require_all_seen(config, context, "--kv")
        kv_attention_cpu.compile_all()  # inside a step it would hold slots for seconds
        # fixed after construction
        self.context = context
        self._blocks = blocks
        self._fraction = fraction if blocks.form.record_bytes else Fraction(0)
        self._source = source
        self._table = table
        self._wait_seconds = wait_seconds
        self._early = early
        self._heads = np.arange(config.kv_heads)[:, None] * blocks.form.groups_per_tile
        # changed by whoever runs steps
        self.refining = True
        """Off: groups are neither selected nor looked up."""
        self.on_block: Callable[[], object] = lambda: None
        """Called after each block that a prefill handed over."""
        # changed by steps and fills
        self.length = 0
        self._places = torch.tensor(blocks.take(blocks_for(context), refined=True), dtype=torch.int64)
        self._encoded = 0
        self._sink, self._tail = _Exact.empty(config), _Exact.empty(config)
        self._pending: tuple[int, NDArray[np.uint8]] | None = None
        self._payloads: NDArray[np.uint8] | None = None
        self._lookups = self._hits = 0
        self._told: set[int] = set()
        self._selected = EarlierSelections(kept_steps)

    # --- steps -------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Encode the tile that filled up, if one did, and go on with what is to be put. Idempotent."""
        if encoded_tiles(self.length + 1) > self._encoded:
            self._encode_tail()
        elif self._pending is not None and self._blocks.put(*self._pending):
            self._pending = None
        self._blocks.settle(self._wait_seconds)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """As :class:`~strataflux.client.runtime.cache.KvCache`."""
        part, at = self._newest()
        part.keys[layer, :, at] = turn(keys)
        part.values[layer, :, at] = turn(values)
        turned, view = turn(queries)[None], self._view(layer)
        resident = kv_attention_cpu.attend(turned, view)
        output = resident.output
        if self.refining and self._fraction and self._source is not None and self._encoded:
            output = self._refine(layer, turned, view, resident)
        return turn(output[0]).flatten()

    def end_step(self) -> None:
        """As :class:`~strataflux.client.runtime.cache.KvCache`."""
        self.length += 1

    def _newest(self) -> tuple[_Exact, int]:
        if self.length < TILE_TOKENS:
            return self._sink, self.length
        return self._tail, self.length - TILE_TOKENS * (1 + self._encoded)

    def _view(self, layer: int) -> KvLayer:
        blocks, sink, tail = self._blocks, self._sink, self._tail
        return KvLayer(
            blocks.form,
            blocks.keys[layer],
            blocks.values[layer],
            self._places[None],
            sink.keys[layer][None],
            sink.values[layer][None],
            tail.keys[layer][None],
            tail.values[layer][None],
            (self.length + 1,),
        )

    def _refine(self, layer: int, queries: Tensor, view: KvLayer, resident: Resident) -> Tensor:
        """Look the strongest groups up, or those that were so a step ago, and add what is present."""
        assert self._source is not None
        groups, shares = select_groups(resident, view, self._fraction)
        if self._early is not None:
            self._ask_early(layer, groups[0], shares[0])
            groups, shares = self._selected.replace(layer, groups, shares)
        oids, scores, known = self._records(layer, groups[0], shares[0])
        addresses = np.zeros(known.shape, np.uint64)
        if oids.size:
            found = np.zeros(oids.size, np.uint64)
            self._hits += self._source.lookup(self._table, oids, scores, found)
            addresses[known] = found
        self._lookups += int((groups >= 0).sum())
        return kv_attention_cpu.refine(queries, view, resident, groups, torch.from_numpy(addresses)[None])

    def _ask_early(self, layer: int, groups: Tensor, shares: Tensor) -> None:
        assert self._early is not None
        oids, scores, _ = self._records(layer, groups, shares)
        if oids.size:
            order = np.argsort(scores, kind="stable")[::-1]
            self._early.prefetch(self._table, oids[order], scores[order], oids.size)

    def _records(
        self, layer: int, groups: Tensor, shares: Tensor
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.bool_]]:
        """Ids and scores [records] of those of ``groups`` [kv_heads, n] that have one, and which these are."""
        per = self._blocks.form.groups_per_tile
        chosen = groups.numpy()
        bases = self._blocks.bases[self._places.numpy()[chosen // per]]
        known = (bases >= 0) & (chosen >= 0)
        first = layer * self._blocks.config.kv_heads * per
        scores = np.searchsorted(SCORE_THRESHOLDS, shares.numpy()[known], side="right").clip(1, 255)
        return (bases + first + self._heads + chosen % per)[known], scores.astype(np.uint8), known

    def foresee(self, layer: int, queries: Tensor) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Ids and scores of the records that ``queries`` [heads, head_dim], turned by position, would select in
        ``layer``, and some more. Between ``begin_step`` and ``attend`` of the layer; nothing where nothing is refined,
        or what is was selected before.
        """
        if not (self.refining and self._fraction and self._encoded) or self._early is not None:
            return np.empty(0, np.int64), np.empty(0, np.uint8)
        shares = kv_attention_cpu.expected_shares(turn(queries)[None], self._view(layer))[0]
        count = min(shares.shape[-1], ceil(MORE * selected_groups(self._fraction, shares.shape[-1])))
        top = shares.topk(count, -1)
        return self._records(layer, top.indices, top.values)[:2]

    # --- tiles that fill up ------------------------------------------------------------------------------------------

    def _encode_tail(self) -> None:
        if self._pending is not None and not self._blocks.put(*self._pending):
            self._blocks.give_up()
        for layer in range(self._blocks.config.layers):
            self._tell_rms(layer, self._tail.keys[layer], self._tail.values[layer])
        tiles = encode_tiles(self._tail.keys.float(), self._tail.values.float(), self._blocks.form)
        place = int(self._places[self._encoded])
        payload = self._blocks.store(place, tiles)
        self._encoded += 1
        self._pending = None if self._blocks.put(place, payload) else (place, payload)

    def fill(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """As :class:`~strataflux.client.runtime.cache.KvCache`; encodes all whole tiles but the first."""
        self.fill_rotated(layer, turn(keys).half(), turn(values).half())

    def fill_rotated(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """As :meth:`fill`, of keys and values in float16 that were rotated before.

        Raises:
            MisuseError: the sequence is not empty, or more tokens than it has room for.
        """
        count = keys.shape[1]
        if self.length or count > self.context:
            found, expected = f"{count} tokens at position {self.length}", f"at most {self.context} at position 0"
            raise MisuseError("fill", found, expected, "truncate first, or raise --context")
        tiles = encoded_tiles(count + 1)
        end = TILE_TOKENS * (1 + tiles)
        for part, tokens in ((self._sink, slice(0, TILE_TOKENS)), (self._tail, slice(end, count))):
            held = keys[:, tokens].shape[1]
            part.keys[layer, :, :held], part.values[layer, :, :held] = keys[:, tokens], values[:, tokens]
        self._tell_rms(layer, keys, values)
        if tiles:
            shape = (keys.shape[0], tiles, TILE_TOKENS, keys.shape[2])
            middle = [t[:, TILE_TOKENS:end].float().reshape(shape).transpose(0, 1) for t in (keys, values)]
            self._store_layer(layer, tiles, encode_tiles(middle[0], middle[1], self._blocks.form))

    def _store_layer(self, layer: int, tiles: int, encoded: EncodedTiles) -> None:
        """Tiles [tiles, kv_heads] of one layer into their blocks, their records to those of other layers."""
        blocks = self._blocks
        index = (layer, self._places[:tiles])
        blocks.keys.store(index, encoded.keys)
        blocks.values.store(index, encoded.values)
        records = encoded.records.flatten(1).numpy()
        if self._payloads is None or self._payloads.shape[0] != tiles:
            self._payloads = np.empty((tiles, blocks.config.layers, records.shape[1]), np.uint8)
        self._payloads[:, layer] = records

    def end_fill(self, count: int) -> None:
        """Hand all blocks over, waiting for staging memory for each; what nobody takes in time stays unrefined."""
        self.length = count
        payloads, self._payloads = self._payloads, None
        self._encoded = 0 if payloads is None else len(payloads)
        for index in range(self._encoded):
            assert payloads is not None
            if not self._blocks.put(int(self._places[index]), payloads[index].ravel(), _PUT_SECONDS):
                self._blocks.give_up()
            self.on_block()
        self._blocks.settle(self._wait_seconds)

    def _tell_rms(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if layer in self._told:
            return
        self._told.add(layer)
        key, value = (float(t.float().square().mean().sqrt()) for t in (keys, values))
        small = min(key, value) < _SMALL_RMS and not self._blocks.form.prenormalize
        hint = " (small: balancing is held at its floor; prenormalizing would lift it)" if small else ""
        _LOG.info("layer %d: RMS of keys %.3g, of values %.3g%s", layer, key, value, hint)

    # --- sequences ---------------------------------------------------------------------------------------------------

    def truncate(self, length: int) -> None:
        """As :class:`~strataflux.client.runtime.cache.KvCache`: back to nothing, or within the tokens in float16.

        Raises:
            MisuseError: those tokens are encoded already, or there are not as many.
        """
        check_truncation(length, self.length)
        if length == 0:
            self._start_over()
        oldest = TILE_TOKENS * (1 + self._encoded) if self._encoded else 0
        if length < oldest:
            raise MisuseError(
                "reset", f"position {length}", f"0, or {oldest} and later", "tiles stay encoded: start over"
            )
        self.length = length

    def _start_over(self) -> None:
        self._blocks.drop(self._places.tolist())
        self._places = torch.tensor(self._blocks.take(len(self._places)), dtype=torch.int64)
        self._encoded, self._pending = 0, None
        self._selected.clear()

    def fork(self) -> "RefinedKVCache":
        """Another sequence with the same tokens so far. Encoded blocks are shared, the newest tokens copied.

        Raises:
            MisuseError: the pool has no room for the blocks that the fork may fill.
        """
        blocks = self._blocks
        other = RefinedKVCache.__new__(RefinedKVCache)
        other.__dict__.update(self.__dict__)
        shared = self._places[: self._encoded]
        own = blocks.take(len(self._places) - self._encoded)
        blocks.share(shared.tolist())
        other._places = torch.cat((shared, torch.tensor(own, dtype=torch.int64)))
        # A full sink never changes, so it is shared.
        other._sink = self._sink if self.length >= TILE_TOKENS else self._sink.copy()
        other._tail = self._tail.copy()
        other._pending = None
        other._selected = self._selected.copy()
        other._lookups = other._hits = 0
        return other

    def close(self) -> None:
        """Give all blocks back, and the disk of those that no fork holds. Outside of steps. Idempotent."""
        self._blocks.drop(self._places.tolist())
        self._blocks.give_back()
        self._places = self._places[:0]
        self.length = self.context = self._encoded = 0

    @property
    def nbytes(self) -> int:
        """Resident bytes of this sequence: its encoded blocks, and 256 tokens in float16."""
        return self._encoded * self._blocks.block_bytes + self._sink.nbytes + self._tail.nbytes

    @property
    def unrefined(self) -> int:
        """Blocks of the pool that nobody took, or that were refused."""
        return self._blocks.unrefined + self._blocks.refused

    def statistics(self) -> SetStatistics:
        """Groups selected, and those that were used; a group without a record counts as a miss."""
        return SetStatistics(self._lookups, self._hits)
