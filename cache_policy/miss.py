"""What a decode step does about a record that is not in the cache.

``skip``     keep the resident precision and go on; the record is fetched for later steps. The default.
``wait:MS``  close the step, sleep until the record is there or MS milliseconds have passed, look again.
``budget:P%``  wait as above, but only for what matters most, and P percent of a step's time in all; skip the rest.
"""

import math
from dataclasses import dataclass

from strataflux.cache_policy.errors import MissPolicyError

__all__ = ["MAX_WAIT_SECONDS", "Budget", "MissPolicy", "Skip", "Wait", "parse_miss_policy"]

MAX_WAIT_SECONDS = 60.0
"""The longest deadline accepted: a step that waits longer is a stuck service, not a slow one."""


@dataclass(frozen=True)
class Skip:
    """Never wait: a miss costs accuracy in this step and nothing else."""

    def __str__(self) -> str:
        """The text that :func:`parse_miss_policy` reads."""
        return "skip"


@dataclass(frozen=True)
class Wait:
    """Wait for missing records until a deadline; what is still missing then is skipped.

    Attributes:
        deadline_seconds: from the first miss of a wait; above 0, at most :data:`MAX_WAIT_SECONDS`.

    Raises:
        MissPolicyError: when made with a deadline outside that range.
    """

    deadline_seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.deadline_seconds <= MAX_WAIT_SECONDS:
            raise MissPolicyError(
                f"a wait of {self.deadline_seconds * 1000:g} ms was asked for; the deadline must be above 0 and at "
                f"most {MAX_WAIT_SECONDS * 1000:g} ms; use 'skip' to not wait at all"
            )

    def __str__(self) -> str:
        """The text that :func:`parse_miss_policy` reads."""
        return f"wait:{self.deadline_seconds * 1000:g}"


@dataclass(frozen=True)
class Budget:
    """Wait for the few missing records with the highest scores, within a share of the time a step takes; skip the rest.

    Attributes:
        share: of the mean time of a step without its waits; above 0, at most 1.

    Raises:
        MissPolicyError: when made with a share outside that range.
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise MissPolicyError(
                f"a budget of {self.share:.6%} of a step was asked for; it must be above 0 and at most 100%; use "
                f"'skip' to not wait at all, or 'wait:MS' to wait for everything"
            )

    def __str__(self) -> str:
        """The text that :func:`parse_miss_policy` reads."""
        return f"budget:{self.share * 100:g}%"


MissPolicy = Skip | Wait | Budget


def parse_miss_policy(text: str) -> MissPolicy:
    """Read ``skip``, ``wait:MS`` (milliseconds) or ``budget:P%`` (percent of a step); decimal numbers.

    Raises:
        MissPolicyError: for any other text, with what was found and what is accepted.
    """
    if text == "skip":
        return Skip()
    name, colon, amount = text.partition(":")
    if name == "budget" and colon:
        return Budget(_number(text, amount.removesuffix("%") if amount.endswith("%") else "", "percent", "3%") / 100)
    if name != "wait" or not colon:
        raise MissPolicyError(
            f"miss policy {text!r} is not known; expected 'skip' or 'wait:MS', such as 'wait:20', or 'budget:P%', "
            "such as 'budget:3%'"
        )
    return Wait(_number(text, amount, "milliseconds", "20") / 1000)


def _number(text: str, amount: str, unit: str, example: str) -> float:
    try:
        number = float(amount)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        name = text.partition(":")[0]
        raise MissPolicyError(
            f"miss policy {text!r} has no number of {unit} after '{name}:'; expected such as '{name}:{example}'"
        )
    return number
