"""The model around codes that are trained: everything in it is frozen, its products run in bfloat16."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from strataflux.client.runtime.block import Attend, attend_newest, norm_heads, run_block
from strataflux.client.runtime.models import DecoderWeights, LayerWeights
from strataflux.client.runtime.rope import rotary_table, rotate

__all__ = ["FrozenModel", "Replaced", "continue_text", "write_more"]

Replaced = Callable[[int, Tensor, Tensor], Tensor]
"""Keys and values [sequences, n, m] of the layer with this number among those that attend to all positions, in the
place of what its projections make of its normed inputs [sequences, n, hidden] float32; given are the number, these
inputs, and the queries [sequences, n, rows] before norm and rotation."""


class FrozenModel:
    """A model's states before its head, with its own keys and values or others."""

    def __init__(self, weights: DecoderWeights) -> None:
        """Copies the matrices of ``weights`` as bfloat16, on their device; states between layers stay float32."""
        self.config = weights.config
        self.head = weights.head.bfloat16()
        """[vocabulary, hidden] bfloat16."""
        self._embedding, self._norm = weights.embedding, weights.norm
        self._layers = [_in_bfloat16(layer) for layer in weights.layers]
        self._turns = torch.empty(0), torch.empty(0)

    def states(
        self,
        tokens: Tensor,
        replaced: Replaced | None = None,
        *,
        recompute: bool = False,
        first: int = 0,
        attends: Sequence[Attend] = (),
    ) -> Tensor:
        """Normed states [sequences, n, hidden] bfloat16 before the head.

        Args:
            tokens: [sequences, n] int64.
            replaced: what makes keys and values; None: the model itself.
            recompute: compute a layer again when its gradients are due instead of keeping what is between.
            first: the position of the first of ``tokens``.
            attends: what each layer's positions see; empty: themselves and those before among ``tokens``, as far as
                the layer's window.
        """
        turns = self._turned(first, first + tokens.shape[1], tokens.device)
        hidden = self._embedding[tokens]
        with torch.autocast(tokens.device.type, torch.bfloat16):
            for index in range(self.config.layers):
                attend = attends[index] if attends else None
                if recompute and torch.is_grad_enabled():
                    hidden = checkpoint(self._run, index, hidden, turns, replaced, attend, use_reentrant=False)
                else:
                    hidden = self._run(index, hidden, turns, replaced, attend)
        return rms_norm(hidden, (self.config.hidden,), self._norm, self.config.norm_epsilon).bfloat16()

    def attended(self, index: int, queries: Tensor, kv: Tensor, positions: Tensor) -> Tensor:
        """How much a few positions attend to each one: the largest share of any head, summed over ``positions``.

        Args:
            index: of the layer, among those that attend to all positions.
            queries: [sequences, n, rows] before norm and rotation, of positions from 0 on.
            kv: keys and values [sequences, n, m], likewise.
            positions: [p] int64, which queries are asked.

        Returns:
            [sequences, n] float32.
        """
        config, count = self.config, queries.shape[1]
        qkv = torch.cat((queries, kv), -1).unflatten(-1, (-1, config.head_dim))  # type: ignore[no-untyped-call]
        heads = norm_heads(config, self._layers[config.whole[index]], qkv)[..., : -config.kv_heads, :]
        cosine, sine = (turn[:, None] for turn in self._turned(0, count, queries.device))
        keys = rotate(heads[..., config.heads :, :], cosine, sine).permute(0, 2, 3, 1)
        asked = rotate(heads[:, positions, : config.heads], cosine[positions], sine[positions]).transpose(1, 2)
        rows = asked.unflatten(1, (config.kv_heads, -1)).flatten(2, 3)  # type: ignore[no-untyped-call]
        logits = (rows @ keys / math.sqrt(config.head_dim)).view(*asked.shape[:3], count).float()
        ahead = torch.arange(count, device=queries.device) > positions[:, None]
        shares: Tensor = logits.masked_fill(ahead, -math.inf).softmax(-1)
        return shares.amax(1).sum(1)

    def _run(
        self, index: int, hidden: Tensor, turns: tuple[Tensor, Tensor], replaced: Replaced | None, attend: Attend | None
    ) -> Tensor:
        config, layer = self.config, self._layers[index]
        rows = config.heads * config.head_dim

        def project(name: str, x: Tensor) -> Tensor:
            if replaced is None or layer.window or name != "qkv":
                return linear(x, layer.projections[name])
            queries = linear(x, layer.projections["qkv"][:rows])
            return torch.cat((queries, replaced(config.whole.index(index), x, queries)), -1)

        return run_block(config, layer, hidden, turns, project, attend)

    def _turned(self, first: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows ``first`` to ``stop`` of the rotary table; a copy to a device waits for all that runs there."""
        if self._turns[0].shape[0] < stop or self._turns[0].device != device:
            cosine, sine = rotary_table(self.config, max(stop, 2048))
            self._turns = cosine.to(device), sine.to(device)
        return self._turns[0][first:stop], self._turns[1][first:stop]


def _in_bfloat16(layer: LayerWeights) -> LayerWeights:
    return replace(
        layer,
        projections={name: matrix.bfloat16() for name, matrix in layer.projections.items()},
        query_norm=None if layer.query_norm is None else layer.query_norm.bfloat16(),
        key_norm=None if layer.key_norm is None else layer.key_norm.bfloat16(),
    )


@torch.no_grad()
def continue_text(model: FrozenModel, prompts: Tensor, length: int, seed: int) -> Tensor:
    """``prompts`` continued by the model itself, each token drawn from the whole of what it predicts.

    Training to imitate a model needs text of the kind that it will see, and no other source of truth; its own is
    unlimited (data-free distillation, as LLM-QAT does it).

    Args:
        model: who writes.
        prompts: [sequences, n] int64; keys and values of all sequences are in memory, in bfloat16.
        length: of a sequence, ``prompts`` included; at least n.
        seed: the same on the same device draws the same.

    Returns:
        [sequences, length] int64.
    """
    config, (count, given) = model.config, prompts.shape
    shape = (config.layers, 2, count, config.kv_heads, length, config.head_dim)
    held = torch.empty(shape, dtype=torch.bfloat16, device=prompts.device)
    random = torch.Generator(prompts.device).manual_seed(seed)
    text = torch.empty(count, length, dtype=torch.int64, device=prompts.device)
    text[:, :given] = prompts
    first = 0
    for stop in range(given, length):
        attends = [partial(_attend_held, one, first, config.window(layer)) for layer, one in enumerate(held)]
        last = model.states(text[:, first:stop], first=first, attends=attends)[:, -1]
        shares = torch.softmax(linear(last, model.head).float(), -1)
        # The largest of p / Exponential(1) is a draw from p.
        text[:, stop] = (shares / torch.empty_like(shares).exponential_(generator=random)).argmax(-1)
        first = stop
    return text


def write_more(
    model: FrozenModel, text: Tensor, count: int, length: int, prompt: int, at_once: int, seed: int = 0
) -> Tensor:
    """``count`` sequences [count, length] that begin with ``prompt`` tokens from random places of ``text`` [n] and go
    on as the model does, ``at_once`` of them at a time; a seed draws always the same.
    """
    made = [text.new_empty(0, length)]
    for number, start in enumerate(range(0, count, at_once), seed * 1_000_003):
        random = torch.Generator().manual_seed(number)
        places = torch.randint(0, text.shape[0] - prompt + 1, (min(at_once, count - start),), generator=random)
        made.append(
            continue_text(model, text[(places[:, None] + torch.arange(prompt)).to(text.device)], length, number)
        )
    return torch.cat(made)


def _attend_held(held: Tensor, first: int, window: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """An :data:`Attend` that appends to ``held`` [2, sequences, kv_heads, length, head_dim] from position ``first``."""
    stop = first + keys.shape[2]
    held[0, :, :, first:stop], held[1, :, :, first:stop] = keys, values
    if first == 0:
        return attend_newest(queries, keys, values, window)
    # One query a head: those of a key head are rows of one product, which reads its keys once.
    rows = queries.squeeze(2).unflatten(1, (keys.shape[1], -1))  # type: ignore[no-untyped-call]
    oldest = max(0, stop - window) if window else 0
    mixed: Tensor = scaled_dot_product_attention(rows, held[0, :, :, oldest:stop], held[1, :, :, oldest:stop])
    return mixed.flatten(1, 2)[:, :, None]
