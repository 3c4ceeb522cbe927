"""Score a text token by token: perplexity, and divergence from the unquantized model.

The model is given each token of the text in turn (teacher forcing) and its prediction of the next one is
judged. With p the reference's distribution and q the model's, in natural logarithms and averaged over
scored tokens:

- ``kl`` is exact, ``Σ p (log p - log q)`` over the whole vocabulary;
- ``kl_top`` keeps the 1,024 tokens most probable under p apart and treats all others as one, as papers
report it. It
  is never larger than ``kl``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strataflux.client.errors import MisuseError

__all__ = ["TOP_TOKENS", "Advance", "Reference", "Score", "divergences", "score", "score_reference"]

TOP_TOKENS = 1024
"""Tokens that ``kl_top`` keeps apart."""

Advance = Callable[[int], Tensor]
"""Appends a token and returns the next one's logits [vocabulary], as :meth:`Decoder.step` does."""


@dataclass(frozen=True)
class Score:
    """Each scored token's numbers, [n] float64, and their means."""

    surprise: NDArray[np.float64]
    """Negative log-probability of the token that came, in nats."""
    divergence: NDArray[np.float64]
    """Exact KL from the reference; zeros for the reference itself."""
    divergence_top: NDArray[np.float64]
    """KL with the 1,024 most probable tokens kept apart."""

    @property
    def tokens(self) -> int:
        """How many tokens were scored."""
        return self.surprise.size

    @property
    def perplexity(self) -> float:
        """The exponential of the mean surprise."""
        return math.exp(float(self.surprise.mean()))

    @property
    def kl(self) -> float:
        """Mean exact KL, in nats a token."""
        return float(self.divergence.mean())

    @property
    def kl_top(self) -> float:
        """Mean KL over the 1,024 most probable tokens and the rest as one, in nats a token."""
        return float(self.divergence_top.mean())

    def without_first(self, count: int) -> "Score":
        """The same without the first ``count`` scored tokens, while caches were still cold.

        Raises:
            MisuseError: nothing would be left.
        """
        if not 0 <= count < self.tokens:
            raise MisuseError("without_first", f"{count}", f"less than the {self.tokens} scored", "score more tokens")
        return Score(self.surprise[count:], self.divergence[count:], self.divergence_top[count:])


@dataclass(frozen=True)
class Reference:
    """The unquantized model's predictions over one text, computed once: n · vocabulary · 4 bytes."""

    tokens: tuple[int, ...]
    """The text, n + 1 tokens; all but the first are scored."""
    log_probabilities: Tensor
    """[n, vocabulary] float32."""
    score: Score


def score_reference(
    advance: Advance, tokens: Sequence[int], on_token: Callable[[], object] = lambda: None
) -> Reference:
    """Predictions of the reference model over ``tokens``; ``on_token`` is called after each of
    ``len(tokens) - 1``.

    Raises:
        MisuseError: fewer than two tokens.
    """
    if len(tokens) < 2:
        raise MisuseError("text", f"{len(tokens)} tokens", "at least 2", "score a longer text")
    rows = []
    for token in tokens[:-1]:
        rows.append(torch.log_softmax(advance(token), -1))
        on_token()
    log_probabilities = torch.stack(rows)
    targets = torch.tensor(tokens[1:], device=log_probabilities.device)
    surprise = -log_probabilities.gather(1, targets[:, None]).flatten().double().cpu().numpy()
    zeros = np.zeros(len(rows))
    return Reference(tuple(tokens), log_probabilities, Score(surprise, zeros, zeros))


def score(advance: Advance, reference: Reference, on_token: Callable[[], object] = lambda: None) -> Score:
    """Score another model over the reference's text.

    Args:
        advance: a step of the model, at the start of a sequence. Whatever a step needs around it is inside.
        reference: the text and what the unquantized model predicts.
        on_token: called after each scored token.
    """
    surprise, divergence, divergence_top = [], [], []
    following = zip(reference.tokens[:-1], reference.tokens[1:], reference.log_probabilities, strict=True)
    for token, target, log_p in following:
        log_q = torch.log_softmax(advance(token), -1)
        surprise.append(-float(log_q[target]))
        exact, top = divergences(log_p, log_q)
        divergence.append(exact)
        divergence_top.append(top)
        on_token()
    return Score(np.array(surprise), np.array(divergence), np.array(divergence_top))


def divergences(log_p: Tensor, log_q: Tensor) -> tuple[float, float]:
    """(``kl``, ``kl_top``) of one token, for log-probabilities [vocabulary]; see the module's formulas."""
    p = log_p.double().exp()
    exact = float((p * (log_p.double() - log_q)).sum())
    if log_p.numel() <= TOP_TOKENS:
        return exact, exact
    chosen = log_p.topk(TOP_TOKENS).indices
    apart = float((p[chosen] * (log_p[chosen].double() - log_q[chosen])).sum())
    # The rest's mass is summed from its members: as a difference from 1 it would be lost in rounding.
    q = log_q.double().exp()
    p[chosen], q[chosen] = 0, 0
    rest_p, rest_q = float(p.sum()), float(q.sum())
    return exact, apart + (rest_p * math.log(rest_p / rest_q) if rest_p > 0 and rest_q > 0 else 0.0)
