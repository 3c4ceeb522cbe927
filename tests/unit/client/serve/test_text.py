"""Text that is shown is the decoded whole up to the first stop text, however it comes in pieces."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from strataflux.client.runtime.generation import text_pieces
from strataflux.client.serve.text import OutgoingText, Pieces, StopText
from tests.unit.client.conftest import TOKENS, TinySource

TOKENIZER: Tokenizer = TinySource.tokenizer(TinySource(None))  # type: ignore[arg-type]  # it needs no dimensions


def shown(tokens: Sequence[int], stops: Sequence[str]) -> tuple[str, bool]:
    out = OutgoingText(TOKENIZER, stops)
    pieces = []
    for token in tokens:
        pieces.append(out.push(token))
        if out.stopped:
            return "".join(pieces), True
    pieces.append(out.finish())
    return "".join(pieces), out.stopped


@given(st.lists(st.integers(0, len(TOKENS) - 2), max_size=30))
def test_pieces_join_to_what_the_tokenizer_decodes(tokens: list[int]) -> None:
    pieces = Pieces(TOKENIZER)
    joined = "".join([pieces.push(token) for token in tokens]) + pieces.finish()
    assert joined == TOKENIZER.decode(tokens) == "".join(text_pieces(TOKENIZER, iter(tokens)))


def test_a_character_of_several_tokens_comes_in_one_piece() -> None:
    tokens = TOKENIZER.encode("aä€b").ids
    pieces = Pieces(TOKENIZER)
    assert [pieces.push(token) for token in tokens] == ["a", "", "ä", "", "", "€", "b"]
    assert pieces.finish() == ""


@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_stop_texts_end_what_is_shown_wherever_pieces_break(pieces: list[str], stops: list[str]) -> None:
    stop = StopText(stops)
    out = "".join(stop.push(piece) for piece in pieces) + stop.finish()
    whole = "".join(pieces)
    # The first stop text that was complete ends it, so look at growing beginnings.
    ends = [
        min(found)
        for length in range(len(whole) + 1)
        if (found := [at for s in stops if (at := whole[:length].find(s)) >= 0])
    ]
    assert stop.stopped == bool(ends)
    expected = {whole[:end] for end in ends} if ends else {whole}
    assert out in expected


@pytest.mark.parametrize(
    ("pushed", "given"),
    [
        (["one t", "wo"], ["one ", ""]),  # "t" may begin "two"
        (["one t", "en"], ["one ", "ten"]),
        (["two", "more"], ["", ""]),
    ],
)
def test_what_may_be_a_stop_text_is_held_back(pushed: list[str], given: list[str]) -> None:
    stop = StopText(["two"])
    assert [stop.push(text) for text in pushed] == given


def test_a_stop_text_over_token_borders() -> None:
    tokens = TOKENIZER.encode("say he there").ids
    assert shown(tokens, ["he t"]) == ("say ", True)
    assert shown(tokens, ["zz"]) == ("say he there", False)
