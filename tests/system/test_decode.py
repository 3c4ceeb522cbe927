"""A model that decodes through a real daemon while that daemon is killed and comes back."""

import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from strataflux.cache_policy.miss import Wait
from strataflux.client.prepare.prepared import open_prepared
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.models import DecoderWeights
from tests.system.conftest import Start
from tests.system.test_demo import tiny_source

pytestmark = pytest.mark.system

MANY_STEPS = 200_000
"""A watchdog: steps that a condition may take, far more than it does."""
CONTEXT = 48


class Decoding:
    """Feeds a fixed text round and round; a step that raises fails the test."""

    def __init__(self, model: RefinedModel) -> None:
        self.model = model
        self.position = 0

    def step(self) -> None:
        if self.position == CONTEXT - 1:
            self.model.reset()
            self.position = 0
        logits = self.model.step(1 + self.position % 7)
        assert np.isfinite(logits.numpy()).all()
        self.position += 1

    def until(self, state: str, *, hits: bool) -> None:
        """Step until the session is in ``state`` and the last step had hits (or none)."""
        for _ in range(MANY_STEPS):
            before = self.model.stats().hits
            self.step()
            stats = self.model.stats()
            if stats.state == state and (stats.hits > before) == hits:
                return
        raise AssertionError(f"never {state} with hits={hits}: {self.model.stats()}")


def test_decoding_goes_on_while_the_daemon_is_killed_and_comes_back(start: Start, tmp_path: Path) -> None:
    prepare(tiny_source(), tmp_path / "prepared", PrepareSettings())
    prepared = open_prepared(tmp_path / "prepared")
    store = str(tmp_path / "prepared" / "refine")
    first = start("--store", store)
    first.expect(b"READY=1")
    weights = DecoderWeights.read(prepared)
    with RefinedModel.attach(prepared, weights, context=CONTEXT, runtime_dir=first.folder, k=32) as model:
        decoding = Decoding(model)
        decoding.until("attached", hits=True)
        generation = model.stats().generation
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
        # What was resident stays readable; the daemon's death is noticed beside the steps.
        decoding.until("reattaching", hits=True)
        for _ in range(3 * CONTEXT):
            decoding.step()
        second = start("--store", store)
        second.expect(b"READY=1")
        decoding.until("attached", hits=True)
        assert model.stats().generation != generation
        assert second.stop(signal.SIGTERM) == 0
        for _ in range(CONTEXT):
            decoding.step()


def test_what_somebody_else_had_read_refines_without_a_read(start: Start, tmp_path: Path) -> None:
    prepared = prepare(tiny_source(), tmp_path / "prepared", PrepareSettings())
    daemon = start("--store", str(prepared.store))
    daemon.expect(b"READY=1")
    weights, wait = DecoderWeights.read(prepared), Wait(60.0)
    with (
        RefinedModel.attach(
            prepared, weights, context=CONTEXT, runtime_dir=daemon.folder, k=1024, miss=wait
        ) as selecting,
        RefinedModel.attach(prepared, weights, context=CONTEXT, runtime_dir=daemon.folder, k=8) as few,
        RefinedModel.attach(
            prepared, weights, context=CONTEXT, runtime_dir=daemon.folder, k=8, residents=1024
        ) as using,
    ):
        everything = selecting.step(3)
        torch.testing.assert_close(using.step(3), everything)
        assert not torch.allclose(few.step(3), everything)
        stats = using.stats()
        assert (stats.lookups, stats.hits) == (few.stats().lookups, few.stats().hits)
        assert stats.lookups + using.residents == selecting.stats().lookups
        assert stats.steps_invalid == 0
    assert daemon.stop(signal.SIGTERM) == 0
