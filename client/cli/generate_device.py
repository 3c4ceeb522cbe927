"""``strataflux generate --device cuda``: the tokens, and what is told of them."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from strataflux.client.cli.output import print_note, progress
from strataflux.client.errors import DaemonUnavailableError, MisuseError, RefusedError
from strataflux.client.kv_options import KvOptions
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.runtime.cuda.budget import Budget
from strataflux.client.runtime.cuda.device import explained, memory_need, require_cuda, require_memory
from strataflux.client.runtime.cuda.model import load_prepared
from strataflux.client.runtime.cuda.refined import DeviceDecoder
from strataflux.client.runtime.generation import Sampling
from strataflux.client.runtime.models import SETS
from strataflux.client.schemes import require_scheme

__all__ = ["PLATFORMS", "DeviceRun", "device_budget", "tokens_on", "told_of"]

PLATFORMS: Final = ("unified", "dedicated")


@dataclass(frozen=True)
class DeviceRun:
    """What is asked for, beside the model and the text.

    Raises:
        MisuseError: on construction: there is no such platform, or it does not refine a KV cache, or has no hot tier.
    """

    platform: str
    """``unified``: refined with what a daemon holds. ``dedicated``: from the whole store, pinned in this process."""
    k: int | None
    runtime_dir: Path | None
    require_daemon: bool
    max_tokens: int
    sampling: Sampling
    kv: KvOptions | None = None
    """How keys and values are kept; None keeps them in float16."""
    hot_bytes: int = 0
    """Device memory for the records that are used most; dedicated."""

    def __post_init__(self) -> None:
        if self.platform not in PLATFORMS:
            raise MisuseError("--platform", repr(self.platform), " or ".join(PLATFORMS), "choose one")
        if (
            self.kv is not None
            and self.platform == "dedicated"
            and (self.kv.refine_key_bits or self.kv.refine_value_bits)
        ):
            found = f"{self.kv.refine_key_bits}/{self.kv.refine_value_bits} with --platform dedicated"
            raise MisuseError("--refine-kv", found, "0/0, since no daemon takes records", "pass --refine-kv 0/0")
        if self.hot_bytes and self.platform != "dedicated":
            found = f"a hot tier with --platform {self.platform}"
            raise MisuseError("--hot-tier", found, "--platform dedicated", "leave --hot-tier away, or pin the store")


def device_budget(prepared: PreparedModel, run: DeviceRun) -> Budget:
    """What a device refines: the prepared model's budgets or ``k``; shifts only where nothing misses.

    Raises:
        MisuseError: the store has no channels of the MLP, or its budgets are for neuron bundles and no ``k`` is given.
    """
    require_scheme(prepared.sets, "channels")
    manifest = prepared.manifest
    if run.k is None and manifest.mlp_scheme != "channels":
        raise MisuseError("k", f"budgets of {manifest.mlp_scheme}", "budgets of channels", "pass --k")
    shift = manifest.shift if run.platform == "dedicated" else dict.fromkeys(SETS, 0.0)
    return Budget(dict(manifest.k) if run.k is None else dict.fromkeys(SETS, run.k), shift)


def tokens_on(
    stack: ExitStack, prepared: PreparedModel, given: Sequence[int], run: DeviceRun, stop: Collection[int]
) -> tuple[Iterator[int], DeviceDecoder]:
    """Tokens after ``given``, and the decoder they come from; ``stack`` closes it.

    Raises:
        FailureError: no GPU, or not enough of its memory. MisuseError: no tokens, or a shape without a kernel.
        DaemonUnavailableError, RefusedError: nobody serves this model, and a daemon is required.
    """
    if not given:
        raise MisuseError("prompt", "no tokens", "at least one", "give some text")
    device, context = require_cuda(), len(given) + run.max_tokens
    budget = device_budget(prepared, run)
    require_memory(device, memory_need(prepared.config, prepared.bits_per_weight, context, run.kv, run.hot_bytes))
    with explained("--device cuda"):
        with progress("reading the model"):
            model = load_prepared(prepared, device)
        decoder = stack.enter_context(
            DeviceDecoder(prepared, model, context=context, budget=budget, sampling=run.sampling, kv=run.kv)
        )
        if run.platform == "dedicated":
            decoder.pin(run.hot_bytes)
        else:
            _attach(decoder, run)
    return _tokens(decoder, given, run.max_tokens, stop), decoder


def _attach(decoder: DeviceDecoder, run: DeviceRun) -> None:
    try:
        decoder.attach(run.runtime_dir)
    except (DaemonUnavailableError, RefusedError) as error:
        if run.require_daemon:
            raise
        print_note(f"not refined: {error.subject}: {error.found}; {error.remedy}")


def _tokens(decoder: DeviceDecoder, given: Sequence[int], count: int, stop: Collection[int]) -> Iterator[int]:
    with explained("--device cuda"):
        for token in given[:-1]:
            decoder.step(token)
        token = decoder.step(given[-1])
        for left in range(count - 1, -1, -1):
            if token in stop:
                return
            yield token
            token = decoder.step() if left else token


def told_of(decoder: DeviceDecoder, run: DeviceRun) -> dict[str, Any]:
    """For the result: where it ran, how it was refined, and how often records were there."""
    rate = decoder.hit_rate()
    kv = {} if run.kv is None else {"kv_hit_rate": decoder.kv_hit_rate().rate}
    return {
        "device": decoder.name,
        "platform": run.platform,
        "access": decoder.access,
        "refined": rate.lookups > 0,
        "weight_lookups": rate.lookups,
        "weight_hit_rate": rate.rate,
        **kv,
    }
