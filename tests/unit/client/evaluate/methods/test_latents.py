"""Latents and factors, against their definitions on small matrices."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from strataflux.client.errors import InputError, MisuseError
from strataflux.client.evaluate.methods.base import KvMethod, Making, parse_method
from strataflux.client.evaluate.methods.factors import Factors
from strataflux.client.evaluate.methods.fitting import moments
from strataflux.client.evaluate.methods.latent import fit_latent, round_latent
from strataflux.client.evaluate.methods.palu import factors_of, heads_of_group, palu_rank, spreading
from strataflux.client.evaluate.methods.ranges import round_in_range
from strataflux.client.evaluate.methods.registry import make_method
from strataflux.client.evaluate.methods.tuned import FactorTuning
from strataflux.client.prepare.fsq_tune import TuneSettings
from strataflux.client.prepare.fsq_tune_text import random_sequences
from strataflux.client.runtime.models import DecoderWeights


def correlated(tokens: int, hidden: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    mix = torch.randn(hidden, hidden, generator=random) * torch.logspace(0, -1.5, hidden)[:, None]
    return torch.randn(tokens, hidden, generator=random) @ mix + torch.randn(hidden, generator=random)


def some_matrix(rows: int, hidden: int) -> Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(8))


def made(text: str, making: Making) -> KvMethod:
    return make_method(parse_method(text), making)


# --- Palu -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 8, 12, 20, 88])
def test_spreading_turns_and_spreads(size: int) -> None:
    turned = spreading(size)
    torch.testing.assert_close(turned @ turned.T, torch.eye(size, dtype=torch.float64))
    assert float(turned.abs().max()) <= (2 / size) ** 0.5 + 1e-9


def test_factors_are_the_best_of_their_rank() -> None:
    """The least error of any rank-r matrix on these inputs is what the outputs' smaller principal components hold."""
    x, matrix = correlated(500, 24, 9), some_matrix(12, 24)
    left, right = factors_of(matrix, moments(x, x), 5)
    y = (x @ matrix.T).double()
    error = (y - x.double() @ right.T @ left.T).square().sum()
    strengths = torch.linalg.svdvals(y)
    assert float(error) == pytest.approx(float(strengths[5:].square().sum()), rel=1e-3)
    whole = factors_of(matrix, moments(x, x), 12)
    torch.testing.assert_close(whole[0] @ whole[1], matrix.double(), atol=1e-6, rtol=1e-6)


def test_palu_rebuilds_groups_from_coded_latents(making: Making) -> None:
    """Heads in one group: 2 · 16 rows of keys, as many of values; 16 bytes a token are 4 + 4 bytes a group."""
    method = made("palu:8x", making)
    assert method.facts == {"rank": 8, "bits": 4, "groups": 2}
    assert method.nbytes(9, 1) == 10 * 2 * 16
    x = torch.nn.functional.rms_norm(making.weights.embedding[:200], (64,), making.weights.layers[0].attention_norm)
    found = method.rebuild[0](x)
    inputs = torch.nn.functional.rms_norm(
        making.weights.embedding[making.text(parse_method("palu:8x"))],
        (64,),
        making.weights.layers[0].attention_norm,
        making.weights.config.norm_epsilon,
    ).flatten(0, 1)
    second = moments(inputs, inputs)
    for group in range(2):
        matrix = making.weights.layers[0].projections["qkv"][64 + 32 * group : 96 + 32 * group]
        left, right = factors_of(matrix, second, 8)
        turned = spreading(8)
        latents = round_in_range((x.double() @ (turned @ right).T).float(), 4)
        expected = latents.double() @ (left @ turned.T).T
        torch.testing.assert_close(found[:, 32 * group : 32 * group + 32].double(), expected, atol=1e-3, rtol=1e-3)


def test_ranks_follow_bytes(weights: DecoderWeights) -> None:
    assert [heads_of_group(count) for count in (1, 2, 3, 4, 5, 6, 8)] == [1, 2, 3, 4, 1, 3, 4]
    config = weights.config
    assert [palu_rank(config, nbytes, bits) for nbytes, bits in ((32, 4), (32, 3), (32, 2), (128, 4))] == [
        24,
        32,
        32,
        32,
    ]
    with pytest.raises(MisuseError, match="at least 10"):
        palu_rank(config, 8, 4)


# --- latents ----------------------------------------------------------------------------------------------------------


def test_a_latent_of_full_width_changes_nothing() -> None:
    x, matrix = correlated(800, 24, 10), some_matrix(12, 24)
    rebuild = round_latent(fit_latent(matrix, x, x, 12), x, grid=False)
    torch.testing.assert_close(rebuild(x), x @ matrix.T, atol=0.05, rtol=0.01)


def test_a_latent_is_the_best_of_its_width() -> None:
    """With keys as loud as values the metric is one number; the least error is that of the smaller components."""
    x, matrix = correlated(3000, 24, 11), some_matrix(12, 24)
    y = x @ matrix.T
    loud = (y - y.mean(0)).square().view(-1, 2, 6).mean((0, 2)).sqrt()
    matrix = matrix / loud.repeat_interleave(6)[:, None]
    y = (x @ matrix.T).double()
    rebuild = round_latent(fit_latent(matrix, x, x, 4), x, grid=False)
    error = (y - rebuild(x).double()).square().sum()
    strengths = torch.linalg.svdvals(y - y.mean(0))
    assert float(error) == pytest.approx(float(strengths[4:].square().sum()), rel=0.01)


def test_a_grid_put_on_afterwards_rounds_the_same_latent() -> None:
    x, matrix = correlated(3000, 24, 12), some_matrix(12, 24)
    plain, coarse = (round_latent(fit_latent(matrix, x, x, 12), x, grid=grid) for grid in (False, True))
    # Rounded coordinates move each output by at most half a step of each; and only 16 ^ 1 values are left of one.
    single = round_latent(fit_latent(matrix, x, x, 1), x, grid=True)
    assert len(torch.unique((single(x) - single(x).mean(0))[:, 0].round(decimals=4))) == 16
    far = (plain(x) - coarse(x)).norm() / (plain(x) - plain(x).mean(0)).norm()
    assert 0.02 < float(far) < 0.3


def test_latents_see_what_earlier_layers_made(making: Making) -> None:
    """Layers are fitted in order: the second one's fit depends on how the first was rebuilt."""
    narrow, wide = (made(text, making) for text in ("latent:32x", "latent:2x"))
    assert (narrow.facts["width"], wide.facts["width"]) == (2, 32)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    again = made("latent:32x", making)
    torch.testing.assert_close(narrow.rebuild[1](x), again.rebuild[1](x))
    assert not torch.allclose(narrow.rebuild[1](x), wide.rebuild[1](x), atol=1e-3)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("latent:4x", 32), ("posthoc:4x", 32), ("posthoc:2.7x", 32), ("latent:3x", 42)]
)
def test_latents_count_their_coordinates(making: Making, text: str, nbytes: int) -> None:
    method = made(text, making)
    assert method.nbytes(7, 3) == 10 * 2 * nbytes
    assert method.bytes_a_token(making.config, 7, 3) == Fraction(nbytes)


@pytest.mark.parametrize("text", ["latent:2x", "posthoc:4x", "palu:4x"])
def test_too_little_text_is_refused(weights: DecoderWeights, text: str) -> None:
    with pytest.raises(InputError, match="give more calibration text"):
        made(text, Making(weights, torch.zeros(2, 10, dtype=torch.long)))


def test_each_layer_is_told_of(weights: DecoderWeights, making: Making) -> None:
    told: list[int] = []

    def count(done: list[int]) -> Callable[[], object]:
        return lambda: done.append(1)

    for text in ("latent:8x", "palu:8x", "fsq:8x", "fsq+pyramid:8x"):
        made(text, Making(weights, making.given, on_layer=count(told)))
    assert len(told) == 4 * weights.config.layers


def test_wider_is_closer(making: Making) -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(2))
    rows: Any = making.weights.layers[0].projections["qkv"][64:]
    for name in ("latent", "palu", "posthoc", "fsq"):
        far = [float((made(f"{name}:{ratio}x", making).rebuild[0](x) - x @ rows.T).norm()) for ratio in (2, 4, 8)]
        assert far == sorted(far), name


# --- trained ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["latent:8x", "posthoc:8x", "palu:8x"])
def test_factors_are_trained_before_they_are_rounded(making: Making, text: str) -> None:
    """By the loss that codes are trained by; groups stay apart, and what is rounded is what was trained."""
    weights, given = making.weights, making.text(parse_method(text))
    seen: list[FactorTuning] = []

    def tune(factors: Sequence[Factors]) -> Sequence[Factors]:
        tuning = FactorTuning(weights, factors, TuneSettings(steps=12, check_every=3), held_out=[given[:8]])
        tuning.run(random_sequences(given[8:].flatten(), 8, 48, seed=0))
        seen.append(tuning)
        return tuning.result()

    plain, trained = made(text, making), made(text, replace(making, tune=tune))
    assert plain.facts == trained.facts
    (tuning,) = seen
    assert tuning.held_out_loss < tuning.held_out_before
    for factors in tuning.result():
        groups, (outputs, width) = factors.groups, factors.decoder.shape
        blocks = factors.decoder.view(groups, outputs // groups, groups, width // groups)
        for i, j in product(range(groups), repeat=2):
            assert bool(blocks[i, :, j].any()) == (i == j)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(4))
    for one, rebuild in zip(tuning.result(), trained.rebuild, strict=True):
        far = (rebuild(x) - one.rebuild(x)).norm() / one.rebuild(x).norm()
        assert float(far) < (1e-3 if text.startswith("latent") else 0.3)
