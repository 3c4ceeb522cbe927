"""The replacement policies by name, for the simulator, the benchmarks and the conformance suite."""

from strataflux.cache_policy import arc, blend, lfu, lru, s3fifo, sieve, tinylfu
from strataflux.cache_policy.base import Policy
from strataflux.cache_policy.errors import UnknownPolicyError

__all__ = ["DEFAULT", "POLICIES", "find_policies"]

POLICIES: dict[str, Policy] = {
    "lru": lru,
    "sieve": sieve,
    "s3fifo": s3fifo,
    "arc": arc,
    "tinylfu": tinylfu,
    "lfu": lfu,
    "blend": blend,
}

DEFAULT = "blend"
"""The best general one by docs/CACHING.md."""


def find_policies(text: str) -> dict[str, Policy]:
    """The policies named in ``text``: ``all``, or names separated by commas.

    Raises:
        UnknownPolicyError: a name is not among :data:`POLICIES`.
    """
    if text == "all":
        return dict(POLICIES)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise UnknownPolicyError(
                f"no policy is called {name!r}; known: all, {', '.join(POLICIES)}; separate several by commas"
            )
    return {name: POLICIES[name] for name in names}
