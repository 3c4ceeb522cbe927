"""Evaluate a low-bit KV cache over windows of a text: exact, in low bits alone, and refined through a daemon.

The last tokens of each window are scored after a prefill of the others, which is computed once and given to all. The
exact cache and the low-bit one alone are functions of the text; so is the refined one if nothing misses (*oracle*).
Through a daemon it depends on what was resident at each step, and goes token by token.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from strataflux.cache_policy.miss import MissPolicy
from strataflux.client.errors import InputError
from strataflux.client.evaluate.compare import join_scores
from strataflux.client.evaluate.kv import DenseKv, Prefilled, prefill, score_exact, score_low_bit
from strataflux.client.evaluate.scoring import Reference, Score, score
from strataflux.client.kv_options import KvOptions, blocks_for
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.cache import require_all_seen
from strataflux.client.runtime.models import DecoderWeights, ModelConfig
from strataflux.client.runtime.threads import decoding_threads
from strataflux.client.session_stats import SessionStats

__all__ = [
    "SCORED_TOKENS",
    "KvEvaluation",
    "KvProgress",
    "cut_kv_windows",
    "evaluate_kv",
    "resident_bytes",
    "scored_tokens",
]

SCORED_TOKENS = 256
"""Tokens at the end of a window that are scored."""


class KvProgress(Protocol):
    """Is told of each piece of work that is done."""

    def layer(self) -> object:
        """A layer of a prefill."""

    def block(self) -> object:
        """A block that was handed over to the daemon."""

    def token(self) -> object:
        """A token that was decoded through the daemon."""


@dataclass
class KvEvaluation:
    """Scores over the same tokens, joined over windows, and what came of the refined one's session."""

    reference: Score
    base: Score
    refined: Score
    bytes_resident: int
    """Of one window's cache at its end: encoded tiles and 256 tokens in float16."""
    lookups: int = 0
    """Groups selected; each is one look-up."""
    hits: int = 0
    blocks_unrefined: int = 0
    """Blocks that nobody took in time or that were refused."""
    tokens_per_second: float | None = None
    session: SessionStats | None = None
    """None for the oracle."""

    @property
    def hit_rate(self) -> float:
        """Hits of all groups selected; 1 for the oracle."""
        if self.session is None:
            return 1.0
        return self.hits / self.lookups if self.lookups else 0.0


@dataclass
class _Parts:
    reference: list[Score] = field(default_factory=list)
    base: list[Score] = field(default_factory=list)
    refined: list[Score] = field(default_factory=list)


def scored_tokens(context: int) -> int:
    """How many tokens of a window of ``context`` are scored: all but one of a very short one."""
    return min(SCORED_TOKENS, context - 1)


def cut_kv_windows(
    subject: object, tokens: Sequence[int], context: int, windows: int, starts: Sequence[int] | None
) -> list[list[int]]:
    """Windows of ``context + 1`` tokens, the last one only as what comes next: at ``starts``, or one after the other.

    Raises:
        InputError: the text is too short.
    """
    begins = list(starts) if starts else [i * (context + 1) for i in range(windows)]
    needed = max(begins) + context + 1
    if len(tokens) < needed:
        expected = f"at least {needed}: a window of {context} tokens and the next one at {max(begins)}"
        raise InputError(subject, f"{len(tokens)} tokens", expected, "lower --context or --windows, or give more text")
    return [list(tokens[begin : begin + context + 1]) for begin in begins]


def resident_bytes(config: ModelConfig, options: KvOptions, context: int) -> int:
    """What a sequence of ``context`` tokens keeps resident: its tiles, and 256 tokens in float16."""
    form = options.form(config.head_dim)
    heads = config.layers * config.kv_heads
    return heads * (blocks_for(context) * form.tile_bytes + 2 * 128 * 2 * 2 * config.head_dim)


def evaluate_kv(
    weights: DecoderWeights,
    windows: Sequence[Sequence[int]],
    options: KvOptions,
    runtime_dir: Path | None,
    *,
    miss: MissPolicy,
    progress: KvProgress,
    ahead: float = 0.0,
) -> KvEvaluation:
    """Score every window, each a sequence of its own.

    Args:
        weights: the model's; the reference has the same with an exact cache.
        windows: tokens of one length, of :func:`cut_kv_windows`.
        options: the cache.
        runtime_dir: of the daemon; None scores as if nothing missed.
        miss: what to do about absent records.
        progress: told of what is done.
        ahead: how many blocks before a layer what it will probably select is asked for; 0 for never.

    Raises:
        MisuseError: there is no such format or distance, or a layer's window is shorter than those of the text.
        DaemonUnavailableError, RefusedError: as attaching.
    """
    context = len(windows[0]) - 1
    require_all_seen(weights.config, context, "--kv")
    form = options.form(weights.config.head_dim)
    parts = _Parts()
    with ExitStack() as stack:
        model = None
        if runtime_dir is not None:
            attached = RefinedModel.attach(
                None, weights, context=context, runtime_dir=runtime_dir, miss=miss, kv=options, ahead=ahead
            )
            model = stack.enter_context(attached)
        for window in windows:
            split = context - scored_tokens(context)
            prefilled = prefill(weights, window[:split], progress.layer)
            reference = score_exact(weights, prefilled, window[split:])
            dense = DenseKv(weights, prefilled, form)
            parts.reference.append(reference.score)
            parts.base.append(score_low_bit(dense, reference, 0 * options.fraction, options.group_tokens))
            if model is None:
                settings = options.fraction, options.group_tokens, options.select_lag * options.kept_steps
                parts.refined.append(score_low_bit(dense, reference, *settings))
            else:
                del dense
                parts.refined.append(_score_through(model, prefilled, reference, progress))
        found = KvEvaluation(
            join_scores(parts.reference),
            join_scores(parts.base),
            join_scores(parts.refined),
            resident_bytes(weights.config, options, context),
        )
        return found if model is None else _with_counts(found, model)


def _score_through(model: RefinedModel, prefilled: Prefilled, reference: Reference, progress: KvProgress) -> Score:
    """Token by token after a prefill that is already there."""
    assert model.kv is not None
    model.reset()
    model.kv.on_block = progress.block
    for layer, (keys, values) in enumerate(zip(prefilled.keys, prefilled.values, strict=True)):
        model.kv.fill_rotated(layer, keys, values)
    model.kv.end_fill(len(prefilled.tokens))
    with decoding_threads():
        return score(model.step, reference, progress.token)


def _with_counts(found: KvEvaluation, model: RefinedModel) -> KvEvaluation:
    assert model.kv is not None
    assert model.kv.nbytes == found.bytes_resident, (model.kv.nbytes, found.bytes_resident)
    counted = model.kv.statistics()
    found.session = model.stats()
    # The session's hits: what was waited for counts as the miss it was.
    found.lookups, found.hits = counted.lookups, found.session.kv_hits
    found.blocks_unrefined = model.kv.unrefined
    found.tokens_per_second = model.steps / model.seconds
    return found
