"""Text of options: sizes, shares and miss policies."""

import pytest

from strataflux.cache_policy.miss import Skip, Wait
from strataflux.client.cli.options import parse_cache, parse_miss
from strataflux.client.errors import MisuseError


@pytest.mark.parametrize(
    ("text", "size"), [("123", 123), ("4KiB", 4096), ("2 MiB", 2 << 20), ("25%", 250), ("12.5 %", 125), ("100%", 1000)]
)
def test_sizes_and_shares(text: str, size: int) -> None:
    assert parse_cache(text, 1000) == size


@pytest.mark.parametrize("text", ["", "0%", "101%", "-1", "1.5MiB", "4 MB", "all", "1e3"])
def test_what_is_neither(text: str) -> None:
    with pytest.raises(MisuseError, match="weight-cache"):
        parse_cache(text, 1000)


def test_miss_policies() -> None:
    assert parse_miss("skip") == Skip()
    assert parse_miss("wait:20") == Wait(0.02)
    for text in ("wait", "wait:x", "wait:0", "wait:-1", "wait:1e9", "drop"):
        with pytest.raises(MisuseError, match="--miss"):
            parse_miss(text)
