"""A low-bit KV cache on a GPU, in a captured step and through a daemon's session, against the CPU's."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.runtime.cuda.budget import Budget
from strataflux.client.runtime.cuda.model import load_prepared
from strataflux.client.runtime.cuda.refined import DeviceDecoder
from strataflux.client.runtime.models import ModelConfig
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon
from tests.fakes.device_model import relative
from tests.unit.client.conftest import TOKENS, TinySource
from tests.unit.client.runtime.cuda.test_low_bit_cache import (
    CONTEXT,
    LENGTH,
    OPTIONS,
    TOKEN,
    again,
    on_cpu,
    start,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


WIDE = ModelConfig(
    vocabulary=len(TOKENS),
    hidden=64,
    intermediate=128,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=64,
    context=CONTEXT,
    rope_theta=10000.0,
    norm_epsilon=1e-5,
    tied_head=True,
)
"""Heads of a size that has kernels."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    folder = tmp_path_factory.mktemp("models") / "wide"
    prepare(TinySource(WIDE), folder, PrepareSettings())
    return open_prepared(folder)


@pytest.fixture
def tokens(prepared: PreparedModel) -> tuple[Tensor, Tensor]:
    """Rotated keys and values of the sequence so far."""
    config, generator = prepared.config, torch.Generator().manual_seed(4)
    shape = (config.layers, config.kv_heads, LENGTH, config.head_dim)
    keys, values = (torch.randn(shape, generator=generator).half() for _ in range(2))
    return keys, values


@pytest.fixture
def decoder(prepared: PreparedModel) -> Iterator[DeviceDecoder]:
    model = load_prepared(prepared, torch.device("cuda"))
    with DeviceDecoder(prepared, model, context=CONTEXT, budget=Budget.common(0), kv=OPTIONS) as made:
        yield made


def test_alone_it_is_the_cpus_resident_cache(
    prepared: PreparedModel, decoder: DeviceDecoder, tokens: tuple[Tensor, Tensor]
) -> None:
    start(decoder, tokens)
    assert relative(decoder.advance(TOKEN), on_cpu(prepared, tokens, Fraction(0))) < 1e-2


def test_through_a_daemon_it_is_the_cpus_refined_cache(
    prepared: PreparedModel, decoder: DeviceDecoder, tokens: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    with FakeDaemon(tmp_path, [open_store(prepared.store)], ring_log2=14):
        decoder.attach(tmp_path)
        start(decoder, tokens)
        found = _until_all_hits(decoder)
    # Inputs in float16 let a group at the border be another one.
    assert relative(found, on_cpu(prepared, tokens, OPTIONS.fraction)) < 2e-2
    assert relative(found, on_cpu(prepared, tokens, Fraction(0))) > 0.5


def _until_all_hits(decoder: DeviceDecoder) -> Tensor:
    """Step until nothing misses; steps of a GPU are short, and others take their time."""
    for _ in range(20_000):
        before = decoder.kv_hit_rate()
        found = again(decoder)
        now = decoder.kv_hit_rate()
        if now.hits - before.hits == now.lookups - before.lookups > 0:
            return found
    raise AssertionError(f"still missing: {decoder.kv_hit_rate()}")
