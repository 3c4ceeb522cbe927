"""Reading published models: GGUF files and Hugging Face folders, whole, damaged and foreign."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from strataflux.client.errors import InputError
from strataflux.client.prepare.errors import DamagedModel, UnsupportedModel
from strataflux.client.prepare.source import ModelSource, open_source, part_shapes
from strataflux.client.runtime.models import SETS

GGUF_PARTS = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
HF_PARTS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
HF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
Tensors = dict[str, Tensor]


def llama_cpp_permute(weight: Tensor, heads: int) -> Tensor:
    """As llama.cpp's converter writes queries and keys."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(source: Any) -> Tensors:
    config = source.config
    tensors = {"token_embd.weight": source.embedding(), "output_norm.weight": source.norm()}
    if not config.tied_head:
        tensors["output.weight"] = source.head()
    if config.rope_divisors:
        tensors["rope_freqs.weight"] = torch.tensor(config.rope_divisors)
    for index in range(config.layers):
        parts, layer = source.parts(index), source.layer(index)
        if config.head_norms:
            tensors[f"blk.{index}.attn_q_norm.weight"] = layer.query_norm
            tensors[f"blk.{index}.attn_k_norm.weight"] = layer.key_norm
        else:
            parts["q"] = llama_cpp_permute(parts["q"], config.heads)
            parts["k"] = llama_cpp_permute(parts["k"], config.kv_heads)
        tensors |= {f"blk.{index}.{GGUF_PARTS[part]}.weight": weight for part, weight in parts.items()}
        names = (f"blk.{index}.attn_norm.weight", f"blk.{index}.ffn_norm.weight")
        tensors |= dict(zip(names, source.norms(index), strict=True))
    return tensors


def write_gguf(
    path: Path, source: Any, tensors: Tensors, architecture: str | None = None, window: int | None = None
) -> None:
    config, meta = source.config, source.tokenizer_metadata()
    writer = gguf.GGUFWriter(path, architecture or config.architecture)
    if window is not None:
        writer.add_sliding_window(window)
    writer.add_key_length(config.head_dim)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_block_count(config.layers)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(meta["tokenizer.ggml.tokens"])
    writer.add_token_types(meta["tokenizer.ggml.token_type"])
    writer.add_token_merges(meta["tokenizer.ggml.merges"])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hf_tensors(source: Any) -> Tensors:
    tensors = {"model.embed_tokens.weight": source.embedding(), "model.norm.weight": source.norm()}
    if not source.config.tied_head:
        tensors["lm_head.weight"] = source.head()
    for index in range(source.config.layers):
        prefix = f"model.layers.{index}."
        tensors |= {f"{prefix}{HF_PARTS[part]}.weight": weight for part, weight in source.parts(index).items()}
        names = (f"{prefix}input_layernorm.weight", f"{prefix}post_attention_layernorm.weight")
        tensors |= dict(zip(names, source.norms(index), strict=True))
        layer = source.layer(index)
        if layer.query_norm is not None:
            tensors |= {
                f"{prefix}self_attn.q_norm.weight": layer.query_norm,
                f"{prefix}self_attn.k_norm.weight": layer.key_norm,
            }
        if layer.qkv_bias is not None:
            rows = [shape[0] for part, shape in part_shapes(source.config).items() if part in "qkv"]
            biases = zip("qkv", layer.qkv_bias.split(rows), strict=True)
            tensors |= {f"{prefix}{HF_PARTS[part]}.bias": bias for part, bias in biases}
    return tensors


def hf_config(source: Any) -> dict[str, Any]:
    config = source.config
    return {
        "architectures": [HF_ARCHITECTURES[config.architecture]],
        "head_dim": config.head_dim,
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.context,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied_head,
    }


def write_hf(folder: Path, source: Any, tensors: Tensors, shards: int = 1, **changes: Any) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config(source) | changes))
    source.tokenizer().save(str(folder / "tokenizer.json"))
    names = list(tensors)
    files = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    )
    for i, file in enumerate(files):
        save_file({name: tensors[name].contiguous() for name in names[i::shards]}, folder / file)
    if shards > 1:
        placed = {name: files[i % shards] for i, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def assert_same(read: ModelSource, source: Any) -> None:
    assert torch.equal(read.embedding(), source.embedding())
    assert torch.equal(read.norm(), source.norm())
    if not source.config.tied_head:
        assert torch.equal(read.head(), source.head())
    for index in range(source.config.layers):
        got, expected = read.layer(index), source.layer(index)
        assert torch.equal(got.attention_norm, expected.attention_norm)
        assert torch.equal(got.mlp_norm, expected.mlp_norm)
        for name in SETS:
            assert torch.equal(got.projections[name], expected.projections[name]), name
        for own in ("query_norm", "key_norm", "qkv_bias"):
            found, wanted = getattr(got, own), getattr(expected, own)
            assert (found is None) == (wanted is None)
            assert found is None or torch.equal(found, wanted), own
    assert read.tokenizer().encode("he is 42").ids == source.tokenizer().encode("he is 42").ids


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_round_trip(tmp_path: Path, tiny_source: Any, tied: bool) -> None:
    source = tiny_source.with_config(tied_head=tied, rope_divisors=(1.0,) * 4 + (8.0,) * 4, norm_epsilon=2.0**-17)
    write_gguf(tmp_path / "m.gguf", source, gguf_tensors(source))
    read = open_source(tmp_path / "m.gguf")
    assert read.config == source.config
    assert_same(read, source)


def test_gguf_of_qwen3_has_head_norms_and_heads_in_halves(tmp_path: Path, tiny_source: Any) -> None:
    source = tiny_source.with_config(architecture="qwen3", head_dim=32, norm_epsilon=2.0**-17)
    write_gguf(tmp_path / "m.gguf", source, gguf_tensors(source))
    read = open_source(tmp_path / "m.gguf")
    assert read.config == source.config
    assert_same(read, source)
    got, expected = read.layer(1), source.layer(1)
    assert got.query_norm is not None
    assert got.key_norm is not None
    assert torch.equal(got.query_norm, expected.query_norm)
    assert torch.equal(got.key_norm, expected.key_norm)


@pytest.mark.parametrize(("tied", "shards"), [(True, 1), (False, 3)])
def test_hugging_face_round_trip(tmp_path: Path, tiny_source: Any, tied: bool, shards: int) -> None:
    source = tiny_source.with_config(tied_head=tied)
    write_hf(tmp_path / "m", source, hf_tensors(source), shards)
    read = open_source(tmp_path / "m")
    assert read.config == source.config
    assert_same(read, source)


def test_hugging_face_folder_of_qwen2_has_biases(tmp_path: Path, tiny_source: Any) -> None:
    source = tiny_source.with_config(architecture="qwen2")
    tensors = hf_tensors(source)
    # A window that is not used is in each configuration of Qwen2.5.
    write_hf(tmp_path / "m", source, tensors, sliding_window=16, use_sliding_window=False)
    read = open_source(tmp_path / "m")
    assert read.config == source.config
    assert_same(read, source)
    write_hf(tmp_path / "less", source, without(tensors, "1.self_attn.k_proj.bias"))
    with pytest.raises(DamagedModel, match=r"without model\.layers\.1\.self_attn\.k_proj\.bias"):
        open_source(tmp_path / "less").layer(1)


def test_bfloat16_is_read_as_float32(tmp_path: Path, tiny_source: Any) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in hf_tensors(tiny_source).items()}
    write_hf(tmp_path / "m", tiny_source, tensors)
    embedding = open_source(tmp_path / "m").embedding()
    assert embedding.dtype == torch.float32
    assert torch.equal(embedding, tiny_source.embedding().bfloat16().float())


def test_llama3_rope_scaling_becomes_divisors(tmp_path: Path, tiny_source: Any) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    write_hf(tmp_path / "m", tiny_source, hf_tensors(tiny_source), rope_scaling=scaling)
    divisors = open_source(tmp_path / "m").config.rope_divisors
    assert divisors[0] == 1.0
    assert divisors[-1] == 8.0
    assert list(divisors) == sorted(divisors)


def without(tensors: Tensors, part: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if part not in name}


def with_nan(tensors: Tensors, part: str) -> Tensors:
    changed = {name: tensor.clone() if part in name else tensor for name, tensor in tensors.items()}
    next(tensor for name, tensor in changed.items() if part in name)[0, 3] = torch.nan
    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: without(tensors, "blk.1.ffn_up"), "blk.1.ffn_up.weight"),
        (lambda tensors: with_nan(tensors, "blk.1.attn_v"), "blk.1.attn_v.weight: found 1 NaN"),
        (lambda tensors: tensors | {"blk.0.ffn_up.weight": torch.zeros(3, 64)}, r"shape \(3, 64\)"),
    ],
)
def test_damaged_gguf_names_the_tensor(
    tmp_path: Path, tiny_source: Any, change: Callable[[Tensors], Tensors], message: str
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_source, change(gguf_tensors(tiny_source)))
    read = open_source(tmp_path / "m.gguf")
    with pytest.raises(DamagedModel, match=message):
        [read.layer(index) for index in range(2)]


@pytest.mark.parametrize("kept", [0, 3, 40, 2000, 100_000, -1])
def test_truncated_gguf_is_refused(tmp_path: Path, tiny_source: Any, kept: int) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_source, gguf_tensors(tiny_source))
    path.write_bytes(path.read_bytes()[: kept if kept >= 0 else -4000])
    with pytest.raises(DamagedModel, match=str(path)):
        open_source(path)


def test_gguf_of_another_architecture(tmp_path: Path, tiny_source: Any) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_source, gguf_tensors(tiny_source), architecture="gpt2")
    with pytest.raises(UnsupportedModel, match="architecture 'gpt2'; expected 'llama' or 'qwen3'"):
        open_source(tmp_path / "m.gguf")


def test_gguf_with_biases_is_refused_rather_than_read_without(tmp_path: Path, tiny_source: Any) -> None:
    tensors = gguf_tensors(tiny_source) | {"blk.0.attn_q.bias": torch.zeros(64)}
    write_gguf(tmp_path / "m.gguf", tiny_source, tensors)
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_q\.bias"):
        open_source(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer 1 of type 'sliding_attention'"),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "layer 1 of type 'full_attention'; expected 'sliding_attention'",
        ),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized already"),
    ],
)
def test_unsupported_hugging_face_models(
    tmp_path: Path, tiny_source: Any, changes: dict[str, Any], message: str
) -> None:
    write_hf(tmp_path / "m", tiny_source, hf_tensors(tiny_source), **changes)
    with pytest.raises(UnsupportedModel, match=message):
        _ = open_source(tmp_path / "m").config


@pytest.mark.parametrize("name", ["self_attn.q_norm", "mlp.experts.0.up_proj", "mlp.shared_expert_gate"])
def test_hugging_face_layers_with_more_than_is_known_are_refused_rather_than_read_without(
    tmp_path: Path, tiny_source: Any, name: str
) -> None:
    tensors = hf_tensors(tiny_source) | {f"model.layers.1.{name}.weight": torch.ones(16)}
    write_hf(tmp_path / "m", tiny_source, tensors)
    with pytest.raises(UnsupportedModel, match=rf"1 tensors such as model\.layers\.1\.{name}"):
        open_source(tmp_path / "m")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_of_a_hugging_face_layer_that_are_not_finite_name_it(
    tmp_path: Path, tiny_source: Any, value: float
) -> None:
    tensors = {name: tensor.clone() for name, tensor in hf_tensors(tiny_source).items()}
    tensors["model.layers.1.mlp.down_proj.weight"][0, 3] = value
    write_hf(tmp_path / "m", tiny_source, tensors)
    with pytest.raises(DamagedModel, match=r"model\.layers\.1\.mlp\.down_proj\.weight: found 1 NaN or infinite"):
        open_source(tmp_path / "m").layer(1)


def test_heads_that_do_not_divide_are_damage(tmp_path: Path, tiny_source: Any) -> None:
    write_hf(tmp_path / "m", tiny_source, hf_tensors(tiny_source), num_key_value_heads=3)
    with pytest.raises(DamagedModel, match="multiple of kv_heads = 3"):
        _ = open_source(tmp_path / "m").config


@pytest.mark.parametrize("damage", [{}, {"factor": "much"}, {"factor": []}])
def test_rope_parameters_that_are_none_are_damage(tmp_path: Path, tiny_source: Any, damage: dict[str, Any]) -> None:
    scaling = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | damage
    write_hf(tmp_path / "m", tiny_source, hf_tensors(tiny_source), rope_scaling=scaling)
    with pytest.raises(DamagedModel, match="rope parameters"):
        _ = open_source(tmp_path / "m").config


def test_damaged_hugging_face_folders(tmp_path: Path, tiny_source: Any) -> None:
    write_hf(tmp_path / "m", tiny_source, hf_tensors(tiny_source), shards=2)
    shard = tmp_path / "m" / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    with pytest.raises(DamagedModel, match="model-00002"):
        open_source(tmp_path / "m")
    shard.unlink()
    with pytest.raises(DamagedModel, match="model-00002"):
        open_source(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(DamagedModel, match="weight_map = None"):
        open_source(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("[1]")
    with pytest.raises(DamagedModel, match="JSON list"):
        open_source(tmp_path / "m")


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="check the path"):
        open_source(tmp_path / "absent.gguf")
    with pytest.raises(UnsupportedModel, match=r"without config\.json"):
        open_source(tmp_path)
