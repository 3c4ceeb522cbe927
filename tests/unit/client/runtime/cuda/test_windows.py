"""Layers with windows on a device: the CPU's decoder says the same, and a ring goes back as far as it can."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.runtime.cuda.attention import HalfCache
from strataflux.client.runtime.cuda.budget import Budget
from strataflux.client.runtime.cuda.refined import make_decoder
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import DecoderWeights
from tests.fakes.device_model import emulated_model, logits_over, relative
from tests.unit.client.conftest import TinySource

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes lanes that masks discard

TOKENS = (7, 9, 30, 81, 12)
CONTEXT = 8
HALF = 2e-3
"""Inputs and keys are float16 on the device and float32 on the CPU."""


def test_steps_in_windows_are_those_of_the_cpu(tmp_path: Path, tiny_source: TinySource) -> None:
    source = tiny_source.with_config(intermediate=128, windows=(2, 0))
    prepared = prepare(source, tmp_path / "p", PrepareSettings())
    weights = DecoderWeights.read(prepared)
    expected = logits_over(Decoder(weights, CONTEXT).step, TOKENS)
    decoder = make_decoder(emulated_model(prepared), CONTEXT, None, Budget.common(0))

    def advance(token: int) -> torch.Tensor:
        decoder.launch(token)
        return decoder.logits

    found = logits_over(advance, TOKENS)
    assert relative(found, expected) < HALF
    with pytest.raises(MisuseError, match="position 3, which attends to 2 and on"):
        decoder.reset(3)
    decoder.reset(4)
    assert torch.equal(logits_over(advance, TOKENS[4:])[0], found[4])


def test_a_cache_has_no_more_rows_than_its_windows(tiny_source: TinySource) -> None:
    config, cpu = tiny_source.with_config(layers=3, windows=(5, 0, 90)).config, torch.device("cpu")
    a_position = 2 * 2 * config.kv_heads * config.head_dim
    assert HalfCache.bytes_for(config, 64) == (5 + 64 + 64) * a_position
    assert HalfCache.bytes_for(config, 4) == 3 * 4 * a_position
    held = HalfCache(config, 64, cpu)
    assert sum(part.nbytes for part in (*held._keys, *held._values)) == HalfCache.bytes_for(config, 64)
