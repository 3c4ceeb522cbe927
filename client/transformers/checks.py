"""Whether a loaded model can be attached, and whether a prepared model was made from it."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strataflux.client.errors import InputError, MisuseError
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.runtime.models import LayerWeights, ModelConfig
from strataflux.client.transformers.options import CONTEXT, AttachOptions

__all__ = [
    "ARCHITECTURES",
    "DTYPES",
    "kv_context",
    "require_checkpoint",
    "require_model",
    "require_projections",
    "windows_of",
]

ARCHITECTURES: Final = {
    "llama": "llama",
    "mistral": "llama",
    "ministral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
"""The library's model types that are supported, and the architecture of their prepared models. SmolLM is a Llama."""
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Of a model's parameters."""

_ROWS: Final = 8192
"""Of an embedding that are compared at once, which bounds what that takes."""
_UNRELATED: Final = 0.9
"""Relative distance from which matrices have nothing to do with one another: two at random have 1.4, and two bits a
weight leave 0.5.
"""


def require_model(model: PreTrainedModel, config: ModelConfig) -> None:
    """Refuse a model that is not of a supported kind, or not of the dimensions in ``config``.

    Raises:
        MisuseError: naming the architecture, dtype, device or dimension.
    """
    if not isinstance(model, PreTrainedModel):
        found = f"{type(model).__module__}.{type(model).__qualname__}"
        raise MisuseError("model", found, "a model of the transformers package", "load one with AutoModelForCausalLM")
    kind = model.config.model_type
    if kind not in ARCHITECTURES or not type(model).__name__.endswith("ForCausalLM"):
        found, expected = f"{type(model).__name__} of type {kind!r}", f"a causal model of {', '.join(ARCHITECTURES)}"
        raise MisuseError("model", found, expected, "use one of these, or run the model without StrataFlux")
    if model.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise MisuseError("model", f"parameters in {model.dtype}", allowed, "load it with dtype=torch.float32")
    if model.device.type not in ("cpu", "meta"):
        raise MisuseError("model", f"parameters on {model.device}", "all on the CPU", "load it without a device_map")
    _require_dimensions(model.config, config)


def kv_context(model: PreTrainedModel, options: AttachOptions) -> int:
    """Tokens of each sequence of a low-bit cache; 0 without one.

    Raises:
        MisuseError: more were asked for than the model has, or it attends to fewer of them.
    """
    if options.kv is None:
        return 0
    config, most = model.config, int(model.config.max_position_embeddings)
    context = min(most, CONTEXT) if options.context is None else options.context
    if context > most:
        raise MisuseError("context", f"{context} tokens", f"at most {most}, as the model has", "lower it")
    window = max(windows_of(config), default=0)
    if 0 < window < context:
        found, remedy = f"layers that attend to a window of {window} tokens", f"attach with context={window} or kv=None"
        raise MisuseError("kv", found, f"attention to all {context}", remedy)
    return context


def windows_of(config: Any) -> tuple[int, ...]:
    """How many positions each layer of a model that was loaded with ``config`` attends to, 0 for all; empty if all
    attend to all.
    """
    window = int(getattr(config, "sliding_window", None) or 0)
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    if config.model_type == "mistral":  # whatever kinds it names
        kinds = ("sliding_attention",) * config.num_hidden_layers
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def _require_dimensions(found: Any, config: ModelConfig) -> None:
    heads = found.num_attention_heads
    pairs = {
        "architecture": (ARCHITECTURES[found.model_type], config.architecture),
        "vocabulary": (found.vocab_size, config.vocabulary),
        "hidden": (found.hidden_size, config.hidden),
        "intermediate": (found.intermediate_size, config.intermediate),
        "layers": (found.num_hidden_layers, config.layers),
        "heads": (heads, config.heads),
        "kv_heads": (found.num_key_value_heads or heads, config.kv_heads),
        "head_dim": (getattr(found, "head_dim", None) or found.hidden_size // heads, config.head_dim),
    }
    differing = [name for name, (here, there) in pairs.items() if here != there]
    if differing:
        says = ", ".join(f"{name} {pairs[name][0]}" for name in differing)
        wants = ", ".join(f"{name} {pairs[name][1]}" for name in differing)
        raise MisuseError("model", says, f"those of the prepared model: {wants}", "prepare this checkpoint")


def require_checkpoint(model: PreTrainedModel, prepared: PreparedModel) -> None:
    """Refuse a prepared model that was made from other weights, told by what it keeps exact: embedding and last norm.

    Raises:
        InputError: with the digests of both.
    """
    base = model.base_model
    for what, here, there in (
        ("embedding", base.embed_tokens.weight, prepared.embedding()),
        ("norm", base.norm.weight, prepared.norm()),
    ):
        if not _same(here, there):
            raise _other_weights(model, prepared, what, here, there)


def require_projections(model: PreTrainedModel, prepared: PreparedModel, index: int, low: LayerWeights) -> None:
    """Refuse it if the queries' matrix of layer ``index`` is not what ``low`` rounds.

    A base may move scales from a matrix into the norm before it: what is compared is their product.

    Raises:
        InputError: with the digests of both.
    """
    layer = model.base_model.layers[index]
    if not isinstance(layer.self_attn.q_proj, nn.Linear):
        return  # loaded without projections of its own
    weight = layer.self_attn.q_proj.weight
    here = weight.detach().float() * layer.input_layernorm.weight.detach().float()
    there = low.projections["qkv"][: weight.shape[0]] * low.attention_norm
    if not float((here - there).norm()) < _UNRELATED * float(here.norm()):
        raise _other_weights(model, prepared, f"layers.{index}.self_attn.q_proj", here, there)


def _same(here: Tensor, there: Tensor) -> bool:
    # Either was rounded to its own dtype, and the prepared embedding to float16 before.
    tolerance = 2 * max(torch.finfo(here.dtype).eps, torch.finfo(torch.float16).eps)
    pairs = zip(_chunks(here), _chunks(there), strict=True)
    return here.shape == there.shape and all(torch.allclose(a, b, rtol=tolerance, atol=1e-6) for a, b in pairs)


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    return (part.float() for part in torch.split(tensor.detach(), _ROWS))


def _other_weights(
    model: PreTrainedModel, prepared: PreparedModel, what: str, here: Tensor, there: Tensor
) -> InputError:
    source = prepared.manifest.origin or "a model that it does not name"
    return InputError(
        f"{prepared.folder} (digest {prepared.manifest.digest[:12]}…, made from {source})",
        f"{what} with SHA-256 {_digest(there)[:12]}…",
        f"SHA-256 {_digest(here)[:12]}…, as in {model.config.name_or_path or 'the given model'}",
        "prepare this checkpoint, or attach what was prepared from it",
    )


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256()
    for part in _chunks(tensor):
        digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()
