"""Fetch lead and lag, token by token, against whole sequences and against the formula written out."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.functional import rms_norm, silu

from strataflux.client.errors import MisuseError
from strataflux.client.evaluate.dense import DenseModel, dense_logits
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import SETS
from strataflux.client.runtime.schedule import make_schedule
from strataflux.client.runtime.shifted import SHIFTS
from strataflux.kernels.topk import largest_mask
from tests.unit.client.runtime.test_shifted import TOKENS, K, by_definition, model

__all__ = ["model"]

STILL = dict.fromkeys(SETS, 0.0)


@dataclass
class Oracle:
    """Refines with all that is selected, and notes what it is told."""

    model: DenseModel
    chosen: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    calls: list[tuple[str, int, str]] = field(default_factory=list)

    def begin(self, layer: int, set_index: int, x: NDArray[np.float32]) -> None:
        self.calls.append(("begin", layer, SETS[set_index]))
        assert sum(key[1] == set_index for key in self.chosen) < 3
        self.chosen[layer, set_index] = largest_mask(torch.from_numpy(x), K)

    def refine(self, layer: int, set_index: int, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        self.calls.append(("refine", layer, SETS[set_index]))
        inputs = torch.from_numpy(x)
        mask = self.chosen.pop((layer, set_index), None)
        mask = largest_mask(inputs, K) if mask is None else mask
        y += (self.model.refinement[layer][SETS[set_index]] @ (inputs * mask)).numpy()


@pytest.mark.parametrize("blocks", SHIFTS)
@pytest.mark.parametrize("moved", [("qkv",), ("o",), ("gate_up",), ("down",), SETS])
def test_steps_are_the_definition(model: DenseModel, blocks: float, moved: tuple[str, ...]) -> None:
    shift = STILL | dict.fromkeys(moved, blocks)
    oracle = Oracle(model)
    decoder = Decoder(model.weights, len(TOKENS), oracle, shift=shift)
    found = torch.stack([decoder.step(token) for token in TOKENS])
    torch.testing.assert_close(found, by_definition(model, shift), rtol=1e-3, atol=1e-3)
    dense = dense_logits(DenseModel(model.weights, model.refinement, model.k, shift=shift), TOKENS)
    torch.testing.assert_close(found, dense, rtol=1e-3, atol=1e-3)
    assert not oracle.chosen


def test_sets_are_shifted_each_by_its_own(model: DenseModel) -> None:
    shift = dict(zip(SETS, (1.5, 0.5, 2.0, 1.0), strict=True))
    decoder = Decoder(model.weights, len(TOKENS), Oracle(model), shift=shift)
    found = torch.stack([decoder.step(token) for token in TOKENS])
    torch.testing.assert_close(found, by_definition(model, shift), rtol=1e-3, atol=1e-3)


def test_no_shift_is_no_shift_to_the_bit(model: DenseModel) -> None:
    """Against the step without positions, ends and tables."""
    weights, oracle, config = model.weights, Oracle(model), model.weights.config
    plain, shape = Decoder(weights, len(TOKENS)), (config.hidden,)

    def project(layer: int, set_index: int, x: torch.Tensor) -> torch.Tensor:
        y = torch.mv(weights.layers[layer].projections[SETS[set_index]], x)
        oracle.refine(layer, set_index, x.numpy(), y.numpy())
        return y

    shifted = Decoder(weights, len(TOKENS), Oracle(model), shift=STILL)
    with torch.inference_mode():
        for token in TOKENS:
            hidden = weights.embedding[token].clone()
            for index, layer in enumerate(weights.layers):
                x = rms_norm(hidden, shape, layer.attention_norm, config.norm_epsilon)
                hidden += project(index, 1, plain._attend(index, project(index, 0, x)))
                gate, up = project(index, 2, rms_norm(hidden, shape, layer.mlp_norm, config.norm_epsilon)).chunk(2)
                hidden += project(index, 3, silu(gate) * up)
            plain.cache.end_step()
            expected = torch.mv(weights.head, rms_norm(hidden, shape, weights.norm, config.norm_epsilon))
            assert torch.equal(shifted.step(token), expected)
    assert all(kind == "refine" for kind, _, _ in oracle.calls)


def test_at_the_ends_leads_are_shorter_and_lags_too(tiny_source: Any) -> None:
    schedule = make_schedule(2, dict(zip(SETS, (2.0, 2.0, 0.5, 1.0), strict=True)))
    # qkv of layer 1 would read four positions before 2; gate_up reads one before its own.
    assert schedule.selects == [[(0, 2), (1, 0)], [], [(1, 2)], []]
    # o of layer 0 writes 1 and is due at 5, beyond the last, 4; so are o of 1 and down of 1.
    assert schedule.adds == [[], [], [], [], [(0, 1), (0, 3), (1, 1), (1, 3)]]
    assert schedule.lags == [False, True, False, True]
    assert not make_schedule(2, STILL).shifted


def test_prefill_knows_no_shift(model: DenseModel) -> None:
    shift, oracle = dict.fromkeys(SETS, 1.0), Oracle(model)
    decoders = [Decoder(model.weights, len(TOKENS), oracle, shift=shift), Decoder(model.weights, len(TOKENS))]
    first, second = (decoder.prefill(TOKENS[:5]) for decoder in decoders)
    assert torch.equal(first, second)
    assert not oracle.calls
    assert not torch.equal(decoders[0].step(TOKENS[5]), decoders[1].step(TOKENS[5]))


def test_a_step_that_was_left_in_the_middle_leaves_no_trace(model: DenseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    shift, oracle = dict.fromkeys(SETS, 1.0), Oracle(model)
    decoder, other = (Decoder(model.weights, 4, one, shift=shift) for one in (oracle, Oracle(model)))
    expected = [other.step(token) for token in TOKENS[:2]]
    assert torch.equal(decoder.step(TOKENS[0]), expected[0])
    with monkeypatch.context() as patch:
        patch.setattr(oracle, "refine", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.step(99)
    assert torch.equal(decoder.step(TOKENS[1]), expected[1])


def _interrupted(layer: int, set_index: int, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
    raise KeyboardInterrupt


class OnlyRefines:
    """A refiner that cannot begin early."""

    def refine(self, layer: int, set_index: int, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        pass


def test_refusals(model: DenseModel) -> None:
    with pytest.raises(MisuseError, match="shift of o: found 3"):
        Decoder(model.weights, 4, shift=STILL | {"o": 3.0})
    Decoder(model.weights, 4, OnlyRefines(), shift=STILL)
    with pytest.raises(MisuseError, match="OnlyRefines"):
        Decoder(model.weights, 4, OnlyRefines(), shift=STILL | {"o": 1.0})
