"""Calibration layer by layer against the whole model at once, and after interruptions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from strataflux.client.errors import InputError
from strataflux.client.prepare.calibrate import Calibration, calibration_windows, draw, walk_back, walk_forward
from strataflux.client.prepare.errors import DamagedModel
from strataflux.client.prepare.states import StateFolder
from strataflux.client.prepare.statistics import LayerStatistics, row_groups
from strataflux.client.runtime.block import run_block
from strataflux.client.runtime.forward import forward_text
from strataflux.client.runtime.models import SETS, DecoderWeights, LayerWeights
from strataflux.client.runtime.rope import rotary_table

TOKENS = torch.randint(0, 250, (5, 12), generator=torch.Generator().manual_seed(0))


def calibration(folder: Path, **changes: Any) -> Calibration:
    return replace(Calibration(TOKENS, StateFolder(folder), batch=2, guide_groups=2), **changes)


class Seen:
    """Collects what is visited; stops the walk after ``limit`` layers."""

    def __init__(self, limit: int = 99) -> None:
        self.layers: dict[int, LayerStatistics] = {}
        self.limit = limit

    def __call__(self, index: int, layer: LayerWeights, found: LayerStatistics) -> None:
        if len(self.layers) == self.limit:
            raise KeyboardInterrupt
        assert index not in self.layers
        self.layers[index] = found


def whole_model(source: Any, drawn: Tensor) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    """Inputs and output gradients [sequences, n, ·] of every projection set, by one backward pass."""
    config, seen = source.config, {}
    hidden = source.embedding()[TOKENS].requires_grad_()
    turns = rotary_table(config, TOKENS.shape[1])
    for index in range(config.layers):
        layer = source.layer(index)

        def project(name: str, x: Tensor, index: int = index, layer: LayerWeights = layer) -> Tensor:
            y = linear(x, layer.projections[name])
            seen[index, name] = x.detach(), y
            return y

        hidden = run_block(config, layer, hidden, turns, project)
    logits = linear(rms_norm(hidden, (config.hidden,), source.norm(), config.norm_epsilon), source.embedding())
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), drawn.flatten(), reduction="sum")
    slopes = torch.autograd.grad(loss, [y for _, y in seen.values()])
    return {key: (x, slope) for (key, (x, _)), slope in zip(seen.items(), slopes, strict=True)}


def drawn_tokens(source: Any) -> Tensor:
    random = torch.Generator().manual_seed(0)
    weights = DecoderWeights.read(source)
    rows = [torch.softmax(forward_text(weights, row.tolist()), -1) for row in TOKENS]
    return torch.stack([draw(row, random)[:, 0] for row in rows])


def test_what_is_drawn_has_its_probability_and_never_none() -> None:
    p = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0]).expand(40000, 6)
    drawn = draw(p, torch.Generator().manual_seed(1))
    shares = torch.bincount(drawn[:, 0], minlength=6) / 40000
    assert shares[p[0] == 0].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(shares, p[0], rtol=0, atol=0.01)


def test_statistics_are_those_of_the_whole_model(tmp_path: Path, tiny_source: Any) -> None:
    where = calibration(tmp_path / "s")
    walk_forward(tiny_source, where, None, lambda: None, keep=True)
    seen = Seen()
    walk_back(tiny_source, where, seen)
    assert list(seen.layers) == [1, 0]
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["gradient.0.npy"]
    for (index, name), (x, slope) in whole_model(tiny_source, drawn_tokens(tiny_source)).items():
        inputs, outputs = seen.layers[index].inputs[name], seen.layers[index].outputs[name]
        flat, slopes = x.flatten(0, 1), slope.flatten(0, 1)
        torch.testing.assert_close(inputs.mean_abs, flat.abs().mean(0), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(inputs.second, flat.T @ flat / len(flat), rtol=1e-3, atol=1e-4)
        fisher = sum((g.T @ one).square() for one, g in zip(x, slope, strict=True))
        torch.testing.assert_close(outputs.fisher, fisher, rtol=2e-2, atol=1e-4)
        for hessian, rows in zip(outputs.hessians, row_groups(tiny_source.config, name, 2), strict=True):
            weight = slopes[:, rows].square().mean(-1, keepdim=True)
            torch.testing.assert_close(hessian, (flat * weight).T @ flat, rtol=1e-2, atol=1e-4)


def test_forward_statistics_are_the_same_and_states_go(tmp_path: Path, tiny_source: Any) -> None:
    forward, back = Seen(), Seen()
    walk_forward(tiny_source, calibration(tmp_path / "a"), forward, lambda: None, keep=False)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["hidden.2.npy"]
    where = calibration(tmp_path / "b", batch=5)
    walk_forward(tiny_source, where, None, lambda: None, keep=True)
    walk_back(tiny_source, where, back)
    for index in range(2):
        for name in SETS:
            one, other = forward.layers[index].inputs[name], back.layers[index].inputs[name]
            torch.testing.assert_close(one.second, other.second, rtol=1e-4, atol=1e-5)
            assert forward.layers[index].outputs == {}


def test_an_interrupted_walk_goes_on_where_it_was(tmp_path: Path, tiny_source: Any) -> None:
    where, whole = calibration(tmp_path / "a"), calibration(tmp_path / "b")
    for keep in (False, True):
        first, rest = Seen(limit=1), Seen()
        folder = calibration(tmp_path / f"{keep}")
        with pytest.raises(KeyboardInterrupt):
            walk_forward(tiny_source, folder, first, lambda: None, keep=keep)
        walk_forward(tiny_source, folder, rest, lambda: None, keep=keep)
        assert (list(first.layers), list(rest.layers)) == ([0], [1])
    expected, first, rest = Seen(), Seen(limit=1), Seen()
    walk_forward(tiny_source, whole, None, lambda: None, keep=True)
    walk_back(tiny_source, whole, expected)
    walk_forward(tiny_source, where, None, lambda: None, keep=True)
    with pytest.raises(KeyboardInterrupt):
        walk_back(tiny_source, where, first)
    walk_back(tiny_source, where, rest)
    assert (list(first.layers), list(rest.layers)) == ([1], [0])
    assert torch.equal(rest.layers[0].outputs["qkv"].fisher, expected.layers[0].outputs["qkv"].fisher)


def test_activations_that_are_not_finite_name_their_layer(tmp_path: Path, tiny_source: Any) -> None:
    tiny_source.layer(1)
    tiny_source.cache["1.down"][0, 0] = torch.nan
    with pytest.raises(DamagedModel, match=r"layers\.1: found 60 NaN"):
        walk_forward(tiny_source, calibration(tmp_path), None, lambda: None, keep=True)


def test_groups_of_rows_cover_each_matrix(tiny_source: Any) -> None:
    assert row_groups(tiny_source.config, "qkv", 1) == [slice(0, 64), slice(64, 96), slice(96, 128)]
    assert row_groups(tiny_source.config, "o", 4) == [slice(16 * i, 16 * i + 16) for i in range(4)]
    assert row_groups(tiny_source.config, "gate_up", 4)[3:5] == [slice(816, 1088), slice(1088, 1360)]


def test_a_short_text_is_refused_with_both_numbers(tiny_source: Any) -> None:
    tokens = calibration_windows("t", tiny_source.tokenizer(), "she hears the hens", 2, 4)
    assert tokens.shape == (2, 4)
    with pytest.raises(InputError, match=r"14 tokens.*at least 400"):
        calibration_windows("t", tiny_source.tokenizer(), "she hears the hens", 4, 100)
