"""What a model is made of: its dimensions, its projection sets, and its weights as the decoder uses them.

A layer has four *projection sets*, each one matrix [outputs, inputs] whose outputs are computed from one
input vector:

| set       | rows                    | input                |
|-----------|-------------------------|----------------------|
| `qkv`     | queries, keys, values   | normed hidden state  |
| `o`       | attention output        | heads' mixed values  |
| `gate_up` | gate, up                | normed hidden state  |
| `down`    | MLP output              | silu(gate) · up      |

Queries and keys are laid out for rotary embedding by halves: in a head of size d, element i turns with i +
d/2.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

__all__ = ["SETS", "DecoderWeights", "LayerWeights", "ModelConfig", "ModelConfigError", "WeightSource"]

_T = TypeVar("_T")

SETS = ("qkv", "o", "gate_up", "down")
"""The projection sets of a layer, in the order in which a step needs them."""


class ModelConfigError(ValueError):
    """Dimensions that contradict each other or lie outside what the decoder can run."""


@dataclass(frozen=True)
class ModelConfig:
    """The dimensions of a Llama-architecture model.

    Raises:
        ModelConfigError: on construction, naming the field, what it holds and what it must hold.
    """

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    """Positions the model was trained for; the decoder's cache may be shorter."""
    rope_theta: float
    norm_epsilon: float
    tied_head: bool
    """The output head is the embedding."""
    rope_divisors: tuple[float, ...] = ()
    """What each rotary frequency is divided by (head_dim / 2 numbers); empty: all by one."""
    architecture: str = "llama"
    """``llama``, or the same with something between a layer's first matrix and its heads: ``qwen2`` adds biases,
    ``qwen3`` norms each query and key head.
    """
    windows: tuple[int, ...] = ()
    """How many positions each layer attends to, the newest ones and a position's own; 0 for all. Empty: all layers to
    all.
    """

    def __post_init__(self) -> None:
        for name in ("vocabulary", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "context"):
            self._require(isinstance(getattr(self, name), int) and getattr(self, name) > 0, name, "a positive integer")
        self._require(self.architecture in ("llama", "qwen2", "qwen3"), "architecture", "'llama', 'qwen2' or 'qwen3'")
        self._require(self.heads % self.kv_heads == 0, "heads", f"a multiple of kv_heads = {self.kv_heads}")
        self._require(self.head_dim % 2 == 0, "head_dim", "an even number")
        for name in ("rope_theta", "norm_epsilon"):
            value = getattr(self, name)
            self._require(math.isfinite(value) and value > 0, name, "a positive finite number")
        self._require(
            len(self.rope_divisors) in (0, self.head_dim // 2) and all(d > 0 for d in self.rope_divisors),
            "rope_divisors",
            f"nothing or {self.head_dim // 2} positive numbers",
        )
        self._require(
            not self.windows or (len(self.windows) == self.layers and _are_windows(self.windows)),
            "windows",
            f"nothing, or for each of {self.layers} layers 0 or a positive integer, one of them positive",
        )

    def _require(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise ModelConfigError(f"model configuration: {name} is {getattr(self, name)!r}; expected {expected}")

    @property
    def head_norms(self) -> bool:
        """Whether query and key heads are normed."""
        return self.architecture == "qwen3"

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.architecture == "qwen2"

    @property
    def sliding(self) -> tuple[int, ...]:
        """Layers that attend to a window of positions only."""
        return tuple(layer for layer in range(self.layers) if self.window(layer))

    @property
    def whole(self) -> tuple[int, ...]:
        """Layers that attend to all positions: the others."""
        return tuple(layer for layer in range(self.layers) if not self.window(layer))

    def by_layer(self, items: Sequence[_T]) -> list[_T | None]:
        """``items``, one for each of :attr:`whole`, by layer; None for layers with a window.

        Raises:
            ValueError: there are more or fewer.
        """
        found = dict(zip(self.whole, items, strict=True))
        return [found.get(layer) for layer in range(self.layers)]

    def window(self, layer: int) -> int:
        """Positions that ``layer`` attends to; 0: all."""
        return self.windows[layer] if self.windows else 0

    def set_shape(self, name: str) -> tuple[int, int]:
        """(outputs, inputs) of a projection set."""
        attention = self.heads * self.head_dim
        return {
            "qkv": (attention + 2 * self.kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, attention),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }[name]

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` turns back into an equal configuration."""
        value = asdict(self) | {"rope_divisors": list(self.rope_divisors), "windows": list(self.windows)}
        if not self.windows:
            del value["windows"]  # what was written before there were any says the same, and keeps its identity
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ModelConfig":
        """The configuration that ``value`` describes.

        Raises:
            ModelConfigError: a field is missing or unknown, or as on construction.
        """
        known = {field.name for field in fields(cls)}
        if value.keys() | {"windows"} != known:
            differing = sorted(value.keys() ^ known)
            raise ModelConfigError(f"model configuration: missing or unknown fields {', '.join(differing)}")
        lists = {name: tuple(value.get(name, ())) for name in ("rope_divisors", "windows")}
        return cls(**{**value, **lists})


def _are_windows(windows: Sequence[object]) -> bool:
    return all(type(window) is int and window >= 0 for window in windows) and any(windows)


@dataclass(frozen=True)
class LayerWeights:
    """One layer in float32: two norms [hidden] and the matrix [outputs, inputs] of each projection set."""

    attention_norm: Tensor
    mlp_norm: Tensor
    projections: Mapping[str, Tensor]
    query_norm: Tensor | None = None
    """[head_dim], shared by all query heads; only with :attr:`ModelConfig.head_norms`."""
    key_norm: Tensor | None = None
    """[head_dim], shared by all key heads; likewise."""
    qkv_bias: Tensor | None = None
    """[outputs of ``qkv``], added to them; only with :attr:`ModelConfig.qkv_bias`."""
    window: int = 0
    """Positions it attends to, as :meth:`ModelConfig.window`."""

    def to(self, device: torch.device) -> "LayerWeights":
        """The same layer on ``device``."""
        matrices = {name: matrix.to(device) for name, matrix in self.projections.items()}
        norms = self.attention_norm.to(device), self.mlp_norm.to(device)
        own = (self.query_norm, self.key_norm, self.qkv_bias)
        query_norm, key_norm, bias = (None if tensor is None else tensor.to(device) for tensor in own)
        return LayerWeights(*norms, matrices, query_norm, key_norm, bias, self.window)


class WeightSource(Protocol):
    """Where weights come from, read when asked for and not kept. Tensors are float32, rows by outputs."""

    @property
    def config(self) -> ModelConfig:
        """The model's dimensions."""

    def embedding(self) -> Tensor:
        """[vocabulary, hidden]."""

    def norm(self) -> Tensor:
        """The norm before the head, [hidden]."""

    def head(self) -> Tensor:
        """The output head [vocabulary, hidden]; called only if it is not tied."""

    def layer(self, index: int) -> LayerWeights:
        """Layer ``index``, with its projection sets fused."""


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a model in float32, held in memory."""

    config: ModelConfig
    embedding: Tensor
    norm: Tensor
    head: Tensor
    """The same tensor as ``embedding`` if tied."""
    layers: Sequence[LayerWeights]

    @classmethod
    def read(cls, source: WeightSource) -> "DecoderWeights":
        """Everything ``source`` has; for a model source this is the unquantized reference."""
        embedding = source.embedding()
        head = embedding if source.config.tied_head else source.head()
        layers = [source.layer(index) for index in range(source.config.layers)]
        return cls(source.config, embedding, source.norm(), head, layers)

    def to(self, device: torch.device) -> "DecoderWeights":
        """The same weights on ``device``; a tied head stays one tensor with the embedding."""
        embedding = self.embedding.to(device)
        head = embedding if self.config.tied_head else self.head.to(device)
        layers = [layer.to(device) for layer in self.layers]
        return DecoderWeights(self.config, embedding, self.norm.to(device), head, layers)
