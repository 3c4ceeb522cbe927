"""Fetch lead and lag through a real daemon: waiting for every record gives what whole sequences give."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strataflux.cache_policy.miss import Skip, Wait
from strataflux.client.evaluate.dense import DenseModel, dense_logits
from strataflux.client.prepare.candidates import Candidate
from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.prepare.refinement import read_refinement
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
CHOSEN = Candidate((64, 192, 96, 128), (1.5, 0.5, 1.0, 2.0))


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedModel:
    source = tiny_source()
    deeper = replace(source, config=replace(source.config, layers=4))
    made = prepare(deeper, tmp_path / "prepared", PrepareSettings())
    keep(made, CHOSEN)
    return open_prepared(made.folder)


def test_with_waiting_it_is_the_whole_sequence(start: Start, prepared: PreparedModel) -> None:
    weights = DecoderWeights.read(prepared)
    whole = DenseModel(weights, list(read_refinement(prepared)), CHOSEN.budgets(), shift=CHOSEN.shifts())
    expected = dense_logits(whole, TOKENS)
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
    assert session.client == "strataflux shift=1.5,0.5,1,2"
    base = torch.stack([Decoder(weights, len(TOKENS)).step(token) for token in TOKENS[:1]])
    assert not torch.allclose(found[:1], base, atol=1e-2)

    # All of it is in the cache now: skipping finds it.
    with RefinedModel.attach(prepared, weights, miss=Skip(), **options) as model:  # type: ignore[arg-type]
        again = torch.stack([model.step(token) for token in TOKENS])
        stats = model.stats()
    assert torch.equal(again, found)
    assert stats.hits == stats.lookups
