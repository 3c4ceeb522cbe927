"""A model's answers to problems, by batches and one by one."""

from typing import Any

import pytest
import torch

from strataflux.client.evaluate.methods.base import Making, parse_method
from strataflux.client.evaluate.methods.registry import make_method
from strataflux.client.evaluate.retrieval.problem import Haystack
from strataflux.client.evaluate.retrieval.run import Retrieved, retrieve
from strataflux.client.evaluate.retrieval.tasks import TASKS, Asked, Wrapping, draw_problems
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import DecoderWeights


def test_scores_are_means_by_task() -> None:
    asked = [Asked("vt", (), ("AB", "CD")), Asked("vt", (), ("EF",)), Asked("qa_1", (), ("Upwell",))]
    found = Retrieved(tuple(asked), ("AB", "ef", "Fernley"))
    assert found.scores == {"vt": 0.75, "qa_1": 0.0}
    assert found.mean == 0.375


def test_answers_are_greedy_whatever_the_batch(tiny_source: Any) -> None:
    weights, tokenizer = DecoderWeights.read(tiny_source), tiny_source.tokenizer()
    drawn = draw_problems(
        ["niah_single_3", "qa_1"], tokenizer, Haystack.of("One."), tokens=800, count=2, seed=0, wrapping=Wrapping()
    )
    method = make_method(parse_method("exact"), Making(weights))
    told: list[int] = []
    found = retrieve(weights, method, drawn, tokenizer, batch=3, on_batch=told.append)
    assert found == retrieve(weights, method, drawn, tokenizer, batch=1)
    assert told == [3, 1]
    assert found.problems == tuple(drawn)
    decoder = Decoder(weights, 900)
    logits, tokens = decoder.prefill(drawn[0].tokens), list[int]()
    while len(tokens) < TASKS["niah_single_3"].tokens and int(logits.argmax()) != 257:
        tokens.append(int(logits.argmax()))
        logits = decoder.step(tokens[-1])
    assert found.said[0] == tokenizer.decode(tokens)


@pytest.mark.parametrize("text", ["kivi:2", "turboquant:4", "pyramid:2x", "pyramid-shared:2x"])
def test_every_way_of_holding_answers(tiny_source: Any, text: str) -> None:
    weights, tokenizer = DecoderWeights.read(tiny_source), tiny_source.tokenizer()
    drawn = draw_problems(["qa_1"], tokenizer, Haystack.of("One."), tokens=800, count=2, seed=0, wrapping=Wrapping())
    found = retrieve(weights, make_method(parse_method(text), Making(weights)), drawn, tokenizer)
    assert len(found.said) == 2
    assert all(len(tokenizer.encode(said).ids) <= 16 for said in found.said)
    assert torch.isfinite(torch.tensor(found.mean))
