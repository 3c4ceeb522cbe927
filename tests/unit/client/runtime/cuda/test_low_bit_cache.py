"""The device's low-bit cache: against the CPU's, through a daemon's session, and what may go wrong with its records."""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.client.bench.long_context import LongSetup, bench_long_context
from strataflux.client.errors import MisuseError
from strataflux.client.kv import RefinedKVCache
from strataflux.client.kv_blocks import KvBlocks
from strataflux.client.kv_options import KvOptions
from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.runtime.cuda import random_model
from strataflux.client.runtime.cuda.budget import Budget
from strataflux.client.runtime.cuda.linear import LowbitLinear
from strataflux.client.runtime.cuda.low_bit_cache import LowBitCache
from strataflux.client.runtime.cuda.refined import DeviceDecoder
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import DecoderWeights, ModelConfig
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon
from tests.fakes.device_model import Expanded, emulated_model, relative
from tests.fakes.records import LocalRecords

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes lanes that masks discard

CPU = torch.device("cpu")
OPTIONS = KvOptions(2, 2, 4, 4, 4, Fraction(1, 2))
CONTEXT, LENGTH = 520, 384
"""What lies before: the tile after the sink is encoded, the one after it is full."""
TOKEN = 7
STEPS = 50
"""A watchdog: far more steps than anything here takes."""


@pytest.fixture
def prepared(folder: Path, tiny_source: Any) -> PreparedModel:
    """Heads of a size that has kernels."""
    if not (folder / "wide").exists():
        source = tiny_source.with_config(layers=2, intermediate=128, heads=2, kv_heads=1, head_dim=64, context=CONTEXT)
        prepare(source, folder / "wide", PrepareSettings())
    return open_prepared(folder / "wide")


@pytest.fixture
def tokens(prepared: PreparedModel) -> tuple[Tensor, Tensor]:
    """Rotated keys and values of the sequence so far: [layers, kv_heads, LENGTH, head_dim] float16."""
    config, generator = prepared.config, torch.Generator().manual_seed(4)
    shape = (config.layers, config.kv_heads, LENGTH, config.head_dim)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    return keys.half(), values.half()


def fill(cache: LowBitCache, tokens: tuple[Tensor, Tensor]) -> None:
    for position in range(0, LENGTH, 128):
        cache.extend(position, *(part[:, :, position : position + 128] for part in tokens))


def local_records(config: ModelConfig) -> LocalRecords:
    form = OPTIONS.form(config.head_dim)
    return LocalRecords(9, config.layers * config.kv_heads * form.groups_per_tile, form.record_bytes)


def on_cpu(prepared: PreparedModel, tokens: tuple[Tensor, Tensor], fraction: Fraction) -> Tensor:
    """Logits after one more token, of the CPU's decoder and cache."""
    config = prepared.config
    records = local_records(config)
    blocks = KvBlocks(config, OPTIONS.form(config.head_dim), 4, records)
    cache = RefinedKVCache(blocks, CONTEXT, fraction, records)
    for layer, (keys, values) in enumerate(zip(*tokens, strict=True)):
        cache.fill_rotated(layer, keys, values)
    cache.end_fill(LENGTH)
    return Decoder(DecoderWeights.read(prepared), 0, cache=cache).step(TOKEN)


@pytest.fixture
def daemon(tmp_path: Path, prepared: PreparedModel) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path, [open_store(prepared.store)], ring_log2=14) as fake:
        yield fake


def make(prepared: PreparedModel) -> DeviceDecoder:
    budget = Budget.common(0)
    return DeviceDecoder(prepared, emulated_model(prepared), context=CONTEXT, budget=budget, kv=OPTIONS)


def start(decoder: DeviceDecoder, tokens: tuple[Tensor, Tensor]) -> None:
    """Let ``tokens`` be what was decoded so far."""
    assert decoder.cache is not None
    fill(decoder.cache, tokens)
    decoder.decoder.position = LENGTH
    decoder.decoder.reset(LENGTH)


def test_without_a_daemon_it_is_the_cpus_resident_cache(prepared: PreparedModel, tokens: tuple[Tensor, Tensor]) -> None:
    with make(prepared) as decoder:
        start(decoder, tokens)
        found = decoder.advance(TOKEN)
        assert relative(found, on_cpu(prepared, tokens, Fraction(0))) < 1e-2
        assert decoder.kv_hit_rate().lookups == 0


def test_through_a_daemon_it_is_the_cpus_refined_cache(
    prepared: PreparedModel, tokens: tuple[Tensor, Tensor], daemon: FakeDaemon, tmp_path: Path
) -> None:
    with make(prepared) as decoder:
        decoder.attach(tmp_path)
        start(decoder, tokens)
        found = until_all_hits(decoder)
        expected = on_cpu(prepared, tokens, OPTIONS.fraction)
        # Inputs in float16 let a group at the border be another one.
        assert relative(found, expected) < 2e-2
        assert relative(found, on_cpu(prepared, tokens, Fraction(0))) > 0.5
        assert sorted(daemon.sessions[0].kv.blocks) == sorted(daemon.sessions[0].kv.granted)[:2]  # type: ignore[union-attr]
        assert decoder.hit_rate().lookups == 0


def again(decoder: DeviceDecoder) -> Tensor:
    """Logits of the step at LENGTH, once more."""
    decoder.decoder.reset(LENGTH)
    return decoder.advance(TOKEN)


def until_all_hits(decoder: DeviceDecoder) -> Tensor:
    """Step until nothing misses: puts settle, and what was mapped is made reachable, beside the steps."""
    for _ in range(STEPS):
        before = decoder.kv_hit_rate()
        found = again(decoder)
        now = decoder.kv_hit_rate()
        if now.hits - before.hits == now.lookups - before.lookups > 0:
            return found
    raise AssertionError(f"still missing: {decoder.kv_hit_rate()}")


def test_a_step_that_was_fenced_encodes_its_tile_once(
    prepared: PreparedModel, tokens: tuple[Tensor, Tensor], daemon: FakeDaemon, tmp_path: Path
) -> None:
    daemon.cache_puts = False  # so that both runs are unrefined
    with make(prepared) as decoder:
        decoder.attach(tmp_path)
        start(decoder, tokens)
        launch, fences = decoder.decoder.launch, [daemon.fence]

        def fenced_launch(token: int | None = None) -> None:
            launch(token)
            while fences:
                fences.pop()()

        decoder.decoder.launch = fenced_launch  # type: ignore[method-assign]
        found = decoder.advance(TOKEN)
        assert decoder._session is not None
        assert decoder._session.stats().steps_invalid == 1
        assert relative(found, on_cpu(prepared, tokens, Fraction(0))) < 1e-2


def test_puts_that_nobody_takes_are_tried_until_the_next_tile(
    prepared: PreparedModel, tokens: tuple[Tensor, Tensor]
) -> None:
    config = prepared.config
    records = local_records(config)
    cache = LowBitCache(config, CONTEXT, CPU, OPTIONS)
    cache.connect(records, 0)
    records.full = True
    fill(cache, tokens)
    cache.begin_step(LENGTH)
    assert cache.blocks.unrefined == 1  # the first tile had its time
    assert not records.blocks
    records.full = False
    cache.begin_step(LENGTH + 1)
    cache.begin_step(LENGTH + 2)
    assert len(records.blocks) == 1
    assert (cache.blocks.bases >= 0).tolist() == [False, True, False]
    assert torch.equal(cache._bases, torch.from_numpy(cache.blocks.bases))
    records.reattach()
    cache.begin_step(LENGTH + 3)
    assert (cache._bases == -1).all()


def test_going_back(prepared: PreparedModel, tokens: tuple[Tensor, Tensor]) -> None:
    records = local_records(prepared.config)
    cache = LowBitCache(prepared.config, CONTEXT, CPU, OPTIONS)
    cache.connect(records, 0)
    fill(cache, tokens)
    with pytest.raises(MisuseError, match="256 and later"):
        cache.truncate(255)
    cache.truncate(256)
    first = cache.blocks.keys.codes[:, cache._held[0]].clone()
    cache.truncate(0)
    assert not cache._encoded
    assert records.released  # what was put is given back
    fill(cache, (tokens[0].flip(2), tokens[1]))
    assert not torch.equal(cache.blocks.keys.codes[:, cache._held[0]], first)


def test_what_cannot_be_is_refused(prepared: PreparedModel, tokens: tuple[Tensor, Tensor]) -> None:
    config = prepared.config
    cache = LowBitCache(config, 300, CPU, OPTIONS)
    with pytest.raises(MisuseError, match="number 0"):
        cache.connect(local_records(config), 1)
    with pytest.raises(MisuseError, match="at most 44"):
        cache.extend(256, *(part[:, :, :45] for part in tokens))
    with pytest.raises(MisuseError, match="head_dim 16"):
        LowBitCache(replace(config, head_dim=16), 300, CPU, OPTIONS)
    with pytest.raises(MisuseError, match="9 query heads"):
        LowBitCache(replace(config, heads=9), 300, CPU, OPTIONS)
    with pytest.raises(MisuseError, match="--context"):
        LongSetup(OPTIONS, 130)


def test_bench_rows_differ_by_the_cache(prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_model, "LowbitLinear", lambda weights: Expanded(LowbitLinear(weights)))
    config = replace(prepared.config, layers=1)
    half, low, refined = bench_long_context(config, LongSetup(OPTIONS, LENGTH, tokens=1, rounds=1), CPU)
    assert [row["name"] for row in (half, low, refined)] == ["float16 cache", "2/2 cache", "2/2 cache + 4/4"]
    assert half["of_first"] == 1
    assert low["cache_bytes"] < half["cache_bytes"]
    assert refined["hit_rate"] == 1
