"""PyramidKV: after a prompt, only what its end attended to is kept, and less in higher layers (Cai et al., 2025).

[P] A past token's score is the attention that the prompt's last W tokens paid it, summed, and the largest of seven
neighbours' scores; the best are kept, and the last W. With k tokens a layer on average and β = 20, ``min = (k - W) //
β`` and ``max = 2 (k - W) - min`` past tokens are kept in the last and the first layer, in equal steps between them;
where ``max`` is more than there are, it is all, and ``min = 2 (k - W) - max``. Only prompts are thinned out: what comes
later is kept whole. A kept token is charged 4 bytes for its position.
[O] Published per query head; here per key head, by the mean of the query heads that share it. *Shared*: one set of
tokens a layer, by the mean over all query heads (the Transformer-FSQ paper's variant, which lines up with its codes).
k is the largest for which the kept part of the prompt is within the budget.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from strataflux.client.errors import MisuseError
from strataflux.client.evaluate.methods.base import KvMethod, Making, MethodSpec, budget_bytes, full_bytes
from strataflux.client.evaluate.methods.fsq import codes_of, rebuild_from
from strataflux.client.evaluate.methods.held import Appended
from strataflux.client.runtime.block import attend_newest
from strataflux.client.runtime.models import ModelConfig

__all__ = [
    "POSITION_BYTES",
    "WINDOW",
    "WINDOWS",
    "PyramidPlan",
    "make_fsq_pyramid",
    "make_pyramid",
    "past_tokens",
    "scores_of_past",
]

WINDOW = 8
"""Last tokens of a prompt, which choose and are kept."""
WINDOWS = (8, 16, 32, 64)
"""Those that may be asked for: published settings are 8, 32 and 64."""
POSITION_BYTES = 4
_NEIGHBOURS = 7
_BETA = 20


def past_tokens(layers: int, prompt: int, average: int, window: int = WINDOW) -> list[int]:
    """Past tokens that each layer keeps of a prompt, window aside, with ``average`` kept a layer, window included."""
    most, left = prompt - window, average - window
    last = left // _BETA
    first = 2 * left - last
    if first > most:
        first, last = most, 2 * left - most
    step = (first - last) // max(1, layers - 1)
    return [first - index * step for index in range(layers)]


@dataclass(frozen=True)
class PyramidPlan:
    """How much is kept of a prompt."""

    layers: int
    target: Fraction
    """Bytes a token and layer."""
    token_bytes: int
    """Of a token's keys and values of all heads, position aside."""
    position_bytes: int = POSITION_BYTES
    """Of a kept token: once, or for each head that chooses for itself."""
    window: int = WINDOW
    """Last tokens, which choose."""

    def kept(self, prompt: int) -> list[int]:
        """Tokens that each layer keeps of a prompt, window included; ``prompt`` each if all fit.

        Raises:
            MisuseError: not even the window fits.
        """
        return list(_kept(self, prompt))

    def nbytes(self, prompt: int, further: int) -> int:
        """Bytes of one sequence, all layers. Without eviction no position is charged."""
        kept = self.kept(prompt) if prompt else []
        position = self.position_bytes if any(count < prompt for count in kept) else 0
        return sum(kept) * (self.token_bytes + position) + further * self.layers * self.token_bytes


@cache
def _kept(plan: PyramidPlan, prompt: int) -> tuple[int, ...]:
    budget = plan.target * prompt * plan.layers
    if budget >= plan.token_bytes * prompt * plan.layers:
        return (prompt,) * plan.layers
    average = min(prompt, int(budget / plan.layers / (plan.token_bytes + plan.position_bytes)))
    while average > plan.window:
        kept = [plan.window + count for count in past_tokens(plan.layers, prompt, average, plan.window)]
        if sum(kept) * (plan.token_bytes + plan.position_bytes) <= budget:
            return tuple(kept)
        average -= 1
    found = f"{float(plan.target):g} bytes a token of {prompt}"
    kept_bytes = plan.token_bytes + plan.position_bytes
    expected = f"more than the {plan.window} tokens of {kept_bytes} bytes that are always kept"
    raise MisuseError("pyramid", found, expected, "ask for a smaller ratio, or give longer prompts")


def scores_of_past(queries: Tensor, keys: Tensor, window: int = WINDOW, *, shared: bool) -> Tensor:
    """Scores [sequences, kv_heads or 1, past] of a prompt's tokens but the last ``window``, of queries [sequences,
    heads, n, head_dim] and keys [sequences, kv_heads, n, head_dim].
    """
    newest = queries[:, :, -window:].unflatten(1, (keys.shape[1], -1))  # type: ignore[no-untyped-call]
    logits = newest @ keys[:, :, None].transpose(-1, -2) / math.sqrt(keys.shape[-1])
    ahead = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu(1)
    logits[..., -window:].masked_fill_(ahead, -math.inf)
    attention = logits.softmax(-1)[..., :-window].sum(-2)
    scores = attention.mean((1, 2))[:, None] if shared else attention.mean(2)
    return max_pool1d(scores, _NEIGHBOURS, stride=1, padding=_NEIGHBOURS // 2)


class _Layer(Appended):
    """What is kept of a prompt, and all that comes later."""

    def __init__(self, plan: PyramidPlan, index: int, shared: bool) -> None:
        super().__init__()
        self._plan, self._index, self._shared = plan, index, shared

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        window = self._plan.window
        count = self._plan.kept(keys.shape[2])[self._index]
        if count == keys.shape[2]:
            return super().prefill(queries, keys, values)
        scores = scores_of_past(queries, keys, window, shared=self._shared)
        places = scores.topk(count - window, -1).indices.sort(-1).values
        places = places.expand(-1, keys.shape[1], -1)[..., None].expand(-1, -1, -1, keys.shape[-1])
        self.append(*(torch.cat((part.gather(2, places), part[:, :, -window:]), 2) for part in (keys, values)))
        return attend_newest(queries, keys, values)


def _layers_of(plan: PyramidPlan, name: str, shared: bool) -> KvMethod:
    return KvMethod(name, lambda index: _Layer(plan, index, shared), plan.nbytes, evicts=True)


def make_pyramid(spec: MethodSpec, making: Making) -> KvMethod:
    """``pyramid:4x`` and ``pyramid-shared:4x``; ``pyramid:4x:32`` has a window of 32 tokens."""
    config, shared = making.config, spec.name == "pyramid-shared"
    positions = POSITION_BYTES * (1 if shared else config.kv_heads)
    plan = PyramidPlan(config.layers, _target(config, spec), full_bytes(config), positions, spec.number or WINDOW)
    return _layers_of(plan, str(spec), shared)


def make_fsq_pyramid(spec: MethodSpec, making: Making) -> KvMethod:
    """``fsq+pyramid:16x``: eviction halves the bytes and codes do the rest, from 4 × on at least half of the logarithm
    [O], as in the paper's stacks. Scores come from rebuilt keys.

    Raises:
        MisuseError: less than 4 × is asked for.
    """
    config, ratio = making.config, spec.ratio or Fraction(1)
    if ratio < 4:
        raise MisuseError(str(spec), f"{float(ratio):g}x", "at least 4x", "use fsq alone")
    codes = codes_of(spec, making, budget_bytes(config, MethodSpec(spec.name, ratio / 2)))
    sizes: Sequence[int] = [code.grid.nbytes for code in codes]
    if len(set(sizes)) > 1:
        raise MisuseError(str(spec), f"codes of {sorted(set(sizes))} bytes", "one size in all layers", "convert so")
    plan = PyramidPlan(config.layers, _target(config, spec), sizes[0], window=spec.number or WINDOW)
    return replace(_layers_of(plan, str(spec), shared=True), rebuild=rebuild_from(making, codes))


def _target(config: ModelConfig, spec: MethodSpec) -> Fraction:
    return Fraction(full_bytes(config)) / (spec.ratio or 1)
