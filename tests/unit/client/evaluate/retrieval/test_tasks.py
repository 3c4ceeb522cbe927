"""Problems can be solved from what is said in them, have the size asked for, and are drawn alike for one seed."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from strataflux.client.errors import MisuseError
from strataflux.client.evaluate.retrieval.answering import PEOPLE
from strataflux.client.evaluate.retrieval.problem import NOISE, Haystack, Problem, Task, hide, listed
from strataflux.client.evaluate.retrieval.tasks import TASKS, Asked, Wrapping, draw_problems, parse_tasks
from strataflux.client.evaluate.retrieval.words import KEYS, keys, uuids
from strataflux.client.evaluate.text import python_prose


@pytest.fixture(scope="module")
def prose() -> Haystack:
    return Haystack.of(python_prose())


@pytest.fixture
def tokenizer(tiny_source: Any) -> Tokenizer:
    made: Tokenizer = tiny_source.tokenizer()
    return made


def problems(tokenizer: Tokenizer, prose: Haystack, names: list[str], **changes: Any) -> list[Asked]:
    asked: dict[str, Any] = {"tokens": 3000, "count": 2, "seed": 7, "wrapping": Wrapping()}
    return draw_problems(names, tokenizer, prose, **(asked | changes))


# --- readers who know no more than the text ---------------------------------------------------------------------------


def read_needles(problem: Problem) -> set[str]:
    names = re.search(r"the special \w+ for (.*) mentioned", problem.text.splitlines()[-1])
    several = re.search(r"the special \w+s for (.*) mentioned", problem.text.splitlines()[-1])
    asked = re.split(r", | and ", (names or several)[1])  # type: ignore[index]
    told = re.findall(r"One of the special \w+ for (.*?) is: (\S+)\.", problem.text)
    return {value for name, value in told if name in asked}


def read_chain(problem: Problem) -> set[str]:
    value = re.search(r"assigned the value (\d+) in the text above\?$", problem.text)[1]  # type: ignore[index]
    found = {value}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", problem.text) * 5:
        found |= {name} if source in found else set()
    return found - {value}


def read_counts(pattern: str, count: int, ignored: str = "") -> Callable[[Problem], set[str]]:
    def read(problem: Problem) -> set[str]:
        found = Counter(re.findall(pattern, problem.text.splitlines()[1]))
        return {word for word, _ in found.most_common(count + bool(ignored)) if word != ignored}

    return read


def read_documents(problem: Problem) -> set[str]:
    born = dict(re.findall(r"(\w+ \w+) was born in (\w+)\.", problem.text))
    taught = dict(re.findall(r"(\w+ \w+) learned from (\w+ \w+),", problem.text))
    question = problem.text.splitlines()[-1]
    if match := re.search(r"the teacher of (\w+ \w+) born", question):
        return {born[taught[match[1]]]}
    return {born[re.search(r"was (\w+ \w+) born", question)[1]]}  # type: ignore[index]


READERS = {
    "vt": read_chain,
    "cwe": read_counts(r"\d+\. (\w+)", 5),
    "fwe": read_counts(r"\S+", 3, "..."),
    "qa_1": read_documents,
    "qa_2": read_documents,
}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("units", [40, 300])
def test_the_text_has_the_answer_and_no_other(prose: Haystack, name: str, units: int) -> None:
    for seed in range(5):
        problem = TASKS[name].build(Random(seed), units, prose)
        assert READERS.get(name, read_needles)(problem) == set(problem.answers)
        assert TASKS[name].score(problem.answers, problem.lead) == 0


def test_the_thirteen_tasks_are_there() -> None:
    assert list(TASKS) == parse_tasks("retrieval")
    assert len(TASKS) == 13


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_problems_have_exactly_the_tokens_asked_for(tokenizer: Tokenizer, prose: Haystack, name: str) -> None:
    drawn = problems(tokenizer, prose, [name])
    assert [len(problem.tokens) for problem in drawn] == [3000, 3000]
    text = tokenizer.decode(list(drawn[0].tokens), skip_special_tokens=False)
    if TASKS[name].any_answer or name.startswith("niah"):
        assert all(answer in text for answer in drawn[0].answers)
    # Before the text there is no more noise than one unit would take, and it ends where it ends.
    before, _, _ = text.partition(TASKS[name].build(Random(0), 40, prose).text[:16])
    assert len(before) < 800
    assert ("".join(f"{sentence} " for sentence in NOISE)[:-1] + "\n").endswith(before[-20:])


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(900, 3000), seed=st.integers(0, 10**9), name=st.sampled_from(["niah_single_1", "vt", "fwe"]))
def test_any_size_is_met(tokens: int, seed: int, name: str) -> None:
    (drawn,) = problems(_bytes(), Haystack.of("One. Two."), [name], tokens=tokens, count=1, seed=seed)
    assert len(drawn.tokens) == tokens


def _bytes() -> Tokenizer:
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    made = Tokenizer(BPE({letter: place for place, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = Decoder()
    return made


def test_words_that_run_out_leave_noise(tokenizer: Tokenizer, prose: Haystack, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (TASKS["niah_multikey_2"].most, TASKS["qa_1"].most) == (KEYS, PEOPLE)
    assert len(TASKS["qa_1"].build(Random(0), PEOPLE, prose).text) > 20 * PEOPLE
    monkeypatch.setitem(cast(dict[str, Task], TASKS), "qa_1", replace(TASKS["qa_1"], most=6))
    (drawn,) = problems(tokenizer, prose, ["qa_1"], count=1)
    text = tokenizer.decode(list(drawn.tokens))
    assert len(drawn.tokens) == 3000
    assert "Document 6:" in text
    assert "Document 7:" not in text


def test_too_few_tokens_are_refused(tokenizer: Tokenizer, prose: Haystack) -> None:
    with pytest.raises(MisuseError, match=r"100 tokens.*at least .* for niah_single_1"):
        problems(tokenizer, prose, ["niah_single_1"], tokens=100)


# --- drawing ----------------------------------------------------------------------------------------------------------


def test_a_seed_draws_the_same_problems(tokenizer: Tokenizer, prose: Haystack) -> None:
    some = ["niah_multiquery", "cwe", "qa_2"]
    first, again, other = (problems(tokenizer, prose, some, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert all(one.tokens != two.tokens for one, two in zip(first, other, strict=True))
    assert first[0].tokens != first[1].tokens
    # A task's problems do not depend on which others are drawn.
    assert problems(tokenizer, prose, ["cwe"], seed=1) == first[2:4]


def test_a_template_stands_around_the_problem(tokenizer: Tokenizer, prose: Haystack) -> None:
    wrapping = Wrapping.by(lambda text: f"<user>{text}</user><model>")
    (drawn,) = problems(tokenizer, prose, ["niah_single_1"], count=1, wrapping=wrapping)
    text = tokenizer.decode(list(drawn.tokens))
    assert len(drawn.tokens) == 3000
    assert text.startswith("<user>")
    assert re.search(
        r"mentioned in the text above\?</user><model>The special number for .* mentioned in the text is$", text
    )


@pytest.mark.parametrize("text", ["retrieval:", "retrieval:niah", "speed", "retrieval:vt,,cwe"])
def test_other_tasks_are_refused(text: str) -> None:
    with pytest.raises(MisuseError, match="retrieval: and some of niah_single_1"):
        parse_tasks(text)


def test_some_tasks_are_named() -> None:
    assert parse_tasks("retrieval:vt,cwe") == ["vt", "cwe"]


# --- parts ------------------------------------------------------------------------------------------------------------


def test_needles_keep_their_order_and_the_hay_its() -> None:
    mixed = hide(Random(1), ["a", "b", "c", "d"], ["1", "2", "3"])
    assert [part for part in mixed if part.isalpha()] == ["a", "b", "c", "d"]
    assert [part for part in mixed if part.isdigit()] == ["1", "2", "3"]
    places = {hide(Random(seed), ["a", "b"], ["1"]).index("1") for seed in range(50)}
    assert places == {0, 1, 2}


def test_scores_are_shares_of_what_is_contained() -> None:
    assert TASKS["vt"].score(("AAA", "BBB", "CCC", "DDD"), "aaa, BBB and ccd") == 0.5
    assert TASKS["qa_1"].score(("Upwell", "Dunwick"), " upwell.") == 1
    assert TASKS["qa_1"].score(("Upwell", "Dunwick"), "Fernley") == 0


def test_words_are_what_they_say() -> None:
    assert len(set(keys(Random(0), KEYS))) == KEYS
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuids(Random(0), 1)[0])
    assert [listed(parts) for parts in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]


def test_passages_wrap_around() -> None:
    hay = Haystack.of("One is. Two\n are! Three was?")
    assert hay.sentences == ("One is.", "Two are!", "Three was?")
    passage = hay.passage(Random(0), 7)
    assert len(passage) == 7
    assert passage[:3] == passage[3:6]
