"""Whole decode steps over a low-bit KV cache by the way that it is refined, and what each part of the errands costs.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python3 bench/gpu_kv_ways.py --out rows.json

Llama-3.1-8B's shape with random 4-bit weights and random tokens before; records of all groups in pinned memory, one
store for all rows. Attention to random tokens is flat and changes little from step to step, so that few records are
brought and kept steps add few groups; look-ups say how many. 1/32 shows what refining four times as many costs.
``--only`` chooses rows by name, ``--without`` takes kinds of errands away, to see what they cost.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_kernels import environment
from gpu_kv import CONTEXT, CUDA, profiled
from gpu_timing import Rows

from strataflux.client.bench.long_context import fill_cache, pin_records
from strataflux.client.bench.replays import tokens_per_second
from strataflux.client.kv_options import KvOptions
from strataflux.client.runtime.cuda.block import DeviceBlock
from strataflux.client.runtime.cuda.budget import Budget
from strataflux.client.runtime.cuda.kv_before import SelectedBefore
from strataflux.client.runtime.cuda.low_bit_cache import LowBitCache
from strataflux.client.runtime.cuda.pinned_store import PinnedStore
from strataflux.client.runtime.cuda.random_model import SHAPES, random_model
from strataflux.client.runtime.cuda.refined import make_decoder

TOKENS = 64
NOTHING = KvOptions(2, 2, fraction=Fraction(0))
NOW = KvOptions(2, 2)
BEFORE = replace(NOW, select_lag=1)
WAYS: dict[str, KvOptions] = {
    "unrefined": NOTHING,
    "before 1/128": BEFORE,
    "step 1/128": NOW,
    "before:4 1/128": replace(BEFORE, kept_steps=4),
    "before 1/32": replace(BEFORE, fraction=Fraction(1, 32)),
    "before:16 1/128": replace(BEFORE, kept_steps=16),
    "before 1/256": replace(BEFORE, fraction=Fraction(1, 256)),
    "step 1/256": replace(NOW, fraction=Fraction(1, 256)),
}


class Ways:
    """One model and one store for all rows."""

    def __init__(self, rounds: int) -> None:
        self.config, self.rounds = SHAPES["llama-3.1-8b"], rounds
        self.model = random_model(self.config, "4-bit", CUDA)
        self.block = DeviceBlock(CUDA)
        self.store: PinnedStore | None = None

    def measure(self, options: KvOptions, profile: bool) -> dict[str, Any]:
        """Milliseconds a step, look-ups, and the kernels that take most."""
        block = self.block if options.fraction else None
        cache = LowBitCache(self.config, CONTEXT + TOKENS, CUDA, options, block)
        decoder = make_decoder(self.model, CONTEXT + TOKENS, block, Budget.common(0), attention=cache)
        fill_cache(cache, CONTEXT)
        if block is not None:
            self._show(cache)
        before = self.block.weight_lookups()
        rate = tokens_per_second(decoder, TOKENS, self.rounds, CONTEXT)
        lookups, hits = (now - then for now, then in zip(self.block.weight_lookups(), before, strict=True))
        found = {"tokens_per_second": rate, "milliseconds": 1e3 / rate, "lookups": lookups, "hits": hits}
        found |= profiled(decoder) if profile else {}
        decoder.wait()
        return found

    def _show(self, cache: LowBitCache) -> None:
        """Let the cache find the store's records."""
        if self.store is None:
            self.store = pin_records(cache, self.block, 0)
            self.store.warm()
        blocks = cache.blocks
        blocks.bases[:] = torch.arange(blocks.capacity).numpy() * blocks.records_a_block


@contextmanager
def without(kinds: list[str]) -> Iterator[None]:
    """No errands of these ``kinds``: shares, rank, list, ask or bring."""
    real = SelectedBefore._make

    def make(self: SelectedBefore, *arguments: Any) -> Any:
        return replace(real(self, *arguments), **dict.fromkeys(kinds))

    SelectedBefore._make = make  # type: ignore[method-assign]
    try:
        yield
    finally:
        SelectedBefore._make = real  # type: ignore[method-assign]


def main() -> None:
    """Measure every row within the time given, the unrefined one again at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--without", nargs="*", default=[], choices=["shares", "rank", "list", "ask", "bring"])
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows, ways = Rows(options.out, options.seconds), Ways(options.rounds)
    rows.run("environment", lambda: environment(rows))

    def row(name: str) -> Callable[[], None]:
        return lambda: rows.add("way", name, without=options.without, **ways.measure(WAYS[name], options.profile))

    with without(options.without):
        for name in [*options.only, options.only[0]]:
            rows.run(name, row(name))
            gc.collect()
            torch.cuda.empty_cache()
    if ways.store is not None:
        ways.store.close()
    rows.add("end", "all rows")


if __name__ == "__main__":
    main()
