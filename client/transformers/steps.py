"""One call of an attached model: a refined step if it decodes, the library's own way if it does not.

A call decodes if it brings one token for each sequence. As in :class:`~strataflux.client.refined.RefinedModel`, a tile
of the KV cache that filled up is encoded before the session's step begins, and a step that the daemon had to cut off is
taken back and run again unrefined. A pass over several tokens is not refined, and none of it is inside a step.

A layer with a sliding window forgets with every token what a step taken back would need: for the length of a step it
keeps that, which the library has for decoding by guesses.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicSlidingWindowLayer

from strataflux.client.errors import MisuseError
from strataflux.client.transformers.cache import StrataFluxCache
from strataflux.client.transformers.service import Service

__all__ = ["CACHE", "Steps"]

CACHE: Final = "cache"
"""The argument by which a model is given its cache, and the field of its outputs."""
_OLD_CACHE: Final = "past_key_values"
_LOG: Final = logging.getLogger(__name__)


class Steps:
    """Calls a model's own ``forward``. One thread at a time."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any], service: Service) -> None:
        # fixed after construction
        self._model, self._forward, self._service = model, forward, service
        # changed by calls
        self._told = False

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """The outputs for ``arguments``, all by name.

        Raises:
            ContextFull: a low-bit cache has no room.
            MisuseError: labels beside tokens that go on with a low-bit cache.
        """
        named = dict(arguments)
        if _OLD_CACHE in named:
            named[CACHE] = named.pop(_OLD_CACHE)
        tokens = named.get("inputs_embeds") if named.get("input_ids") is None else named["input_ids"]
        if tokens is None:
            return self._forward(**named)  # which refuses that
        if named.get(CACHE) is None and self._service.pool is not None and self._caches(named):
            named[CACHE] = StrataFluxCache(self._model)
        cache = named.get(CACHE)
        if tokens.shape[1] == 1:
            return self._step(named, cache)
        if isinstance(cache, StrataFluxCache) and cache.get_seq_length():
            return self._one_by_one(named, cache, tokens.shape[1])
        return self._forward(**named)

    def _caches(self, named: Mapping[str, Any]) -> bool:
        wanted = named.get("use_cache")
        return bool(self._model.config.use_cache if wanted is None else wanted)  # type: ignore[union-attr]

    @torch.no_grad()
    def _step(self, named: Mapping[str, Any], cache: Cache | None) -> Any:
        session = self._service.session
        if session is None or not self._can_take_back(cache):
            return self._forward(**named)
        low_bit = cache if isinstance(cache, StrataFluxCache) else None
        if low_bit is not None:
            low_bit.sequences.begin_step()
        with _keeping(cache):
            self._refine(low_bit, True)
            try:
                with session.step() as step:
                    outputs = self._forward(**named)
            finally:
                self._refine(low_bit, False)
            if step.end():
                return outputs
            if cache is not None:
                cache.crop(-1)
        return self._forward(**named)

    def _refine(self, cache: StrataFluxCache | None, on: bool) -> None:
        self._service.refinement.on = on
        if cache is not None:
            cache.refine(on)

    def _can_take_back(self, cache: Cache | None) -> bool:
        """Whether the last token can be taken out of ``cache`` again."""
        can = cache is None or isinstance(cache, StrataFluxCache) or (cache.is_croppable and _windows_can_wait(cache))
        if not can and not self._told:
            self._told = True
            _LOG.warning("not refined: a %s, out of which no step can be taken back (told once)", type(cache).__name__)
        return can

    def _one_by_one(self, named: dict[str, Any], cache: StrataFluxCache, count: int) -> Any:
        """Several tokens after others: a low-bit cache takes them one at a time, each in a refined step."""
        if named.get("labels") is not None:
            found = f"labels for {count} tokens after {cache.get_seq_length()}"
            raise MisuseError("labels", found, "none beside a low-bit cache in use", "compute the loss of the logits")
        keep = named.pop("logits_to_keep", 0)
        past, logits, outputs = cache.get_seq_length(), [], None
        for at in range(count):
            outputs = self._step(_token_of(named, at, past), cache)
            logits.append(outputs[0])
        joined = torch.cat(logits, 1)
        kept = joined[:, -keep:] if isinstance(keep, int) else joined[:, keep]
        assert outputs is not None
        if not hasattr(outputs, "logits"):  # the caller asked for a tuple
            return (kept, *outputs[1:])
        outputs.logits = kept
        return outputs


def _windows_can_wait(cache: Cache) -> bool:
    """Whether layers with windows, if ``cache`` has any, can keep what leaves them, and are not told to by others."""
    sliding = [layer for layer in cache.layers if getattr(layer, "is_sliding", False)]
    return all(isinstance(layer, DynamicSlidingWindowLayer) and not layer.record_past for layer in sliding)


@contextmanager
def _keeping(cache: Cache | None) -> Iterator[None]:
    """Layers of ``cache`` with windows keep what leaves them until the block ends."""
    layers = [] if cache is None or isinstance(cache, StrataFluxCache) else cache.layers
    sliding = [layer for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)]
    for layer in sliding:
        layer.record_past = True
    try:
        yield
    finally:
        for layer in sliding:
            if layer.is_initialized:  # it is not where a first step failed
                layer.crop(0)
            layer.record_past = False


def _token_of(named: Mapping[str, Any], at: int, past: int) -> dict[str, Any]:
    """The arguments for the token at ``at`` alone, with ``past`` columns before the first."""
    one = dict(named)
    for name in ("input_ids", "inputs_embeds", "position_ids"):
        if isinstance(value := one.get(name), Tensor):
            one[name] = value[:, at : at + 1]
    if isinstance(mask := one.get("attention_mask"), Tensor):
        one["attention_mask"] = mask[:, : past + at + 1]
    return one
