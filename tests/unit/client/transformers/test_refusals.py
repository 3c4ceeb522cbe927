"""Models, prepared models and arguments that cannot be attached, each with what was found and what is right."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig

from strataflux.cache_policy.miss import Skip
from strataflux.client.errors import InputError, MisuseError
from strataflux.client.kv_options import KvOptions
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.transformers import StrataFluxConfig, attach, detach
from strataflux.client.transformers.checks import kv_context, require_model
from strataflux.client.transformers.options import AttachOptions
from strataflux.client.transformers.quantizer import StrataFluxQuantizer
from strataflux.client.transformers.versions import FIRST, check_version
from tests.unit.client.conftest import TinySource
from tests.unit.client.transformers.conftest import Load


def reseeded(source: TinySource) -> TinySource:
    return TinySource(source.config, seed=7)


def test_weights_prepared_from_another_checkpoint_are_refused_with_both_digests(
    load: Load, tmp_path: Path, source: TinySource
) -> None:
    other = prepare(reseeded(source), tmp_path / "other", PrepareSettings())
    with pytest.raises(InputError, match=r"embedding with SHA-256 \w{12}….*expected SHA-256 \w{12}…, as in") as refusal:
        attach(load(), other.folder)
    assert other.manifest.digest[:12] in str(refusal.value)


def test_projections_of_another_checkpoint_are_refused(load: Load, tmp_path: Path, source: TinySource) -> None:
    """A model may share its embedding and norms with one that it was tuned from."""
    tuned = reseeded(source)
    tuned.cache.update({name: source.tensor(name, *shape) for name, *shape in named_shapes(source)})
    other = prepare(tuned, tmp_path / "other", PrepareSettings())
    model = load()
    with pytest.raises(InputError, match=r"layers\.0\.self_attn\.q_proj with SHA-256"):
        attach(model, other.folder)
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear


def named_shapes(source: TinySource) -> list[tuple[Any, ...]]:
    hidden, vocabulary = source.config.hidden, source.config.vocabulary
    return [("embedding", vocabulary, hidden), ("norm", hidden), ("0.norm.attention", hidden)]


def test_other_dimensions_are_named(load: Load, prepared: PreparedModel) -> None:
    config = replace(prepared.config, kv_heads=4, layers=3)
    with pytest.raises(MisuseError, match="layers 2, kv_heads 2; expected those of the prepared model: layers 3, kv"):
        require_model(load(), config)


@pytest.mark.parametrize(
    ("config", "found"),
    [(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8), "GPT2LMHeadModel of type 'gpt2'")],
    ids=["gpt2"],
)
def test_other_architectures_are_named(prepared: PreparedModel, config: Any, found: str) -> None:
    with pytest.raises(MisuseError, match=found + r".*llama, mistral, ministral, qwen2, qwen3"):
        attach(AutoModelForCausalLM.from_config(config), prepared.folder)
    with pytest.raises(MisuseError, match=r"torch.nn.modules.linear.Linear; expected a model of the transformers"):
        attach(torch.nn.Linear(2, 2), prepared.folder)


def test_other_dtypes_are_named(load: Load, prepared: PreparedModel) -> None:
    with pytest.raises(MisuseError, match=r"parameters in torch.float64; expected float32, bfloat16, float16"):
        attach(load().double(), prepared.folder)


def test_a_sliding_window_and_a_low_bit_cache_do_not_go_together(prepared: PreparedModel) -> None:
    config = prepared.config
    same = {
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
    }
    windowed = AutoModelForCausalLM.from_config(MistralConfig(**same, sliding_window=16))
    require_model(windowed, config)
    assert kv_context(windowed, low_bit(16)) == 16
    with pytest.raises(MisuseError, match="a window of 16 tokens; expected attention to all 17"):
        kv_context(windowed, low_bit(17))
    whole = AutoModelForCausalLM.from_config(LlamaConfig(**same))
    require_model(whole, config)
    assert kv_context(whole, low_bit(None)) == 2048
    assert kv_context(whole, replace(low_bit(None), kv=None)) == 0


def low_bit(context: int | None) -> AttachOptions:
    return AttachOptions(None, None, Skip(), KvOptions(2, 2), context, 1, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"miss": "hope"}, "miss: found 'hope'; expected skip, wait, wait:MS"),
        ({"kv": "9/2"}, "--kv: found '9/2'"),
        ({"context": 0, "kv": "2/2"}, "context: found 0; expected at least 1"),
        ({"context": 5000, "kv": "2/2"}, "context: found 5000 tokens; expected at most 1024"),
        ({"sequences": 0}, "sequences: found 0; expected at least 1"),
        ({"k": 5000}, "k of qkv: found 5000"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be(
    load: Load, prepared: PreparedModel, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    model = load()
    with pytest.raises(MisuseError, match=re.escape(message)):
        attach(model, prepared.folder, runtime_dir=tmp_path, **arguments)
    assert not hasattr(model, "strataflux")


def test_a_damaged_prepared_model(load: Load, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a prepared model's manifest"):
        attach(load(), tmp_path / "nothing")


def test_an_attached_model_is_not_attached_saved_or_moved(load: Load, prepared: PreparedModel, tmp_path: Path) -> None:
    model = attach(load(), prepared.folder, runtime_dir=tmp_path)
    with pytest.raises(MisuseError, match="one that is attached"):
        attach(model, prepared.folder, runtime_dir=tmp_path)
    with pytest.raises(MisuseError, match="detach it first"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(MisuseError, match=r"an attached model going to torch\.bfloat16 on cpu"):
        model.to(torch.bfloat16)
    assert model.to("cpu").float().dtype == torch.float32
    detach(model)
    with pytest.raises(MisuseError, match="one that is not attached"):
        detach(model)
    assert model.to(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("version", ["4.57.6", "5.23.0", "5.25.0", "6.0.0"])
def test_untested_versions_of_the_library_are_refused(version: str) -> None:
    with pytest.raises(MisuseError, match=f"found {version}; expected {FIRST} or newer, below"):
        check_version(version)


def test_tested_versions_are_not() -> None:
    check_version("5.24.0")
    check_version("5.24.3")


def test_devices_other_than_the_cpu_are_refused_on_loading(prepared: PreparedModel) -> None:
    quantizer = StrataFluxQuantizer(StrataFluxConfig(prepared.folder), pre_quantized=False)
    with pytest.raises(MisuseError, match="device_map: found cuda:0; expected cpu"):
        quantizer.validate_environment(device_map={"": "cuda:0"})
    quantizer.validate_environment(device_map="cpu")
    quantizer.validate_environment(device_map=None)


def test_settings_that_cannot_be_are_refused_before_loading(prepared: PreparedModel) -> None:
    with pytest.raises(MisuseError, match="sequences: found 0"):
        StrataFluxConfig(prepared.folder, sequences=0)
