"""Miss policies: what is read, what is refused and how."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strataflux.cache_policy.errors import MissPolicyError
from strataflux.cache_policy.miss import MAX_WAIT_SECONDS, Budget, Skip, Wait, parse_miss_policy


def test_the_policies_are_read() -> None:
    assert parse_miss_policy("skip") == Skip()
    assert parse_miss_policy("wait:20") == Wait(0.020)
    assert parse_miss_policy("wait:0.5") == Wait(0.0005)
    assert parse_miss_policy("budget:3%") == Budget(0.03)
    assert parse_miss_policy("budget:0.5%") == Budget(0.005)


@pytest.mark.parametrize("text", ["", "Skip", "skip:1", "wait", "waits:3", "budget", "never"])
def test_an_unknown_policy_is_refused_with_what_is_known(text: str) -> None:
    with pytest.raises(MissPolicyError, match=rf"{text!r} is not known; expected 'skip' or 'wait:MS'"):
        parse_miss_policy(text)


@pytest.mark.parametrize("text", ["wait:", "wait:soon", "wait:nan", "wait:inf", "wait:20ms"])
def test_a_wait_without_a_number_is_refused(text: str) -> None:
    with pytest.raises(MissPolicyError, match=r"no number of milliseconds after 'wait:'"):
        parse_miss_policy(text)


@pytest.mark.parametrize("text", ["budget:", "budget:3", "budget:%", "budget:nan%", "budget:3ms"])
def test_a_budget_without_a_percentage_is_refused(text: str) -> None:
    with pytest.raises(MissPolicyError, match=r"no number of percent after 'budget:'; expected such as 'budget:3%'"):
        parse_miss_policy(text)


@pytest.mark.parametrize("text", ["budget:0%", "budget:-1%", "budget:100.1%"])
def test_a_budget_out_of_range_is_refused_with_the_limit(text: str) -> None:
    with pytest.raises(MissPolicyError, match=r"above 0 and at most 100%.*'skip'"):
        parse_miss_policy(text)


@pytest.mark.parametrize("text", ["wait:0", "wait:-3", "wait:60001"])
def test_a_deadline_out_of_range_is_refused_with_the_limit(text: str) -> None:
    with pytest.raises(MissPolicyError, match=r"above 0 and at most 60000 ms.*'skip'"):
        parse_miss_policy(text)


def test_a_wait_made_directly_is_checked_too() -> None:
    with pytest.raises(MissPolicyError):
        Wait(MAX_WAIT_SECONDS * 2)


@given(st.integers(1, int(MAX_WAIT_SECONDS * 1000)))
def test_text_and_policy_round_trip(milliseconds: int) -> None:
    policy = Wait(milliseconds / 1000)
    assert parse_miss_policy(str(policy)) == policy
    budget = parse_miss_policy(str(Budget(milliseconds / 60_000)))
    assert isinstance(budget, Budget)
    assert budget.share == pytest.approx(milliseconds / 60_000, rel=1e-5)
    assert parse_miss_policy(str(Skip())) == Skip()
