"""Fit one layer's refinement values on the inputs that the refined model itself gives it.

Calibration text runs through the low-bit model with plain residuals at the default budgets, which is what decoding will
see, not through the unquantized one. One pass serves several budgets of each set.

Neuron bundles have a set of their own, ``mlp``: the down column of a bundle stands in for neurons that were not
selected, so it is fitted as ``down`` is (Eq. 4 with h for x), but to what the *unrefined* gate and up put out, since
only selected neurons are refined. A bundle's rows see all of x: there the residual is best already.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from strataflux.client.prepare.fit import MULTIPLIERS, Fit, HeldOut, SelectionMoments, fit_residual, fitted_values
from strataflux.client.runtime.block import run_block
from strataflux.client.runtime.models import LayerWeights, ModelConfig
from strataflux.client.schemes import BUNDLES, Scheme
from strataflux.kernels.topk import largest_mask, largest_masks

__all__ = ["HELD_OUT_EVERY", "RUNGS_EVERY", "FitRun", "LayerMoments", "fit_layer"]

HELD_OUT_EVERY = 4
"""One sequence in so many is held out."""
RUNGS_EVERY = 2
"""One sequence in so many counts for the ladder, held out or not."""


@dataclass(frozen=True)
class FitRun:
    """What all layers of a fitting pass share."""

    config: ModelConfig
    turns: tuple[Tensor, Tensor]
    """The rotary table of a sequence, on the device."""
    budgets: Mapping[str, Sequence[int]]
    """What to fit for: by projection set, or ``mlp`` for bundles, channels or neurons per 1,024."""
    carried: Mapping[str, int]
    """Budgets by projection set of the model whose activations are passed on."""
    scheme: Scheme = "channels"
    """How its MLPs are refined."""
    multipliers: Sequence[float] = MULTIPLIERS
    plain: bool = True
    """Whether the plain residual is a candidate."""
    rungs: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Budgets of a ladder: not judged, and from fewer sequences, which is enough to compare budgets by."""


class LayerMoments:
    """What a pass over one layer's inputs leaves for fitting."""

    def __init__(self, run: FitRun, device: torch.device) -> None:
        """Start empty."""
        self._run = run
        self._sites = {name: _Site.of(run, name, device) for name in run.budgets}

    def add(self, name: str, x: Tensor, sequence: int) -> dict[int, Tensor]:
        """Take in inputs ``x`` [..., inputs] of the set ``name``, if it is to be fitted; what budgets select."""
        return self._sites[name].add(x, sequence) if name in self._sites else {}

    def fit(self, name: str, budget: int, residual: Tensor) -> Fit:
        """The fit of ``residual`` [outputs, inputs] of the set ``name``; at a budget of 0 that is the residual."""
        if not budget:
            return Fit(residual, None, {})
        site = self._sites[name]
        held_out = HeldOut(site.judged[budget], site.second)
        return fit_residual(residual, site.made[budget], held_out, self._run.multipliers, plain=self._run.plain)

    def fit_rung(self, name: str, budget: int, residual: Tensor, multiplier: float | None) -> Tensor:
        """Values for a budget of the ladder with ``multiplier``, or ``residual`` itself for None."""
        if not budget or multiplier is None:
            return residual
        return fitted_values(residual, self._sites[name].rungs[budget], multiplier)


@dataclass(frozen=True)
class _Site:
    """Sums of one input by budget."""

    made: Mapping[int, SelectionMoments]
    """Over the sequences that fits are made from."""
    judged: Mapping[int, SelectionMoments]
    """Over those that are held out."""
    second: Tensor
    """Σ x xᵀ of these."""
    rungs: Mapping[int, SelectionMoments]

    @classmethod
    def of(cls, run: FitRun, name: str, device: torch.device) -> "_Site":
        inputs = run.config.set_shape("down" if name == BUNDLES else name)[1]
        made, judged, rungs = (
            {budget: SelectionMoments(inputs, device) for budget in budgets if budget}
            for budgets in (run.budgets[name], run.budgets[name], run.rungs.get(name, ()))
        )
        return cls(made, judged, torch.zeros(inputs, inputs, device=device), rungs)

    def add(self, x: Tensor, sequence: int) -> dict[int, Tensor]:
        held_out = sequence % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        if held_out:
            flat = x.reshape(-1, x.shape[-1])
            self.second.addmm_(flat.T, flat)
        parts = [self.judged if held_out else self.made]
        if sequence % RUNGS_EVERY == 0:
            parts.append(self.rungs)
        budgets = {budget for part in parts for budget in part}
        selected = largest_masks(x, budgets) if budgets else {}
        for part in parts:
            for budget, moments in part.items():
                moments.add(x, selected[budget])
        return selected


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
        project = _Projections(run, low, carried, down, moments, index)
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
    sequence: int
    unrefined: Tensor | None = None
    """The neurons' activations with nothing refined in gate and up, [1, n, intermediate]."""
    refined: Tensor | None = None
    """The same with everything refined in them; only if bundles are carried."""

    def __call__(self, name: str, x: Tensor) -> Tensor:
        selected = self.moments.add(name, x, self.sequence)
        y = linear(x, self.low.projections[name])
        if name == "gate_up":
            self._note(x, y)
        elif name == "down" and self.unrefined is not None:
            of_neurons = self.moments.add(BUNDLES, self.unrefined, self.sequence)
            # With bundles carried, x is the unrefined activation itself.
            selected = of_neurons if self.run.scheme == "bundles" else selected
        budget = self.run.carried[name]
        if not budget:
            return y
        chosen = selected[budget] if budget in selected else largest_mask(x, budget)
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
