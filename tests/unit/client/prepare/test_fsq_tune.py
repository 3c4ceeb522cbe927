"""What training is made of: the loss, the frozen model around codes, and the text that comes again and again."""

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from strataflux.client.prepare import fsq_tune_loss
from strataflux.client.prepare.fsq import FsqSettings, convert
from strataflux.client.prepare.fsq_tune import FsqTuning, TuneSettings
from strataflux.client.prepare.fsq_tune_loss import head_divergence
from strataflux.client.prepare.fsq_tune_model import FrozenModel, continue_text, write_more
from strataflux.client.prepare.fsq_tune_text import Course, Lesson, overlapping
from strataflux.client.runtime.forward import forward_text
from strataflux.client.runtime.models import DecoderWeights

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 258, (24, 60), generator=torch.Generator().manual_seed(0))


def test_divergence_and_its_gradient_are_those_of_whole_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsq_tune_loss, "_ROWS_CPU", 3)
    random = torch.Generator().manual_seed(1)
    found = torch.randn(2, 5, 8, generator=random, requires_grad=True)
    wanted, head = torch.randn(2, 5, 8, generator=random), torch.randn(17, 8, generator=random)
    log_q, log_p = (torch.log_softmax(states @ head.T, -1) for states in (found, wanted))
    expected = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    (gradient,) = torch.autograd.grad(3 * expected, found)
    loss = head_divergence(found, wanted, head)
    (made,) = torch.autograd.grad(3 * loss, found)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(made, gradient, atol=1e-6)
    assert float(head_divergence(wanted, wanted, head)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("architecture", "windows"), [("llama", ()), ("qwen3", ()), ("qwen3", (24, 0))])
def test_the_frozen_model_is_the_model(tiny_source: Any, architecture: str, windows: tuple[int, ...]) -> None:
    weights = DecoderWeights.read(tiny_source.with_config(architecture=architecture, windows=windows))
    model = FrozenModel(weights)
    expected = forward_text(weights, TOKENS[0].tolist())
    made = model.states(TOKENS[:2])[0].float() @ weights.head.T
    assert (made - expected).norm() < 0.03 * expected.norm()


def test_only_layers_that_attend_to_all_are_replaced(tiny_source: Any) -> None:
    weights = DecoderWeights.read(tiny_source.with_config(windows=(24, 0)))
    asked: list[int] = []

    def replaced(index: int, x: Tensor, queries: Tensor) -> Tensor:
        asked.append(index)
        return x @ weights.layers[1].projections["qkv"][queries.shape[-1] :].T

    model = FrozenModel(weights)
    made, own = model.states(TOKENS[:2], replaced).float(), model.states(TOKENS[:2]).float()
    assert asked == [0]
    assert (made - own).norm() < 0.03 * own.norm()


@pytest.mark.parametrize("windows", [(), (16, 0)])
def test_a_model_continues_as_it_predicts(tiny_source: Any, windows: tuple[int, ...]) -> None:
    weights = DecoderWeights.read(tiny_source.with_config(windows=windows))
    sharp = FrozenModel(replace(weights, head=weights.head * 100))
    text = continue_text(sharp, TOKENS[:3, :7], 40, seed=5)
    assert torch.equal(text[:, :7], TOKENS[:3, :7])
    for row in text:
        logits = forward_text(weights, row.tolist()[:-1])[6:]
        chosen = logits.gather(1, row[7:, None]).flatten()
        # So sharp a head draws what is likeliest, but for what bfloat16 cannot tell apart.
        assert (logits.amax(1) - chosen < 0.05 * logits.std(1)).all()


def test_a_continuation_is_a_draw(tiny_source: Any) -> None:
    model = FrozenModel(DecoderWeights.read(tiny_source))
    prompts = TOKENS[:1, :7].expand(400, 7)
    text = continue_text(model, prompts, 8, seed=5)
    assert torch.equal(text, continue_text(model, prompts, 8, seed=5))
    shares = torch.softmax(model.states(TOKENS[:1, :7])[0, -1].float() @ model.head.float().T, -1)
    surprise = -shares.log()
    drawn = surprise[text[:, 7]]
    entropy = float((shares * surprise).sum())
    spread = float((shares * (surprise - entropy).square()).sum().sqrt()) / 400**0.5
    assert float(drawn.mean()) == pytest.approx(entropy, abs=5 * spread)


def test_what_a_model_writes_begins_with_the_text(tiny_source: Any) -> None:
    model, text = FrozenModel(DecoderWeights.read(tiny_source)), TOKENS.flatten()
    made = write_more(model, text, count=5, length=20, prompt=6, at_once=2)
    stretches = {tuple(stretch) for stretch in text.unfold(0, 6, 1).tolist()}
    assert made.shape == (5, 20)
    assert {tuple(row) for row in made[:, :6].tolist()} <= stretches
    assert len({tuple(row) for row in made.tolist()}) == 5
    assert torch.equal(made, write_more(model, text, count=5, length=20, prompt=6, at_once=2))
    assert write_more(model, text, count=0, length=20, prompt=6, at_once=2).shape == (0, 20)


class Teacher:
    """Counts what it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, tokens: Tensor) -> Tensor:
        self.asked += tokens.shape[0]
        return tokens[..., None].expand(*tokens.shape, 4).bfloat16()


def test_every_sequence_comes_once_a_turn_and_is_taught_once() -> None:
    teacher, sequences = Teacher(), torch.arange(42).view(14, 3)
    course = Course(sequences, teacher, hidden=4)
    seen = list(islice(course.batches(4, seed=0), 6))
    for turn in (seen[:3], seen[3:]):
        rows = {tuple(row) for lesson in turn for row in lesson.tokens.tolist()}
        assert len(rows) == 12
    assert not torch.equal(seen[0].tokens, seen[3].tokens)
    assert 12 <= teacher.asked <= 14
    for lesson in seen:
        assert lesson.states is not None
        assert torch.equal(lesson.states[..., 0], lesson.tokens.bfloat16())
    fifth = next(course.batches(4, seed=0, first=4))
    assert torch.equal(fifth.tokens, seen[4].tokens)


def test_states_that_do_not_fit_are_not_kept() -> None:
    teacher = Teacher()
    course = Course(torch.arange(42).view(14, 3), teacher, hidden=4, keep_bytes=14 * 3 * 4 * 2 - 1)
    assert next(course.batches(4, seed=0)).states is None
    assert teacher.asked == 0


def test_more_sequences_a_batch_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"5 sequences.*4"):
        next(Course(torch.zeros(4, 3), Teacher(), hidden=4).batches(5, seed=0))


def test_overlapping_sequences_have_each_token_at_two_places() -> None:
    made = overlapping(torch.arange(14), 4, 2)
    assert made.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13]]


def test_what_is_kept_trains_like_what_is_computed(tiny_source: Any) -> None:
    weights = DecoderWeights.read(tiny_source)
    codes = [one.layer for one in convert(tiny_source, TOKENS, FsqSettings(4, 16, "tanh"), CPU)]
    kept, computed = (FsqTuning(weights, codes, TuneSettings(steps=4)) for _ in range(2))
    lessons = list(islice(Course(TOKENS, kept.teach, weights.config.hidden).batches(4, seed=0), 4))
    kept.run(lessons)
    computed.run([Lesson(lesson.tokens) for lesson in lessons])
    for one, other in zip(kept.result(), computed.result(), strict=True):
        assert torch.allclose(one.encoder, other.encoder, atol=1e-6)
        assert torch.allclose(one.decoder, other.decoder, atol=1e-6)
