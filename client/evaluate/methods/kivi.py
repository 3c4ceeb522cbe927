"""KIVI: integers of a few bits between minimum and maximum, keys by channel and values by token (Liu et al., 2024).

[P] Keys are grouped along 32 tokens of one channel, after rotation, values along 32 channels of one token; a group has
a scale and a zero point in float16. The newest keys stay as they are until 128 have come and are then coded together;
the newest 128 values stay, too, and leave one by one. A prompt attends in full precision.
[O] Query heads that share a key head see the same codes; the released code has as many key heads as query heads.
"""

import math
from functools import partial

import torch
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.evaluate.methods.base import KvMethod, Making, MethodSpec
from strataflux.client.evaluate.methods.held import Appended
from strataflux.client.evaluate.methods.ranges import range_group_bytes, round_in_range
from strataflux.client.runtime.block import attend_newest, seen_by_newest
from strataflux.client.runtime.models import ModelConfig

__all__ = ["GROUP", "NEWEST", "kivi_bytes", "make_kivi"]

GROUP = 32
"""Tokens of a group of keys."""
NEWEST = 128
"""Tokens that stay exact."""


def _value_group(head_dim: int) -> int:
    """Channels of a group of values: 32, or a whole small head.

    Raises:
        MisuseError: heads are no whole number of groups.
    """
    size = min(GROUP, head_dim)
    if head_dim % size:
        raise MisuseError("kivi", f"heads of {head_dim}", f"a multiple of {GROUP}", "choose another method")
    return size


def kivi_bytes(config: ModelConfig, bits: int, tokens: int) -> int:
    """Bytes of one sequence of ``tokens``, all layers."""
    head, group = config.head_dim, _value_group(config.head_dim)
    coded_keys, coded_values = tokens - tokens % NEWEST, max(0, tokens - NEWEST)
    keys = coded_keys // GROUP * head * range_group_bytes(GROUP, bits)
    values = coded_values * (head // group) * range_group_bytes(group, bits)
    exact = (2 * tokens - coded_keys - coded_values) * head * 2
    return config.layers * config.kv_heads * (keys + values + exact)


class _Layer:
    """Every token exact, and as its codes give it back; which of the two a position sees depends on how far it is."""

    def __init__(self, bits: int, group: int) -> None:
        # fixed after construction
        self._bits, self._group = bits, group
        # changed by prefill and decode
        self._exact, self._coded = Appended(), Appended()

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._append(keys, values)
        return attend_newest(queries, keys, values)

    def decode(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values, coded_keys, coded_values = self._append(keys, values)
        count, held = queries.shape[2], keys.shape[2]
        heads = queries.unflatten(1, (keys.shape[1], -1))  # type: ignore[no-untyped-call]
        places = torch.arange(held, device=keys.device)
        now = places[held - count :, None]
        exact, coarse = (heads @ part[:, :, None].transpose(-1, -2) for part in (keys, coded_keys))
        logits = torch.where(places < now - now % NEWEST, coarse, exact) / math.sqrt(queries.shape[-1])
        logits.masked_fill_(~seen_by_newest(count, held, keys.device), -math.inf)
        weights, old = logits.softmax(-1), places < now - NEWEST
        mixed: Tensor = (weights * old) @ coded_values[:, :, None] + (weights * ~old) @ values[:, :, None]
        return mixed.flatten(1, 2)

    def _append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        exact_keys, exact_values = self._exact.append(keys.half().float(), values.half().float())
        coded = self._code_values(exact_values[:, :, -values.shape[2] :])
        # Keys are coded once their group is whole; until then they are only looked at exactly.
        before = exact_keys.shape[2] - keys.shape[2]
        first = before - before % GROUP
        _, coded_values = self._coded.append(exact_keys[:, :, before:], coded)
        assert self._coded.keys is not None
        self._coded.keys = torch.cat((self._coded.keys[:, :, :first], self._code_keys(exact_keys[:, :, first:])), 2)
        return exact_keys, exact_values, self._coded.keys, coded_values

    def _code_keys(self, keys: Tensor) -> Tensor:
        whole = keys.shape[2] - keys.shape[2] % GROUP
        groups = keys[:, :, :whole].unflatten(2, (-1, GROUP)).transpose(-1, -2)  # type: ignore[no-untyped-call]
        coded = round_in_range(groups, self._bits).transpose(-1, -2).flatten(2, 3)
        return torch.cat((coded, keys[:, :, whole:]), 2)

    def _code_values(self, values: Tensor) -> Tensor:
        groups = values.unflatten(-1, (-1, self._group))  # type: ignore[no-untyped-call]
        return round_in_range(groups, self._bits).flatten(-2)


def make_kivi(spec: MethodSpec, making: Making) -> KvMethod:
    """``kivi:2``."""
    bits, config = spec.number or 2, making.config
    group = _value_group(config.head_dim)
    nbytes = partial(kivi_bytes, config, bits)
    return KvMethod(str(spec), lambda _: _Layer(bits, group), lambda prompt, further: nbytes(prompt + further))
