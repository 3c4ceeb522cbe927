"""Finetune codes in two tiers: one encoder, a decoder for whole codes and one for what is resident (ours).

Whatever part of a text is refined, the model should come as near to itself as it can. So in each layer and sequence
some tokens are whole and the others are what is resident of them, drawn anew at each step; the share of whole ones is
anything from 1/32 to all. Whole are rather those that coarse keys attend to, as they will be when a daemon refines
them: what a few positions attend to, as weights of a draw without replacement. The loss is the divergence of this
mixture, and a quarter of that of the resident tier alone.

The mixture costs no more than one tier, since a token is whole for all positions or none; when decoding, each position
chooses its own.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from strataflux.client.prepare.fsq_tune import TuneSettings, Tuning
from strataflux.client.prepare.fsq_tune_code import TrainedTier
from strataflux.client.prepare.fsq_tune_text import Lesson
from strataflux.client.runtime.models import DecoderWeights
from strataflux.kernels.fsq_nested import FsqTier

__all__ = ["TierTuning", "draw_whole"]

_LEAST_SHARE = 1 / 32
_CHECKED_SHARE = 1 / 16
_COARSE_WEIGHT = 0.25
_ASKED = 32
"""Positions whose attention decides which tokens are whole."""


class TierTuning(Tuning[FsqTier]):
    """A run over codes in two tiers."""

    def __init__(
        self,
        weights: DecoderWeights,
        tiers: Sequence[FsqTier],
        settings: TuneSettings,
        state: Path | None = None,
        held_out: Sequence[Tensor] = (),
    ) -> None:
        """As :class:`Tuning`, beginning at ``tiers``; held-out text has 1/16 of its tokens whole."""
        super().__init__(weights, map(TrainedTier, tiers), settings, state, held_out)

    def _loss(self, lesson: Lesson, number: int | None) -> Tensor:
        tokens = lesson.tokens
        shares = _shares(tokens.shape[0], number).to(tokens.device)

        def mixed(index: int, x: Tensor, queries: Tensor) -> Tensor:
            coarse, whole = self._parts[index](x)
            # Made of the step's number, so that a layer which is computed again for its gradients draws the same.
            seed = (0 if number is None else number + 1) * self._model.config.layers + index
            random = torch.Generator(tokens.device).manual_seed(seed)
            with torch.no_grad():
                asked = torch.randint(0, tokens.shape[1], (_ASKED,), device=tokens.device, generator=random)
                attended = self._model.attended(index, queries, coarse, asked)
                chosen = draw_whole(attended, shares, random)
            return torch.where(chosen[..., None], whole, coarse)

        def resident(index: int, x: Tensor, _: Tensor) -> Tensor:
            coarse: Tensor = self._parts[index](x)[0]
            return coarse

        return self._divergence(lesson, mixed) + _COARSE_WEIGHT * self._divergence(lesson, resident)


def _shares(count: int, number: int | None) -> Tensor:
    """Of the tokens of each of ``count`` sequences, how many are whole in step ``number``."""
    if number is None:
        return torch.full((count,), _CHECKED_SHARE)
    random = torch.Generator().manual_seed(number)
    # One in each of as many equal parts of the logarithm, so that a batch has all kinds.
    along = (torch.arange(count) + torch.rand(count, generator=random)) / count
    shares: Tensor = _LEAST_SHARE**along
    return shares


def draw_whole(attended: Tensor, shares: Tensor, random: torch.Generator) -> Tensor:
    """Which tokens are whole [sequences, n] bool: of each sequence a share, drawn without replacement.

    Args:
        attended: [sequences, n], the weight of each token; the draw favours what is attended to.
        shares: [sequences], of the n tokens; rounded up.
        random: on their device.
    """
    uniform = torch.rand(attended.shape, generator=random, device=attended.device).clamp_min(1e-9)
    # The largest of log w + Gumbel noise are a draw by the weights w.
    keys = attended.clamp_min(1e-9).log() - (-uniform.log()).log()
    ranks = keys.argsort(-1, descending=True).argsort(-1)
    return ranks < (shares * attended.shape[1]).ceil()[:, None]
