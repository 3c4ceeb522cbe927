"""Methods' names, and running a model with one: batches against single texts, prompts against none, bytes."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from strataflux.client.errors import MisuseError
from strataflux.client.evaluate.dense import dense_reference
from strataflux.client.evaluate.fsq import fsq_logits
from strataflux.client.evaluate.methods.base import Making, MethodSpec, parse_method
from strataflux.client.evaluate.methods.fsq import codes_of
from strataflux.client.evaluate.methods.registry import METHODS, check_method, make_method
from strataflux.client.evaluate.methods.sequences import Sequences, after_prompt, generate, score_method
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import DecoderWeights

TOKENS = [5, 80, 80, 3, 200, 17, 256, 1, 9, 9, 30, 44]


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("palu:8x", MethodSpec("palu", Fraction(8))),
        ("pyramid-shared:2.5x", MethodSpec("pyramid-shared", Fraction(5, 2))),
        ("fsq+pyramid:16x", MethodSpec("fsq+pyramid", Fraction(16))),
        ("palu:8x:3", MethodSpec("palu", Fraction(8), 3)),
        ("pyramid:4x:32", MethodSpec("pyramid", Fraction(4), 32)),
        ("kivi:2", MethodSpec("kivi", number=2)),
        ("exact", MethodSpec("exact")),
    ],
)
def test_names_are_read_as_they_are_written(text: str, spec: MethodSpec) -> None:
    assert parse_method(text) == spec
    assert str(spec) == text


@pytest.mark.parametrize("text", ["", "8x", "palu:", "palu:x", "palu:0.5x", "kivi:160", "FSQ:8x", "fsq:4:8x"])
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(MisuseError, match="NAME:RATIOx"):
        parse_method(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vecinfer:8x", "one of .*fsq"),
        ("fsq:2", "fsq:8x"),
        ("exact:2", "alone"),
        ("fsq:8x:4", "fsq:8x"),
        ("kivi", "kivi:2"),
        ("kivi:8x", "kivi:2"),
        ("palu:4x:8", "palu:8x"),
    ],
)
def test_what_does_not_exist_is_refused(text: str, expected: str) -> None:
    with pytest.raises(MisuseError, match=expected):
        check_method(parse_method(text))


def test_a_fitted_method_needs_text(weights: DecoderWeights) -> None:
    fitted = [name for name, method in METHODS.items() if method.fitted]
    assert fitted
    for name in fitted:
        with pytest.raises(MisuseError, match="text to fit on"):
            make_method(MethodSpec(name, Fraction(4)), Making(weights))


def test_exact_is_the_decoder(weights: DecoderWeights) -> None:
    method = make_method(parse_method("exact"), Making(weights))
    decoder = Decoder(weights, len(TOKENS))
    expected = torch.stack([decoder.step(token) for token in TOKENS])
    sequences = Sequences(weights, method, len(TOKENS))
    found = [sequences.prefill(torch.tensor([TOKENS[:5], TOKENS[5:10]]))[:1]]
    found.append(sequences.decode(torch.tensor([TOKENS[5:9], TOKENS[:4]]))[0])
    found += [sequences.decode(torch.tensor([[token], [0]]))[0] for token in TOKENS[9:]]
    torch.testing.assert_close(torch.cat(found), expected[4:], atol=1e-4, rtol=1e-4)


def test_no_more_tokens_than_there_is_room_for(weights: DecoderWeights) -> None:
    sequences = Sequences(weights, make_method(parse_method("exact"), Making(weights)), 4)
    sequences.prefill(torch.tensor([TOKENS[:3]]))
    with pytest.raises(MisuseError, match="position 3"):
        sequences.prefill(torch.tensor([TOKENS[:1]]))
    with pytest.raises(MisuseError, match="at most 4"):
        sequences.decode(torch.tensor([TOKENS[:2]]))


def test_codes_are_those_of_whole_windows(making: Making) -> None:
    weights, spec = making.weights, parse_method("fsq:4x")
    method = make_method(spec, making)
    codes = codes_of(spec, making, 32)
    expected = fsq_logits(weights, codes, TOKENS)
    found = Sequences(weights, method, len(TOKENS)).decode(torch.tensor([TOKENS]))
    torch.testing.assert_close(found[0], expected)
    assert method.nbytes(10, 2) == 2 * 12 * 32
    assert method.bytes_a_token(weights.config, 10, 2) == 32
    given = make_method(spec, Making(weights, codes=codes))
    torch.testing.assert_close(Sequences(weights, given, 12).decode(torch.tensor([TOKENS]))[0], expected)
    with pytest.raises(MisuseError, match="of at most 16"):
        make_method(parse_method("fsq:8x"), Making(weights, codes=codes))


def test_scores_are_of_what_comes_after_the_prompt(making: Making) -> None:
    weights = making.weights
    reference = dense_reference(weights, TOKENS)
    method = make_method(parse_method("fsq:4x"), making)
    whole, rest = score_method(weights, method, reference), score_method(weights, method, reference, prompt=4)
    assert (whole.tokens, rest.tokens) == (11, 7)
    np.testing.assert_allclose(rest.divergence, whole.divergence[4:], atol=1e-5)
    exact = score_method(weights, make_method(parse_method("exact"), making), reference, prompt=4)
    np.testing.assert_allclose(exact.surprise, after_prompt(reference, 4).score.surprise, atol=1e-4)
    assert whole.kl > 1e-4 > exact.kl


def test_generation_goes_on_with_the_likeliest_and_stops(weights: DecoderWeights) -> None:
    method = make_method(parse_method("exact"), Making(weights))
    prompts = torch.tensor([TOKENS[:6], TOKENS[6:]])
    expected = []
    for prompt in prompts.tolist():
        decoder = Decoder(weights, 16)
        logits, row = decoder.prefill(prompt), list[int]()
        while len(row) < 8:
            row.append(int(logits.argmax()))
            logits = decoder.step(row[-1])
        expected.append(row)
    assert generate(weights, method, prompts, 8) == expected
    stop = expected[0][3]
    cut = [row[: row.index(stop)] if stop in row else row for row in expected]
    assert generate(weights, method, prompts, 8, [stop]) == cut
