"""Choosing tokens and streaming text."""

from typing import Any

import pytest
import torch

from strataflux.client.runtime.generation import Sampling, choose_token, generate_tokens, text_pieces

LOGITS = torch.log(torch.tensor([0.05, 0.5, 0.15, 0.3]))


def draw(sampling: Sampling, count: int = 4000) -> list[float]:
    random = torch.Generator().manual_seed(sampling.seed)
    tokens = [choose_token(LOGITS, sampling, random) for _ in range(count)]
    return [tokens.count(token) / count for token in range(4)]


def test_greedy_takes_the_most_probable() -> None:
    assert draw(Sampling(), 10) == [0, 1, 0, 0]


def test_samples_follow_the_distribution() -> None:
    assert draw(Sampling(temperature=1.0)) == pytest.approx([0.05, 0.5, 0.15, 0.3], abs=0.03)
    hot = torch.softmax(LOGITS / 2, -1).tolist()
    assert draw(Sampling(temperature=2.0)) == pytest.approx(hot, abs=0.03)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, [1]), (0.51, [1, 3]), (0.79, [1, 3]), (0.9, [1, 2, 3]), (1e-9, [1])])
def test_top_p_keeps_the_smallest_sufficient_set(top_p: float, kept: list[int]) -> None:
    shares = draw(Sampling(temperature=1.0, top_p=top_p), 500)
    assert [token for token, share in enumerate(shares) if share > 0] == kept


@pytest.mark.parametrize(
    "setting", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_settings_out_of_range(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        Sampling(**setting)  # type: ignore[arg-type]


def counting(seen: list[int]) -> Any:
    """A model that always predicts the token after the one it was given."""

    def advance(token: int) -> torch.Tensor:
        seen.append(token)
        return torch.nn.functional.one_hot(torch.tensor(token + 1), 10).float()

    return advance


def test_generation_follows_the_prompt_and_stops() -> None:
    seen: list[int] = []
    assert list(generate_tokens(counting(seen), [7, 1], 3, Sampling())) == [2, 3, 4]
    assert seen == [7, 1, 2, 3]
    assert list(generate_tokens(counting([]), [1], 9, Sampling(), stop={4})) == [2, 3]
    with pytest.raises(ValueError, match="prompt"):
        next(generate_tokens(counting([]), [], 1, Sampling()))


def test_one_seed_gives_one_text() -> None:
    def flat(token: int) -> torch.Tensor:
        return torch.zeros(50)

    texts = [list(generate_tokens(flat, [0], 20, Sampling(1.0, seed=seed))) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("text", ["he is here", "été 日本 🎉 done", "", "🎉"])
def test_pieces_make_the_text_and_never_split_a_character(tiny_source: Any, text: str) -> None:
    tokenizer = tiny_source.tokenizer()
    pieces = list(text_pieces(tokenizer, iter(tokenizer.encode(text).ids)))
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_character_cut_short_is_still_given_out(tiny_source: Any) -> None:
    tokenizer = tiny_source.tokenizer()
    tokens = tokenizer.encode("a🎉").ids[:-1]
    assert "".join(text_pieces(tokenizer, iter(tokens))) == tokenizer.decode(tokens)
