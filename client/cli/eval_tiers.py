"""``strataflux eval --kv fsq:16x --refine-kv fsq:8x``: what codes in two tiers cost, the finer one at a daemon."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strataflux.cache_policy.miss import MissPolicy
from strataflux.client.cli.eval_method import Evaluated, MethodCommand, given_text, method_windows, open_evaluated
from strataflux.client.cli.kv_options import parse_fraction
from strataflux.client.cli.options import parse_cache
from strataflux.client.cli.output import Output, print_note, progress
from strataflux.client.errors import MisuseError

if TYPE_CHECKING:
    from strataflux.client.evaluate.fsq_run import TierEvaluation
    from strataflux.client.evaluate.methods.base import MethodSpec
    from strataflux.kernels.fsq_nested import FsqTier

__all__ = ["TierCommand", "names_tiers", "run_eval_tiers"]

_KV_CACHE = "10%"
_GRACE_SECONDS = 60.0
"""Of a daemon of one's own: nobody else waits for slots, and to be fenced in the middle is to lose all that was put."""


@dataclass(frozen=True)
class TierCommand:
    """What was asked for beside the resident code."""

    refine: str
    fraction: str
    group: int
    miss: MissPolicy
    oracle: bool
    kv_cache: str | None
    """None: 10 % of a window's records."""
    runtime_dir: Path | None


def names_tiers(refine: str) -> bool:
    """Whether ``--refine-kv`` names a code, and not widths such as ``4/4``."""
    return ":" in refine


def run_eval_tiers(output: Output, command: MethodCommand, asked: TierCommand) -> None:
    """Evaluate and show.

    Raises:
        StrataFluxError: what stood in the way.
    """
    from strataflux.client.evaluate.dense import dense_reference
    from strataflux.client.evaluate.fsq_run import evaluate_tiers
    from strataflux.client.fsq_refined import TierOptions

    coarse, fine = _specs(command, asked)
    options = TierOptions(parse_fraction(asked.fraction), asked.group)
    with progress("reading the model"):
        found = open_evaluated(command.model, str(fine), command.reference, command.device)
        windows, rest = method_windows(command, found.tokenizer)
    tiers = _divided(command, coarse, fine, found, rest)
    slots = parse_cache(asked.kv_cache or _KV_CACHE, options.slots_of(tiers, command.context - 1), "--kv-cache")
    with progress("scoring exactly", len(windows)) as advance:
        references = []
        for window in windows:
            references.append(dense_reference(found.weights, window))
            advance()
    with _daemon(asked, options.daemon_bytes(tiers, slots)) as runtime_dir:
        count = 0 if runtime_dir is None else sum(len(window) - 1 for window in windows)
        with progress("decoding tokens", count) as advance:
            made = evaluate_tiers(
                found.weights, tiers, references, options, runtime_dir, miss=asked.miss, on_token=advance
            )
    _show(output, (coarse, fine), command, asked, made)


def _specs(command: MethodCommand, asked: TierCommand) -> "tuple[MethodSpec, MethodSpec]":
    from strataflux.client.evaluate.methods.base import parse_method

    coarse, fine = parse_method(command.spec), parse_method(asked.refine)
    for option, spec in (("--kv", coarse), ("--refine-kv", fine)):
        if spec.name != "fsq" or spec.ratio is None:
            raise MisuseError(option, str(spec), "two sizes of codes", "write --kv fsq:16x --refine-kv fsq:8x")
    assert coarse.ratio is not None
    assert fine.ratio is not None
    if coarse.ratio <= fine.ratio:
        raise MisuseError("--refine-kv", str(fine), f"a lower ratio than that of --kv {coarse}", "swap the two")
    if command.sequential:
        raise MisuseError("--sequential", "together with --refine-kv", "one of the two", "a daemon is always that")
    if command.device != "cpu" and not asked.oracle:
        raise MisuseError("--device", command.device, "cpu, or --kv-oracle beside it", "add --kv-oracle")
    return coarse, fine


def _divided(
    command: MethodCommand, coarse: "MethodSpec", fine: "MethodSpec", found: Evaluated, rest: Sequence[int]
) -> "list[FsqTier]":
    """The finer codes in two tiers: prepared so, or prepared or converted here, and divided."""
    from strataflux.client.evaluate.methods.base import Making, budget_bytes
    from strataflux.client.evaluate.methods.fsq import InMemory, codes_of
    from strataflux.client.prepare.fsq_tiers import divide_codes
    from strataflux.client.runtime.cache import require_no_windows

    config, device = found.weights.config, found.weights.embedding.device
    require_no_windows(config, "--refine-kv")
    size = budget_bytes(config, coarse)
    if found.codes is not None and found.codes.about.resident_nbytes == size:
        return list(found.codes.tiers)
    given = given_text(command, found.tokenizer, rest).to(device)
    if found.codes is None:
        print_note(f"{command.model} has no codes of {fine}: converted here; `strataflux prepare --fsq` keeps them")
    with progress("fitting layers", config.layers) as advance:
        making = Making(found.weights, given, None if found.codes is None else found.codes.layers, advance)
        codes = codes_of(fine, making, budget_bytes(config, fine))
    with progress("dividing layers", config.layers) as advance:
        return divide_codes(InMemory(found.weights), codes, given, size, device, lambda _: advance())


@contextmanager
def _daemon(asked: TierCommand, kv_bytes: int) -> Iterator[Path | None]:
    """None without one; the daemon that was named, or one of its own whose slots hold what --kv-cache says."""
    if asked.oracle or asked.runtime_dir is not None:
        yield asked.runtime_dir
        return
    from strataflux.client.launch import PrivateDaemon

    daemon = PrivateDaemon([], weight_cache_bytes=0, kv_cache_bytes=kv_bytes, grace_seconds=_GRACE_SECONDS)
    with progress("starting a daemon (its first start compiles)"):
        daemon.start()
    try:
        yield daemon.runtime_dir
    finally:
        daemon.stop()


def _show(
    output: Output,
    specs: "tuple[MethodSpec, MethodSpec]",
    command: MethodCommand,
    asked: TierCommand,
    made: "TierEvaluation",
) -> None:
    coarse, fine = (str(spec) for spec in specs)
    output.print(f"{coarse:9}  KL {made.coarse.kl:.5f}  resident of {fine}, alone")
    output.print(f"{fine:9}  KL {made.whole.kl:.5f}  whole")
    output.print(f"refined    KL {made.refined.kl:.5f}  {made.recovered:.1%} of the way")
    counts = made.counts
    if counts is not None:
        output.print(f"hit rate {counts.hit_rate:.1%}, {made.bytes_resident / 1e6:.1f} MB resident a sequence")
    settings = {"fraction": str(parse_fraction(asked.fraction)), "group": asked.group, "oracle": asked.oracle}
    settings |= {"miss": str(asked.miss), "kv_cache": asked.kv_cache or _KV_CACHE}
    settings |= {"context": command.context, "windows": command.windows, "tokens": made.refined.tokens}
    output.result({"kv": _json(coarse, fine, made), **settings, **_counted(made)})


def _json(coarse: str, fine: str, made: "TierEvaluation") -> dict[str, object]:
    return {
        "resident": coarse,
        "refined": fine,
        "base_kl": made.coarse.kl,
        "whole_kl": made.whole.kl,
        "refined_kl": made.refined.kl,
        "base_ppl": made.coarse.perplexity,
        "whole_ppl": made.whole.perplexity,
        "refined_ppl": made.refined.perplexity,
        "recovered": made.recovered,
        "bytes_resident": made.bytes_resident,
        "recall_by_layer": made.recall,
    }


def _counted(made: "TierEvaluation") -> dict[str, object]:
    counts = made.counts
    if counts is None:
        return {}
    return {
        "lookups": counts.lookups,
        "hits": counts.hits,
        "hit_rate": counts.hit_rate,
        "blocks_unrefined": counts.blocks_unrefined,
        "engine": counts.session.engine,
        "direct_io": counts.session.direct_io,
        "steps_invalid": counts.session.steps_invalid,
        "deadlines_exceeded": counts.session.deadlines_exceeded,
        "requests_dropped": counts.session.dropped,
    }
