"""``strataflux eval --kv``: divergence of a low-bit KV cache from an exact one, refined through a daemon."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strataflux.cache_policy.miss import MissPolicy
from strataflux.client.cli.options import parse_cache
from strataflux.client.cli.output import Output, progress
from strataflux.client.cli.read_ahead import spoken_prefetches

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from strataflux.client.evaluate.kv_run import KvEvaluation
    from strataflux.client.kv_options import KvOptions
    from strataflux.client.runtime.models import DecoderWeights

__all__ = ["KvCommand", "run_eval_kv"]


_GRACE_SECONDS = 60.0
"""Of a daemon of one's own: nobody else waits for slots, and to be fenced in the middle is to lose all that was put."""


@dataclass(frozen=True)
class KvCommand:
    """What was asked for."""

    model: Path
    text: Path | None
    options: "KvOptions"
    context: int
    windows: int
    starts: tuple[int, ...] | None
    miss: MissPolicy
    oracle: bool
    kv_cache: str
    runtime_dir: Path | None
    ahead: float = 0.0


@dataclass
class _Told:
    """A display for each kind of work; :class:`~strataflux.client.evaluate.kv_run.KvProgress`."""

    layer: Callable[[], object]
    block: Callable[[], object]
    token: Callable[[], object]


def run_eval_kv(output: Output, command: KvCommand) -> None:
    """Evaluate and show.

    Raises:
        StrataFluxError, ContractError: what stood in the way.
    """
    from strataflux.client.evaluate.kv_run import cut_kv_windows, evaluate_kv
    from strataflux.client.evaluate.text import python_prose, read_text

    with progress("reading the model"):
        weights, tokenizer = _open(command.model)
        command.options.form(weights.config.head_dim)
        words = python_prose() if command.text is None else read_text(command.text)
        tokens = tokenizer.encode(words).ids
        subject = "pydoc_data.topics" if command.text is None else command.text
        windows = cut_kv_windows(subject, tokens, command.context, command.windows, command.starts)
    with ExitStack() as stack:
        runtime_dir = None if command.oracle else stack.enter_context(_daemon(command, weights))
        told = stack.enter_context(_displays(weights, command, len(windows)))
        found = evaluate_kv(
            weights,
            windows,
            command.options,
            runtime_dir,
            miss=command.miss,
            progress=told,
            ahead=command.ahead,
        )
    _show(output, command, found, len(windows))


def _open(model: Path) -> "tuple[DecoderWeights, Tokenizer]":
    """A prepared model's low-bit weights, or a model as it is published."""
    from strataflux.client.prepare.prepared import MANIFEST, open_prepared
    from strataflux.client.prepare.source import open_source
    from strataflux.client.runtime.models import DecoderWeights

    source = open_prepared(model) if (model / MANIFEST).exists() else open_source(model)
    return DecoderWeights.read(source), source.tokenizer()


@contextmanager
def _daemon(command: KvCommand, weights: "DecoderWeights") -> Iterator[Path]:
    """The daemon that was named, or one of its own whose slots hold what --kv-cache says."""
    if command.runtime_dir is not None:
        yield command.runtime_dir
        return
    from strataflux.client.launch import PrivateDaemon
    from strataflux.client.prepare.prepared import MANIFEST, STORE

    options, config = command.options, weights.config
    slots = parse_cache(command.kv_cache, options.slots_of(config, command.context), "--kv-cache")
    stores = [command.model / STORE] if (command.model / MANIFEST).exists() else []
    kv_bytes = options.daemon_bytes(config, slots)
    daemon = PrivateDaemon(stores, weight_cache_bytes=0, kv_cache_bytes=kv_bytes, grace_seconds=_GRACE_SECONDS)
    with progress("starting a daemon (its first start compiles)"):
        daemon.start()
    try:
        yield daemon.runtime_dir
    finally:
        daemon.stop()


@contextmanager
def _displays(weights: "DecoderWeights", command: KvCommand, windows: int) -> Iterator[_Told]:
    from strataflux.client.evaluate.kv_run import scored_tokens
    from strataflux.client.kv_options import blocks_for

    scored = scored_tokens(command.context)
    with ExitStack() as stack:
        layer = stack.enter_context(progress("prefilling layers", weights.config.layers * windows))
        if command.oracle:
            yield _Told(layer, lambda: None, lambda: None)
            return
        blocks = blocks_for(command.context - scored + 1)
        block = stack.enter_context(progress("writing refinement of blocks", max(1, blocks * windows)))
        yield _Told(layer, block, stack.enter_context(progress("scoring tokens", scored * windows)))


def _show(output: Output, command: KvCommand, found: "KvEvaluation", windows: int) -> None:
    options = command.options
    resident, refined = (f"{options.key_bits}/{options.value_bits}", _refinement(options))
    output.print(f"exact      perplexity {found.reference.perplexity:.3f}")
    output.print(f"{resident:9}  perplexity {found.base.perplexity:.3f}  KL {found.base.kl:.5f}")
    output.print(f"{refined:9}  perplexity {found.refined.perplexity:.3f}  KL {found.refined.kl:.5f}")
    output.print(f"hit rate {found.hit_rate:.1%}, {found.bytes_resident / 1e6:.1f} MB resident a sequence")
    if found.session is not None and command.ahead:
        output.print(spoken_prefetches(found.session.kv_prefetches))
    output.result({"kv": _json(command, found), **_settings(command, windows), **_session(found)})


def _refinement(options: "KvOptions") -> str:
    return f"+{options.refine_key_bits}/+{options.refine_value_bits}"


def _json(command: KvCommand, found: "KvEvaluation") -> dict[str, object]:
    return {
        "base_kl": found.base.kl,
        "refined_kl": found.refined.kl,
        "base_kl_top_1024": found.base.kl_top,
        "refined_kl_top_1024": found.refined.kl_top,
        "exact_ppl": found.reference.perplexity,
        "base_ppl": found.base.perplexity,
        "refined_ppl": found.refined.perplexity,
        "hit_rate": found.hit_rate,
        "bytes_resident": found.bytes_resident,
        "lookups": found.lookups,
        "hits": found.hits,
        "blocks_unrefined": found.blocks_unrefined,
        "tokens_per_second": found.tokens_per_second,
        "oracle": command.oracle,
    }


def _settings(command: KvCommand, windows: int) -> dict[str, object]:
    from strataflux.client.evaluate.kv_run import scored_tokens

    options = command.options
    return {
        "resident": f"{options.key_bits}/{options.value_bits}",
        "refinement": _refinement(options),
        "group": options.group_tokens,
        "fraction": str(options.fraction),
        "prenormalize": options.prenormalize,
        "select": f"before:{options.kept_steps}" if options.select_lag else "step",
        "context": command.context,
        "windows": windows,
        "tokens": scored_tokens(command.context),
        "miss": str(command.miss),
        "read_ahead": command.ahead,
    }


def _session(found: "KvEvaluation") -> dict[str, object]:
    if found.session is None:
        return {}
    return {
        "engine": found.session.engine,
        "direct_io": found.session.direct_io,
        "waits": found.session.waits,
        "wait_nanoseconds": found.session.wait_nanoseconds,
        "deadlines_exceeded": found.session.deadlines_exceeded,
        "steps_invalid": found.session.steps_invalid,
        "requests_dropped": found.session.dropped,
        "prefetches": found.session.kv_prefetches.to_json(),
    }
