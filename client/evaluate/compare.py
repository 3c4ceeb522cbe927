"""Score one text with several weights: the reference's, the low-bit ones alone, and refined through a daemon.

Teacher forcing makes the unrefined ones a function of the text, computed in one pass. The refined ones depend on what
was resident at each step and go token by token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from strataflux.client.errors import InputError, MisuseError
from strataflux.client.evaluate.scoring import Reference, Score, score, score_reference
from strataflux.client.runtime.forward import forward_text
from strataflux.client.runtime.models import DecoderWeights, ModelConfig

__all__ = [
    "COLD_TOKENS",
    "Row",
    "cut_windows",
    "join_scores",
    "reference_of",
    "require_same_dimensions",
    "score_unrefined",
]

COLD_TOKENS = 64
"""Means are also given without so many first tokens, in which a cache that starts empty fills."""


@dataclass(frozen=True)
class Row:
    """What came of one way to decode."""

    score: Score
    against_reference: bool = True
    """Whether divergences are from the unquantized model; if not, they mean nothing and are left out."""
    tokens_per_second: float | None = None
    """Of token-by-token steps; None where there were none."""
    weight_hit_rate: float | None = None
    """Look-ups that were hits, of all; a record that was waited for counts as a miss."""
    weight_resident_rate: float | None = None
    """Channels that refined without having been selected, for each that was looked up."""
    bytes_read: int | None = None
    """Read from the store by the daemon meanwhile."""
    kv_hit_rate: float | None = None
    """The same of KV groups; None with an exact KV cache."""

    @property
    def kl(self) -> float | None:
        """Mean divergence from the reference over all scored tokens."""
        return self.score.kl if self.against_reference else None

    @property
    def kl_without_first_64(self) -> float | None:
        """The same without the first 64 tokens; None if there are no others."""
        if not self.against_reference or self.score.tokens <= COLD_TOKENS:
            return None
        return self.score.without_first(COLD_TOKENS).kl

    def to_json(self) -> dict[str, object]:
        """This row as a JSON object."""
        return {
            "ppl": self.score.perplexity,
            "kl": self.kl,
            "kl_top_1024": self.score.kl_top if self.against_reference else None,
            "kl_without_first_64": self.kl_without_first_64,
            "tokens_per_second": self.tokens_per_second,
            "weight_hit_rate": self.weight_hit_rate,
            "weight_resident_rate": self.weight_resident_rate,
            "kv_hit_rate": self.kv_hit_rate,
            "bytes_read": self.bytes_read,
        }


def cut_windows(subject: object, tokens: Sequence[int], scored: int, windows: int) -> list[list[int]]:
    """``windows`` stretches of ``scored + 1`` tokens, one after the other; all but the first of each are scored.

    Raises:
        InputError: the text is too short.
    """
    needed = windows * (scored + 1)
    if len(tokens) < needed:
        raise InputError(
            subject,
            f"{len(tokens)} tokens",
            f"at least {needed}: {windows} windows of {scored} scored tokens and the one before",
            "lower --tokens or --windows, or give a longer text",
        )
    return [list(tokens[start : start + scored + 1]) for start in range(0, needed, scored + 1)]


def require_same_dimensions(reference: ModelConfig, prepared: ModelConfig) -> None:
    """Refuse a reference that cannot be the model that was prepared.

    Raises:
        MisuseError: its dimensions differ.
    """
    if _dimensions(reference) != _dimensions(prepared):
        raise MisuseError(
            "--reference",
            f"dimensions {_dimensions(reference)}",
            f"{_dimensions(prepared)}, as prepared",
            "pass the model that was prepared",
        )


def _dimensions(config: ModelConfig) -> tuple[int, ...]:
    # Integers only: two files of one model may round its constants differently.
    heads = (config.heads, config.kv_heads, config.head_dim)
    return config.vocabulary, config.hidden, config.intermediate, config.layers, *heads


def reference_of(weights: DecoderWeights, tokens: Sequence[int]) -> Reference:
    """What ``weights`` predict over ``tokens`` [n + 1], in one pass."""
    logits = iter(forward_text(weights, tokens[:-1]))
    return score_reference(lambda _: next(logits), tokens)


def score_unrefined(
    weights: DecoderWeights, reference: Reference, on_token: Callable[[], object] = lambda: None
) -> Score:
    """Score ``weights`` alone over the reference's text, in one pass."""
    logits = iter(forward_text(weights, reference.tokens[:-1]))
    return score(lambda _: next(logits), reference, on_token)


def join_scores(scores: Sequence[Score]) -> Score:
    """All tokens of ``scores`` as one."""
    return Score(
        np.concatenate([one.surprise for one in scores]),
        np.concatenate([one.divergence for one in scores]),
        np.concatenate([one.divergence_top for one in scores]),
    )
