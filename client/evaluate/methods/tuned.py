"""Train the factors of other methods as codes are trained, so that what is compared is the method and not the training.

Loss, rates and text are those of ``client/prepare/fsq_tune.py``; what a method rounds is not rounded meanwhile, since
its grid is put on afterwards: by the ranges of the calibration text, behind the trained and rounded layers before it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from strataflux.client.evaluate.methods.base import Making, Rebuild
from strataflux.client.evaluate.methods.factors import Factors
from strataflux.client.evaluate.methods.fitting import Fit, fit_layers
from strataflux.client.prepare.fsq_tune import TuneSettings, Tuning
from strataflux.client.prepare.fsq_tune_code import TrainedEncoder
from strataflux.client.prepare.fsq_tune_text import Lesson
from strataflux.client.runtime.models import DecoderWeights

__all__ = ["FactorTuning", "Finish", "fit_factors"]

Finish = Callable[[Factors, Tensor], Rebuild]
"""What rounds the latents of a layer's factors, given inputs [tokens, hidden] in the model that they will work in."""


class _TrainedFactors(nn.Module):
    """One layer's factors in units of their sizes, as codes are trained."""

    def __init__(self, factors: Factors) -> None:
        super().__init__()
        self.groups = factors.groups
        self.encoder = TrainedEncoder(factors.encoder, factors.encoder_bias)
        # A decoder is encoded by its columns: each in units of its size, and a bias against all of a row.
        self.columns = factors.decoder.square().mean(0, keepdim=True).sqrt().clamp_min(1e-12)
        self.shift = factors.decoder.square().sum(1).sqrt()
        outputs, width = factors.decoder.shape
        block = torch.ones(outputs // self.groups, width // self.groups, device=factors.decoder.device)
        self.mask: Tensor = torch.block_diag(*[block] * self.groups)  # type: ignore[no-untyped-call]
        self.decoder = nn.Parameter(factors.decoder / self.columns)
        self.decoder_bias = nn.Parameter(factors.decoder_bias / self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.encoder(x), self.decoder * self.columns * self.mask, self.decoder_bias * self.shift)

    @torch.no_grad()
    def result(self) -> Factors:
        decoder = self.decoder * self.columns * self.mask
        return Factors(*self.encoder.result(), decoder, self.decoder_bias * self.shift, self.groups)


class FactorTuning(Tuning[Factors]):
    """A run over factors."""

    def __init__(
        self,
        weights: DecoderWeights,
        factors: Sequence[Factors],
        settings: TuneSettings,
        state: Path | None = None,
        held_out: Sequence[Tensor] = (),
    ) -> None:
        """As :class:`~strataflux.client.prepare.fsq_tune.Tuning`, beginning at ``factors``."""
        super().__init__(weights, map(_TrainedFactors, factors), settings, state, held_out)

    def _loss(self, lesson: Lesson, number: int | None) -> Tensor:  # noqa: ARG002 (every step is like the others)
        return self._divergence(lesson, self._replaced)

    def _replaced(self, index: int, x: Tensor, _: Tensor) -> Tensor:
        made: Tensor = self._parts[index](x)
        return made


def fit_factors(
    making: Making,
    given: Tensor,
    fit: Callable[[Tensor, Tensor, Tensor], Factors],
    finish: Finish,
    *,
    sequential: bool,
) -> list[Rebuild]:
    """Factors of every layer, trained if ``making`` says how, and rounded.

    Args:
        making: the model, and what trains.
        given: [sequences, n] int64 to fit on.
        fit: as :data:`~strataflux.client.evaluate.methods.fitting.Fit`, but for what it makes.
        finish: what rounds.
        sequential: whether layers see what the rounded ones before them made of the text; those that were trained do.
    """

    def at_once(matrix: Tensor, exact: Tensor, fed: Tensor) -> Rebuild:
        return finish(fit(matrix, exact, fed), fed)

    if making.tune is None:
        return fit_layers(making, given, at_once, sequential=sequential)
    made = list[Factors]()

    def keep(matrix: Tensor, exact: Tensor, fed: Tensor) -> Rebuild:
        made.append(fit(matrix, exact, fed))
        return made[-1].rebuild

    fit_layers(making, given, keep, sequential=sequential)
    trained = iter(making.tune(made))
    rounded: Fit = lambda _, __, fed: finish(next(trained), fed)  # noqa: E731
    return fit_layers(making, given, rounded, sequential=True)
