"""Calibration: run a text through the unquantized model, one layer in memory at a time, and learn about each layer.

Going forward, every layer's inputs are measured and its outputs kept on disk as the next one's. For bases that need to
know how the loss depends on a layer, a second walk goes back from the last layer: each is run once more from its kept
input, and the gradient by its output becomes that by its input. The loss is that of tokens drawn from the model's own
predictions: its mean squared gradients are then the Fisher information, the curvature of the divergence from the
unquantized model, with no regard to how well the text is predicted.

What is on disk is whole (written by rename), so an interrupted walk goes on at the layer it reached. A layer is handed
to ``visit`` at most once per walk, with all that is known of it; after ``visit`` its state may be gone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from strataflux.client.errors import InputError
from strataflux.client.prepare.errors import DamagedModel
from strataflux.client.prepare.states import StateFolder
from strataflux.client.prepare.statistics import InputSums, LayerStatistics, OutputSums, row_groups
from strataflux.client.runtime.block import run_block
from strataflux.client.runtime.models import SETS, LayerWeights, ModelConfig, WeightSource
from strataflux.client.runtime.rope import rotary_table

__all__ = ["Calibration", "Visit", "calibration_windows", "draw", "require_finite", "walk_back", "walk_forward"]

Visit = Callable[[int, LayerWeights, LayerStatistics], None]
"""Told each layer's index, its weights on the calibration's device, and what was learnt."""


@dataclass(frozen=True)
class Calibration:
    """What calibration runs on."""

    tokens: Tensor
    """[sequences, n] int64."""
    states: StateFolder
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    batch: int = 4
    """Sequences at a time; memory grows with it."""
    guide_groups: int = 1
    """Row groups of each matrix that get Hessians of their own; 0: no Hessians."""
    inputs: bool = True
    """Whether going back measures inputs, too."""
    seed: int = 0
    """Of the tokens that are drawn from the model's predictions."""

    def batches(self) -> list[slice]:
        """The sequences, ``batch`` at a time."""
        return [slice(first, first + self.batch) for first in range(0, self.tokens.shape[0], self.batch)]

    def turns(self, config: ModelConfig) -> tuple[Tensor, Tensor]:
        """The rotary table of one sequence."""
        cosine, sine = rotary_table(config, self.tokens.shape[1])
        return cosine.to(self.device), sine.to(self.device)


def calibration_windows(subject: object, tokenizer: Tokenizer, text: str, sequences: int, length: int) -> Tensor:
    """The first ``sequences · length`` tokens of ``text`` as [sequences, length] int64.

    Raises:
        InputError: the text is too short.
    """
    tokens = tokenizer.encode(text).ids
    needed = sequences * length
    if len(tokens) < needed:
        raise InputError(
            subject, f"{len(tokens)} tokens", f"at least {needed} for calibration", "give a longer --calibration text"
        )
    return torch.tensor(tokens[:needed]).view(sequences, length)


@torch.no_grad()
def walk_forward(
    source: WeightSource, calibration: Calibration, visit: Visit | None, advance: Callable[[], object], keep: bool
) -> None:
    """Run every layer; its inputs are measured if there is a ``visit``.

    Args:
        source: the unquantized model.
        calibration: text, device, and where states are kept.
        visit: told of each layer, without gradients; None for none.
        advance: called after each layer.
        keep: whether all layers' inputs stay on disk, as :func:`walk_back` needs.

    Raises:
        DamagedModel: activations that are not finite.
    """
    states, config = calibration.states, source.config
    if not any(states.has(f"hidden.{index}") for index in range(config.layers + 1)):
        states.save("hidden.0", source.embedding()[calibration.tokens])
    for index in range(config.layers):
        # After an interruption the states before the one it reached may be gone already.
        if not states.has(f"hidden.{index + 1}") and states.has(f"hidden.{index}"):
            _forward_layer(source, calibration, index, visit)
        if not keep:
            states.drop(f"hidden.{index}")
        advance()


def _forward_layer(source: WeightSource, calibration: Calibration, index: int, visit: Visit | None) -> None:
    config, layer = source.config, source.layer(index).to(calibration.device)
    sums = {name: InputSums(config.set_shape(name)[1], calibration.device) for name in SETS}

    def project(name: str, x: Tensor) -> Tensor:
        if visit is not None:
            sums[name].add(x)
        return linear(x, layer.projections[name])

    hidden, turns = calibration.states.load(f"hidden.{index}"), calibration.turns(config)
    after = torch.cat(
        [
            run_block(config, layer, hidden[batch].to(calibration.device), turns, project).cpu()
            for batch in calibration.batches()
        ]
    )
    require_finite(index, after)
    if visit is not None:
        visit(index, layer, LayerStatistics({name: total.result() for name, total in sums.items()}, {}))
    calibration.states.save(f"hidden.{index + 1}", after)


def require_finite(index: int, hidden: Tensor) -> None:
    """Refuse states or gradients ``hidden`` of layer ``index`` that are not finite.

    Raises:
        DamagedModel: naming the layer.
    """
    bad = int((~hidden.isfinite()).sum())
    if bad:
        raise DamagedModel(
            f"layers.{index}", f"{bad} NaN or infinite activations", "finite activations", "check the model's weights"
        )


def walk_back(
    source: WeightSource, calibration: Calibration, visit: Visit, advance: Callable[[], object] = lambda: None
) -> None:
    """Tell ``visit`` of each layer, the last first, with gradients; :func:`walk_forward` kept the states.

    Raises:
        DamagedModel: gradients that are not finite.
    """
    states, count = calibration.states, source.config.layers
    if not any(states.has(f"gradient.{index}") for index in range(count + 1)):
        states.save(f"gradient.{count}", _loss_gradient(source, calibration))
        states.drop(f"hidden.{count}")
    for index in reversed(range(count)):
        if not states.has(f"gradient.{index}") and states.has(f"gradient.{index + 1}"):
            _back_layer(source, calibration, index, visit)
        states.drop(f"gradient.{index + 1}")
        states.drop(f"hidden.{index}")
        advance()


def _loss_gradient(source: WeightSource, calibration: Calibration) -> Tensor:
    """The gradient [sequences, n, hidden] of the drawn tokens' summed loss by the last layer's output."""
    config, device = source.config, calibration.device
    norm = source.norm().to(device)
    head = (source.embedding() if config.tied_head else source.head()).to(device)
    random = torch.Generator(device).manual_seed(calibration.seed)
    gradients = []
    for sequence in calibration.states.load(f"hidden.{config.layers}"):
        hidden = sequence.to(device).requires_grad_()
        normed = rms_norm(hidden, (config.hidden,), norm, config.norm_epsilon)
        p = torch.softmax(linear(normed.detach(), head), -1)
        drawn = draw(p, random)
        # By the logits it is p less one for the token drawn: in place, a vocabulary's width is held once.
        slope = p.scatter_add_(1, drawn, torch.full_like(drawn, -1, dtype=p.dtype)) @ head
        gradients.append(torch.autograd.grad(normed, hidden, slope)[0].cpu())
    return torch.stack(gradients)


def draw(p: Tensor, random: torch.Generator) -> Tensor:
    """One index [rows, 1] int64 from each row of probabilities ``p`` [rows, n], where the running sum passes a uniform
    number: far quicker than ``torch.multinomial`` on a CPU where rows are as wide as a vocabulary.
    """
    passed = p.cumsum(-1)
    at = torch.rand(p.shape[0], 1, generator=random, device=p.device) * passed[:, -1:]
    return torch.searchsorted(passed, at, right=True).clamp(max=p.shape[-1] - 1)


def _back_layer(source: WeightSource, calibration: Calibration, index: int, visit: Visit) -> None:
    config, device = source.config, calibration.device
    layer, turns = source.layer(index).to(device), calibration.turns(config)
    inputs = {name: InputSums(config.set_shape(name)[1], device) for name in SETS if calibration.inputs}
    outputs = {
        name: OutputSums(config.set_shape(name), row_groups(config, name, calibration.guide_groups), device)
        for name in SETS
    }
    hidden, gradient = calibration.states.load(f"hidden.{index}"), calibration.states.load(f"gradient.{index + 1}")
    before = []
    for batch in calibration.batches():
        seen: dict[str, tuple[Tensor, Tensor]] = {}
        start = hidden[batch].to(device).requires_grad_()
        after = run_block(config, layer, start, turns, _recorder(layer, seen))
        points = [y for _, y in seen.values()]
        slopes: Sequence[Tensor] = torch.autograd.grad(after, [start, *points], gradient[batch].to(device))
        before.append(slopes[0].cpu())
        for (name, (x, _)), slope in zip(seen.items(), slopes[1:], strict=True):
            if name in inputs:
                inputs[name].add(x)
            outputs[name].add(x, slope)
    stacked = torch.cat(before)
    require_finite(index, stacked)
    totals = {name: total.result() for name, total in outputs.items()}
    visit(index, layer, LayerStatistics({name: total.result() for name, total in inputs.items()}, totals))
    calibration.states.save(f"gradient.{index}", stacked)


def _recorder(layer: LayerWeights, seen: dict[str, tuple[Tensor, Tensor]]) -> Callable[[str, Tensor], Tensor]:
    def project(name: str, x: Tensor) -> Tensor:
        y = linear(x, layer.projections[name])
        seen[name] = x.detach(), y
        return y

    return project
