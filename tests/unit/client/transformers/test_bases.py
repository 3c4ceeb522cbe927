"""A base that moves scales into the norms before its matrices: both are put in, and taken out, together."""

from pathlib import Path

import pytest
import torch

from strataflux.client.prepare.bases.awq import AwqSettings
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.transformers import StrataFluxConfig, attach, detach
from tests.unit.client.conftest import TinySource
from tests.unit.client.transformers.conftest import NEAR, Load, step_logits, tokens


@pytest.fixture
def prepared(tmp_path: Path, source: TinySource) -> PreparedModel:
    text = torch.randint(0, 250, (4, 32), generator=torch.Generator().manual_seed(1))
    return prepare(source, tmp_path / "awq", PrepareSettings(AwqSettings(3, 64), tokens=text))


def low_bits(prepared: PreparedModel, ids: torch.Tensor) -> torch.Tensor:
    decoder = Decoder(DecoderWeights.read(prepared), 64)
    return torch.stack([decoder.step(token) for token in ids[0].tolist()])[None]


def test_scaled_norms_come_and_go_with_their_matrices(load: Load, prepared: PreparedModel, tmp_path: Path) -> None:
    ids, model = tokens(5), load()
    norm = model.model.layers[0].input_layernorm.weight
    before = step_logits(model, ids)
    attach(model, prepared.folder, runtime_dir=tmp_path)
    assert not torch.equal(model.model.layers[0].input_layernorm.weight, norm)
    torch.testing.assert_close(step_logits(model, ids), low_bits(prepared, ids), **NEAR)
    detach(model)
    assert model.model.layers[0].input_layernorm.weight is norm
    assert torch.equal(step_logits(model, ids), before)


def test_a_model_loaded_in_low_bits_keeps_both(load: Load, prepared: PreparedModel, tmp_path: Path) -> None:
    ids = tokens(5)
    model = load(quantization_config=StrataFluxConfig(prepared.folder, runtime_dir=tmp_path))
    detach(model)
    torch.testing.assert_close(step_logits(model, ids), low_bits(prepared, ids), **NEAR)
