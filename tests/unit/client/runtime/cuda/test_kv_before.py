"""A device's cache that refines what the step before selected: against the CPU's, and what must not outlive a step."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.client.kv import RefinedKVCache
from strataflux.client.kv_blocks import KvBlocks
from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.runtime.cuda.budget import Budget
from strataflux.client.runtime.cuda.kv_before import SelectedBefore
from strataflux.client.runtime.cuda.refined import DeviceDecoder, HitRate
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import DecoderWeights
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon
from tests.fakes.device_model import emulated_model, relative
from tests.unit.client.runtime.cuda.test_low_bit_cache import CONTEXT, LENGTH, OPTIONS, STEPS, local_records, start

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes lanes that masks discard

BEFORE = replace(OPTIONS, select_lag=1)
TEXT = (7, 11, 5)


@pytest.fixture
def prepared(folder: Path, tiny_source: Any) -> PreparedModel:
    """Three layers: the last one's records are fetched in the step that uses them, the others' in the one before."""
    if not (folder / "deep").exists():
        source = tiny_source.with_config(layers=3, intermediate=128, heads=2, kv_heads=1, head_dim=64, context=CONTEXT)
        prepare(source, folder / "deep", PrepareSettings())
    return open_prepared(folder / "deep")


@pytest.fixture
def tokens(prepared: PreparedModel) -> tuple[Tensor, Tensor]:
    """Rotated keys and values of the sequence so far: [layers, kv_heads, LENGTH, head_dim] float16."""
    config, generator = prepared.config, torch.Generator().manual_seed(4)
    shape = (config.layers, config.kv_heads, LENGTH, config.head_dim)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    return keys.half(), values.half()


@pytest.fixture
def decoder(prepared: PreparedModel, tokens: tuple[Tensor, Tensor], tmp_path: Path) -> Iterator[DeviceDecoder]:
    """Attached to a daemon, ``tokens`` being what was decoded so far."""
    budget, model = Budget.common(0), emulated_model(prepared)
    with (
        FakeDaemon(tmp_path, [open_store(prepared.store)], ring_log2=14) as daemon,
        DeviceDecoder(prepared, model, context=CONTEXT, budget=budget, kv=BEFORE) as made,
    ):
        made.attach(tmp_path)
        start(made, tokens)
        made.fence = daemon.fence  # type: ignore[attr-defined]
        yield made


def on_cpu(
    prepared: PreparedModel, tokens: tuple[Tensor, Tensor], text: Sequence[int], fraction: Fraction, select_lag: int
) -> Tensor:
    """Logits after each token of ``text``, of the CPU's decoder and cache."""
    config = prepared.config
    records = local_records(config)
    blocks = KvBlocks(config, OPTIONS.form(config.head_dim), 4, records)
    cache = RefinedKVCache(blocks, CONTEXT, fraction, records, early=records if select_lag else None)
    for layer, (keys, values) in enumerate(zip(*tokens, strict=True)):
        cache.fill_rotated(layer, keys, values)
    cache.end_fill(LENGTH)
    decoder = Decoder(DecoderWeights.read(prepared), 0, cache=cache)
    return torch.stack([decoder.step(token) for token in text])


def since(before: HitRate, now: HitRate) -> HitRate:
    return HitRate(now.lookups - before.lookups, now.hits - before.hits)


def until_all_hits(decoder: DeviceDecoder, text: Sequence[int], tries: int = STEPS) -> Tensor:
    """Logits after ``text``, once nothing misses in it: what was put settles beside steps."""
    assert decoder.cache is not None
    for _ in range(tries):
        before, known = decoder.kv_hit_rate(), int((decoder.cache.blocks.bases >= 0).sum())
        decoder.decoder.reset(LENGTH)
        found = torch.stack([decoder.advance(token) for token in text])
        counted = since(before, decoder.kv_hit_rate())
        if counted.hits == counted.lookups > 0 and known == 2:  # both tiles' records may be looked up
            return found
    raise AssertionError(f"still missing: {decoder.kv_hit_rate()}")


def test_a_step_is_refined_by_the_one_before_as_on_a_cpu(
    prepared: PreparedModel, tokens: tuple[Tensor, Tensor], decoder: DeviceDecoder
) -> None:
    found = until_all_hits(decoder, TEXT)
    expected = on_cpu(prepared, tokens, TEXT, OPTIONS.fraction, 1)
    plain = on_cpu(prepared, tokens, TEXT, Fraction(0), 0)
    assert relative(found[0], plain[0]) < 1e-2  # nothing was selected before
    # Inputs in float16 let a group at the border be another one.
    assert relative(found[1], expected[1]) < 2e-2
    assert relative(found[2], expected[2]) < 2e-2
    assert relative(found[2], plain[2]) > 0.1
    assert relative(found[2], on_cpu(prepared, tokens, TEXT, OPTIONS.fraction, 0)[2]) > 5e-2


def test_what_an_invalid_step_fetched_is_not_used(
    prepared: PreparedModel, tokens: tuple[Tensor, Tensor], decoder: DeviceDecoder
) -> None:
    until_all_hits(decoder, TEXT[:1])
    launch, fences = decoder.decoder.launch, [decoder.fence]  # type: ignore[attr-defined]

    def fenced_launch(token: int | None = None) -> None:
        launch(token)
        while fences:
            fences.pop()()

    decoder.decoder.launch = fenced_launch  # type: ignore[method-assign]
    found = decoder.advance(TEXT[1])
    assert decoder._session is not None
    assert decoder._session.stats().steps_invalid == 1
    plain = on_cpu(prepared, tokens, TEXT[:2], Fraction(0), 0)
    assert relative(found, plain[1]) < 1e-2
    assert decoder.cache is not None
    way = decoder.cache._way
    assert isinstance(way, SelectedBefore)
    for layer in (0, 1):  # fetched at the end of the step that was run again
        assert int(way._layers[layer].listed.counts[0])
        assert (way._layers[layer].numbers == -1).all()
