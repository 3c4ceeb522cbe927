"""A tiny checkpoint, the model prepared from it, and a fake daemon that serves it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.transformers import attach
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon
from tests.unit.client.conftest import TinySource
from tests.unit.client.prepare.test_sources import hf_tensors, write_hf

CONTEXT = 1024
NEAR: dict[str, Any] = {"rtol": 0.0, "atol": 2e-4}
"""Between two orders of summation, for logits of about 3."""
Load = Callable[..., PreTrainedModel]


@pytest.fixture
def source(tiny_source: TinySource) -> TinySource:
    return tiny_source.with_config(context=CONTEXT)


@pytest.fixture
def checkpoint(tmp_path: Path, source: TinySource) -> Path:
    tensors = hf_tensors(source)
    # A prepared model keeps it in float16: numbers that float16 can hold make the two equal.
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].half().float()
    write_hf(tmp_path / "checkpoint", source, tensors, model_type="llama")
    return tmp_path / "checkpoint"


@pytest.fixture
def load(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads the checkpoint, from its folder alone."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return lambda **options: AutoModelForCausalLM.from_pretrained(checkpoint, **options)


@pytest.fixture
def prepared(tmp_path: Path, source: TinySource) -> PreparedModel:
    return prepare(source, tmp_path / "prepared", PrepareSettings())


@pytest.fixture
def daemon(tmp_path_factory: pytest.TempPathFactory, prepared: PreparedModel) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path_factory.mktemp("f"), [open_store(prepared.store)], ring_log2=16) as fake:
        yield fake


@pytest.fixture
def resident(daemon: FakeDaemon) -> FakeDaemon:
    """The daemon with all weights in its cache."""
    daemon.publish(0, *range(daemon.manifests[0].record_count))
    return daemon


def tokens(count: int, batch: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(1, 250, (batch, count), generator=torch.Generator().manual_seed(seed))


def step_logits(model: Any, ids: Tensor, cache: Any = None) -> Tensor:
    """Logits [batch, tokens, vocabulary] of ``ids`` [batch, tokens], given one by one after ``cache``."""
    rows = []
    for at in range(ids.shape[1]):
        outputs = model(input_ids=ids[:, at : at + 1], cache=cache, use_cache=True)
        cache = outputs.cache
        rows.append(outputs.logits)
    return torch.cat(rows, 1)


def connect(load: Load, prepared: PreparedModel, daemon: FakeDaemon, **options: Any) -> Any:
    return attach(load(), prepared.folder, runtime_dir=daemon.path.parent, **options)


def own_logits(prepared: PreparedModel, daemon: FakeDaemon, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """What the project's decoder says to the same tokens."""
    weights = DecoderWeights.read(prepared)
    with RefinedModel.attach(prepared, weights, context=64, runtime_dir=daemon.path.parent, **options) as model:
        return torch.stack([model.step(token) for token in ids[0].tolist()])[None]
