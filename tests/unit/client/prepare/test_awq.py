"""Activation-aware rounding: the same function, and the best of what is searched."""

from typing import Any

import pytest
import torch
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.bases.awq import ALPHAS, CLIPS, AwqSettings, fold_scales, quantize_awq
from strataflux.client.prepare.bases.matrices import power_cost, round_groups
from strataflux.client.prepare.statistics import InputStatistics, InputSums
from strataflux.client.runtime.forward import forward_text
from strataflux.client.runtime.models import SETS, DecoderWeights


def inputs_of(width: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(400, width, generator=random) * torch.exp(1.5 * torch.randn(width, generator=random))
    return x + x[:, :1] * 0.3


def statistics(source: Any) -> dict[str, InputStatistics]:
    found = {}
    for seed, name in enumerate(SETS):
        sums = InputSums(source.config.set_shape(name)[1], torch.device("cpu"))
        sums.add(inputs_of(source.config.set_shape(name)[1], seed))
        found[name] = sums.result()
    return found


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_folded_scales_leave_the_function_as_it_was(tiny_source: Any, architecture: str) -> None:
    weights = DecoderWeights.read(tiny_source.with_config(architecture=architecture))
    config, layers = weights.config, []
    for layer in weights.layers:
        scales = {name: torch.rand(config.set_shape(name)[1]) + 0.5 for name in SETS}
        scales["o"] = scales["o"].view(2, 2, 16)[:, :1].expand(2, 2, 16).reshape(64)
        layers.append(fold_scales(config, layer, scales))
    folded = DecoderWeights(config, weights.embedding, weights.norm, weights.head, layers)
    tokens = [1, 2, 3, 50, 60]
    torch.testing.assert_close(forward_text(folded, tokens), forward_text(weights, tokens), rtol=1e-3, atol=1e-3)
    assert not torch.equal(layers[0].projections["qkv"], weights.layers[0].projections["qkv"])


def output_error(x: Tensor, exact: Tensor, low: Tensor) -> float:
    return float((x @ (low - exact).T).square().sum(-1).mean())


def test_scales_are_the_best_of_the_search_and_beat_none(tiny_source: Any) -> None:
    layer, found = tiny_source.layer(0), statistics(tiny_source)
    made = quantize_awq("layers.0", tiny_source.config, layer, found, AwqSettings(3, 64))
    weight, x = layer.projections["gate_up"], inputs_of(64, SETS.index("gate_up"))
    errors = []
    for alpha in ALPHAS:
        scale = x.abs().mean(0).pow(alpha)
        scale /= (scale.max() * scale.min()).sqrt()
        low = round_groups("w", weight * scale, 3, 64, torch.ones(1), power_cost(2.0)).dequantized() / scale
        errors.append(output_error(x, weight, low))
        if errors[-1] == min(errors):
            best = scale
    torch.testing.assert_close(made.scales["gate_up"], best)
    assert min(errors) < 0.8 * errors[0]
    plain = round_groups("w", weight, 3, 64, torch.ones(1), power_cost(2.0)).dequantized()
    low = made.matrices["gate_up"].dequantized() / made.scales["gate_up"]
    rows = slice(0, 1088)  # up rows are divided by the scales of down
    assert output_error(x, weight[rows], low[rows]) < 0.8 * output_error(x, weight[rows], plain[rows])


def test_each_group_takes_the_clip_with_the_least_output_error(tiny_source: Any) -> None:
    layer, found = tiny_source.layer(0), statistics(tiny_source)
    made = quantize_awq("layers.0", tiny_source.config, layer, found, AwqSettings(3, 64))
    scale, exact = made.scales["down"], made.exact.projections["down"]
    x = inputs_of(1088, SETS.index("down")) / scale
    for row, group in ((0, 0), (5, 3), (63, 16)):
        part = slice(64 * group, 64 * group + 64)
        errors = []
        for clip in CLIPS:
            one = round_groups("w", exact[row : row + 1, part], 3, 64, torch.tensor([clip]), power_cost(2.0))
            errors.append(output_error(x[:, part], exact[row : row + 1, part], one.dequantized()))
        low = made.matrices["down"].dequantized()[row : row + 1, part]
        assert output_error(x[:, part], exact[row : row + 1, part], low) == pytest.approx(min(errors), rel=1e-3)


def test_the_residual_undoes_clipping(tiny_source: Any) -> None:
    made = quantize_awq(
        "layers.0", tiny_source.config, tiny_source.layer(0), statistics(tiny_source), AwqSettings(3, 64)
    )
    exact, low = made.exact.projections["qkv"], made.matrices["qkv"].dequantized()
    half_step = made.matrices["qkv"].scales.float().amax(-1, keepdim=True) / 2
    assert bool(((exact - low).abs() > 1.01 * half_step).any())
    torch.testing.assert_close(low + (exact - low), exact)


def test_value_heads_that_are_shared_have_one_scale(tiny_source: Any) -> None:
    made = quantize_awq(
        "layers.0", tiny_source.config, tiny_source.layer(0), statistics(tiny_source), AwqSettings(3, 64)
    )
    by_head = made.scales["o"].view(2, 2, 16)
    assert torch.equal(by_head[:, 0], by_head[:, 1])
    assert not torch.equal(by_head[0, 0], by_head[1, 0])


def test_refusals(tiny_source: Any) -> None:
    with pytest.raises(MisuseError, match="2"):
        AwqSettings(bits=2)
    with pytest.raises(MisuseError, match=r"128 for layers\.0\.qkv with 64 inputs"):
        quantize_awq("layers.0", tiny_source.config, tiny_source.layer(0), statistics(tiny_source), AwqSettings())
