"""Many positions at once against token by token, and what refinement is worth on a tiny model."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from strataflux.client.evaluate.kv import DenseKv, prefill, score_exact, score_low_bit
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import DecoderWeights
from strataflux.kernels.kv_encode import KvFormat

CONTEXT, SCORED = 520, 270
FORM = KvFormat(2, 2, 16, 4, 4, 4)


@pytest.fixture
def weights(tiny_source: Any) -> DecoderWeights:
    return DecoderWeights.read(tiny_source)


def some_tokens(count: int) -> list[int]:
    return torch.randint(0, 250, (count,), generator=torch.Generator().manual_seed(5)).tolist()


def test_the_exact_cache_is_the_decoder(weights: DecoderWeights) -> None:
    tokens = some_tokens(40)
    reference = score_exact(weights, prefill(weights, tokens[:30]), tokens[30:])
    decoder = Decoder(weights, 64)
    rows = [torch.log_softmax(decoder.step(token), -1) for token in tokens[:-1]]
    torch.testing.assert_close(reference.log_probabilities, torch.stack(rows[30:]), rtol=1e-3, atol=1e-3)
    assert reference.tokens == tuple(tokens[30:])


def test_refinement_takes_most_of_the_divergence_away(weights: DecoderWeights) -> None:
    tokens = some_tokens(CONTEXT + 1)
    prefilled = prefill(weights, tokens[: CONTEXT - SCORED])
    reference = score_exact(weights, prefilled, tokens[CONTEXT - SCORED :])
    dense = DenseKv(weights, prefilled, FORM)
    base = score_low_bit(dense, reference, Fraction(0), 4)
    some = score_low_bit(dense, reference, Fraction(1, 4), 4)
    all_ = score_low_bit(dense, reference, Fraction(1), 4)
    assert base.tokens == SCORED
    assert 0 < all_.kl < 0.03 * base.kl
    assert all_.kl < some.kl < base.kl


def test_positions_together_are_positions_apart(weights: DecoderWeights) -> None:
    tokens = some_tokens(300)
    dense = DenseKv(weights, prefill(weights, tokens[:250]), FORM)
    together = list(dense.rows(tokens[250:], Fraction(1, 8), 4))
    apart = list[Tensor]()
    for position in range(250, 300, 7):
        # Behind position 256 the tile that filled up holds what its own step saw, so only the row itself may be new.
        rows = list(dense.rows(tokens[250 : position + 1], Fraction(1, 8), 4))
        apart.append(rows[-1])
    torch.testing.assert_close(torch.stack(apart), torch.stack(together[::7]), rtol=1e-3, atol=1e-3)


def test_layers_are_told_of(weights: DecoderWeights) -> None:
    told = list[int]()
    prefill(weights, some_tokens(9), lambda: told.append(1))
    assert len(told) == weights.config.layers
