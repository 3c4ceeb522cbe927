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

from strataflux.kernels.topk import largest_mask

__all__ = ["MULTIPLIERS", "Fit", "SelectionMoments", "fit_residual", "transform"]

MULTIPLIERS = (0.1, 0.3, 1.0)
"""Of the mean diagonal of M; 1 is the paper's."""

# Below this width the solution is in float64, above in float32, which the condition number allows.
_WIDE = 4096


class SelectionMoments:
    """Sums over tokens of z zᵀ, x zᵀ and, where errors are asked for, x xᵀ, for one input and budget; float32."""

    def __init__(self, inputs: int, device: torch.device, *, judge: bool = False) -> None:
        """Start empty; only sums that ``judge`` can tell an :meth:`error`."""
        self.selected, self.cross = (torch.zeros(inputs, inputs, device=device) for _ in range(2))
        self.second = torch.zeros(inputs, inputs, device=device) if judge else None
        self.tokens = 0

    def add(self, x: Tensor, k: int) -> None:
        """Take in ``x`` [..., inputs] with ``k`` channels per 1,024 selected."""
        x = x.reshape(-1, x.shape[-1])
        z = x * largest_mask(x, k)
        if self.second is not None:
            self.second += x.T @ x
        self.selected += z.T @ z
        self.cross += x.T @ z
        self.tokens += x.shape[0]

    def __add__(self, other: "SelectionMoments") -> "SelectionMoments":
        """Both's tokens together; the sum does not judge."""
        both = SelectionMoments(0, self.selected.device)
        both.selected, both.cross = self.selected + other.selected, self.cross + other.cross
        both.tokens = self.tokens + other.tokens
        return both

    def error(self, residual: Tensor, values: Tensor) -> float:
        """``E‖R x - C z‖²`` for ``residual`` R and ``values`` C [outputs, inputs]; 0 without tokens.

        Raises:
            ValueError: these sums do not judge.
        """
        if self.second is None:
            raise ValueError("an error was asked of sums that lack E[x xᵀ]; make them with judge=True")
        total = (residual @ self.second * residual).sum(dtype=torch.float64)
        total -= 2 * (residual @ self.cross * values).sum(dtype=torch.float64)
        total += (values @ self.selected * values).sum(dtype=torch.float64)
        return float(total) / max(1, self.tokens)


@dataclass(frozen=True)
class Fit:
    """What came of fitting one projection set."""

    values: Tensor
    """C [outputs, inputs] float32."""
    multiplier: float | None
    """None: the plain residual."""
    errors: dict[str, float]
    """Held-out errors by candidate: ``plain``, and each multiplier tried."""


def transform(moments: SelectionMoments, multiplier: float) -> Tensor:
    """T [inputs, inputs] float32."""
    inputs = moments.selected.shape[0]
    dtype = torch.float64 if inputs <= _WIDE else torch.float32
    selected, cross = moments.selected.to(dtype), moments.cross.to(dtype)
    diagonal = selected.diagonal()
    ridge = multiplier * diagonal.mean() * torch.eye(inputs, dtype=dtype, device=selected.device)
    if not bool(diagonal.any()):
        return torch.eye(inputs, device=selected.device)
    # T A = B with A symmetric is A Tᵀ = Bᵀ.
    factor = torch.linalg.cholesky(selected + ridge)
    return torch.cholesky_solve((cross + ridge).T, factor).T.float()


def fit_residual(
    residual: Tensor,
    moments: SelectionMoments,
    held_out: SelectionMoments,
    multipliers: Sequence[float] = MULTIPLIERS,
    *,
    plain: bool = True,
) -> Fit:
    """Fit ``residual`` [outputs, inputs] float32 and keep what ``held_out`` likes best.

    Args:
        residual: R.
        moments: what candidates are made from.
        held_out: what they are compared on: other tokens of the same input and budget; they judge.
        multipliers: of λ; of equals the first wins.
        plain: whether the residual itself is a candidate.
    """
    never = moments.selected.diagonal() + held_out.selected.diagonal() == 0
    candidates: dict[float | None, Tensor] = {None: residual} if plain else {}
    candidates |= {multiplier: _fitted(residual, moments, multiplier, never) for multiplier in multipliers}
    errors = {multiplier: held_out.error(residual, values) for multiplier, values in candidates.items()}
    chosen = min(errors, key=errors.__getitem__)
    values = residual if chosen is None else _fitted(residual, moments + held_out, chosen, never)
    named = {"plain" if key is None else f"{key:g}": error for key, error in errors.items()}
    return Fit(values, chosen, named)


def _fitted(residual: Tensor, moments: SelectionMoments, multiplier: float, never: Tensor) -> Tensor:
    return torch.where(never, residual, residual @ transform(moments, multiplier))
