"""What a user says when attaching, read and checked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strataflux.cache_policy.errors import MissPolicyError
from strataflux.cache_policy.miss import MissPolicy, Wait, parse_miss_policy
from strataflux.client.cli.kv_options import parse_kv
from strataflux.client.errors import MisuseError
from strataflux.client.kv_options import KvOptions

__all__ = ["CONTEXT", "WAIT_SECONDS", "AttachOptions", "KvText"]

CONTEXT: Final = 4096
"""Positions of a low-bit KV cache if nothing is said; less where the model has less."""
WAIT_SECONDS: Final = 1.0
"""How long ``miss="wait"`` waits at each look-up."""

KvText = str | KvOptions | None
"""A KV cache's bits, such as ``2/2``, or all of its settings."""


@dataclass(frozen=True)
class AttachOptions:
    """How a model is attached; see :func:`strataflux.client.transformers.attach`."""

    runtime_dir: Path | None
    k: int | None
    miss: MissPolicy
    kv: KvOptions | None
    context: int | None
    sequences: int
    require_daemon: bool

    @classmethod
    def read(
        cls,
        *,
        runtime_dir: Path | str | None,
        k: int | None,
        miss: str | MissPolicy,
        kv: KvText,
        refine_kv: str,
        context: int | None,
        sequences: int,
        require_daemon: bool,
    ) -> "AttachOptions":
        """The options that these arguments say.

        Raises:
            MisuseError: naming the argument that cannot be.
        """
        for name, number in (("context", context), ("sequences", sequences)):
            if number is not None and number < 1:
                raise MisuseError(name, f"{number}", "at least 1", "raise it")
        settings = parse_kv(kv, refine_kv, 4, "1/128", False) if isinstance(kv, str) else kv
        folder = None if runtime_dir is None else Path(runtime_dir)
        return cls(folder, k, _miss(miss), settings, context, sequences, require_daemon)


def _miss(miss: str | MissPolicy) -> MissPolicy:
    if not isinstance(miss, str):
        return miss
    if miss == "wait":
        return Wait(WAIT_SECONDS)
    try:
        return parse_miss_policy(miss)
    except MissPolicyError as error:
        expected = "skip, wait, wait:MS with 0 < MS <= 60000, or budget:P% with 0 < P <= 100"
        raise MisuseError("miss", repr(miss), expected, str(error)) from error
