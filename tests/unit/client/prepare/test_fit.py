"""Fitted refinement values: identities, the minimum itself, and the choice on held-out tokens."""

import pytest
import torch
from torch import Tensor

from strataflux.client.prepare.fit import HeldOut, SelectionMoments, fit_residual, fitted_values
from strataflux.kernels.topk import largest_mask

K = 128


def moments(x: Tensor, k: int = K) -> SelectionMoments:
    sums = SelectionMoments(x.shape[1], x.device)
    for start in range(0, x.shape[0], 1000):
        part = x[start : start + 1000]
        sums.add(part, largest_mask(part, k))
    return sums


def held_out(x: Tensor) -> HeldOut:
    return HeldOut(moments(x), x.T @ x)


def transform(sums: SelectionMoments, multiplier: float) -> Tensor:
    """T, which is C of R = I."""
    return fitted_values(torch.eye(48), sums, multiplier)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated(tokens: int, seed: int = 0) -> Tensor:
    return random(tokens, 48, seed=seed) * 0.7 + random(tokens, 6, seed=seed + 1) @ random(6, 48, seed=99)


def test_the_transform_is_the_same_for_every_residual_and_solves_equation_4() -> None:
    x, residual = correlated(2000), random(10, 48)
    sums = moments(x)
    z = x * largest_mask(x, K)
    M, G = z.T @ z, x.T @ z
    ridge = M.diagonal().mean() * torch.eye(48)
    C = fitted_values(residual, sums, 1.0)
    torch.testing.assert_close(C, residual @ transform(sums, 1.0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(C @ (M + ridge), residual @ (G + ridge), rtol=1e-3, atol=0.5)


def test_it_is_the_minimum() -> None:
    x, residual = correlated(2000), random(10, 48)
    z = x * largest_mask(x, K)

    def objective(C: Tensor) -> float:
        ridge = float(0.3 * z.square().sum(0).mean())
        return float((x @ residual.T - z @ C.T).square().sum() + ridge * (C - residual).square().sum())

    C = fitted_values(residual, moments(x), 0.3)
    least = objective(C)
    assert least < objective(residual)
    for seed in range(5):
        assert objective(C + 0.01 * random(10, 48, seed=seed)) > least


@pytest.mark.parametrize("outputs", [5, 100])
def test_few_outputs_and_many_are_solved_differently_to_the_same_end(outputs: int) -> None:
    sums, residual = moments(correlated(2000)), random(outputs, 48)
    expected = residual.double() @ transform(sums, 0.3).double()
    torch.testing.assert_close(fitted_values(residual, sums, 0.3).double(), expected, rtol=1e-4, atol=1e-5)


def test_everything_selected_changes_nothing() -> None:
    x = correlated(500)
    torch.testing.assert_close(transform(moments(x, 1024), 1.0), torch.eye(48), rtol=0, atol=1e-6)


def test_independent_inputs_change_next_to_nothing() -> None:
    x = random(40000, 48)
    assert float((transform(moments(x), 1.0) - torch.eye(48)).abs().max()) < 0.03
    assert float((transform(moments(correlated(40000)), 1.0) - torch.eye(48)).abs().max()) > 0.1


def test_channels_that_were_never_selected_keep_their_residual_exactly() -> None:
    x, residual = correlated(2000), random(10, 48)
    x[:, 7] *= 1e-3
    fitted = fit_residual(residual, moments(x[:1500]), held_out(x[1500:]))
    assert fitted.multiplier is not None
    assert torch.equal(fitted.values[:, 7], residual[:, 7])
    assert not torch.equal(fitted.values[:, 8], residual[:, 8])


def test_the_held_out_error_is_the_error_on_held_out_tokens() -> None:
    x, residual, C = correlated(700), random(10, 48), random(10, 48, seed=3)
    z = x * largest_mask(x, K)
    expected = float((x @ residual.T - z @ C.T).square().sum(-1).mean())
    assert held_out(x).error(residual, C) == pytest.approx(expected, rel=1e-4)


def test_fitting_is_taken_where_it_helps_and_left_where_it_does_not() -> None:
    residual = random(10, 48)
    helped = fit_residual(residual, moments(correlated(3000)), held_out(correlated(1000, seed=5)))
    assert helped.multiplier in (0.1, 0.3, 1.0)
    assert helped.errors[f"{helped.multiplier:g}"] == min(helped.errors.values())
    assert helped.errors[f"{helped.multiplier:g}"] < 0.9 * helped.errors["plain"]
    other = random(1000, 48) - random(1000, 6, seed=4) @ random(6, 48, seed=99).roll(1, 0).flip(1)
    few = correlated(60)
    left = fit_residual(residual, moments(few), held_out(other))
    assert left.multiplier is None
    assert torch.equal(left.values, residual)
    assert fit_residual(residual, moments(few), held_out(other), (1.0,), plain=False).multiplier == 1.0
