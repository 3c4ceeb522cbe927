"""Fit one layer's refinement values on the inputs that the refined model itself gives it.

Calibration text runs through the low-bit model with plain residuals at the default budgets, which is what decoding will
see, not through the unquantized one. One pass serves several budgets of each set.

Neuron bundles have a set of their own, ``mlp``: the down column of a bundle stands in for neurons that were not
selected, so it is fitted as ``down`` is (Eq. 4 with h for x), but to what the *unrefined* gate and up put out, since
only selected neurons are refined. A bundle's rows see all of x: there the residual is best already.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from strataflux.client.prepare.fit import MULTIPLIERS, Fit, HeldOut, SelectionMoments, fit_residual
from strataflux.client.runtime.block import run_block
from strataflux.client.runtime.models import LayerWeights, ModelConfig
from strataflux.client.schemes import BUNDLES, Scheme
from strataflux.kernels.topk import largest_mask

__all__ = ["HELD_OUT_EVERY", "FitRun", "LayerMoments", "fit_layer"]

HELD_OUT_EVERY = 4
"""One sequence in so many is held out."""


@dataclass(frozen=True)
class FitRun:
    """What all layers of a fitting pass share."""

    config: ModelConfig
    turns: tuple[Tensor, Tensor]
    """The rotary table of a sequence, on the device."""
    budgets: Mapping[str, Sequence[int]]
    """What to fit: by projection set, or ``mlp`` for bundles, channels or neurons per 1,024."""
    carried: Mapping[str, int]
    """Budgets by projection set of the model whose activations are passed on."""
    scheme: Scheme = "channels"
    """How its MLPs are refined."""
    multipliers: Sequence[float] = MULTIPLIERS
    plain: bool = True
    """Whether the plain residual is a candidate."""


class LayerMoments:
    """What a pass over one layer's inputs leaves for fitting."""

    def __init__(self, run: FitRun, device: torch.device) -> None:
        """Start empty."""
        self._run = run
        self._sums = {
            name: [_SiteSums(run, name, device, held_out=held_out) for held_out in (False, True)]
            for name in run.budgets
        }

    def add(self, name: str, x: Tensor, *, held_out: bool) -> None:
        """Take in inputs ``x`` [..., inputs] of the set ``name``, if it is one to be fitted."""
        if name in self._sums:
            self._sums[name][held_out].add(x)

    def fit(self, name: str, budget: int, residual: Tensor) -> Fit:
        """The fit of ``residual`` [outputs, inputs] of the set ``name``; at a budget of 0 that is the residual."""
        if not budget:
            return Fit(residual, None, {})
        made, judged = self._sums[name]
        assert judged.second is not None, "held-out sums judge"
        held_out = HeldOut(judged.moments[budget], judged.second)
        return fit_residual(residual, made.moments[budget], held_out, self._run.multipliers, plain=self._run.plain)


class _SiteSums:
    """Sums of one input for all its budgets."""

    def __init__(self, run: FitRun, name: str, device: torch.device, *, held_out: bool) -> None:
        inputs = run.config.set_shape("down" if name == BUNDLES else name)[1]
        self.second = torch.zeros(inputs, inputs, device=device) if held_out else None
        self.moments = {budget: SelectionMoments(inputs, device) for budget in run.budgets[name] if budget}

    def add(self, x: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1])
        if self.second is not None:
            self.second.addmm_(x.T, x)
        for budget, moments in self.moments.items():
            moments.add(x, budget)


@torch.no_grad()
def fit_layer(
    run: FitRun,
    low: LayerWeights,
    carried: Mapping[str, Tensor],
    hidden: Tensor,
    down: Tensor | None = None,
) -> tuple[Tensor, LayerMoments]:
    """Run one layer over all sequences and gather what its fits need.

    Args:
        run: settings.
        low: the layer as it is resident, dequantized, on the device.
        carried: plain refinement values [outputs, inputs] float32 by projection set, as stored, on the device.
        hidden: [sequences, n, hidden] float32 before the layer; taken to the device one sequence at a time.
        down: the unquantized down matrix on the device, which bundles copy; needed if ``run.scheme`` is theirs.

    Returns:
        The hidden states after the layer, where ``hidden`` is; and the moments.
    """
    device = low.mlp_norm.device
    moments = LayerMoments(run, device)
    after = []
    for index, sequence in enumerate(hidden):
        held_out = index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        project = _Projections(run, low, carried, down, moments, held_out)
        after.append(run_block(run.config, low, sequence[None].to(device), run.turns, project).to(hidden.device))
    return torch.cat(after), moments


@dataclass
class _Projections:
    """The products of one sequence, which tell the moments of their inputs."""

    run: FitRun
    low: LayerWeights
    carried: Mapping[str, Tensor]
    down: Tensor | None
    moments: LayerMoments
    held_out: bool
    unrefined: Tensor | None = None
    """The neurons' activations with nothing refined in gate and up, [1, n, intermediate]."""
    refined: Tensor | None = None
    """The same with everything refined in them; only if bundles are carried."""

    def __call__(self, name: str, x: Tensor) -> Tensor:
        self.moments.add(name, x, held_out=self.held_out)
        y = linear(x, self.low.projections[name])
        if name == "gate_up":
            self._note(x, y)
        elif name == "down" and self.unrefined is not None:
            self.moments.add(BUNDLES, self.unrefined, held_out=self.held_out)
        budget = self.run.carried[name]
        if not budget:
            return y
        chosen = largest_mask(x, budget)
        y = y + linear(x * chosen, self.carried[name])
        if self.refined is not None and self.down is not None and name == "down":
            y = y + linear((self.refined - x) * chosen, self.down)
        return y

    def _note(self, x: Tensor, y: Tensor) -> None:
        if BUNDLES in self.run.budgets:
            self.unrefined = _gated(y)
        if self.run.scheme == "bundles" and self.run.carried["down"]:
            self.refined = _gated(y + linear(x, self.carried["gate_up"]))


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up
