"""Evaluation of whole windows against token by token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from strataflux.client.evaluate.dense import (
    DenseModel,
    _divergences,
    _Products,
    dense_logits,
    dense_reference,
    dense_score,
)
from strataflux.client.evaluate.scoring import divergences, score, score_reference
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.refinement import read_refinement
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.forward import forward_text
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.kernels.refine import pack_records, refine_reference
from strataflux.kernels.select import select_reference

TOKENS = [5, 80, 80, 3, 200, 17, 256, 1, 9, 9, 30, 44]


class ResidentRefiner:
    """The oracle: every selected record is there."""

    def __init__(self, prepared: PreparedModel, k: int) -> None:
        self.values, self.k = list(read_refinement(prepared)), k

    def refine(self, layer: int, set_index: int, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        inputs = torch.from_numpy(x)
        chosen = select_reference(inputs, self.k)[0]
        y += (self.values[layer][SETS[set_index]][:, chosen] @ inputs[chosen]).numpy()


@pytest.fixture
def prepared(tmp_path: Path, tiny_source: Any) -> PreparedModel:
    return prepare(tiny_source, tmp_path / "p", PrepareSettings())


@pytest.mark.parametrize("k", [0, 32, 200])
def test_agrees_with_steps_when_nothing_misses(prepared: PreparedModel, tiny_source: Any, k: int) -> None:
    exact, low = DecoderWeights.read(tiny_source), DecoderWeights.read(prepared)
    model = DenseModel(low, list(read_refinement(prepared)), dict.fromkeys(SETS, k))
    dense = dense_score(model, dense_reference(exact, TOKENS))
    reference = score_reference(Decoder(exact, len(TOKENS)).step, TOKENS)
    stepped = score(Decoder(low, len(TOKENS), ResidentRefiner(prepared, k)).step, reference)
    np.testing.assert_allclose(dense.divergence, stepped.divergence, atol=1e-4)
    np.testing.assert_allclose(dense.divergence_top, stepped.divergence_top, atol=1e-4)
    np.testing.assert_allclose(dense.surprise, stepped.surprise, atol=1e-4)
    assert dense.kl > 0.01


def test_all_channels_restore_the_model(prepared: PreparedModel, tiny_source: Any) -> None:
    reference = dense_reference(DecoderWeights.read(tiny_source), TOKENS)
    low, values = DecoderWeights.read(prepared), list(read_refinement(prepared))
    base = dense_score(DenseModel(low), reference).kl
    chosen = dense_score(DenseModel(low, values, dict.fromkeys(SETS, 256)), reference).kl
    restored = dense_score(DenseModel(low, values, dict.fromkeys(SETS, 1024)), reference).kl
    assert restored < 0.02 * base
    assert restored < chosen < base


def test_records_are_read_as_the_kernel_reads_them(prepared: PreparedModel) -> None:
    values = next(read_refinement(prepared))["o"]
    scale = prepared.refinement_scales(0, "o")
    codes = (values / scale[:, None]).round().to(torch.int8)
    x, expected = torch.randn(64, generator=torch.Generator().manual_seed(0)), torch.zeros(64)
    chosen = torch.tensor([3, 9, 60])
    refine_reference(expected, x, chosen, pack_records(codes)[chosen], scale)
    torch.testing.assert_close(values[:, chosen] @ x[chosen], expected)


def test_the_divergence_over_the_top_tokens_is_that_of_single_rows() -> None:
    random = torch.Generator().manual_seed(1)
    log_p, log_q = (torch.log_softmax(3 * torch.randn(2, 3000, generator=random), -1) for _ in range(2))
    exact, top = _divergences(log_p, log_q)
    for row in range(2):
        one, one_top = divergences(log_p[row], log_q[row])
        assert float(exact[row]) == pytest.approx(one)
        assert float(top[row]) == pytest.approx(one_top)
    assert float((exact - top).min()) > 0


def test_unrefined_logits_are_those_of_the_forward_pass(tiny_source: Any) -> None:
    weights = DecoderWeights.read(tiny_source)
    torch.testing.assert_close(dense_logits(DenseModel(weights), TOKENS), forward_text(weights, TOKENS))


def test_bundles_are_their_definition_neuron_by_neuron(prepared: PreparedModel, tiny_source: Any) -> None:
    config, random = tiny_source.config, torch.Generator().manual_seed(2)
    low, values = DecoderWeights.read(prepared), list(read_refinement(prepared))
    copies = [layer.projections["down"] for layer in DecoderWeights.read(tiny_source).layers]
    products = _Products(DenseModel(low, values, dict.fromkeys(SETS, 100), down_copies=copies))
    x = torch.randn(config.hidden, generator=random)
    gate, up = products.base(1, "gate_up", x).chunk(2)
    assert products.refined(1, "gate_up", x, x) is None
    h = torch.nn.functional.silu(gate) * up
    found = products.refined(1, "down", h, h)
    expected, rows = torch.zeros(config.hidden), values[1]["gate_up"]
    for j in select_reference(h, 100)[0].tolist():
        refined = torch.nn.functional.silu(gate[j] + rows[j] @ x) * (up[j] + rows[config.intermediate + j] @ x)
        expected += copies[1][:, j] * (refined - h[j]) + values[1]["down"][:, j] * h[j]
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_all_neurons_bundled_restore_the_mlp(prepared: PreparedModel, tiny_source: Any) -> None:
    exact = DecoderWeights.read(tiny_source)
    low, values = DecoderWeights.read(prepared), list(read_refinement(prepared))
    copies = [layer.projections["down"] for layer in exact.layers]
    reference, every = dense_reference(exact, TOKENS), dict.fromkeys(SETS, 1024)
    base = dense_score(DenseModel(low), reference).kl
    assert dense_score(DenseModel(low, values, every, down_copies=copies), reference).kl < 0.02 * base
