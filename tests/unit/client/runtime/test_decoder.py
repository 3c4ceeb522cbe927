"""The decoder against a full-sequence implementation written from the formulas, without a cache."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from strataflux.client.runtime.decoder import ContextFull, Decoder
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.runtime.rope import llama3_divisors

TOKENS = [5, 80, 80, 3, 200, 17, 256, 1]


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def turn(head: Tensor, config: Any) -> Tensor:
    """Rotary embedding of [positions, head_dim] with complex numbers."""
    half = config.head_dim // 2
    divisors = torch.tensor(config.rope_divisors or (1.0,) * half, dtype=torch.float64)
    frequency = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half) / divisors
    angle = torch.arange(head.shape[0])[:, None] * frequency
    pairs = torch.complex(head[:, :half], head[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((pairs.real, pairs.imag), -1)


def full_sequence(source: Any, tokens: list[int]) -> Tensor:
    """Logits [positions, vocabulary] in float64."""
    config, count = source.config, len(tokens)
    future = torch.triu(torch.full((count, count), -math.inf, dtype=torch.float64), 1)
    h = source.embedding().double()[tokens]
    for index in range(config.layers):
        part = {name: weight.double() for name, weight in source.parts(index).items()}
        attention_norm, mlp_norm = (weight.double() for weight in source.norms(index))
        x = norm(h, attention_norm, config.norm_epsilon)
        q, k, v = ((x @ part[name].T).split(config.head_dim, -1) for name in ("q", "k", "v"))
        mixed = []
        for head in range(config.heads):
            shared = head // (config.heads // config.kv_heads)
            scores = turn(q[head], config) @ turn(k[shared], config).T / math.sqrt(config.head_dim) + future
            mixed.append(scores.softmax(-1) @ v[shared])
        h = h + torch.cat(mixed, -1) @ part["o"].T
        x = norm(h, mlp_norm, config.norm_epsilon)
        gate = x @ part["gate"].T
        h = h + (gate * torch.sigmoid(gate) * (x @ part["up"].T)) @ part["down"].T
    head = source.embedding() if config.tied_head else source.head()
    logits: Tensor = norm(h, source.norm().double(), config.norm_epsilon) @ head.double().T
    return logits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_head": False},
        {"rope_divisors": llama3_divisors(16, 10000.0, 8.0, 1.0, 4.0, 32), "rope_theta": 500.0},
    ],
)
def test_steps_equal_the_whole_sequence(tiny_source: Any, changes: dict[str, Any]) -> None:
    source = tiny_source.with_config(**changes)
    decoder = Decoder(DecoderWeights.read(source), context=len(TOKENS))
    logits = torch.stack([decoder.step(token) for token in TOKENS])
    torch.testing.assert_close(logits.double(), full_sequence(source, TOKENS), rtol=1e-4, atol=1e-4)


def test_going_back_forgets_later_tokens(tiny_source: Any) -> None:
    decoder = Decoder(DecoderWeights.read(tiny_source), context=8)
    first = [decoder.step(token) for token in TOKENS[:4]]
    decoder.reset(2)
    decoder.step(99)
    decoder.reset(2)
    assert torch.equal(decoder.step(TOKENS[2]), first[2])
    decoder.reset()
    assert torch.equal(decoder.step(TOKENS[0]), first[0])
    with pytest.raises(ValueError, match="position 5"):
        decoder.reset(5)


def test_a_full_cache_and_an_unknown_token_change_nothing(tiny_source: Any) -> None:
    decoder = Decoder(DecoderWeights.read(tiny_source), context=2)
    decoder.step(1)
    with pytest.raises(IndexError):
        decoder.step(100_000)
    decoder.step(2)
    with pytest.raises(ContextFull, match="position 2"):
        decoder.step(3)
    assert decoder.position == 2


class Restoring:
    """Adds what a decoder with weights of zero lacks: all of it."""

    def __init__(self, weights: DecoderWeights) -> None:
        self.weights = weights
        self.calls: list[tuple[int, int]] = []

    def refine(self, layer: int, set_index: int, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        self.calls.append((layer, set_index))
        y += self.weights.layers[layer].projections[SETS[set_index]].numpy() @ x


def test_every_projection_passes_the_refiner_in_order(tiny_source: Any) -> None:
    weights = DecoderWeights.read(tiny_source)
    config = weights.config
    hollow = DecoderWeights(
        config,
        weights.embedding,
        weights.norm,
        weights.head,
        [
            type(layer)(layer.attention_norm, layer.mlp_norm, {n: torch.zeros(config.set_shape(n)) for n in SETS})
            for layer in weights.layers
        ],
    )
    refiner = Restoring(weights)
    plain, refined = Decoder(weights, 8), Decoder(hollow, 8, refiner)
    for token in TOKENS:
        torch.testing.assert_close(refined.step(token), plain.step(token), rtol=1e-4, atol=1e-4)
    assert refiner.calls == [(layer, s) for _ in TOKENS for layer in range(config.layers) for s in range(len(SETS))]
