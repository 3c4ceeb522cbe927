"""A whole text in one pass gives what steps give."""

from typing import Any

import pytest
import torch

from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.forward import forward_text
from strataflux.client.runtime.models import DecoderWeights

QWEN3 = {"architecture": "qwen3", "head_dim": 32, "heads": 6}
TOKENS = [5, 80, 80, 3, 200, 17, 256, 1, 9, 9, 30]


@pytest.mark.parametrize(
    "changes", [{}, {"tied_head": False}, {"rope_divisors": (1.0, 2.0) * 4}, {"kv_heads": 4}, QWEN3]
)
def test_equals_the_decoder_step_by_step(tiny_source: Any, changes: dict[str, Any]) -> None:
    weights = DecoderWeights.read(tiny_source.with_config(**changes))
    decoder = Decoder(weights, len(TOKENS))
    stepped = torch.stack([decoder.step(token) for token in TOKENS])
    torch.testing.assert_close(forward_text(weights, TOKENS), stepped, rtol=1e-4, atol=1e-4)


def test_leaves_the_weights_alone(tiny_source: Any) -> None:
    weights = DecoderWeights.read(tiny_source)
    before = weights.embedding.clone()
    forward_text(weights, TOKENS)
    assert torch.equal(weights.embedding, before)
