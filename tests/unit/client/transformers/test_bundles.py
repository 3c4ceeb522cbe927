"""An MLP refined by neurons, in a model whose two halves of an MLP are apart."""

from pathlib import Path

import pytest
import torch

from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.transformers import detach
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon
from tests.unit.client.conftest import TinySource
from tests.unit.client.transformers.conftest import NEAR, Load, connect, own_logits, step_logits, tokens


def test_neuron_bundles_are_refined_as_by_the_decoder(
    load: Load, tmp_path: Path, source: TinySource, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bundled = prepare(source, tmp_path / "bundled", PrepareSettings(mlp="bundles"))
    with FakeDaemon(tmp_path_factory.mktemp("f"), [open_store(bundled.store)], ring_log2=16) as daemon:
        daemon.publish(0, *range(daemon.manifests[0].record_count))
        ids = tokens(6)
        model = connect(load, bundled, daemon, k=64)
        own = own_logits(bundled, daemon, ids, k=64)
        torch.testing.assert_close(step_logits(model, ids), own, **NEAR)
        pair = torch.cat((ids, ids.flip(1)))
        torch.testing.assert_close(step_logits(model, pair)[:1], own, **NEAR)
        detach(model)
