"""What could be asked for ahead, beside an ideal reader: every read is there at the next layer's look-up.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python bench/ahead_model.py --model SmolLM2-135M-Instruct.Q4_1.gguf \
        --text moby-dick.txt --share 5% nothing ahead:1 near:-1,1,2

In this process, without a daemon: an LRU cache of a share of all KV records and what is asked for beside misses.
``ahead:B`` guesses B blocks before a layer, as ``--read-ahead`` does; ``near:D,…`` asks for the groups so far from each
selected one. KV in 2/2 bits, 4/4 refined on 1/128 of groups of 4 tokens; the first --tokens after the prefill are
scored against an exact cache. Prints one JSON object a line: divergence, hits, reads a step, and which part of what was
asked for ahead was used before it left.
"""

import argparse
import json
from collections import OrderedDict
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strataflux.client.evaluate.kv import Prefilled, prefill, score_exact
from strataflux.client.evaluate.scoring import Reference, score
from strataflux.client.evaluate.text import read_text
from strataflux.client.kv import RefinedKVCache
from strataflux.client.kv_blocks import KvBlocks
from strataflux.client.kv_options import KvOptions, blocks_for
from strataflux.client.kv_puts import Settled
from strataflux.client.prepare.source import open_source
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import DecoderWeights
from strataflux.proto import layout

KV = KvOptions(2, 2)


class Reader:
    """Takes puts, and finds records by exact LRU; what was missed or asked for is there at the next look-up."""

    def __init__(self, slots: int, records_a_block: int, record_bytes: int) -> None:
        self._slots, self._shape = slots, (records_a_block, record_bytes)
        self._blocks: dict[int, NDArray[np.uint8]] = {}
        self._settled: list[Settled] = []
        self._resident: OrderedDict[int, None] = OrderedDict()
        self._coming: dict[int, bool] = {}
        """Whether each was asked for ahead."""
        self._unused: set[int] = set()
        self.lookups = self.hits = self.reads = self.used = self.left = 0
        self.epoch = 0

    def reserve(self, blocks: int) -> list[int]:
        """Ids in order."""
        return list(range(len(self._blocks), len(self._blocks) + blocks))

    def release(self, ids: Sequence[int]) -> None:
        """Nothing is given back within a run."""

    def put(self, block: int, payload: NDArray[np.uint8]) -> bool:
        """The newest blocks are resident."""
        self._blocks[block] = payload.reshape(self._shape).copy()
        self._settled.append(Settled(block, layout.PUT_ACCEPTED))
        for oid in range(block * self._shape[0], (block + 1) * self._shape[0]):
            self._resident[oid] = None
        self._evict()
        return True

    def put_waiting(self, block: int, payload: NDArray[np.uint8], deadline: float) -> bool:
        """The same."""
        return self.put(block, payload)

    def settled(self) -> list[Settled]:
        """At once."""
        taken, self._settled = self._settled, []
        return taken

    def wait_settled(self, deadline: float) -> bool:
        """There is nothing to wait for."""
        return True

    def count_dropped(self, blocks: int = 1) -> None:
        """Nothing is."""

    def lookup(self, table: int, oids: NDArray[Any], scores: NDArray[Any], addresses: NDArray[Any]) -> int:
        """What was asked for before is there."""
        for oid, ahead in self._coming.items():
            self.reads += 1
            self._resident[oid] = None
            if ahead:
                self._unused.add(oid)
        self._coming.clear()
        self._evict()
        for i, oid in enumerate(oids.tolist()):
            addresses[i] = self._find(oid)
        hits = int(np.count_nonzero(addresses))
        self.lookups, self.hits = self.lookups + oids.size, self.hits + hits
        return hits

    def _find(self, oid: int) -> int:
        if oid not in self._resident:
            self._coming[oid] = False
            return 0
        self._resident.move_to_end(oid)
        self.used += oid in self._unused
        self._unused.discard(oid)
        block, index = divmod(oid, self._shape[0])
        return int(self._blocks[block][index].ctypes.data)

    def ask(self, oids: NDArray[np.int64]) -> None:
        """Ahead of misses."""
        for oid in oids.tolist():
            if oid not in self._resident:
                self._coming.setdefault(oid, True)

    def _evict(self) -> None:
        while len(self._resident) > self._slots:
            oid, _ = self._resident.popitem(last=False)
            self.left += oid in self._unused
            self._unused.discard(oid)


class Asking(RefinedKVCache):
    """Asks for more than it selects."""

    distances: Sequence[int] = ()
    """Of the groups that are asked for, from each that is selected."""
    _selecting = False

    def _refine(self, *arguments: Any) -> Tensor:
        self._selecting = True
        return super()._refine(*arguments)

    def _records(self, layer: int, groups: Tensor, shares: Tensor) -> Any:
        found = super()._records(layer, groups, shares)
        if self.distances and self._selecting:
            last = self._encoded * self._blocks.form.groups_per_tile - 1
            others = torch.cat([(groups + distance).clamp(0, last) for distance in self.distances], -1)
            assert isinstance(self._source, Reader)
            self._source.ask(super()._records(layer, others, torch.zeros(others.shape))[0])
        self._selecting = False
        return found


class Guesses:
    """A decoder's foresight that asks a reader for all of what a cache guesses."""

    channels_wanted, groups_wanted = False, True

    def __init__(self, blocks: float, cache: RefinedKVCache, reader: Reader) -> None:
        self.blocks = blocks
        self._cache, self._reader = cache, reader

    def begin_layer(self, layer: int) -> None:
        """Slots are taken at once."""

    def channels(self, layer: int, set_index: int, x: NDArray[np.float32]) -> None:
        """Not wanted."""

    def groups(self, layer: int, queries: Tensor) -> None:
        """Ask."""
        self._reader.ask(self._cache.foresee(layer, queries)[0])


def main() -> None:
    """One line for each thing that is asked for."""
    options = parse()
    source = open_source(options.model)
    weights = DecoderWeights.read(source)
    tokens = source.tokenizer().encode(read_text(options.text)).ids[options.start :][: options.context]
    split = options.context - 256
    prefilled = prefill(weights, tokens[:split])
    reference = score_exact(weights, prefilled, tokens[split : split + options.tokens + 1])
    for asked in options.asked:
        print(json.dumps({"asked": asked, **run(asked, options, weights, prefilled, reference)}), flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("asked", nargs="+", help="nothing, ahead:BLOCKS or near:DISTANCES")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--share", type=lambda text: float(text.rstrip("%")) / 100, default=0.05)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--start", type=int, default=5000)
    parser.add_argument("--tokens", type=int, default=96)
    return parser.parse_args()


def run(
    asked: str, options: argparse.Namespace, weights: DecoderWeights, prefilled: Prefilled, reference: Reference
) -> dict[str, Any]:
    """Decode the scored tokens with one reader."""
    form, capacity = KV.form(weights.config.head_dim), blocks_for(options.context)
    a_block = weights.config.layers * weights.config.kv_heads * form.groups_per_tile
    reader = Reader(round(options.share * a_block * capacity), a_block, form.record_bytes)
    cache = Asking(KvBlocks(weights.config, form, capacity, reader), options.context, Fraction(1, 128), reader)
    kind, _, detail = asked.partition(":")
    cache.distances = [int(one) for one in detail.split(",")] if kind == "near" else ()
    for layer, (keys, values) in enumerate(zip(prefilled.keys, prefilled.values, strict=True)):
        cache.fill_rotated(layer, keys, values)
    cache.end_fill(len(prefilled.tokens))
    foresight = Guesses(float(detail), cache, reader) if kind == "ahead" else None
    found = score(Decoder(weights, 0, cache=cache, foresight=foresight).step, reference)
    known = reader.used + reader.left
    return {
        "kl": found.kl,
        "hit_rate": reader.hits / reader.lookups,
        "reads_a_step": reader.reads / found.tokens,
        "useful": reader.used / known if known else None,
    }


if __name__ == "__main__":
    main()
