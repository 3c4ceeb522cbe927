"""A served model is refined while a daemon serves it, says when that changes, and finds one that comes later."""

from pathlib import Path
from typing import Any

import pytest
import torch

from strataflux.cache_policy.miss import Skip
from strataflux.client.errors import DaemonUnavailableError
from strataflux.client.kv_options import KvOptions
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.serve.model import ModelOptions, ServedModel
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon
from tests.system.test_demo import tiny_source

TOKENS = [5, 80, 3, 200]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return prepare(tiny_source(), tmp_path_factory.mktemp("m") / "prepared", PrepareSettings())


class Served:
    def __init__(self, prepared: PreparedModel, folder: Path, **changes: Any) -> None:
        self.said: list[str] = []
        self.now = 0.0
        options: dict[str, Any] = {
            "context": 300,
            "sequences": 2,
            "runtime_dir": folder,
            "k": None,
            "miss": Skip(),
            "kv": None,
            "require_daemon": False,
        }
        self.weights = DecoderWeights.read(prepared)
        self.model = ServedModel(
            prepared, self.weights, ModelOptions(**options | changes), self.said.append, lambda: self.now
        )


def fake(prepared: PreparedModel, folder: Path) -> FakeDaemon:
    return FakeDaemon(folder, [open_store(prepared.store)], ring_log2=14)


def test_without_a_daemon_it_is_the_base_and_says_so_once(prepared: PreparedModel, tmp_path: Path) -> None:
    served = Served(prepared, tmp_path)
    for _ in range(2):
        served.now += 100
        sequence = served.model.open(8)
        assert torch.equal(sequence.prefill(TOKENS), Decoder(served.weights, 8).prefill(TOKENS))
        sequence.close()
    assert len(served.said) == 1
    assert "not refined" in served.said[0]
    assert not served.model.counts().refined


def test_a_daemon_that_comes_later_is_found_after_a_pause(prepared: PreparedModel, short: Path) -> None:
    served = Served(prepared, short)
    with fake(prepared, short) as daemon:
        daemon.publish(0, *range(daemon.manifests[0].record_count))
        served.model.open(8).close()
        assert len(served.said) == 1
        served.now += 5.0
        sequence = served.model.open(8)
        sequence.step(5)
        counts = served.model.counts()
        assert (served.said[1:], counts.refined) == (["refined by the daemon"], True)
        assert counts.hits == counts.lookups > 0
        sequence.close()
        served.model.close()


def test_a_required_daemon(prepared: PreparedModel, short: Path) -> None:
    with pytest.raises(DaemonUnavailableError):
        Served(prepared, short, require_daemon=True)
    with fake(prepared, short) as daemon:
        served = Served(prepared, short, require_daemon=True)
        served.model.open(8).close()
        daemon.die()
        while served.model.counts().refined:  # the hang-up is noticed by another thread
            pass
        with pytest.raises(DaemonUnavailableError, match="require-daemon"):
            served.model.open(8)
        served.model.close()


@pytest.mark.parametrize("daemon_is_there", [False, True])
def test_low_bit_caches_give_their_blocks_back(prepared: PreparedModel, short: Path, daemon_is_there: bool) -> None:
    """The pool holds two full sequences exactly, so a third one opens only if an earlier one was given back."""
    daemon = fake(prepared, short) if daemon_is_there else None
    served = Served(prepared, short, kv=KvOptions(2, 2))
    try:
        for _ in range(3):
            pair = [served.model.open(300) for _ in range(2)]
            assert torch.isfinite(pair[0].prefill(list(range(200)) + TOKENS)).all()
            for sequence in pair:
                sequence.close()
        assert served.model.counts().refined == daemon_is_there
    finally:
        served.model.close()
        if daemon is not None:
            daemon.die()


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path that leaves room for a socket's name."""
    return tmp_path_factory.mktemp("f")
