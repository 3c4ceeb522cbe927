"""Packed codes in the place of keys and values: all that a decoder keeps of past positions.

A position is one code a layer, ``tokens · Σ_layers B`` bytes in one allocation and nothing beside. Layers that attend
to a window of positions have no code and count for nothing there: what they attend to is kept as it is. Keys are built
anew at every step, since norm and rotation come after the code's decoder; values never are: with attention weights a_i

    o_j = D_V Σ_i a_i c_i + b_V                      (the paper's equation 6: the weights sum to one)

so codes are summed and decoded once. Tokens go tile by tile, and partial sums (m, Z, A) of tiles are merged as those of
any other split: m the largest logit, Z the sum of weights relative to it, A the same of weighted codes.

Attention sees rounded codes only, the newest position's too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.cache import ExactLayer, check_truncation
from strataflux.client.runtime.models import DecoderWeights, LayerWeights
from strataflux.client.runtime.rope import rotary_table, rotate
from strataflux.kernels.fsq import FsqLayer

__all__ = ["CodeBuffer", "FsqCache", "LatentSum", "with_biases"]

_TILE = 1024
"""Positions whose keys exist at a time."""


class CodeBuffer:
    """Packed codes of one sequence: for each layer [context, bytes of its code], all in one allocation."""

    def __init__(self, sizes: Sequence[int], context: int) -> None:
        """Room for ``context`` positions of ``sizes`` bytes each, a layer's each; 0 for one without a code."""
        self.whole = torch.zeros(context * sum(sizes), dtype=torch.uint8)
        """[context · Σ sizes] uint8, layer after layer."""
        parts = self.whole.split([context * size for size in sizes])  # type: ignore[no-untyped-call]
        self.layers: list[Tensor] = [part.view(context, size) for part, size in zip(parts, sizes, strict=True)]
        """[context, bytes] uint8 views, to be written by position."""

    @property
    def nbytes(self) -> int:
        """Bytes of the allocation."""
        return self.whole.untyped_storage().nbytes()


@dataclass(frozen=True)
class LatentSum:
    """Attention to some positions, not decoded yet; float32."""

    maximum: Tensor
    """m [heads]."""
    total: Tensor
    """Z [heads]."""
    codes: Tensor
    """A [heads, width]."""

    @classmethod
    def of(cls, logits: Tensor, centres: Tensor) -> "LatentSum":
        """Attention by ``logits`` [heads, n] to codes of ``centres`` [n, width], of which there is one or more."""
        maximum = logits.amax(-1)
        shares = (logits - maximum[:, None]).exp()
        return cls(maximum, shares.sum(-1), shares @ centres)

    def merged(self, other: "LatentSum") -> "LatentSum":
        """Attention to the positions of both, which share none."""
        maximum = torch.maximum(self.maximum, other.maximum)
        mine, theirs = (self.maximum - maximum).exp(), (other.maximum - maximum).exp()
        total = self.total * mine + other.total * theirs
        return LatentSum(maximum, total, self.codes * mine[:, None] + other.codes * theirs[:, None])


class FsqCache:
    """A :class:`~strataflux.client.runtime.cache.KvCache` of codes. One thread at a time.

    Pairs: :meth:`take` of a layer's inputs / :meth:`attend`, or :meth:`rebuild`, of that layer. Keys and values that
    the contract passes in are not looked at: they are what the codes taken before say.
    """

    def __init__(self, weights: DecoderWeights, codes: Sequence[FsqLayer], context: int) -> None:
        """Allocate ``context`` positions.

        Args:
            weights: the model's; of its layers norms and biases of keys are used.
            codes: one for each layer that attends to all positions, made over these weights.
            context: positions.

        Raises:
            MisuseError: there are more or fewer codes than such layers.
        """
        config = weights.config
        if len(codes) != len(config.whole):
            expected = f"{len(config.whole)}, the model's that attend to all positions"
            raise MisuseError("codes", f"{len(codes)} layers", expected, "load its own codes")
        placed = config.by_layer(codes)
        # fixed after construction
        self.context = context
        self._config = config
        self._layers = weights.layers
        self._codes = {at: with_biases(code, weights.layers[at]) for at, code in enumerate(placed) if code is not None}
        self._cosine, self._sine = rotary_table(config, context)
        # changed by steps and fills
        self.exact = {layer: ExactLayer(config, context, config.window(layer)) for layer in config.sliding}
        """Keys and values of layers that have no code."""
        self.buffer = CodeBuffer([0 if code is None else code.grid.nbytes for code in placed], context)
        assert self.buffer.nbytes == context * sum(code.grid.nbytes for code in codes)
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes that the codes of the positions so far take."""
        return self.length * sum(code.grid.nbytes for code in self._codes.values())

    @property
    def exact_nbytes(self) -> int:
        """Bytes that keys and values of the positions so far take in layers without a code."""
        a_position = 2 * self._config.kv_heads * self._config.head_dim * torch.float32.itemsize
        return sum(min(self.length, layer.rows) for layer in self.exact.values()) * a_position

    def begin_step(self) -> None:
        """Nothing to do."""

    def take(self, layer: int, x: Tensor) -> None:
        """Encode inputs ``x`` [n, hidden] of a coded layer's projections, at positions from ``length`` on."""
        grid, now = self._codes[layer].grid, self.length
        self.buffer.layers[layer][now : now + x.shape[0]] = grid.pack(self._codes[layer].encode(x))

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Mixed values [heads · head_dim] of ``queries`` [heads, head_dim], turned by position, over all positions so
        far and the one that was taken last.
        """
        if layer in self.exact:
            return self.exact[layer].attend(self.length, queries, keys, values)
        # What the codes say is what later steps will see, not ``keys`` and ``values``.
        found = self.accumulate(layer, queries, 0, min(_TILE, self.length + 1))
        for start in range(_TILE, self.length + 1, _TILE):
            found = found.merged(self.accumulate(layer, queries, start, min(start + _TILE, self.length + 1)))
        return self.decode(layer, found)

    def accumulate(self, layer: int, queries: Tensor, start: int, stop: int) -> LatentSum:
        """Attention of ``queries`` [heads, head_dim] to positions ``start`` … ``stop`` - 1, of which there is one."""
        centres = self._centres(layer, start, stop)
        return LatentSum.of(self._logits(layer, self._codes[layer], queries, centres, slice(start, stop)), centres)

    def decode(self, layer: int, found: LatentSum) -> Tensor:
        """Mixed values [heads · head_dim] that ``found`` stands for: one decoder product a step."""
        code, config = self._codes[layer], self._config
        shape = (config.kv_heads, config.head_dim)
        matrix = code.decoder[shape[0] * shape[1] :].view(*shape, -1)
        bias = code.decoder_bias[shape[0] * shape[1] :].view(*shape)
        latent = (found.codes / found.total[:, None]).view(shape[0], -1, matrix.shape[2])
        mixed: Tensor = (latent @ matrix.transpose(1, 2) + bias[:, None]).flatten()
        return mixed

    def rebuild(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys, turned, and values [kv_heads, stop - start, head_dim] of positions that were taken."""
        return self._heads(layer, self._codes[layer], self._centres(layer, start, stop), slice(start, stop))

    def end_step(self) -> None:
        """As :class:`~strataflux.client.runtime.cache.KvCache`."""
        self.length += 1

    def fill(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep them where there is no code; codes were taken."""
        if layer in self.exact:
            self.exact[layer].fill(0, keys, values)

    def end_fill(self, count: int) -> None:
        """All layers took codes of positions up to ``count``."""
        self.length = count

    def truncate(self, length: int) -> None:
        """As :class:`~strataflux.client.runtime.cache.ExactCache`."""
        check_truncation(length, self.length)
        for layer in self.exact.values():
            layer.truncate(length)
        self.length = length

    def _centres(self, layer: int, start: int, stop: int) -> Tensor:
        grid = self._codes[layer].grid
        return grid.centres(grid.unpack(self.buffer.layers[layer][start:stop]))

    def _logits(self, layer: int, code: FsqLayer, queries: Tensor, centres: Tensor, at: slice | Tensor) -> Tensor:
        """[heads, n] of ``queries`` [heads, head_dim] to codes of ``centres`` [n, width] at positions ``at``."""
        keys = self._keys(layer, code, centres, at)
        shared = queries.view(keys.shape[0], -1, keys.shape[2])
        return (shared @ keys.transpose(1, 2) / math.sqrt(keys.shape[2])).flatten(0, 1)

    def _heads(self, layer: int, code: FsqLayer, centres: Tensor, at: slice) -> tuple[Tensor, Tensor]:
        """Keys, normed and turned, and values [kv_heads, n, head_dim] of ``centres`` [n, width] at ``at``."""
        config = self._config
        split = config.kv_heads * config.head_dim
        values = linear(centres, code.decoder[split:], code.decoder_bias[split:])
        shape = (centres.shape[0], config.kv_heads, config.head_dim)
        return self._keys(layer, code, centres, at), values.view(shape).transpose(0, 1)

    def _keys(self, layer: int, code: FsqLayer, centres: Tensor, at: slice | Tensor) -> Tensor:
        """[kv_heads, n, head_dim] of ``centres`` [n, width] at positions ``at``, normed and turned."""
        config, norm = self._config, self._layers[layer].key_norm
        split = config.kv_heads * config.head_dim
        keys = linear(centres, code.decoder[:split], code.decoder_bias[:split])
        keys = keys.view(-1, config.kv_heads, config.head_dim)
        if norm is not None:
            keys = rms_norm(keys, (config.head_dim,), norm, config.norm_epsilon)
        return rotate(keys, self._cosine[at][:, None], self._sine[at][:, None]).transpose(0, 1)


def with_biases(code: FsqLayer, layer: LayerWeights) -> FsqLayer:
    """``code`` with the model's own biases of keys and values in the decoder's."""
    if layer.qkv_bias is None:
        return code
    return replace(code, decoder_bias=code.decoder_bias + layer.qkv_bias[-code.decoder_bias.shape[0] :])
