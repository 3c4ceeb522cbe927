"""Fetch lead and lag against the formula written out."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from strataflux.client.errors import MisuseError
from strataflux.client.evaluate.dense import DenseModel, dense_logits
from strataflux.client.runtime.block import attend_causally, mix_heads, run_block
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.runtime.rope import rotary_table
from strataflux.client.runtime.shifted import SHIFTS, check_shift, run_shifted
from strataflux.kernels.topk import largest_mask

TOKENS = [5, 80, 80, 3, 200, 17, 256, 1, 9, 9, 30, 44]
K = 128


@pytest.fixture
def model(tiny_source: Any) -> DenseModel:
    weights = DecoderWeights.read(tiny_source.with_config(layers=4))
    random = torch.Generator().manual_seed(0)
    values = [
        {name: 0.02 * torch.randn(matrix.shape, generator=random) for name, matrix in layer.projections.items()}
        for layer in weights.layers
    ]
    return DenseModel(weights, values, dict.fromkeys(SETS, K))


def by_definition(model: DenseModel, shift: dict[str, float]) -> Tensor:
    """The stream's states by their positions; every addition is listed by where it belongs, then summed in order."""
    weights, config = model.weights, model.weights.config
    turns, last = rotary_table(config, len(TOKENS)), 2 * config.layers
    additions: dict[int, list[Tensor]] = {at: [] for at in range(last + 1)}
    additions[0].append(weights.embedding[TOKENS][None])

    def state(position: int) -> Tensor:
        return torch.stack([one for at in range(max(0, position) + 1) for one in additions[at]]).sum(0)

    for at in range(last):
        layer, values = weights.layers[at // 2], model.refinement[at // 2]
        reads, writes = ("gate_up", "down") if at % 2 else ("qkv", "o")
        norm = layer.mlp_norm if at % 2 else layer.attention_norm
        x, early = (
            rms_norm(state(p), (config.hidden,), norm, config.norm_epsilon) for p in (at, at - round(2 * shift[reads]))
        )
        y = linear(x, layer.projections[reads]) + linear(x * largest_mask(early, K), values[reads])
        gate, up = y.chunk(2, -1)
        h = silu(gate) * up if at % 2 else mix_heads(config, layer, y, turns, attend_causally)
        additions[at + 1].append(linear(h, layer.projections[writes]))
        late = min(last, at + 1 + round(2 * shift[writes]))
        additions[late].append(linear(h * largest_mask(h, K), values[writes]))
    hidden = rms_norm(state(last)[0], (config.hidden,), weights.norm, config.norm_epsilon)
    return linear(hidden, weights.head)


@pytest.mark.parametrize("blocks", SHIFTS)
@pytest.mark.parametrize("moved", [("qkv",), ("o",), ("gate_up",), ("down",), SETS])
def test_is_the_definition(model: DenseModel, blocks: float, moved: tuple[str, ...]) -> None:
    shift = dict.fromkeys(SETS, 0.0) | dict.fromkeys(moved, blocks)
    found = dense_logits(DenseModel(model.weights, model.refinement, model.k, shift=shift), TOKENS)
    expected = by_definition(model, shift)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert blocks == 0 or not torch.allclose(found, dense_logits(model, TOKENS), rtol=1e-3, atol=1e-3)


class Both:
    """Products for both ways to run a layer."""

    def __init__(self, model: DenseModel) -> None:
        self.model = model

    def base(self, layer: int, name: str, x: Tensor) -> Tensor:
        return linear(x, self.model.weights.layers[layer].projections[name])

    def refined(self, layer: int, name: str, x: Tensor, ranks: Tensor) -> Tensor:
        return linear(x * largest_mask(ranks, K), self.model.refinement[layer][name])


def test_no_shift_is_no_shift_to_the_bit(model: DenseModel) -> None:
    weights, both = model.weights, Both(model)
    hidden = start = weights.embedding[TOKENS][None]
    turns = rotary_table(weights.config, len(TOKENS))
    for index, layer in enumerate(weights.layers):

        def project(name: str, x: Tensor, index: int = index) -> Tensor:
            return both.base(index, name, x) + both.refined(index, name, x, x)

        hidden = run_block(weights.config, layer, hidden, turns, project)
    shifted = run_shifted(weights.config, weights.layers, start, turns, dict.fromkeys(SETS, 0.0), both)
    assert torch.equal(shifted, hidden)


def test_shifts_that_do_not_exist() -> None:
    check_shift(dict.fromkeys(SETS, 1.5))
    with pytest.raises(MisuseError, match=r"shift of o: found 0\.25"):
        check_shift(dict.fromkeys(SETS, 0.0) | {"o": 0.25})
    with pytest.raises(MisuseError, match="one for each"):
        check_shift({"o": 1.0})
