"""Evaluate a prepared model over windows of a text, through a daemon that serves its store."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from strataflux.cache_policy.miss import MissPolicy
from strataflux.client.control import Control
from strataflux.client.evaluate.compare import Row, join_scores, reference_of, require_same_dimensions, score_unrefined
from strataflux.client.evaluate.scoring import Score, score
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.runtime.threads import decoding_threads
from strataflux.client.session_stats import SessionStats

__all__ = ["Evaluation", "evaluate", "refined_row"]


@dataclass(frozen=True)
class Evaluation:
    """Three rows over the same tokens, and what the session counted."""

    reference: Row | None
    base: Row
    refined: Row
    session: SessionStats


def evaluate(
    prepared: PreparedModel,
    reference: DecoderWeights | None,
    windows: Sequence[Sequence[int]],
    runtime_dir: Path,
    *,
    k: int | None,
    miss: MissPolicy,
    on_token: Callable[[], object],
    ahead: float = 0.0,
    shift: Mapping[str, float] | None = None,
    residents: int = 0,
) -> Evaluation:
    """Score every window with the reference, the base, and refined; each window is a sequence of its own.

    Args:
        prepared: the model.
        reference: the unquantized weights; without them rows have perplexity and no divergence.
        windows: tokens, the first of each given and the others scored.
        runtime_dir: of the daemon.
        k: channels per 1,024; None takes the prepared model's.
        miss: what to do about absent records.
        on_token: called after each refined token.
        ahead: how many blocks before a layer what it will probably select is asked for; 0 for never.
        shift: blocks of fetch lead or lag of each projection set; None takes the prepared model's.
        residents: channels per 1,024 beyond ``k`` that refine, too, where they are present.

    Raises:
        MisuseError: the reference is of other dimensions than the prepared model.
        DaemonUnavailableError, RefusedError: as attaching.
    """
    if reference is not None:
        require_same_dimensions(reference.config, prepared.config)
    weights = DecoderWeights.read(prepared)
    scores: dict[str, list[Score]] = {"reference": [], "base": [], "refined": []}
    context = max(len(window) for window in windows)
    attached = RefinedModel.attach(
        prepared,
        weights,
        context=context,
        runtime_dir=runtime_dir,
        k=k,
        miss=miss,
        ahead=ahead,
        shift=shift,
        residents=residents,
    )
    with attached as model, Control(runtime_dir) as control:
        before = control.stats().reads.bytes
        for window in windows:
            # Without a reference the base stands in for it: surprise does not depend on what it is compared with.
            exact = reference_of(reference or weights, window)
            scores["reference"].append(exact.score)
            scores["base"].append(score_unrefined(weights, exact) if reference else exact.score)
            model.reset()
            with decoding_threads():
                scores["refined"].append(score(model.step, exact, on_token))
        joined = {name: join_scores(parts) for name, parts in scores.items()}
        compared = reference is not None
        return Evaluation(
            Row(joined["reference"]) if compared else None,
            Row(joined["base"], compared),
            refined_row(joined["refined"], model, control.stats().reads.bytes - before, compared=compared),
            model.stats(),
        )


def refined_row(result: Score, model: RefinedModel, bytes_read: int, *, compared: bool = True) -> Row:
    """The row of what ``model`` decoded until now."""
    stats = model.stats()
    lookups, hits = stats.lookups - stats.kv_lookups, stats.hits - stats.kv_hits
    return Row(
        result,
        compared,
        tokens_per_second=model.steps / model.seconds,
        weight_hit_rate=hits / lookups if lookups else 0.0,
        weight_resident_rate=model.residents / lookups if lookups else 0.0,
        bytes_read=bytes_read,
        kv_hit_rate=None if model.kv is None else stats.kv_hits / max(1, model.kv.statistics().lookups),
    )
