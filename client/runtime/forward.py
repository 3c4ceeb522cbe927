"""A whole text in one pass: what unrefined weights predict after each token, all positions at once.

The same function of the weights as a decoder's steps, summed in another order. Refinement depends on what was resident
at each step and has no such short cut.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from strataflux.client.runtime.block import multiply, run_block
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.runtime.rope import rotary_table

__all__ = ["forward_text"]


@torch.inference_mode()
def forward_text(weights: DecoderWeights, tokens: Sequence[int]) -> Tensor:
    """Logits [n, vocabulary] float32 of the next token after each of ``tokens`` [n]."""
    config = weights.config
    turns = rotary_table(config, len(tokens))
    hidden = weights.embedding[list(tokens)][None]
    for layer in weights.layers:
        hidden = run_block(config, layer, hidden, turns, partial(multiply, layer))
    return linear(rms_norm(hidden[0], (config.hidden,), weights.norm, config.norm_epsilon), weights.head)
