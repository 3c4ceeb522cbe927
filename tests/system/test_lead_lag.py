"""Fetch lead and lag through a real daemon: waiting for every record gives what whole sequences give."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strataflux.cache_policy.miss import Skip, Wait
from strataflux.client.evaluate.dense import dense_logits
from strataflux.client.evaluate.dense_run import refined_dense
from strataflux.client.prepare.candidates import Candidate
from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.tuning import keep
from strataflux.proto import control_pb2
from tests.system.conftest import Start
from tests.system.test_demo import tiny_source

pytestmark = pytest.mark.system

TOKENS = [5, 80, 3, 200, 17, 1, 9, 30]
# Of the outputs' 128 inputs 24: at the first token heads that share a value are equal, so an odd number would leave the
# choice within a pair to whoever selects.
CHANNELS = Candidate((64, 192, 96, 128), (1.5, 0.5, 1.0, 2.0))
BUNDLES = Candidate((64, 192, 0, 128), (1.5, 0.5, 0.0, 2.0), "bundles")


def prepare_tuned(folder: Path, chosen: Candidate) -> PreparedModel:
    source = tiny_source()
    deeper = replace(source, config=replace(source.config, layers=4))
    made = prepare(deeper, folder, PrepareSettings(mlp="both"))
    keep(made, chosen)
    return open_prepared(made.folder)


@pytest.mark.parametrize("chosen", [CHANNELS, BUNDLES], ids=["channels", "bundles"])
def test_with_waiting_it_is_the_whole_sequence(start: Start, tmp_path: Path, chosen: Candidate) -> None:
    prepared = prepare_tuned(tmp_path / "prepared", chosen)
    weights = DecoderWeights.read(prepared)
    expected = dense_logits(refined_dense(prepared, weights), TOKENS)
    daemon = start("--store", str(prepared.store))
    daemon.expect(b"READY=1")
    options = {"context": len(TOKENS), "runtime_dir": daemon.folder}
    with RefinedModel.attach(prepared, weights, miss=Wait(60.0), **options) as model:  # type: ignore[arg-type]
        found = torch.stack([model.step(token) for token in TOKENS])
        stats = model.stats()
        (session,) = daemon.control().ListSessions(control_pb2.ListSessionsRequest()).sessions
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert stats.deadlines_exceeded == 0
    assert 0 < stats.hits < stats.lookups
    assert session.client.startswith(f"strataflux shift={','.join(f'{blocks:g}' for blocks in chosen.shift)}")
    assert ("mlp=bundles" in session.client) == (chosen is BUNDLES)
    base = Decoder(weights, len(TOKENS)).step(TOKENS[0])
    assert not torch.allclose(found[0], base, atol=1e-2)

    # All of it is in the cache now: skipping finds it.
    with RefinedModel.attach(prepared, weights, miss=Skip(), **options) as model:  # type: ignore[arg-type]
        again = torch.stack([model.step(token) for token in TOKENS])
        stats = model.stats()
    assert torch.equal(again, found)
    assert stats.hits == stats.lookups
