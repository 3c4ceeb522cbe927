"""Attention to a cache of discrete codes: the layout of blocks, and the definition that kernels are compared with.

One code c of a token stands for its keys and values in all KV heads (:mod:`strataflux.kernels.fsq`). For a query q,
normed and rotated already, of a head that uses this KV head, and tokens t at positions n_t:

    k_t = rotate(norm(D_K c_t + b_K), n_t)           rebuilt, never stored; normed where the model does it (the paper)
    l_t = q · k_t / sqrt(head_dim)
    o   = D_V (Σ_t p_t c_t) + b_V,  p = softmax(l)   the decoder comes after the sum: weights add up to one (the paper)

Any set of tokens leaves a *part*: its largest logit m, ``z = Σ 2^(l - m)`` and ``a = Σ 2^(l - m) c``, logits for powers
of two. Parts of disjoint sets merge in code space.

Blocks (ours). Codes of 64 tokens lie together: 16 bytes of each token, then the next 16 bytes of each, and so on; the
last chunk has what is left of a code. Nothing is padded: a block has 64 times the bytes of a code.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from strataflux.kernels.fsq import FsqGrid, FsqLayer

__all__ = [
    "BLOCK_TOKENS",
    "FsqHeads",
    "FsqPart",
    "attend_codes",
    "block_codes",
    "merge_parts",
    "part_of_codes",
    "rotate_halves",
    "token_codes",
]

BLOCK_TOKENS: Final = 64
_CHUNK: Final = 16


@dataclass(frozen=True)
class FsqHeads:
    """A layer's decoder by heads, and what its keys go through.

    Raises:
        ValueError: on construction, if shapes contradict each other.
    """

    grid: FsqGrid
    key_decoder: Tensor
    """D_K, [kv_heads, head_dim, width] float32; ``value_decoder`` likewise."""
    key_bias: Tensor
    """b_K, [kv_heads, head_dim] float32; ``value_bias`` likewise."""
    value_decoder: Tensor
    value_bias: Tensor
    frequencies: Tensor
    """[head_dim / 2] float64, radians a position; channels d and d + head_dim / 2 turn together."""
    key_norm: Tensor | None = None
    """[head_dim] float32; None where keys are not normed."""
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        kv_heads, d, width = self.key_decoder.shape
        found = [t.shape for t in (self.value_decoder, self.key_bias, self.value_bias, self.frequencies)]
        if found != [(kv_heads, d, width), (kv_heads, d), (kv_heads, d), (d // 2,)] or width != self.grid.width:
            raise ValueError(
                f"decoders {list(self.key_decoder.shape)} and {list(found[0])}, biases {list(found[1])} and "
                f"{list(found[2])}, {list(found[3])} frequencies for a code of {self.grid.width} coordinates"
            )
        if self.key_norm is not None and self.key_norm.shape != (d,):
            raise ValueError(f"a norm of {list(self.key_norm.shape)} weights for keys of {d} channels")

    @classmethod
    def of_layer(
        cls, layer: FsqLayer, kv_heads: int, frequencies: Tensor, key_norm: Tensor | None = None, epsilon: float = 1e-6
    ) -> "FsqHeads":
        """The heads of a layer whose decoder has rows of all key heads, then of all value heads."""
        keys, values = layer.decoder.view(2, kv_heads, -1, layer.grid.width)
        key_bias, value_bias = layer.decoder_bias.view(2, kv_heads, -1)
        return cls(layer.grid, keys, key_bias, values, value_bias, frequencies, key_norm, epsilon)

    def to(self, device: torch.device) -> "FsqHeads":
        """The same heads on ``device``."""
        keys, key_bias, values, value_bias, frequencies = (
            t.to(device)
            for t in (self.key_decoder, self.key_bias, self.value_decoder, self.value_bias, self.frequencies)
        )
        norm = None if self.key_norm is None else self.key_norm.to(device)
        return FsqHeads(self.grid, keys, key_bias, values, value_bias, frequencies, norm, self.epsilon)

    @property
    def kv_heads(self) -> int:
        """KV heads."""
        return self.key_decoder.shape[0]

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.key_decoder.shape[1]

    def keys(self, codes: Tensor, positions: Tensor) -> Tensor:
        """Keys [kv_heads, tokens, head_dim] float64 of levels [tokens, width] at ``positions`` [tokens], rotated."""
        centres = self.grid.centres(codes).double()
        keys = torch.einsum("tw,gdw->gtd", centres, self.key_decoder.double()) + self.key_bias.double()[:, None]
        if self.key_norm is not None:
            keys = keys * torch.rsqrt(keys.square().mean(-1, keepdim=True) + self.epsilon) * self.key_norm.double()
        return rotate_halves(keys, positions.double()[:, None] * self.frequencies.double())


class FsqPart(NamedTuple):
    """What a set of tokens adds to the attention of some heads."""

    sums: Tensor
    """[heads, width] float64, Σ 2^(l - top) c; zeros without tokens."""
    top: Tensor
    """[heads] float64, largest logit for powers of two; -inf without tokens."""
    total: Tensor
    """[heads] float64, Σ 2^(l - top)."""


def rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Heads [..., d] turned by ``angles`` [..., d / 2]: channels i and i + d/2 are a pair."""
    first, second = x.chunk(2, -1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def block_codes(packed: Tensor) -> Tensor:
    """Codes [..., tokens, bytes] uint8 as blocks [..., blocks, 64 · bytes]; zeros fill the last block."""
    *batch, tokens, nbytes = packed.shape
    blocks = -(-tokens // BLOCK_TOKENS)
    whole = packed.new_zeros((*batch, blocks * BLOCK_TOKENS, nbytes))
    whole[..., :tokens, :] = packed
    chunks = torch.split(whole.view(*batch, blocks, BLOCK_TOKENS, nbytes), _CHUNK, -1)
    return torch.cat([chunk.flatten(-2) for chunk in chunks], -1)


def token_codes(blocks: Tensor, tokens: int) -> Tensor:
    """Codes [..., tokens, bytes] of blocks; undoes :func:`block_codes`."""
    nbytes = blocks.shape[-1] // BLOCK_TOKENS
    sizes = [BLOCK_TOKENS * min(_CHUNK, nbytes - at) for at in range(0, nbytes, _CHUNK)]
    chunks = [chunk.reshape(*chunk.shape[:-1], BLOCK_TOKENS, -1) for chunk in torch.split(blocks, sizes, -1)]
    return torch.cat(chunks, -1).flatten(-3, -2)[..., :tokens, :]


def part_of_codes(queries: Tensor, codes: Tensor, positions: Tensor, heads: FsqHeads) -> FsqPart:
    """The part of levels [tokens, width] at ``positions`` [tokens] for ``queries`` [heads, head_dim]."""
    count = queries.shape[0]
    if not len(codes):
        none = queries.new_zeros(count, dtype=torch.float64)
        return FsqPart(none.new_zeros(count, heads.grid.width), none - torch.inf, none)
    grouped = queries.double().view(heads.kv_heads, -1, heads.head_dim)
    logits = torch.einsum("gnd,gtd->gnt", grouped, heads.keys(codes, positions)).flatten(0, 1)
    logits = logits * (heads.head_dim**-0.5 / torch.log(torch.tensor(2.0, dtype=torch.float64)))
    top = logits.amax(-1)
    weights = torch.exp2(logits - top[:, None])
    return FsqPart(weights @ heads.grid.centres(codes).double(), top, weights.sum(-1))


def merge_parts(parts: list[FsqPart], heads: FsqHeads) -> Tensor:
    """Outputs [heads, head_dim] float64 of all parts of a sequence; at least one has tokens."""
    tops = torch.stack([part.top for part in parts])
    weights = torch.exp2(tops - tops.amax(0))
    sums = sum(part.sums * w[:, None] for part, w in zip(parts, weights, strict=True))
    total = sum(part.total * w for part, w in zip(parts, weights, strict=True))
    latent = (torch.as_tensor(sums) / torch.as_tensor(total)[:, None]).view(heads.kv_heads, -1, heads.grid.width)
    values = torch.einsum("gnw,gdw->gnd", latent, heads.value_decoder.double())
    return torch.flatten(values + heads.value_bias.double()[:, None], 0, 1)


def attend_codes(queries: Tensor, codes: Tensor, positions: Tensor, heads: FsqHeads) -> Tensor:
    """Outputs [heads, head_dim] float64 by definition: keys and values of every token rebuilt, then attended to.

    Args:
        queries: [heads, head_dim], normed and rotated; KV head i serves the i-th group of them.
        codes: levels [tokens, width] uint8.
        positions: [tokens], of those tokens.
        heads: the layer.
    """
    grouped = queries.double().view(heads.kv_heads, -1, heads.head_dim)
    logits = torch.einsum("gnd,gtd->gnt", grouped, heads.keys(codes, positions)) * heads.head_dim**-0.5
    values = torch.einsum("tw,gdw->gtd", heads.grid.centres(codes).double(), heads.value_decoder.double())
    outputs: Tensor = logits.softmax(-1) @ (values + heads.value_bias.double()[:, None])
    return outputs.flatten(0, 1)
