"""A tiny random model that the tests of the model's side share."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from strataflux.client.prepare.chat import ChatTemplate
from strataflux.client.prepare.source import fused_layer, part_shapes
from strataflux.client.prepare.tokenizer import tokenizer_from_gguf
from strataflux.client.runtime.models import LayerWeights, ModelConfig

TOKENS = [*sorted(ByteLevel.alphabet()), "he", "<|end|>"]


@dataclass(frozen=True)
class TinySource:
    """A model source made of random numbers: grouped queries, and an MLP wider than one chunk of channels."""

    config: ModelConfig
    seed: int = 0
    cache: dict[str, Tensor] = field(default_factory=dict)
    chat: ChatTemplate | None = None

    def tensor(self, name: str, *shape: int) -> Tensor:
        if name not in self.cache:
            generator = torch.Generator().manual_seed(self.seed + sum(name.encode()) * len(name))
            offset = 1.0 if "norm" in name else 0.0
            self.cache[name] = offset + torch.randn(shape, generator=generator) * (0.1 if offset else shape[-1] ** -0.5)
        return self.cache[name]

    def embedding(self) -> Tensor:
        return self.tensor("embedding", self.config.vocabulary, self.config.hidden)

    def norm(self) -> Tensor:
        return self.tensor("norm", self.config.hidden)

    def head(self) -> Tensor:
        return self.tensor("head", self.config.vocabulary, self.config.hidden)

    def parts(self, index: int) -> dict[str, Tensor]:
        return {part: self.tensor(f"{index}.{part}", *shape) for part, shape in part_shapes(self.config).items()}

    def norms(self, index: int) -> tuple[Tensor, Tensor]:
        hidden = self.config.hidden
        return self.tensor(f"{index}.norm.attention", hidden), self.tensor(f"{index}.norm.of.mlp", hidden)

    def layer(self, index: int) -> LayerWeights:
        parts, window = self.parts(index), self.config.window(index)
        if self.config.qkv_bias:
            biases = [self.tensor(f"{index}.bias.{part}", parts[part].shape[0]) for part in "qkv"]
            return fused_layer(self.norms(index), parts, biases=biases, window=window)
        if not self.config.head_norms:
            return fused_layer(self.norms(index), parts, window=window)
        heads = (self.tensor(f"{index}.norm.{name}", self.config.head_dim) for name in ("queries", "keys"))
        return fused_layer(self.norms(index), parts, (next(heads), next(heads)), window=window)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_gguf("tiny", self.tokenizer_metadata())

    def chat_template(self) -> ChatTemplate | None:
        return self.chat

    def tokenizer_metadata(self) -> dict[str, object]:
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.token_type": [1] * (len(TOKENS) - 1) + [3],
            "tokenizer.ggml.merges": ["h e"],
            "tokenizer.ggml.add_bos_token": False,
        }

    def with_config(self, **changes: object) -> "TinySource":
        return TinySource(replace(self.config, **changes), self.seed, self.cache, self.chat)  # type: ignore[arg-type]


@pytest.fixture
def tiny_source() -> TinySource:
    return TinySource(
        ModelConfig(
            vocabulary=len(TOKENS),
            hidden=64,
            intermediate=1088,
            layers=2,
            heads=4,
            kv_heads=2,
            head_dim=16,
            context=64,
            rope_theta=10000.0,
            norm_epsilon=1e-5,
            tied_head=True,
        )
    )
