"""Evaluate codes in two tiers over windows of a text: the resident tier, the whole code, and a part of it refined.

Resident and whole codes are functions of the text, and so is the refined one if nothing misses; through a daemon it
depends on what was resident at each step, and goes token by token from an empty sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from strataflux.cache_policy.miss import MissPolicy
from strataflux.client.evaluate.compare import join_scores
from strataflux.client.evaluate.dense import score_logits
from strataflux.client.evaluate.fsq import FsqTiers, fsq_logits, recall_of_tiers
from strataflux.client.evaluate.scoring import Reference, Score, score
from strataflux.client.fsq_blocks import BLOCK_TOKENS
from strataflux.client.fsq_refined import TieredModel, TierOptions
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.runtime.threads import decoding_threads
from strataflux.client.session_stats import SessionStats
from strataflux.kernels.fsq import FsqLayer
from strataflux.kernels.fsq_nested import FsqTier

__all__ = ["TierCounts", "TierEvaluation", "evaluate_tiers"]

_LEAST_RECALL = 512
"""Tokens of a window from which recall is told: its first 256 are left out of it."""


@dataclass(frozen=True)
class TierCounts:
    """What came of the look-ups of a session."""

    lookups: int
    hits: int
    """Of the session: what was waited for counts as the miss it was."""
    blocks_unrefined: int
    session: SessionStats

    @property
    def hit_rate(self) -> float:
        """Hits of all groups selected; 0 before the first."""
        return self.hits / self.lookups if self.lookups else 0.0


@dataclass(frozen=True)
class TierEvaluation:
    """Scores over the same tokens, joined over windows."""

    coarse: Score
    """Of the resident tier alone."""
    whole: Score
    refined: Score
    bytes_resident: int
    """Of one window's codes."""
    recall: list[float]
    """For each layer, the share of the groups that fine keys would select which coarse keys select; empty for windows
    of less than 512 tokens.
    """
    counts: TierCounts | None
    """None if nothing missed."""

    @property
    def recovered(self) -> float:
        """Of the divergence between the resident tier and the whole code, the share that refinement takes away."""
        return (self.coarse.kl - self.refined.kl) / (self.coarse.kl - self.whole.kl)


def evaluate_tiers(
    weights: DecoderWeights,
    tiers: Sequence[FsqTier],
    references: Sequence[Reference],
    options: TierOptions,
    runtime_dir: Path | None,
    *,
    miss: MissPolicy,
    on_token: Callable[[], object],
) -> TierEvaluation:
    """Score every window, each a sequence of its own.

    Args:
        weights: the model's; with a daemon in this process's memory.
        tiers: one for each layer, on the weights' device.
        references: windows of one length, and what the same weights with an exact cache say of them.
        options: what is refined.
        runtime_dir: of the daemon; None scores as if nothing missed.
        miss: what to do about absent records.
        on_token: called after each token that was decoded through the daemon.

    Raises:
        DaemonUnavailableError, RefusedError: as attaching.
    """
    context = len(references[0].tokens) - 1
    dense = [FsqTiers(one.coarse, one.whole, options.fraction, options.group_tokens, BLOCK_TOKENS) for one in tiers]
    counts = None
    if runtime_dir is None:
        refined = _at_once(weights, dense, references)
    else:
        with TieredModel.attach(weights, tiers, options, context=context, runtime_dir=runtime_dir, miss=miss) as model:
            refined = join_scores([_through(model, reference, on_token) for reference in references])
            counts = _counted(model)
    return TierEvaluation(
        _at_once(weights, [one.coarse for one in tiers], references),
        _at_once(weights, [one.whole for one in tiers], references),
        refined,
        context * sum(one.grid.resident.nbytes for one in tiers),
        recall_of_tiers(weights, dense, references[0].tokens[:-1]) if context >= _LEAST_RECALL else [],
        counts,
    )


def _at_once(weights: DecoderWeights, codes: Sequence[FsqLayer | FsqTiers], references: Sequence[Reference]) -> Score:
    return join_scores([score_logits(fsq_logits(weights, codes, one.tokens[:-1]), one) for one in references])


def _through(model: TieredModel, reference: Reference, on_token: Callable[[], object]) -> Score:
    model.reset()
    with decoding_threads():
        return score(model.step, reference, on_token)


def _counted(model: TieredModel) -> TierCounts:
    assert model.cache.buffer.nbytes == model.cache.nbytes, "the last window is full"
    session = model.stats()
    return TierCounts(model.cache.statistics().lookups, session.kv_hits, model.cache.blocks.unrefined, session)
