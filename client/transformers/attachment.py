"""Put a prepared model under a loaded Transformers model, and take it out again."""

import functools
import inspect
import weakref
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from strataflux.cache_policy.miss import MissPolicy
from strataflux.client.errors import MisuseError
from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.runtime.decoder import ContextFull
from strataflux.client.runtime.models import SETS, LayerWeights
from strataflux.client.session_stats import SessionStats
from strataflux.client.transformers.cache import ATTENTION, KvPool, StrataFluxCache
from strataflux.client.transformers.checks import kv_context, require_checkpoint, require_model, require_projections
from strataflux.client.transformers.options import AttachOptions, KvText
from strataflux.client.transformers.projections import PARTS, ProjectionSet, RefinedLinear, part_rows
from strataflux.client.transformers.service import Service, open_service
from strataflux.client.transformers.steps import CACHE, Steps

__all__ = ["Attachment", "attach", "attach_loaded", "detach"]

_M = TypeVar("_M", bound=PreTrainedModel)
_NAME: Final = "strataflux"
"""The attribute of an attached model that holds its :class:`Attachment`."""
_MISSING: Final = object()


class Attachment:
    """What ``attach`` put into a model: ``model.strataflux``.

    Pairs: construction / :meth:`undo`.
    """

    def __init__(self, model: PreTrainedModel, prepared: PreparedModel, service: Service) -> None:
        """Nothing is changed yet. A model without projections of its own stays in low bits when this is undone."""
        # fixed after construction
        self.prepared = prepared
        self._model, self._service = model, service
        self._restores = isinstance(model.base_model.layers[0].self_attn.q_proj, nn.Linear)
        # what was there before, in the order in which it was replaced
        self._before: list[tuple[Any, str, object]] = []
        self._attention = model.config._attn_implementation

    @property
    def pool(self) -> KvPool | None:
        """Where its low-bit sequences come from; None: keys and values are exact."""
        return self._service.pool

    def stats(self) -> SessionStats | None:
        """Counts and state of the session; None if no daemon answered."""
        return None if self._service.session is None else self._service.session.stats()

    def place_layer(self, index: int, low: LayerWeights) -> None:
        """Put the low-bit matrices and the norms of ``low`` into layer ``index``."""
        layer = self._model.base_model.layers[index]
        for name in SETS:
            projections = ProjectionSet(index, name, low.projections[name], self._service.refinement)
            for path, rows in zip(PARTS[name], part_rows(self.prepared.config, name), strict=True):
                parent, _, child = path.partition(".")
                part = getattr(getattr(layer, parent), child)
                if not isinstance(part, RefinedLinear):
                    part = RefinedLinear(part.in_features, part.out_features, part.bias)
                    self._replace(getattr(layer, parent), child, part)
                part.bind(projections, rows)
                if name == "qkv" and low.qkv_bias is not None:  # a base may have scaled it, as the norms below
                    part.bias = nn.Parameter(low.qkv_bias[rows].to(self._model.dtype), requires_grad=False)
        for norm, weight in (
            (layer.input_layernorm, low.attention_norm),
            (layer.post_attention_layernorm, low.mlp_norm),
        ):
            # A base may have moved scales from a matrix into the norm before it: the two belong together.
            parameter = nn.Parameter(weight.to(self._model.dtype), requires_grad=False)
            if self._restores:
                self._replace(norm, "weight", parameter)
            else:
                norm.weight = parameter

    def place_calls(self) -> None:
        """Let calls of the model, and caches that generation makes, go through here."""
        model = self._model
        forward = model.forward
        steps = Steps(model, forward, self._service)
        names = tuple(inspect.signature(forward).parameters)

        @functools.wraps(forward)
        def call(*positional: Any, **named: Any) -> Any:
            return steps.call(dict(zip(names, positional, strict=False)) | named)

        self._replace(model, "forward", call)
        self._replace(model, "save_pretrained", _refuse_to_save)
        self._replace(model, "_apply", functools.partial(_apply_where_it_is, model, model._apply))
        if self.pool is not None:
            self._replace(
                model, "_prepare_cache_for_generation", self._cache_maker(model._prepare_cache_for_generation)
            )
            model.set_attn_implementation(ATTENTION)
        if self._service.session is not None:
            weakref.finalize(model, self._service.session.close)  # whoever drops a model need not detach it

    def undo(self) -> None:
        """Leave the daemon and put everything back as it was. Idempotent."""
        if self.pool is not None and self._before:
            self._model.set_attn_implementation(self._attention)
        while self._before:
            owner, name, value = self._before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        if self._service.session is not None:
            self._service.session.close()

    def _replace(self, owner: nn.Module, name: str, value: object) -> None:
        own = name in owner.__dict__ or name in owner._modules or name in owner._parameters
        self._before.append((owner, name, getattr(owner, name) if own else _MISSING))
        setattr(owner, name, value)

    def _cache_maker(self, original: Any) -> Any:
        @functools.wraps(original)
        def prepare(config: GenerationConfig, arguments: dict[str, Any], mode: Any, batch: int, longest: int) -> Any:
            wanted = config.use_cache is not False and config.cache_implementation in (None, "dynamic")
            if arguments.get(CACHE) is not None or not wanted or self.pool is None:
                return original(config, arguments, mode, batch, longest)
            if longest > self.pool.context:
                found, most = f"{longest} tokens, prompt and new ones", f"at most {self.pool.context}"
                raise ContextFull("KV cache", found, most, "shorten it, or attach with a larger context=")
            arguments[CACHE] = StrataFluxCache(self._model)
            return None

        return prepare


def attach(
    model: _M,
    prepared: Path | str,
    *,
    runtime_dir: Path | str | None = None,
    k: int | None = None,
    miss: str | MissPolicy = "skip",
    kv: KvText = None,
    refine_kv: str = "4/4",
    context: int | None = None,
    sequences: int = 1,
    require_daemon: bool = False,
) -> _M:
    """Run ``model`` on the low-bit weights of ``prepared``, refined by a daemon; the same object.

    Each step of a decode loop is refined, under ``torch.no_grad``; a pass over a prompt is not. Counts are in
    ``model.strataflux.stats()``.

    Args:
        model: a Llama, Mistral, Qwen2 or Qwen3 model on the CPU, with the weights that ``prepared`` was made from.
        prepared: the folder that ``strataflux prepare`` wrote.
        runtime_dir: where the daemon's sockets are; None looks in the usual places.
        k: refined channels per 1,024; None takes the prepared model's.
        miss: what to do about records that are not in the daemon's cache: ``skip``, ``wait``,
            ``wait:MS`` or ``budget:P%``.
        kv: bits of cached keys and values, such as ``2/2``; None keeps them exact.
        refine_kv: bits that refine those; ``0/0``: none.
        context: tokens of a low-bit sequence; None: 4,096, or what the model has if that is less.
        sequences: how many are decoded at once at most, with a low-bit cache; without one more may be.
        require_daemon: fail if no daemon serves this model. Otherwise a warning says so once, and nothing is refined.

    Raises:
        MisuseError: the model is attached already, or is of an architecture, dtype or shape that cannot be; or an
            argument cannot be.
        InputError: ``prepared`` is damaged, or was made from other weights.
        DaemonUnavailableError, RefusedError: no daemon serves this model, and one is required.
    """
    options = AttachOptions.read(
        runtime_dir=runtime_dir,
        k=k,
        miss=miss,
        kv=kv,
        refine_kv=refine_kv,
        context=context,
        sequences=sequences,
        require_daemon=require_daemon,
    )
    if hasattr(model, _NAME):
        raise MisuseError("model", "one that is attached", "one that is not", "detach it first")
    opened = open_prepared(Path(prepared))
    require_model(model, opened.config)
    attach_loaded(model, opened, options)
    return model


def attach_loaded(model: PreTrainedModel, prepared: PreparedModel, options: AttachOptions) -> None:
    """The rest of :func:`attach`, for a model that may have no projections of its own.

    Raises:
        MisuseError, InputError, DaemonUnavailableError, RefusedError: as there; nothing has changed.
    """
    context = kv_context(model, options)
    require_checkpoint(model, prepared)
    service = open_service(prepared, context, options)
    attachment = Attachment(model, prepared, service)
    try:
        for index in range(prepared.config.layers):
            low = prepared.layer(index)
            if index == 0:
                require_projections(model, prepared, index, low)
            attachment.place_layer(index, low)
        attachment.place_calls()
        setattr(model, _NAME, attachment)
    except BaseException:
        attachment.undo()
        raise


def detach(model: _M) -> _M:
    """Make ``model`` what it was before :func:`attach`, to the bit, and leave the daemon; the same object.

    A model that was loaded in low bits has no other weights: it stays so, unrefined.

    Raises:
        MisuseError: it is not attached.
    """
    attachment = getattr(model, _NAME, None)
    if not isinstance(attachment, Attachment):
        raise MisuseError("model", "one that is not attached", "an attached one", "attach it first")
    attachment.undo()
    delattr(model, _NAME)
    return model


def _refuse_to_save(*_arguments: Any, **_named: Any) -> None:
    raise MisuseError("save_pretrained", "an attached model", "one with its own weights", "detach it first")


def _apply_where_it_is(model: PreTrainedModel, original: Any, change: Any, *more: Any, **named: Any) -> Any:
    """``Module._apply`` for changes that leave dtype and device as they are; its matrices are not modules' own."""
    probe: Tensor = change(torch.empty(0, dtype=model.dtype))
    if probe.dtype != model.dtype or probe.device.type != "cpu":
        found = f"an attached model going to {probe.dtype} on {probe.device}"
        raise MisuseError("model", found, f"{model.dtype} on the CPU", "detach it first")
    return original(change, *more, **named)
