"""A low-bit KV cache that refines what the step before selected, in a captured step on a GPU, against the CPU's."""

from collections.abc import Iterator
from dataclasses import replace
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
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon
from tests.fakes.device_model import relative
from tests.gpu.test_low_bit_cache import WIDE
from tests.unit.client.conftest import TinySource
from tests.unit.client.runtime.cuda.test_kv_before import BEFORE, TEXT, on_cpu, until_all_hits
from tests.unit.client.runtime.cuda.test_low_bit_cache import CONTEXT, LENGTH, OPTIONS, start

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """Four layers: errands of one layer's launch are for four others."""
    folder = tmp_path_factory.mktemp("models") / "deep"
    prepare(TinySource(replace(WIDE, layers=4)), folder, PrepareSettings())
    return open_prepared(folder)


@pytest.fixture
def tokens(prepared: PreparedModel) -> tuple[Tensor, Tensor]:
    """Rotated keys and values of the sequence so far."""
    config, generator = prepared.config, torch.Generator().manual_seed(4)
    shape = (config.layers, config.kv_heads, LENGTH, config.head_dim)
    keys, values = (torch.randn(shape, generator=generator).half() for _ in range(2))
    return keys, values


@pytest.fixture
def decoder(prepared: PreparedModel, tokens: tuple[Tensor, Tensor], tmp_path: Path) -> Iterator[DeviceDecoder]:
    model = load_prepared(prepared, torch.device("cuda"))
    with (
        FakeDaemon(tmp_path, [open_store(prepared.store)], ring_log2=14),
        DeviceDecoder(prepared, model, context=CONTEXT, budget=Budget.common(0), kv=BEFORE) as made,
    ):
        made.attach(tmp_path)
        start(made, tokens)
        yield made


def test_a_step_is_refined_by_the_one_before_as_on_a_cpu(
    prepared: PreparedModel, tokens: tuple[Tensor, Tensor], decoder: DeviceDecoder
) -> None:
    found = until_all_hits(decoder, TEXT, tries=5_000)  # steps of a GPU are short, and others take their time
    expected = on_cpu(prepared, tokens, TEXT, OPTIONS.fraction, 1)
    plain = on_cpu(prepared, tokens, TEXT, 0 * OPTIONS.fraction, 0)
    assert relative(found[0], plain[0]) < 1e-2
    # Inputs in float16 let a group at the border be another one.
    assert relative(found[1], expected[1]) < 2e-2
    assert relative(found[2], expected[2]) < 2e-2
    assert relative(found[2], plain[2]) > 0.1
