"""Read a Hugging Face folder of the Llama architecture: ``config.json``, ``*.safetensors``,
``tokenizer.json``.

Layers that attend to a window are told as Transformers' own classes tell them: all of Mistral's, and for Qwen and
Ministral those that ``layer_types`` names, which for Qwen are by default those from ``max_window_layers`` on.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor

from strataflux.client.prepare.chat import ChatTemplate, chat_from_hf
from strataflux.client.prepare.errors import DamagedModel, UnsupportedModel
from strataflux.client.prepare.source import fused_layer, part_shapes, require_tensor
from strataflux.client.runtime.models import LayerWeights, ModelConfig, ModelConfigError
from strataflux.client.runtime.rope import llama3_divisors

__all__ = ["HfSource"]

_PARTS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MinistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_OWN = {
    "llama": (),
    "qwen2": tuple(f"{_PARTS[part]}.bias" for part in "qkv"),
    "qwen3": ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
}
"""Tensors of a layer that others do not have."""
_WINDOW, _MAX_WINDOW_LAYERS = 4096, 28
"""Where the configuration does not say: Transformers' defaults."""


class HfSource:
    """A folder of safetensors files, mapped; tensors are read when asked for."""

    def __init__(self, folder: Path) -> None:
        """Read the configuration of ``folder`` and find which file holds which tensor."""
        self.path = folder
        self._json = _read_json(folder / "config.json")
        if self._json.get("architectures") not in [[name] for name in _ARCHITECTURES]:
            raise UnsupportedModel(
                folder / "config.json",
                f"architectures = {self._json.get('architectures')}",
                f"one of {', '.join(_ARCHITECTURES)}",
                "use a model of these architectures",
            )
        self._refuse_variants()
        self._files = self._index()
        self._refuse_extras()

    @cached_property
    def config(self) -> ModelConfig:
        """The model's dimensions."""
        heads, hidden = self._setting("num_attention_heads"), self._setting("hidden_size")
        head_dim = self._json.get("head_dim") or hidden // heads
        rope = self._json.get("rope_parameters") or self._json.get("rope_scaling") or {}
        theta = float(rope.get("rope_theta") or self._json.get("rope_theta", 10000.0))
        try:
            return ModelConfig(
                vocabulary=self._setting("vocab_size"),
                hidden=hidden,
                intermediate=self._setting("intermediate_size"),
                layers=self._setting("num_hidden_layers"),
                heads=heads,
                kv_heads=self._json.get("num_key_value_heads") or heads,
                head_dim=head_dim,
                context=self._setting("max_position_embeddings"),
                rope_theta=theta,
                norm_epsilon=float(self._setting("rms_norm_eps")),
                tied_head=bool(self._json.get("tie_word_embeddings", False)),
                rope_divisors=self._rope_divisors(rope, head_dim, theta),
                architecture=_ARCHITECTURES[self._json["architectures"][0]],
                windows=self._windows(),
            )
        except ModelConfigError as error:
            raise DamagedModel(
                self.path / "config.json", str(error), "consistent dimensions", "download the model again"
            ) from error

    def embedding(self) -> Tensor:
        """[vocabulary, hidden]."""
        return self._tensor("model.embed_tokens.weight", (self.config.vocabulary, self.config.hidden))

    def norm(self) -> Tensor:
        """The norm before the head, [hidden]."""
        return self._tensor("model.norm.weight", (self.config.hidden,))

    def head(self) -> Tensor:
        """The output head [vocabulary, hidden]."""
        return self._tensor("lm_head.weight", (self.config.vocabulary, self.config.hidden))

    def layer(self, index: int) -> LayerWeights:
        """Layer ``index``, with its projection sets fused."""
        prefix, shapes, window = f"model.layers.{index}.", part_shapes(self.config), self.config.window(index)
        parts = {part: self._tensor(f"{prefix}{_PARTS[part]}.weight", shape) for part, shape in shapes.items()}
        norms = [
            self._tensor(f"{prefix}{name}.weight", (self.config.hidden,))
            for name in ("input_layernorm", "post_attention_layernorm")
        ]
        if self.config.qkv_bias:
            biases = [self._tensor(f"{prefix}{_PARTS[part]}.bias", shapes[part][:1]) for part in "qkv"]
            return fused_layer((norms[0], norms[1]), parts, biases=biases, window=window)
        if not self.config.head_norms:
            return fused_layer((norms[0], norms[1]), parts, window=window)
        shape = (self.config.head_dim,)
        queries, keys = (self._tensor(f"{prefix}self_attn.{name}_norm.weight", shape) for name in "qk")
        return fused_layer((norms[0], norms[1]), parts, (queries, keys), window=window)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in ``tokenizer.json``."""
        path = self.path / "tokenizer.json"
        if not path.is_file():
            raise UnsupportedModel(self.path, "no tokenizer.json", "tokenizer.json", "save a fast tokenizer there")
        return Tokenizer.from_file(str(path))

    def chat_template(self) -> ChatTemplate | None:
        """The template in ``chat_template.jinja`` or ``tokenizer_config.json``."""
        try:
            return chat_from_hf(self.path)
        except (OSError, ValueError, KeyError, AttributeError) as error:
            found = f"a chat template that cannot be read ({error})"
            raise DamagedModel(self.path, found, "a template, or none", "download the model again") from error

    def _refuse_variants(self) -> None:
        """What the configuration says of layers that run differently from those here."""
        path = self.path / "config.json"
        for name in ("attention_bias", "mlp_bias"):
            if self._json.get(name):
                raise UnsupportedModel(path, f"{name} = true", "false", "use another model")
        if self._json.get("hidden_act", "silu") != "silu":
            raise UnsupportedModel(path, f"hidden_act = {self._json['hidden_act']!r}", "'silu'", "use another model")
        if "quantization_config" in self._json:
            found = "quantization_config: weights that are quantized already"
            raise UnsupportedModel(path, found, "unquantized weights", "use the model they were made of")
        kinds = self._layer_kinds()
        for layer, kind in enumerate(self._told_kinds() or ()):
            if kind not in kinds:
                found, expected = f"layer {layer} of type {kind!r}", " or ".join(map(repr, kinds))
                raise UnsupportedModel(path, found, expected, "use another model")

    def _refuse_extras(self) -> None:
        # Biases, experts and further norms would be dropped in silence otherwise.
        norms = ("input_layernorm", "post_attention_layernorm")
        own = _OWN[_ARCHITECTURES[self._json["architectures"][0]]]
        known = {f"{name}.weight" for name in (*_PARTS.values(), *norms)} | {"self_attn.rotary_emb.inv_freq", *own}
        layers = (name for name in self._files if name.startswith("model.layers."))
        extra = sorted(name for name in layers if name.split(".", 3)[3] not in known)
        if extra:
            raise UnsupportedModel(
                self.path,
                f"{len(extra)} tensors such as {extra[0]}",
                "norms and the seven projections in a layer, and biases where the architecture has them",
                "this variant of the architecture is not supported",
            )

    def _index(self) -> dict[str, Path]:
        """{tensor: file} over all shards, with the files' headers checked."""
        files = sorted(self.path.glob("*.safetensors"))
        index_path = self.path / "model.safetensors.index.json"
        if index_path.is_file():
            placed = _read_json(index_path).get("weight_map")
            if not isinstance(placed, dict):
                wrong = f"weight_map = {placed!r}"[:80]
                raise DamagedModel(index_path, wrong, "the file of each tensor", "download the model again")
            files = sorted({self.path / str(name) for name in placed.values()})
        if not files:
            raise DamagedModel(self.path, "no *.safetensors", "the model's weights", "download the model again")
        found: dict[str, Path] = {}
        for path in files:
            try:
                with safe_open(path, framework="pt") as opened:
                    found.update(dict.fromkeys(opened.keys(), path))
            except (SafetensorError, FileNotFoundError) as error:
                raise DamagedModel(path, str(error), "a whole safetensors file", "download it again") from error
        return found

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._files:
            raise DamagedModel(self.path, f"{len(self._files)} tensors without {name}", name, "download it again")
        with safe_open(self._files[name], framework="pt") as opened:
            return require_tensor(f"{self._files[name]}: {name}", opened.get_tensor(name), shape)

    def _window(self) -> int:
        """Of the layers that have one; 0 if none has."""
        name = self._json["architectures"][0]
        used = self._json.get("use_sliding_window", False) if name.startswith("Qwen") else name != "LlamaForCausalLM"
        return self._count("sliding_window", _WINDOW) if used and self._json.get("sliding_window", _WINDOW) else 0

    def _layer_kinds(self) -> tuple[str, ...]:
        """What ``layer_types`` may name; Mistral's layers are all alike, whatever it says."""
        if not self._window():
            return ("full_attention",)
        mistral = self._json["architectures"][0] == "MistralForCausalLM"
        return ("sliding_attention",) if mistral else ("full_attention", "sliding_attention")

    def _told_kinds(self) -> list[Any] | None:
        kinds = self._json.get("layer_types")
        if kinds is not None and not isinstance(kinds, list):
            found, expected = f"layer_types = {kinds!r}", "a list with a kind for each layer"
            raise DamagedModel(self.path / "config.json", found, expected, "download the model again")
        return kinds

    def _windows(self) -> tuple[int, ...]:
        window, kinds = self._window(), self._told_kinds()
        if not window:
            return ()
        if kinds is None:
            qwen = self._json["architectures"][0].startswith("Qwen")
            first = self._count("max_window_layers", _MAX_WINDOW_LAYERS) if qwen else 0
            layers = range(self._count("num_hidden_layers", None))
            kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in layers]
        windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
        return windows if any(windows) else ()

    def _count(self, name: str, otherwise: int | None) -> int:
        value = self._json.get(name, otherwise)
        if type(value) is not int or value < 0:
            expected = "a whole number from 0 on"
            raise DamagedModel(self.path / "config.json", f"{name} = {value!r}", expected, "download the model again")
        return value

    def _setting(self, name: str) -> Any:
        if name not in self._json:
            raise DamagedModel(self.path / "config.json", f"no {name}", name, "download the model again")
        return self._json[name]

    def _rope_divisors(self, rope: dict[str, Any], head_dim: int, theta: float) -> tuple[float, ...]:
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind == "default":
            return ()
        path = self.path / "config.json"
        if kind != "llama3":
            raise UnsupportedModel(path, f"rope type {kind!r}", "'default' or 'llama3'", "use another model")
        try:
            return llama3_divisors(
                head_dim,
                theta,
                factor=float(rope["factor"]),
                low=float(rope["low_freq_factor"]),
                high=float(rope["high_freq_factor"]),
                original_context=int(rope["original_max_position_embeddings"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            found = f"rope parameters of type llama3: {type(error).__name__} {error}"
            expected = "factor, low_freq_factor, high_freq_factor and original_max_position_embeddings"
            raise DamagedModel(path, found, expected, "download the model again") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DamagedModel(path, str(error), "a JSON object", "download the model again") from error
    if not isinstance(value, dict):
        raise DamagedModel(path, f"a JSON {type(value).__name__}", "a JSON object", "download the model again")
    return value
