"""Refinement values fitted to the selection, so that selected channels stand in for omitted ones (Eq. 3-4).

With x a projection set's input, z its selected channels (the others zero) and R the residual,

    C = argmin E‖R x - C z‖² + λ ‖C - R‖²  =  R T,   T = (G + λI) (M + λI)⁻¹,   M = E[z zᵀ],  G = E[x zᵀ]

T depends on inputs and budget alone, not on weights or quantizer. λ is ``multiplier · mean diagonal of M``. Channels
that calibration never selected keep their residual exactly. M + λI has a condition number of at most inputs + 1.

A fit is chosen on tokens it was not made from: multipliers and the plain residual are compared by the held-out error
``E‖R x - C z‖²``, then the chosen one is made anew from all tokens. Where calibration text is unlike the text that is
decoded, fitting can lose; held-out tokens of the same text do not show that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MULTIPLIERS", "Fit", "HeldOut", "SelectionMoments", "fit_residual", "fitted_values"]

MULTIPLIERS = (0.1, 0.3, 1.0)
"""Of the mean diagonal of M; 1 is the paper's."""

# Up to this width the solution is in float64, above in float32, which the condition number allows.
_WIDE = 1024


class SelectionMoments:
    """Sums over tokens of z zᵀ and x zᵀ for one input and budget; float32."""

    def __init__(self, inputs: int, device: torch.device) -> None:
        """Start empty."""
        self.selected, self.cross = (torch.zeros(inputs, inputs, device=device) for _ in range(2))
        self.tokens = 0

    def add(self, x: Tensor, selected: Tensor) -> None:
        """Take in inputs ``x`` [..., inputs] of which those of the mask ``selected`` [..., inputs] are selected."""
        x, z = x.reshape(-1, x.shape[-1]), (x * selected).reshape(-1, x.shape[-1])
        self.selected.addmm_(z.T, z)
        self.cross.addmm_(x.T, z)
        self.tokens += x.shape[0]

    def __add__(self, other: "SelectionMoments") -> "SelectionMoments":
        """Both's tokens together."""
        both = SelectionMoments(0, self.selected.device)
        both.selected, both.cross = self.selected + other.selected, self.cross + other.cross
        both.tokens = self.tokens + other.tokens
        return both


@dataclass(frozen=True)
class HeldOut:
    """Sums over tokens that no candidate was made from."""

    moments: SelectionMoments
    second: Tensor
    """Σ x xᵀ over the same tokens, [inputs, inputs] float32; does not depend on the budget."""

    def error(self, residual: Tensor, values: Tensor) -> float:
        """``E‖R x - C z‖²`` for ``residual`` R and ``values`` C [outputs, inputs]; 0 without tokens."""
        return _Against.of(self, residual).error(values)


@dataclass(frozen=True)
class _Against:
    """What the errors of all candidates for one residual share."""

    held_out: HeldOut
    total: Tensor
    """Σ ‖R x‖², a scalar."""
    crossed: Tensor
    """R Σ x zᵀ, [outputs, inputs]."""

    @classmethod
    def of(cls, held_out: HeldOut, residual: Tensor) -> "_Against":
        total = _inner(residual @ held_out.second, residual)
        return cls(held_out, total, residual @ held_out.moments.cross)

    def error(self, values: Tensor) -> float:
        moments = self.held_out.moments
        total = self.total - 2 * _inner(self.crossed, values) + _inner(values @ moments.selected, values)
        return float(total) / max(1, moments.tokens)


def _inner(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(dtype=torch.float64)


@dataclass(frozen=True)
class Fit:
    """What came of fitting one projection set."""

    values: Tensor
    """C [outputs, inputs] float32."""
    multiplier: float | None
    """None: the plain residual."""
    errors: dict[str, float]
    """Held-out errors by candidate: ``plain``, and each multiplier tried."""


def fitted_values(residual: Tensor, moments: SelectionMoments, multiplier: float) -> Tensor:
    """C [outputs, inputs] float32 of R = ``residual``; R itself where nothing was ever selected."""
    outputs, inputs = residual.shape
    dtype = torch.float64 if inputs <= _WIDE else torch.float32
    selected, cross = moments.selected.to(dtype), moments.cross.to(dtype)
    ridge = multiplier * selected.diagonal().mean()
    if not bool(ridge > 0):
        return residual
    # C A = B with A symmetric is A Cᵀ = Bᵀ. With more outputs than inputs, T for all of them is less to solve.
    eye = torch.eye(inputs, dtype=dtype, device=residual.device)
    factor = torch.linalg.cholesky(selected + ridge * eye)
    if outputs > inputs:
        transform = torch.cholesky_solve((cross + ridge * eye).T, factor).T
        return residual @ transform.float()
    wide = residual.to(dtype)
    return torch.cholesky_solve((wide @ cross + ridge * wide).T, factor).T.float()


def fit_residual(
    residual: Tensor,
    moments: SelectionMoments,
    held_out: HeldOut,
    multipliers: Sequence[float] = MULTIPLIERS,
    *,
    plain: bool = True,
) -> Fit:
    """Fit ``residual`` [outputs, inputs] float32 and keep what ``held_out`` likes best.

    Args:
        residual: R.
        moments: what candidates are made from.
        held_out: what they are compared on: other tokens of the same input and budget.
        multipliers: of λ; of equals the first wins.
        plain: whether the residual itself is a candidate.
    """
    never = moments.selected.diagonal() + held_out.moments.selected.diagonal() == 0
    against = _Against.of(held_out, residual)
    errors: dict[float | None, float] = {None: against.error(residual)} if plain else {}
    for multiplier in multipliers:
        errors[multiplier] = against.error(_fitted(residual, moments, multiplier, never))
    chosen = min(errors, key=errors.__getitem__)
    values = residual if chosen is None else _fitted(residual, moments + held_out.moments, chosen, never)
    named = {"plain" if key is None else f"{key:g}": error for key, error in errors.items()}
    return Fit(values, chosen, named)


def _fitted(residual: Tensor, moments: SelectionMoments, multiplier: float, never: Tensor) -> Tensor:
    return torch.where(never, residual, fitted_values(residual, moments, multiplier))
