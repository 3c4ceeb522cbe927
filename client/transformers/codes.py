"""Put discrete codes in the place of a Transformers model's key and value projections, and take them out again.

The model's other weights stay its own, or are the low-bit ones of an attached prepared model: codes belong to the
weights they were made over, and are refused over others.
"""

import functools
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from strataflux.client.errors import InputError, MisuseError
from strataflux.client.prepare.fsq_file import FsqCodes, load_codes, read_about, weights_digest
from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.runtime.models import LayerWeights, ModelConfig
from strataflux.client.transformers.attachment import Attachment
from strataflux.client.transformers.checks import require_model, windows_of
from strataflux.client.transformers.codes_cache import CodedLayer, CodedModel, CodesCache
from strataflux.client.transformers.steps import CACHE

__all__ = ["CodesAttachment", "attach_codes", "detach_codes"]

_M = TypeVar("_M", bound=PreTrainedModel)
_NAME: Final = "strataflux_codes"
"""The attribute of a model that holds its :class:`CodesAttachment`."""


class _CodedLinear(nn.Module):
    """Keys or values out of codes, where the model had a linear layer."""

    def __init__(self, layer: CodedLayer, rows: slice, replaced: nn.Module) -> None:
        super().__init__()
        self.replaced = [replaced]  # in a list, so that it is no part of the model meanwhile
        self.bias = getattr(replaced, "bias", None)
        self._layer, self._rows = layer, rows

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [..., outputs] of ``x`` [..., inputs]."""
        y = self._layer.project(x, self._rows)
        return y if self.bias is None else y + self.bias


class _LoadedModel:
    """A loaded model as a source of weights, for its digest."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig) -> None:
        self.config = config
        self._model, self._base = model, model.base_model

    def embedding(self) -> Tensor:
        return _exact(self._base.embed_tokens.weight)

    def norm(self) -> Tensor:
        return _exact(self._base.norm.weight)

    def head(self) -> Tensor:
        return _exact(self._model.get_output_embeddings().weight)

    def layer(self, index: int) -> LayerWeights:
        layer = self._base.layers[index]
        attention, mlp = layer.self_attn, layer.mlp
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        query_norm, key_norm = (
            None if norm is None else _exact(norm.weight)
            for norm in (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        )
        return LayerWeights(
            _exact(layer.input_layernorm.weight),
            _exact(layer.post_attention_layernorm.weight),
            {
                "qkv": torch.cat([_exact(part.weight) for part in parts]),
                "o": _exact(attention.o_proj.weight),
                "gate_up": torch.cat([_exact(mlp.gate_proj.weight), _exact(mlp.up_proj.weight)]),
                "down": _exact(mlp.down_proj.weight),
            },
            query_norm=query_norm,
            key_norm=key_norm,
            qkv_bias=torch.cat([_exact(part.bias) for part in parts]) if self.config.qkv_bias else None,
            window=self.config.window(index),
        )


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().float().cpu()


class CodesAttachment:
    """What ``attach_codes`` put into a model: ``model.strataflux_codes``.

    Pairs: construction / :meth:`undo`.
    """

    def __init__(self, model: PreTrainedModel, codes: FsqCodes, config: ModelConfig) -> None:
        """Replace the projections."""
        self.codes = codes
        self._model = model
        keys = config.kv_heads * config.head_dim
        rows = (slice(0, keys), slice(keys, 2 * keys))
        layers = []
        self._attentions = [model.base_model.layers[index].self_attn for index in config.whole]
        for attention, code in zip(self._attentions, codes.layers, strict=True):
            layers.append(CodedLayer(code, attention, rows))
            for name, part in zip(("k_proj", "v_proj"), rows, strict=True):
                setattr(attention, name, _CodedLinear(layers[-1], part, getattr(attention, name)))
        rotary = model.base_model.rotary_emb
        self.coded = CodedModel(config.by_layer(layers), rotary, config.windows)
        self._hook = rotary.register_forward_pre_hook(self.coded.note, with_kwargs=True)
        self._own_maker = model.__dict__.get("_prepare_cache_for_generation")
        setattr(model, "_prepare_cache_for_generation", self._cache_maker(model._prepare_cache_for_generation))  # noqa: B010

    def undo(self) -> None:
        """Put everything back as it was."""
        self._hook.remove()
        for attention in self._attentions:
            for name in ("k_proj", "v_proj"):
                setattr(attention, name, getattr(attention, name).replaced[0])
        delattr(self._model, "_prepare_cache_for_generation")
        if self._own_maker is not None:
            setattr(self._model, "_prepare_cache_for_generation", self._own_maker)  # noqa: B010

    def _cache_maker(self, original: Any) -> Any:
        @functools.wraps(original)
        def prepare(config: GenerationConfig, arguments: dict[str, Any], mode: Any, batch: int, longest: int) -> Any:
            wanted = config.use_cache is not False and config.cache_implementation in (None, "dynamic")
            if arguments.get(CACHE) is not None or not wanted:
                return original(config, arguments, mode, batch, longest)
            arguments[CACHE] = CodesCache(self._model, longest)
            return None

        return prepare


def attach_codes(model: _M, prepared: Path | str, name: str) -> _M:
    """Let ``model`` keep codes instead of keys and values; the same object. Layers that attend to a window of positions
    have no codes and stay as they are.

    Generation makes a :class:`~strataflux.client.transformers.codes_cache.CodesCache` of its own; make one yourself for
    calls of the model. With another cache, or none, keys and values are those of the codes all the same.

    Args:
        model: a Llama, Ministral, Qwen2 or Qwen3 model on the CPU: the original that the codes were made over, or one
            with ``prepared`` attached if they were made over that.
        prepared: the folder that ``strataflux prepare --fsq`` wrote.
        name: which of its codes, such as ``16x``.

    Raises:
        MisuseError: the model has codes, or is of an architecture, dtype or shape that cannot be.
        InputError: there are no such codes, they are damaged, or were made over other weights.
    """
    if hasattr(model, _NAME):
        raise MisuseError("model", "one with codes", "one without", "detach_codes(model) first")
    opened = open_prepared(Path(prepared))
    require_model(model, opened.config)
    if (windows := windows_of(model.config)) != opened.config.windows:
        found, expected = f"windows {windows or 'in no layer'}", f"{opened.config.windows or 'none'}, as when prepared"
        raise MisuseError("model", found, expected, "prepare this checkpoint")
    if name not in opened.codes:
        found = f"codes {', '.join(opened.codes) or 'of no size'}"
        raise InputError(opened.folder, found, name, f"prepare it with --fsq {name}")
    path = opened.codes[name]
    digest = _digest(model, opened, read_about(path).weights)
    setattr(model, _NAME, CodesAttachment(model, load_codes(path, opened.config, digest), opened.config))
    return model


def _digest(model: PreTrainedModel, prepared: PreparedModel, made_over: str) -> str:
    """Of the weights that ``model`` computes with."""
    attached = getattr(model, "strataflux", None)
    if not isinstance(attached, Attachment):
        if made_over == "base":
            found, remedy = (
                "a model with its own weights",
                "attach the prepared model first, or use --fsq-weights original",
            )
            raise InputError(prepared.folder, found, "its low-bit base attached", remedy)
        return weights_digest(_LoadedModel(model, prepared.config))
    if attached.pool is not None:
        raise MisuseError("codes", "a low-bit KV cache beside them", "one of the two", "attach with kv=None")
    return weights_digest(attached.prepared)


def detach_codes(model: _M) -> _M:
    """Make ``model`` what it was before :func:`attach_codes`; the same object.

    Raises:
        MisuseError: it has no codes.
    """
    attachment = getattr(model, _NAME, None)
    if not isinstance(attachment, CodesAttachment):
        raise MisuseError("model", "one without codes", "one with codes attached", "attach_codes(model, …) first")
    attachment.undo()
    delattr(model, _NAME)
    return model
