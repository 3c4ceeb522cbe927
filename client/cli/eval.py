"""``strataflux eval``: perplexity and divergence of a prepared model, decoded through a daemon."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strataflux.cache_policy.miss import MissPolicy
from strataflux.client.cli.kv_options import (
    FractionOption,
    GroupOption,
    KvCacheOption,
    KvOption,
    PrenormalizeOption,
    RefineKvOption,
    StartsOption,
    parse_kv,
    parse_starts,
)
from strataflux.client.cli.options import (
    ChannelsOption,
    JsonOption,
    MissOption,
    PreparedArgument,
    RuntimeDirOption,
    WeightCacheOption,
    parse_cache,
    parse_miss,
    refined_by,
    spoken_refinement,
)
from strataflux.client.cli.output import Output, progress
from strataflux.client.errors import MisuseError

if TYPE_CHECKING:
    from strataflux.client.evaluate.run import Evaluation
    from strataflux.client.prepare.prepared import PreparedModel
    from strataflux.client.runtime.models import DecoderWeights

__all__ = ["register"]

_DEFAULT_CACHE = "25%"
_DEFAULT_KV_CACHE = "10%"
_TOKENS, _DENSE_TOKENS = 512, 2047

_ReferenceOption = Annotated[
    Path | None,
    typer.Option(help="The unquantized model. Without it there is no KL.", show_default="what was prepared"),
]
_TokensOption = Annotated[
    int | None, typer.Option(min=1, help="Scored tokens in each window.", show_default="512; with --dense 2047")
]


def _command(
    folder: PreparedArgument,
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text.", show_default="prose of Python's own help")] = None,
    reference: _ReferenceOption = None,
    tokens: _TokensOption = None,
    windows: Annotated[int, typer.Option(min=1, help="How many stretches of the text to score.")] = 1,
    k: ChannelsOption = None,
    dense: Annotated[bool, typer.Option("--dense", help="Whole windows at once, as if nothing missed.")] = False,
    device: Annotated[str, typer.Option(help="Where --dense runs: cpu or cuda.")] = "cpu",
    miss: MissOption = "skip",
    weight_cache: WeightCacheOption = None,
    kv: KvOption = None,
    refine_kv: RefineKvOption = "4/4",
    group: GroupOption = 4,
    fraction: FractionOption = "1/128",
    prenormalize: PrenormalizeOption = False,
    context: Annotated[int, typer.Option(min=2, help="With --kv: tokens of a window.")] = 8192,
    starts: StartsOption = None,
    kv_oracle: Annotated[bool, typer.Option("--kv-oracle", help="With --kv: as if nothing missed.")] = False,
    kv_cache: KvCacheOption = None,
    runtime_dir: RuntimeDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score a text token by token through a daemon: the one of --runtime-dir, or one of its own.

    The unquantized model and the low-bit weights alone are scored beside it. Bytes read are the daemon's count of what
    it read from its stores meanwhile; a daemon that serves others counts theirs, too. With --dense there is no daemon:
    every token is refined with all that it selects, which is what a cache that held everything would give.

    With --kv the low-bit thing is the KV cache: the last 256 tokens of each window are scored after a prefill of the
    others, against the same weights with an exact cache. The model may then also be one that was not prepared.
    """
    options = None if kv is None else parse_kv(kv, refine_kv, group, fraction, prenormalize)
    if options is not None:
        given = {"--tokens": tokens, "--k": k, "--dense": dense or None, "--reference": reference}
        _refuse_together("--kv", given | {"--weight-cache": weight_cache})
        if runtime_dir is not None or kv_oracle:
            _refuse_together("--kv-oracle" if kv_oracle else "--runtime-dir", {"--kv-cache": kv_cache})
        from strataflux.client.cli.eval_kv import KvCommand, run_eval_kv

        cache = kv_cache or _DEFAULT_KV_CACHE
        where, policy = parse_starts(starts), parse_miss(miss)
        command = KvCommand(folder, text, options, context, windows, where, policy, kv_oracle, cache, runtime_dir)
        run_eval_kv(Output(as_json), command)
        return
    if runtime_dir is not None:
        _refuse_together("--runtime-dir", {"--weight-cache": weight_cache})
    model = _Model.open(folder, reference)
    tokens = tokens or (_DENSE_TOKENS if dense else _TOKENS)
    if dense:
        _dense(Output(as_json), model, _windows(model.prepared, text, tokens, windows), k, device)
        return
    policy, cache_bytes = parse_miss(miss), model.cache_bytes(weight_cache)
    chosen = _windows(model.prepared, text, tokens, windows)
    found = _through_daemon(model, chosen, k, policy, cache_bytes, runtime_dir)
    settings = {"tokens": tokens, "windows": windows, **refined_by(model.prepared.manifest, k), "miss": str(policy)}
    _show(Output(as_json), found, settings, spoken_refinement(model.prepared.manifest, k))


@dataclass(frozen=True)
class _Model:
    """A prepared model, and where the unquantized one is read from if that is known."""

    prepared: "PreparedModel"
    reference: Path | None

    @classmethod
    def open(cls, folder: Path, reference: Path | None) -> "_Model":
        from strataflux.client.prepare.prepared import open_prepared

        prepared = open_prepared(folder)
        origin = prepared.manifest.origin
        found = Path(origin) if origin and Path(origin).exists() else None
        return cls(prepared, reference or found)

    def exact(self) -> "DecoderWeights | None":
        return None if self.reference is None else _read(self.reference)

    def cache_bytes(self, asked: str | None) -> int:
        from strataflux.client.schemes import store_slot_bytes

        return parse_cache(asked or _DEFAULT_CACHE, store_slot_bytes(self.prepared.config, self.prepared.sets))


def _through_daemon(
    model: _Model,
    windows: list[list[int]],
    k: int | None,
    miss: MissPolicy,
    cache_bytes: int,
    runtime_dir: Path | None,
) -> "Evaluation":
    from strataflux.client.evaluate.run import evaluate
    from strataflux.client.launch import PrivateDaemon

    prepared = model.prepared
    with progress("reading the models"):
        exact = model.exact()
    with ExitStack() as stack:
        if runtime_dir is None:
            daemon = PrivateDaemon([prepared.store], weight_cache_bytes=cache_bytes)
            with progress("starting a daemon (its first start compiles)"):
                runtime_dir = stack.enter_context(daemon).runtime_dir
        with progress("scoring tokens", sum(len(window) - 1 for window in windows)) as advance:
            return evaluate(prepared, exact, windows, runtime_dir, k=k, miss=miss, on_token=advance)


def _refuse_together(option: str, others: Mapping[str, object]) -> None:
    for name, value in others.items():
        if value is not None:
            raise MisuseError(name, f"together with {option}", "one of the two", "leave one out")


def _windows(prepared: "PreparedModel", text: Path | None, tokens: int, windows: int) -> list[list[int]]:
    from strataflux.client.evaluate.compare import cut_windows
    from strataflux.client.evaluate.text import python_prose, read_text

    words = python_prose() if text is None else read_text(text)
    subject = "pydoc_data.topics" if text is None else text
    return cut_windows(subject, prepared.tokenizer().encode(words).ids, tokens, windows)


def _dense(output: Output, model: _Model, windows: list[list[int]], k: int | None, device: str) -> None:
    from strataflux.client.cli.table import comparison_table
    from strataflux.client.evaluate.dense_run import evaluate_dense

    prepared = model.prepared
    with progress("reading the models"):
        exact = model.exact()
    with progress("scoring windows", len(windows)) as advance:
        rows = evaluate_dense(prepared, exact, windows, k=k, device=device, on_window=advance)
    output.print(comparison_table(rows))
    output.print(spoken_refinement(prepared.manifest, k))
    if exact is None:
        output.print("no --reference was given: perplexity only")
    output.result(
        {
            **{name: row.to_json() for name, row in rows.items()},
            "bits_per_weight": prepared.bits_per_weight,
            "tokens": len(windows[0]) - 1,
            "windows": len(windows),
            **refined_by(prepared.manifest, k),
            "dense": True,
        }
    )


def _read(source: Path) -> "DecoderWeights":
    from strataflux.client.prepare.source import open_source
    from strataflux.client.runtime.models import DecoderWeights

    return DecoderWeights.read(open_source(source))


def _show(output: Output, found: "Evaluation", settings: dict[str, object], refinement: str) -> None:
    from strataflux.client.cli.table import comparison_table

    rows = {"reference": found.reference, "base": found.base, "refined": found.refined}
    present = {name: row for name, row in rows.items() if row is not None}
    output.print(comparison_table(present))
    output.print(refinement)
    output.print(f"engine {found.session.engine}, {found.session.direct_io} reads; bytes read by the daemon's count")
    if found.reference is None:
        output.print("no --reference was given: perplexity only")
    output.result(
        {
            **{name: row.to_json() for name, row in present.items()},
            **settings,
            "engine": found.session.engine,
            "direct_io": found.session.direct_io,
            "steps_invalid": found.session.steps_invalid,
            "bytes_read_source": "the daemon's control socket: reads.bytes",
        }
    )


def register(app: typer.Typer) -> None:
    """Add ``eval``."""
    app.command("eval")(_command)
