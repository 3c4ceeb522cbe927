"""Errors of the cache's decisions.

    CachePolicyError(ValueError)      a request that cannot be met; nothing was changed
    ├── MissPolicyError               a miss policy's text is not one we know
    ├── SlotTooLargeError             a record does not fit a page
    ├── TooManyClassesError           more slot sizes than the budget has room for
    └── UnknownPolicyError            no replacement policy of that name

All are misuse: they are raised before anything is done, and each says what was asked, what was found or is
the limit, and what to change. Broken invariants are not errors here; ``check_integrity`` returns them as
codes.
"""

__all__ = [
    "CachePolicyError",
    "MissPolicyError",
    "SlotTooLargeError",
    "TooManyClassesError",
    "UnknownPolicyError",
]


class CachePolicyError(ValueError):
    """A request that the cache's decisions cannot meet; the message carries the numbers and the remedy."""


class MissPolicyError(CachePolicyError):
    """The text of a miss policy is neither ``skip``, ``wait:MS`` nor ``budget:P%``."""


class SlotTooLargeError(CachePolicyError):
    """A slot of the asked size does not fit into one page."""


class TooManyClassesError(CachePolicyError):
    """The budget's table of size classes is full."""


class UnknownPolicyError(CachePolicyError):
    """No replacement policy carries the asked name."""
