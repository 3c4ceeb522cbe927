"""What a decoder tells early about what its layers will read: exactly that, where the stream does not change."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.cache import ExactCache
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import SETS, DecoderWeights, LayerWeights
from strataflux.client.runtime.schedule import make_foresight

TOKENS = [5, 80, 3]


class Seer:
    """Keeps what it is told."""

    def __init__(self, blocks: float = 1.0, *, channels: bool = True, groups: bool = True) -> None:
        self.blocks = blocks
        self.channels_wanted = channels
        self.groups_wanted = groups
        self.inputs: dict[tuple[int, int], NDArray[np.float32]] = {}
        self.queries: dict[int, Tensor] = {}
        self.begun: list[int] = []

    def begin_layer(self, layer: int) -> None:
        self.begun.append(layer)

    def channels(self, layer: int, set_index: int, x: NDArray[np.float32]) -> None:
        self.inputs[layer, set_index] = x.copy()

    def groups(self, layer: int, queries: Tensor) -> None:
        self.queries[layer] = queries.clone()


class Watcher(ExactCache):
    """Keeps the queries of the newest step, and refines nothing while it keeps inputs, too."""

    def __init__(self, weights: DecoderWeights) -> None:
        super().__init__(weights.config, 8)
        self.inputs: dict[tuple[int, int], NDArray[np.float32]] = {}
        self.queries: dict[int, Tensor] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.queries[layer] = queries.clone()
        return super().attend(layer, queries, keys, values)

    def refine(self, layer: int, set_index: int, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        self.inputs[layer, set_index] = x.copy()


def still(weights: DecoderWeights) -> DecoderWeights:
    """The same, writing nothing to the stream."""

    def layer(one: LayerWeights) -> LayerWeights:
        zero = {name: torch.zeros_like(one.projections[name]) for name in ("o", "down")}
        return replace(one, projections={**one.projections, **zero})

    return replace(weights, layers=[layer(one) for one in weights.layers])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_stream_that_stays_is_foreseen_exactly(tiny_source: Any, architecture: str) -> None:
    weights = still(DecoderWeights.read(tiny_source.with_config(architecture=architecture, layers=3)))
    seer, watcher = Seer(), Watcher(weights)
    decoder = Decoder(weights, 8, watcher, watcher, foresight=seer)
    for token in TOKENS:
        decoder.step(token)
    assert seer.begun == [0, 1, 2] * len(TOKENS)
    # Nothing comes before the first layer's own input.
    assert sorted(seer.inputs) == [(0, 2), (1, 0), (1, 2), (2, 0), (2, 2)]
    assert sorted(seer.queries) == [1, 2]
    for place, x in seer.inputs.items():
        np.testing.assert_allclose(x, watcher.inputs[place], rtol=1e-6)
    for layer, queries in seer.queries.items():
        torch.testing.assert_close(queries, watcher.queries[layer], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("blocks", [0.5, 1.0, 2.0])
def test_it_changes_no_result(tiny_source: Any, blocks: float) -> None:
    weights = DecoderWeights.read(tiny_source.with_config(layers=3))
    plain, foreseen = Decoder(weights, 8), Decoder(weights, 8, foresight=Seer(blocks))
    for token in TOKENS:
        assert torch.equal(plain.step(token), foreseen.step(token))


def test_what_nobody_wants_is_not_computed(tiny_source: Any) -> None:
    seer = Seer(channels=False, groups=False)
    Decoder(DecoderWeights.read(tiny_source), 8, foresight=seer).step(1)
    assert not seer.inputs
    assert not seer.queries


@pytest.mark.parametrize(
    ("blocks", "guesses"),
    [
        (0.0, [[], [], [], []]),
        (0.5, [[(0, 2)], [(1, 0)], [(1, 2)], []]),
        (1.0, [[(0, 2), (1, 0)], [(1, 2)], [], []]),
        (2.0, [[(0, 2), (1, 0), (1, 2)], [], [], []]),
    ],
)
def test_when_inputs_are_guessed(blocks: float, guesses: list[list[tuple[int, int]]]) -> None:
    assert make_foresight(2, blocks) == guesses
    assert all(set_index in (SETS.index("qkv"), SETS.index("gate_up")) for each in guesses for _, set_index in each)


def test_a_distance_that_is_not_supported_is_refused() -> None:
    with pytest.raises(MisuseError, match=r"0\.7 blocks"):
        make_foresight(2, 0.7)
