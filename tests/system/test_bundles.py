"""A model whose MLPs are refined by neuron bundles, through a real daemon."""

from pathlib import Path

import pytest
import torch

from strataflux.cache_policy.miss import Wait
from strataflux.client.evaluate.dense import dense_logits
from strataflux.client.evaluate.dense_run import refined_dense
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.schemes import Scheme
from tests.system.conftest import Start
from tests.system.test_demo import tiny_source

pytestmark = pytest.mark.system

TOKENS = [1, 40, 7, 7, 200, 3, 90, 15, 2, 61, 5, 118]


def test_decoding_that_waits_is_the_dense_definition_for_both_schemes(start: Start, tmp_path: Path) -> None:
    prepared = prepare(tiny_source(), tmp_path / "prepared", PrepareSettings(mlp="both"))
    daemon = start("--store", str(prepared.store))
    daemon.expect(b"READY=1")
    weights = DecoderWeights.read(prepared)
    schemes: tuple[Scheme, ...] = ("bundles", "channels")
    for scheme in schemes:
        with RefinedModel.attach(
            prepared,
            weights,
            context=len(TOKENS),
            runtime_dir=daemon.folder,
            k=100,
            scheme=scheme,
            miss=Wait(60.0),
        ) as model:
            decoded = torch.stack([model.step(token) for token in TOKENS])
            stats = model.stats()
        # Nothing was resident at first: without waiting this would be the base.
        assert 0 < stats.hits < stats.lookups
        expected = dense_logits(refined_dense(prepared, weights, 100, scheme), TOKENS)
        torch.testing.assert_close(decoded, expected, rtol=1e-3, atol=1e-3)
