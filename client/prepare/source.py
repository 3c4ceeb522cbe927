"""Open a model as it is published: a GGUF file or a Hugging Face safetensors folder, one layer in memory at
a time.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from strataflux.client.errors import InputError
from strataflux.client.prepare.chat import ChatTemplate
from strataflux.client.prepare.errors import DamagedModel, UnsupportedModel
from strataflux.client.runtime.models import LayerWeights, ModelConfig, WeightSource

__all__ = ["ModelSource", "fused_layer", "open_source", "part_shapes", "require_tensor"]


class ModelSource(WeightSource, Protocol):
    """A model's weights and its tokenizer.

    Every tensor is checked when read: a missing one, one of another shape and one with numbers that are not
    finite raise :class:`DamagedModel` naming the tensor.
    """

    def tokenizer(self) -> Tokenizer:
        """The tokenizer; encoding adds special tokens exactly where the model's own does.

        Raises:
            UnsupportedModel: the tokenizer is of a kind that cannot be built here.
        """

    def chat_template(self) -> ChatTemplate | None:
        """How the model wants conversations written; None where its files do not say."""


def open_source(path: Path) -> ModelSource:
    """The model at ``path``: a ``.gguf`` file, or a folder with ``config.json`` and ``*.safetensors``.

    Raises:
        InputError: there is nothing at ``path``.
        UnsupportedModel: it is something else, or of another architecture.
        DamagedModel: it is truncated or lacks a required part.
    """
    from strataflux.client.prepare.gguf_source import GgufSource
    from strataflux.client.prepare.hf_source import HfSource

    if not path.exists():
        raise InputError(path, "nothing", "a .gguf file or a Hugging Face folder", "check the path")
    if path.is_dir() and (path / "config.json").is_file():
        return HfSource(path)
    if path.is_file() and path.suffix == ".gguf":
        return GgufSource(path)
    raise UnsupportedModel(
        path,
        "a folder without config.json" if path.is_dir() else f"a file ending in {path.suffix!r}",
        "a .gguf file, or a folder with config.json and *.safetensors",
        "point at the model itself",
    )


def require_tensor(subject: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``tensor`` in float32 if it has ``shape`` and only finite numbers; else :class:`DamagedModel`."""
    if tuple(tensor.shape) != shape:
        raise DamagedModel(
            subject, f"shape {tuple(tensor.shape)}", f"{shape}", "the file and its configuration disagree"
        )
    tensor = tensor.float()
    values = tensor.numpy()
    # Extremes propagate NaN and need no array of flags.
    if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):
        bad = int((~torch.isfinite(tensor)).sum())
        raise DamagedModel(
            subject, f"{bad} NaN or infinite weights", "finite weights", "download or convert the model again"
        )
    return tensor


def fused_layer(
    norms: tuple[Tensor, Tensor],
    parts: dict[str, Tensor],
    head_norms: tuple[Tensor, Tensor] | None = None,
    biases: Sequence[Tensor] = (),
    window: int = 0,
) -> LayerWeights:
    """One layer of separate matrices ``q k v o gate up down`` with its projection sets fused along
    outputs, and likewise the ``biases`` of queries, keys and values, if there are any; it attends to ``window``
    positions, or to all for 0.
    """
    return LayerWeights(
        attention_norm=norms[0],
        mlp_norm=norms[1],
        projections={
            "qkv": torch.cat((parts["q"], parts["k"], parts["v"])),
            "o": parts["o"],
            "gate_up": torch.cat((parts["gate"], parts["up"])),
            "down": parts["down"],
        },
        query_norm=head_norms[0] if head_norms else None,
        key_norm=head_norms[1] if head_norms else None,
        qkv_bias=torch.cat(tuple(biases)) if biases else None,
        window=window,
    )


def part_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shapes [outputs, inputs] of a layer's separate matrices."""
    attention, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "q": (attention, config.hidden),
        "k": (keys, config.hidden),
        "v": (keys, config.hidden),
        "o": (config.hidden, attention),
        "gate": (config.intermediate, config.hidden),
        "up": (config.intermediate, config.hidden),
        "down": (config.hidden, config.intermediate),
    }
