"""Read a GGUF file of the Llama or Qwen3 architecture; quantized tensors are dequantized to float32.

llama.cpp stores the queries and keys of Llama for rotary embedding by neighbouring pairs; the decoder here turns
halves, so rows of each head are put back in that order. Those of Qwen3 are stored by halves.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from tokenizers import Tokenizer
from torch import Tensor

from strataflux.client.prepare.chat import ChatTemplate, chat_from_gguf
from strataflux.client.prepare.errors import DamagedModel, UnsupportedModel
from strataflux.client.prepare.source import fused_layer, part_shapes, require_tensor
from strataflux.client.prepare.tokenizer import tokenizer_from_gguf
from strataflux.client.runtime.models import LayerWeights, ModelConfig, ModelConfigError

__all__ = ["GgufSource"]

_PARTS = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


_ARCHITECTURES = ("llama", "qwen3")
_NORMS = ("attn_norm", "ffn_norm")
_HEAD_NORMS = ("attn_q_norm", "attn_k_norm")


class GgufSource:
    """A GGUF file, mapped; tensors are dequantized when asked for."""

    def __init__(self, path: Path) -> None:
        """Map ``path`` and check that it is whole and of an architecture that is supported."""
        self.path = path
        self._reader = _open(path)
        self._tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}
        self._architecture = str(self._field("general.architecture"))
        if self._architecture not in _ARCHITECTURES:
            found, expected = f"architecture {self._architecture!r}", " or ".join(map(repr, _ARCHITECTURES))
            raise UnsupportedModel(path, found, expected, "convert a model of these architectures")
        self._refuse_extras()

    @cached_property
    def config(self) -> ModelConfig:
        """The model's dimensions."""
        heads, hidden = int(self._own("attention.head_count")), int(self._own("embedding_length"))
        head_dim = int(self._own("attention.key_length", hidden // heads))
        scaling = self._own("rope.scaling.type", "none")
        if scaling != "none":
            raise UnsupportedModel(
                self.path,
                f"{self._architecture}.rope.scaling.type = {scaling!r}",
                "'none', or factors in rope_freqs.weight",
                "use the Hugging Face folder of this model",
            )
        window, context = int(self._own("attention.sliding_window", 0)), int(self._own("context_length"))
        if 0 < window < context:
            # Which layers it is meant for is not in the file, but in the code of who runs the architecture.
            found = f"{self._architecture}.attention.sliding_window = {window} of {context} positions"
            raise UnsupportedModel(self.path, found, "no window", "use the Hugging Face folder of this model")
        try:
            return ModelConfig(
                vocabulary=int(self._entry("token_embd.weight").shape[1]),
                hidden=hidden,
                intermediate=int(self._own("feed_forward_length")),
                layers=int(self._own("block_count")),
                heads=heads,
                kv_heads=int(self._own("attention.head_count_kv", heads)),
                head_dim=head_dim,
                context=context,
                rope_theta=float(self._own("rope.freq_base", 10000.0)),
                norm_epsilon=float(self._own("attention.layer_norm_rms_epsilon")),
                tied_head="output.weight" not in self._tensors,
                rope_divisors=self._rope_divisors(head_dim),
                architecture=self._architecture,
            )
        except ModelConfigError as error:
            raise DamagedModel(self.path, str(error), "consistent metadata", "convert the model again") from error

    def embedding(self) -> Tensor:
        """[vocabulary, hidden]."""
        return self._tensor("token_embd.weight", (self.config.vocabulary, self.config.hidden))

    def norm(self) -> Tensor:
        """The norm before the head, [hidden]."""
        return self._tensor("output_norm.weight", (self.config.hidden,))

    def head(self) -> Tensor:
        """The output head [vocabulary, hidden]."""
        return self._tensor("output.weight", (self.config.vocabulary, self.config.hidden))

    def layer(self, index: int) -> LayerWeights:
        """Layer ``index``, with its projection sets fused."""
        config, prefix = self.config, f"blk.{index}."
        parts = {
            part: self._tensor(f"{prefix}{_PARTS[part]}.weight", shape) for part, shape in part_shapes(config).items()
        }
        norms = [self._tensor(f"{prefix}{name}.weight", (config.hidden,)) for name in _NORMS]
        if config.head_norms:
            queries, keys = (self._tensor(f"{prefix}{name}.weight", (config.head_dim,)) for name in _HEAD_NORMS)
            return fused_layer((norms[0], norms[1]), parts, (queries, keys))
        parts["q"] = _halves_from_pairs(parts["q"], config.heads)
        parts["k"] = _halves_from_pairs(parts["k"], config.kv_heads)
        return fused_layer((norms[0], norms[1]), parts)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the file's metadata."""
        return tokenizer_from_gguf(self.path, self._tokenizer_metadata())

    def chat_template(self) -> ChatTemplate | None:
        """The template in the file's metadata."""
        return chat_from_gguf(self._tokenizer_metadata())

    def _tokenizer_metadata(self) -> dict[str, Any]:
        return {name: field.contents() for name, field in self._reader.fields.items() if "tokenizer." in name}

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        entry = self._entry(name)
        try:
            values = dequantize(entry.data, entry.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{self.path}: {name}",
                f"tensor type {entry.tensor_type.name}",
                "a type the gguf package can dequantize",
                "convert the model to F16, BF16 or Q8_0",
            ) from error
        # A copy: what is plain float32 in the file would otherwise be a read-only view of the mapping.
        return require_tensor(f"{self.path}: {name}", torch.from_numpy(np.array(values, np.float32)), shape)

    def _entry(self, name: str) -> ReaderTensor:
        if name not in self._tensors:
            raise DamagedModel(
                self.path, f"{len(self._tensors)} tensors without {name}", name, "download or convert the model again"
            )
        return self._tensors[name]

    def _field(self, name: str) -> Any:
        if name not in self._reader.fields:
            raise DamagedModel(self.path, f"metadata without {name}", name, "convert the model again")
        return self._reader.fields[name].contents()

    def _own(self, name: str, default: Any = None) -> Any:
        """A field of the architecture's own; without a ``default`` it has to be there."""
        full = f"{self._architecture}.{name}"
        return default if default is not None and full not in self._reader.fields else self._field(full)

    def _rope_divisors(self, head_dim: int) -> tuple[float, ...]:
        if "rope_freqs.weight" not in self._tensors:
            return ()
        return tuple(float(value) for value in self._tensor("rope_freqs.weight", (head_dim // 2,)))

    def _refuse_extras(self) -> None:
        # Biases, experts and norms of another architecture would be dropped in silence otherwise.
        own = _HEAD_NORMS if self._architecture == "qwen3" else ()
        known = {f"{name}.weight" for name in (*_PARTS.values(), *_NORMS, *own)}
        extra = sorted(name for name in self._tensors if name.startswith("blk.") and name.split(".", 2)[2] not in known)
        if extra:
            raise UnsupportedModel(
                self.path,
                f"{len(extra)} tensors such as {extra[0]}",
                "only norms and the seven projections in a layer",
                "this variant of the architecture is not supported",
            )


def _open(path: Path) -> GGUFReader:
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise DamagedModel(
            path, f"{path.stat().st_size} bytes that do not parse ({error})", "a whole GGUF file", "download it again"
        ) from error
    end = max((int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors), default=0)
    if end > path.stat().st_size:
        raise DamagedModel(path, f"{path.stat().st_size} bytes", f"at least {end} bytes", "download it again")
    return reader


def _halves_from_pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from (0, d/2, 1, d/2 + 1, …) back to (0, 1, …, d - 1)."""
    rows, inputs = weight.shape
    return weight.view(heads, rows // heads // 2, 2, inputs).transpose(1, 2).reshape(rows, inputs)
