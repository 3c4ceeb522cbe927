"""An attached model: the numbers of the project's own decoder, whatever the daemon does, and nothing left after."""

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from strataflux.client.errors import DaemonUnavailableError
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.source import open_source
from strataflux.client.prepare.write import prepare
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.transformers import attach, detach
from strataflux.client.transformers.projections import RefinedLinear
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon
from tests.unit.client.conftest import TinySource
from tests.unit.client.prepare.test_sources import hf_tensors, write_hf
from tests.unit.client.transformers.conftest import NEAR, Load, connect, own_logits, step_logits, tokens


def test_steps_are_those_of_the_decoder(load: Load, prepared: PreparedModel, resident: FakeDaemon) -> None:
    ids = tokens(12)
    model = connect(load, prepared, resident, k=64)
    torch.testing.assert_close(step_logits(model, ids), own_logits(prepared, resident, ids, k=64), **NEAR)
    stats = model.strataflux.stats()
    assert stats.hits == stats.lookups > 0
    detach(model)


def test_a_prompt_is_not_refined_and_no_step(load: Load, prepared: PreparedModel, resident: FakeDaemon) -> None:
    ids = tokens(9)
    model = connect(load, prepared, resident)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    assert model.strataflux.stats().lookups == 0
    prefilled = Decoder(DecoderWeights.read(prepared), 64).prefill(ids[0].tolist())
    torch.testing.assert_close(logits[0, -1], prefilled, **NEAR)
    detach(model)


def test_tokens_after_a_prompt_are_refined(load: Load, prepared: PreparedModel, resident: FakeDaemon) -> None:
    ids = tokens(12)
    weights = DecoderWeights.read(prepared)
    with RefinedModel.attach(prepared, weights, context=64, runtime_dir=resident.path.parent) as own:
        own.prefill(ids[0, :9].tolist())
        expected = torch.stack([own.step(token) for token in ids[0, 9:].tolist()])[None]
    model = connect(load, prepared, resident)
    cache = model(input_ids=ids[:, :9], use_cache=True).cache
    torch.testing.assert_close(step_logits(model, ids[:, 9:], cache), expected, **NEAR)
    detach(model)


@pytest.mark.parametrize(("miss", "declared"), [("skip", False), ("budget:3%", False), ("wait:20", True)])
def test_only_who_waits_for_all_declares_its_largest_set(
    load: Load, prepared: PreparedModel, daemon: FakeDaemon, miss: str, declared: bool
) -> None:
    model = connect(load, prepared, daemon, miss=miss)
    assert (daemon.sessions[-1].hello.largest_set_bytes > 0) == declared
    detach(model)


def test_a_batch_is_refined_row_by_row(load: Load, prepared: PreparedModel, resident: FakeDaemon) -> None:
    ids = tokens(6, batch=3)
    model = connect(load, prepared, resident)
    together = step_logits(model, ids)
    for row in range(3):
        torch.testing.assert_close(together[row : row + 1], step_logits(model, ids[row : row + 1]), **NEAR)
    detach(model)


def test_detaching_restores_every_bit(load: Load, prepared: PreparedModel, resident: FakeDaemon) -> None:
    model, ids = load(), tokens(7)
    before, kept = model(input_ids=ids).logits, {name: t.clone() for name, t in model.state_dict().items()}
    kinds = {name: type(module) for name, module in model.named_modules()}
    own = set(vars(model))
    attach(model, prepared.folder, runtime_dir=resident.path.parent, kv="2/2")
    assert isinstance(model.model.layers[1].mlp.up_proj, RefinedLinear)
    assert not torch.equal(model(input_ids=ids).logits, before)
    assert detach(model) is model
    assert torch.equal(model(input_ids=ids).logits, before)
    after = model.state_dict()
    assert list(after) == list(kept)
    assert all(torch.equal(after[name], tensor) for name, tensor in kept.items())
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert set(vars(model)) == own
    assert model.config._attn_implementation == "sdpa"
    assert resident.call(lambda: len(resident.sessions)) == 0


@pytest.mark.parametrize("kv", [None, "2/2"])
def test_a_step_that_was_cut_off_is_taken_back_and_run_again_unrefined(
    load: Load, prepared: PreparedModel, resident: FakeDaemon, kv: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokens(5)
    unrefined = connect(load, prepared, resident, k=0, kv=kv)
    expected = step_logits(unrefined, ids)
    detach(unrefined)
    model = connect(load, prepared, resident, kv=kv)
    down = model.model.layers[-1].mlp.down_proj
    original = down.forward

    def fenced(x: torch.Tensor) -> Any:
        resident.fence()
        return original(x)

    cache = None
    for at in range(5):
        # Only within the first attempt at a step is there anything that a fence could make wrong.
        monkeypatch.setattr(down, "forward", fenced)
        outputs = model(input_ids=ids[:, at : at + 1], cache=cache, use_cache=True)
        cache = outputs.cache
        torch.testing.assert_close(outputs.logits[0, 0], expected[0, at], **NEAR)
        assert cache.get_seq_length() == at + 1
    assert model.strataflux.stats().steps_invalid >= 1
    detach(model)


WINDOW = 5


@pytest.fixture
def windowed(tmp_path: Path, source: TinySource) -> tuple[Any, PreparedModel]:
    """A checkpoint with a window in its first layer, loaded, and what was prepared from it."""
    other = source.with_config(architecture="qwen3")
    weights = hf_tensors(other)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].half().float()
    kinds = ["sliding_attention", "full_attention"]
    told: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": kinds}
    write_hf(tmp_path / "windowed", other, weights, model_type="qwen3", **told)
    made = prepare(open_source(tmp_path / "windowed"), tmp_path / "made", PrepareSettings())
    return AutoModelForCausalLM.from_pretrained(tmp_path / "windowed"), made


def test_layers_with_windows_are_refined_and_steps_in_them_taken_back(
    windowed: tuple[Any, PreparedModel], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model, made), ids = windowed, tokens(14)
    with FakeDaemon(tmp_path_factory.mktemp("f"), [open_store(made.store)], ring_log2=16) as fake:
        fake.publish(0, *range(fake.manifests[0].record_count))
        attach(model, made.folder, runtime_dir=fake.path.parent, k=64)
        cache = DynamicCache(config=model.config)
        torch.testing.assert_close(step_logits(model, ids, cache), own_logits(made, fake, ids, k=64), **NEAR)
        assert model.strataflux.stats().lookups > 0
        assert cache.layers[0].keys.shape[2] == WINDOW - 1  # as many as the library keeps
        detach(model)

        attach(model, made.folder, runtime_dir=fake.path.parent, k=0)
        expected, cache = step_logits(model, ids), DynamicCache(config=model.config)
        step_logits(model, ids[:, :9], cache)
        down = model.model.layers[-1].mlp.down_proj
        original = down.forward

        def fenced(x: torch.Tensor) -> Any:
            fake.fence()
            return original(x)

        monkeypatch.setattr(down, "forward", fenced)
        torch.testing.assert_close(step_logits(model, ids[:, 9:], cache), expected[:, 9:], **NEAR)
        assert model.strataflux.stats().steps_invalid >= 1
        assert [layer.get_seq_length() for layer in cache.layers] == [14, 14]
        detach(model)


def test_what_ends_a_first_step_is_told_as_it_was(
    windowed: tuple[Any, PreparedModel], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made = windowed

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with FakeDaemon(tmp_path_factory.mktemp("f"), [open_store(made.store)], ring_log2=16) as fake:
        attach(model, made.folder, runtime_dir=fake.path.parent, k=0)
        cache = DynamicCache(config=model.config)
        with monkeypatch.context() as patch:
            patch.setattr(model.model.embed_tokens, "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                step_logits(model, tokens(1), cache)
        assert not cache.layers[0].record_past
        torch.testing.assert_close(step_logits(model, tokens(3), cache), step_logits(model, tokens(3)), **NEAR)
        detach(model)


def test_without_a_daemon_it_works_and_says_so_once(
    load: Load, prepared: PreparedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = tokens(4)
    with caplog.at_level(logging.WARNING):
        model = attach(load(), prepared.folder, runtime_dir=tmp_path / "nobody", kv="2/2")
        step_logits(model, ids)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["not refined"]
    assert model.strataflux.stats() is None
    exact = attach(load(), prepared.folder, runtime_dir=tmp_path / "nobody")
    decoder = Decoder(DecoderWeights.read(prepared), 64)
    base = torch.stack([decoder.step(token) for token in ids[0].tolist()])
    torch.testing.assert_close(step_logits(exact, ids)[0], base, **NEAR)


def test_a_required_daemon_that_is_absent_leaves_the_model_alone(
    load: Load, prepared: PreparedModel, tmp_path: Path
) -> None:
    model = load()
    own = set(vars(model))
    with pytest.raises(DaemonUnavailableError):
        attach(model, prepared.folder, runtime_dir=tmp_path / "nobody", require_daemon=True)
    assert set(vars(model)) == own
    assert not any(isinstance(module, RefinedLinear) for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_go_around_the_matrices(
    load: Load, prepared: PreparedModel, resident: FakeDaemon, dtype: torch.dtype
) -> None:
    ids = tokens(4)
    model = attach(load(dtype=dtype), prepared.folder, runtime_dir=resident.path.parent, kv="4/4")
    logits = step_logits(model, ids)
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.float(), own_logits(prepared, resident, ids), rtol=0.0, atol=0.3)
    assert detach(model).dtype == dtype


def test_a_model_that_is_dropped_leaves_the_daemon(load: Load, prepared: PreparedModel, resident: FakeDaemon) -> None:
    model = connect(load, prepared, resident)
    step_logits(model, tokens(2))
    session = model.strataflux._service.session
    del model
    gc.collect()
    assert session.state == "detached"
