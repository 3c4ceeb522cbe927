"""Fit one layer's refinement values on the inputs that the refined model itself gives it.

Calibration text runs through the low-bit model with plain residuals at the default budget, which is what decoding will
see, not through the unquantized one. One pass serves several budgets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from strataflux.client.prepare.fit import MULTIPLIERS, Fit, SelectionMoments, fit_residual
from strataflux.client.runtime.block import run_block
from strataflux.client.runtime.models import SETS, LayerWeights, ModelConfig
from strataflux.kernels.residual import round_residual
from strataflux.kernels.topk import largest_mask

__all__ = ["HELD_OUT_EVERY", "FitRun", "fit_layer"]

HELD_OUT_EVERY = 4
"""One sequence in so many is held out."""


@dataclass(frozen=True)
class FitRun:
    """What all layers of a fitting pass share."""

    config: ModelConfig
    turns: tuple[Tensor, Tensor]
    """The rotary table of a sequence, on the device."""
    budgets: Sequence[int]
    """Channels per 1,024 to fit for."""
    carried: int
    """The budget of the model whose activations are passed on."""
    multipliers: Sequence[float] = MULTIPLIERS
    plain: bool = True
    """Whether the plain residual is a candidate."""


@torch.no_grad()
def fit_layer(
    run: FitRun, low: LayerWeights, residuals: Mapping[str, Tensor], hidden: Tensor
) -> tuple[Tensor, dict[int, dict[str, Fit]]]:
    """Run one layer over all sequences and fit its projection sets.

    Args:
        run: settings.
        low: the layer as it is resident, dequantized, on the device.
        residuals: what it lacks, [outputs, inputs] float32 by projection set, on the device.
        hidden: [sequences, n, hidden] float32 before the layer; taken to the device one sequence at a time.

    Returns:
        The hidden states after the layer, where ``hidden`` is; and the fits by budget and projection set.
    """
    device = low.mlp_norm.device
    sums = [_sums(run, device, judge=judge) for judge in (False, True)]
    carried = {name: round_residual(residual) for name, residual in residuals.items()}
    after = []
    for index, sequence in enumerate(hidden):
        held_out = index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        project = _project(run, low, carried, sums[held_out])
        after.append(run_block(run.config, low, sequence[None].to(device), run.turns, project).to(hidden.device))
    fits = {
        k: {
            name: fit_residual(residuals[name], sums[0][k, name], sums[1][k, name], run.multipliers, plain=run.plain)
            for name in SETS
        }
        for k in run.budgets
    }
    return torch.cat(after), fits


def _sums(run: FitRun, device: torch.device, *, judge: bool) -> dict[tuple[int, str], SelectionMoments]:
    return {
        (k, name): SelectionMoments(run.config.set_shape(name)[1], device, judge=judge)
        for k in run.budgets
        for name in SETS
    }


def _project(
    run: FitRun, low: LayerWeights, carried: Mapping[str, Tensor], sums: dict[tuple[int, str], SelectionMoments]
) -> Callable[[str, Tensor], Tensor]:
    def project(name: str, x: Tensor) -> Tensor:
        for k in run.budgets:
            sums[k, name].add(x, k)
        y = linear(x, low.projections[name])
        return y + linear(x * largest_mask(x, run.carried), carried[name]) if run.carried else y

    return project
