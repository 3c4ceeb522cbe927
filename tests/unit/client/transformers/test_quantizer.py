"""A checkpoint loaded straight onto low-bit weights, by the library's quantization interface."""

import json
from pathlib import Path

import pytest
import torch

from strataflux.client.errors import InputError
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.transformers import StrataFluxConfig, detach
from tests.fakes.daemon import FakeDaemon
from tests.unit.client.conftest import TinySource
from tests.unit.client.transformers.conftest import Load, connect, step_logits, tokens


@pytest.mark.parametrize("kv", [None, "2/2"])
def test_it_is_the_model_that_attaching_gives(
    load: Load, prepared: PreparedModel, resident: FakeDaemon, kv: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    ids = tokens(150)
    settings = StrataFluxConfig(prepared.folder, runtime_dir=resident.path.parent, kv=kv)
    loaded = load(quantization_config=settings, dtype=torch.bfloat16)
    assert caplog.records == []  # nothing missing, nothing unexpected
    attached = connect(load, prepared, resident, kv=kv)
    assert loaded.dtype == torch.float32
    logits = []
    for model in (loaded, attached):
        cache = model(input_ids=ids[:, :-3]).cache
        logits.append(step_logits(model, ids[:, -3:], cache))
    assert torch.equal(*logits)
    assert loaded.num_parameters() == attached.num_parameters()


def test_detached_it_goes_on_in_low_bits(load: Load, prepared: PreparedModel, resident: FakeDaemon) -> None:
    ids = tokens(3)
    model = load(quantization_config=StrataFluxConfig(prepared.folder, runtime_dir=resident.path.parent))
    refined = step_logits(model, ids)
    detach(model)
    low = step_logits(model, ids)
    assert torch.isfinite(low).all()
    assert not torch.equal(low, refined)
    assert resident.call(lambda: len(resident.sessions)) == 0
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(prepared.folder.parent / "saved")


def test_a_prepared_model_of_another_checkpoint_is_refused(load: Load, tmp_path: Path, source: TinySource) -> None:
    other = prepare(TinySource(source.config, seed=7), tmp_path / "other", PrepareSettings())
    with pytest.raises(InputError, match="embedding with SHA-256"):
        load(quantization_config=StrataFluxConfig(other.folder))


def test_a_checkpoint_may_name_its_prepared_model(
    load: Load, checkpoint: Path, prepared: PreparedModel, resident: FakeDaemon
) -> None:
    settings = StrataFluxConfig(prepared.folder, runtime_dir=resident.path.parent, k=64)
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings.to_dict()}))
    model = load()
    assert model.strataflux.prepared.manifest.digest == prepared.manifest.digest
    assert step_logits(model, tokens(2)).isfinite().all()
    assert model.strataflux.stats().hits > 0
    detach(model)
