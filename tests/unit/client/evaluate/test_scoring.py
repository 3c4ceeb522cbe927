"""Perplexity and divergence against their sums."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from strataflux.client.evaluate.scoring import TOP_TOKENS, divergences, score, score_reference

TOKENS = [3, 1, 4, 1, 5]


def model(seed: int, vocabulary: int) -> "Model":
    return Model(torch.randn(len(TOKENS), vocabulary, generator=torch.Generator().manual_seed(seed)) * 2)


class Model:
    """Gives out prepared logits in order and remembers what it was asked."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.seen: list[int] = []

    def __call__(self, token: int) -> Tensor:
        self.seen.append(token)
        return self.logits[len(self.seen) - 1]


def test_scores_follow_the_definitions() -> None:
    exact, other = model(0, 50), model(1, 50)
    reference = score_reference(exact, TOKENS)
    result = score(other, reference)
    assert exact.seen == other.seen == TOKENS[:-1]
    p, q = exact.logits[:4].double().softmax(-1), other.logits[:4].double().softmax(-1)
    target = torch.tensor(TOKENS[1:])
    surprise = -q.gather(1, target[:, None]).log().mean()
    assert result.tokens == 4
    assert result.perplexity == pytest.approx(math.exp(surprise), rel=1e-5)
    assert result.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-5)
    assert result.kl_top == pytest.approx(result.kl)
    assert reference.score.kl == 0
    expected = math.exp(-p.gather(1, target[:, None]).log().mean())
    assert reference.score.perplexity == pytest.approx(expected, rel=1e-5)


def test_a_model_does_not_diverge_from_itself() -> None:
    result = score(model(0, 3000), score_reference(model(0, 3000), TOKENS))
    assert result.kl == pytest.approx(0, abs=1e-6)
    assert result.kl_top == pytest.approx(0, abs=1e-6)


def test_top_divergence_keeps_1024_tokens_apart() -> None:
    log_p, log_q = (model(seed, 3000).logits[0].log_softmax(-1) for seed in (0, 1))
    exact, top = divergences(log_p, log_q)
    p, q = log_p.double().exp(), log_q.double().exp()
    order = p.argsort(descending=True)
    kept, rest = order[:TOP_TOKENS], order[TOP_TOKENS:]
    merged_p, merged_q = (torch.cat((d[kept], d[rest].sum()[None])) for d in (p, q))
    assert top == pytest.approx(float((merged_p * (merged_p / merged_q).log()).sum()), rel=1e-6)
    assert exact == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)
    assert top < exact


def test_certain_predictions_stay_finite() -> None:
    sure = torch.full((3000,), -1000.0)
    sure[7] = 0
    exact, top = divergences(sure.log_softmax(-1), torch.zeros(3000).log_softmax(-1))
    assert exact == pytest.approx(math.log(3000), rel=1e-5)
    assert top == pytest.approx(math.log(3000), rel=1e-5)


def test_the_first_tokens_can_be_left_out() -> None:
    result = score(model(1, 20), score_reference(model(0, 20), TOKENS))
    later = result.without_first(3)
    assert later.tokens == 1
    assert later.kl == pytest.approx(result.divergence[3])
    assert np.array_equal(result.without_first(0).surprise, result.surprise)
    with pytest.raises(ValueError, match="4"):
        result.without_first(4)


def test_a_text_of_one_token_predicts_nothing() -> None:
    with pytest.raises(ValueError, match="1 tokens"):
        score_reference(model(0, 20), [1])


def test_each_token_is_reported() -> None:
    calls: list[str] = []
    reference = score_reference(model(0, 20), TOKENS, lambda: calls.append("reference"))
    score(model(1, 20), reference, lambda: calls.append("model"))
    assert calls == ["reference"] * 4 + ["model"] * 4
