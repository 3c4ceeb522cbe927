"""Tokens a second of whole decode steps at a long context: keys and values in float16, in low bits, and refined.

The sequence before is random tokens, encoded as any. Refinement reads random records of every group from pinned
memory; projections stay at their resident precision throughout, so that rows differ by the cache alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch

from strataflux.client.bench.decode import Row
from strataflux.client.bench.replays import tokens_per_second
from strataflux.client.errors import MisuseError
from strataflux.client.kv_options import KvOptions
from strataflux.client.runtime.cuda.attention import HalfCache
from strataflux.client.runtime.cuda.block import DeviceBlock
from strataflux.client.runtime.cuda.budget import Budget
from strataflux.client.runtime.cuda.decoder import GraphDecoder
from strataflux.client.runtime.cuda.low_bit_cache import LowBitCache
from strataflux.client.runtime.cuda.model import DeviceModel
from strataflux.client.runtime.cuda.pinned_store import PinnedStore, random_records
from strataflux.client.runtime.cuda.random_model import Base, random_model
from strataflux.client.runtime.cuda.refined import make_decoder
from strataflux.client.runtime.models import ModelConfig
from strataflux.kernels.kv_pack import TILE_TOKENS
from strataflux.proto.store_format import SectionSpec

__all__ = ["Also", "LongSetup", "bench_long_context", "fill_cache", "pin_records"]


@dataclass(frozen=True)
class LongSetup:
    """What is measured.

    Raises:
        MisuseError: on construction: a round would encode tiles, of which there is no way back to its beginning.
    """

    kv: KvOptions
    start: int
    """Position of the first token: whole tiles."""
    bases: tuple[Base, ...] = ("4-bit",)
    tokens: int = 64
    rounds: int = 5
    hot_bytes: int = 0
    """Device memory for a part of the records."""
    float16: bool = True
    """Measure a cache in float16, too."""

    def __post_init__(self) -> None:
        if self.start % TILE_TOKENS or self.tokens > TILE_TOKENS:
            found, expected = f"{self.tokens} tokens from {self.start}", "up to 128 from a multiple of 128 on"
            raise MisuseError("--context, --tokens", found, expected, "change them")


Also = Callable[[GraphDecoder], Row]
"""What else is to be known of each decoder, as a part of its row."""


def bench_long_context(
    config: ModelConfig,
    setup: LongSetup,
    device: torch.device,
    on_row: Callable[[Row], object] = lambda _: None,
    also: Also = lambda _: {},
) -> list[Row]:
    """Measure; each row is given out as soon as it is there.

    Raises:
        MisuseError: heads without a kernel, or no such format. FailureError: records cannot be pinned.
    """
    rows: list[Row] = []
    for base in setup.bases:
        model = random_model(config, base, device)
        first = 0.0
        for row in _rows(model, setup, also):
            first = first or row["tokens_per_second"]
            rows.append({"base": base, **row, "of_first": row["tokens_per_second"] / first})
            on_row(rows[-1])
    return rows


def _rows(model: DeviceModel, setup: LongSetup, also: Also) -> Iterator[Row]:
    config, kv = model.config, setup.kv
    context = setup.start + setup.tokens
    if setup.float16:
        size = HalfCache.bytes_for(config, context)
        yield {"name": "float16 cache", "cache_bytes": size, **_time(model, setup, also, None, None)}
    size, widths = LowBitCache.bytes_for(config, context, kv), f"{kv.key_bits}/{kv.value_bits}"
    cache = LowBitCache(config, context, model.device, replace(kv, fraction=Fraction(0)))
    yield {"name": f"{widths} cache", "cache_bytes": size, **_time(model, setup, also, cache, None)}
    del cache
    if kv.geometry(config, 1) is not None:
        block = DeviceBlock(model.device)
        cache = LowBitCache(config, context, model.device, kv, block)
        name = f"{widths} cache + {kv.refine_key_bits}/{kv.refine_value_bits}"
        found = _time(model, setup, also, cache, block)
        settings = {"fraction": str(kv.fraction), "select_lag": kv.select_lag}
        yield {"name": name, **settings, "cache_bytes": size, **found}


def _time(
    model: DeviceModel, setup: LongSetup, also: Also, cache: LowBitCache | None, block: DeviceBlock | None
) -> dict[str, Any]:
    """Measure with this cache, or one in float16; with ``block`` its records are there, too."""
    decoder = make_decoder(model, setup.start + setup.tokens, block, Budget.common(0), attention=cache)
    if cache is not None:
        fill_cache(cache, setup.start)
    if cache is None or block is None:
        return _rate(decoder, setup) | also(decoder)
    store = pin_records(cache, block, setup.hot_bytes)
    try:
        # Attention to random tokens has no favourites: any part of the records stands for a tier with so many hits.
        store.warm()
        found, access = _rate(decoder, setup), store.access
        found |= also(decoder)
        if store.hot:
            found |= {"hot_bytes": store.hot.bytes, "hot_share": min(1.0, store.hot.bytes / store.bytes)}
        lookups, hits = block.weight_lookups()  # the table counts as one of weights
    finally:
        decoder.wait()
        store.close()
    return {**found, "access": access, "hit_rate": hits / lookups if lookups else None}


def _rate(decoder: GraphDecoder, setup: LongSetup, between: Callable[[], object] = lambda: None) -> dict[str, Any]:
    rate = tokens_per_second(decoder, setup.tokens, setup.rounds, setup.start, between)
    return {"tokens_per_second": rate, "milliseconds": 1e3 / rate}


def fill_cache(cache: LowBitCache, length: int) -> None:
    """Let random tokens be in an empty cache, as if ``length`` of them had been decoded: whole tiles."""
    config, device = cache.blocks.config, cache.blocks.keys.codes.device
    for position in range(0, length, TILE_TOKENS):
        shape = (2, config.layers, config.kv_heads, TILE_TOKENS, config.head_dim)
        keys, values = torch.randn(shape, device=device).half()
        cache.extend(position, keys, values)


def pin_records(cache: LowBitCache, block: DeviceBlock, hot_bytes: int) -> PinnedStore:
    """Random records of all blocks of a cache, in pinned memory, which its look-ups find; ``hot_bytes`` of device
    memory are for the most used ones. To be closed.

    Raises:
        FailureError: there is not so much memory.
    """
    blocks = cache.blocks
    count = blocks.records_a_block
    sections = [
        SectionSpec(f"block {place}", "kv_group", 0, "kv", count, blocks.form.record_bytes)
        for place in range(blocks.capacity)
    ]
    blocks.bases[:] = torch.arange(blocks.capacity).numpy() * count
    store = PinnedStore(sections, random_records(), block, hot_bytes=hot_bytes)
    try:
        store.wait()
    except BaseException:
        store.close()
        raise
    return store
