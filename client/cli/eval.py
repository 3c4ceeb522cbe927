"""``strataflux eval``: perplexity and divergence of a prepared model, decoded through a daemon."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strataflux.client.cli.eval_kv import KvCommand, run_eval_kv
from strataflux.client.cli.eval_method import MethodCommand, is_method, run_eval_method
from strataflux.client.cli.eval_tasks import (
    TaskCommand,
    TaskCountOption,
    TaskSeedOption,
    TasksOption,
    TaskTokensOption,
    run_eval_tasks,
)
from strataflux.client.cli.eval_tiers import TierCommand, names_tiers, run_eval_tiers
from strataflux.client.cli.kv_options import (
    FractionOption,
    GroupOption,
    KvCacheOption,
    KvOption,
    KvSelectOption,
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
from strataflux.client.cli.read_ahead import (
    AboutMisses,
    LagOption,
    ReadAheadOption,
    ResidentsOption,
    spoken_prefetches,
    spoken_residents,
)
from strataflux.client.errors import MisuseError

if TYPE_CHECKING:
    from strataflux.client.evaluate.run import Evaluation
    from strataflux.client.prepare.prepared import PreparedModel
    from strataflux.client.runtime.models import DecoderWeights

__all__ = ["register"]

_Given = dict[str, object]
"""Options by name, as they were given."""
_Asked = tuple[int | None, AboutMisses]
"""Channels per 1,024, and what is done about misses."""

_DEFAULT_CACHE = "25%"
_KV_CACHE = "10%"
_TOKENS, _DENSE_TOKENS = 512, 2047
_KV_CONTEXT, _METHOD_CONTEXT = 8192, 2048
_NO_METHOD = "anything but --kv METHOD"

_ReferenceOption = Annotated[
    Path | None,
    typer.Option(help="The unquantized model. Without it there is no KL.", show_default="what was prepared"),
]
_TokensOption = Annotated[
    int | None, typer.Option(min=1, help="Scored tokens in each window.", show_default="512; with --dense 2047")
]
_ContextOption = Annotated[
    int | None,
    typer.Option(min=2, help="With --kv: tokens of a window.", show_default="8192; with a METHOD 2048"),
]
_SequentialOption = Annotated[
    bool, typer.Option("--sequential", help="With --kv fsq:RATIOx: token by token through a cache of codes.")
]
_CalibrationOption = Annotated[
    Path | None,
    typer.Option(help="With --kv METHOD: a text to fit on.", show_default="what of the text is not scored"),
]
_CalibrationTokensOption = Annotated[int, typer.Option(min=512, help="With --kv METHOD: how much of it to use.")]


def _command(
    folder: PreparedArgument,
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text.", show_default="prose of Python's own help")] = None,
    reference: _ReferenceOption = None,
    tokens: _TokensOption = None,
    windows: Annotated[int, typer.Option(min=1, help="How many stretches of the text to score.")] = 1,
    k: ChannelsOption = None,
    dense: Annotated[bool, typer.Option("--dense", help="Whole windows at once, as if nothing missed.")] = False,
    device: Annotated[str, typer.Option(help="Where --dense, or --kv METHOD, runs: cpu or cuda.")] = "cpu",
    miss: MissOption = "skip",
    read_ahead: ReadAheadOption = 0.0,
    residents: ResidentsOption = 0,
    lag: LagOption = None,
    weight_cache: WeightCacheOption = None,
    kv: KvOption = None,
    refine_kv: RefineKvOption = "4/4",
    group: GroupOption = 4,
    fraction: FractionOption = "1/128",
    kv_select: KvSelectOption = "step",
    prenormalize: PrenormalizeOption = False,
    context: _ContextOption = None,
    starts: StartsOption = None,
    kv_oracle: Annotated[bool, typer.Option("--kv-oracle", help="With --kv: as if nothing missed.")] = False,
    kv_cache: KvCacheOption = None,
    sequential: _SequentialOption = False,
    calibration: _CalibrationOption = None,
    calibration_tokens: _CalibrationTokensOption = 16384,
    tasks: TasksOption = None,
    task_tokens: TaskTokensOption = 1024,
    task_count: TaskCountOption = 8,
    task_seed: TaskSeedOption = 0,
    runtime_dir: RuntimeDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score a text token by token through a daemon: the one of --runtime-dir, or one of its own.

    The unquantized model and the low-bit weights alone are scored beside it. Bytes read are the daemon's count of what
    it read from its stores meanwhile; a daemon that serves others counts theirs, too. With --dense there is no daemon:
    every token is refined with all that it selects, which is what a cache that held everything would give.

    With --kv the low-bit thing is the KV cache: the last 256 tokens of each window are scored after a prefill of the
    others, against the same weights with an exact cache. The model may then also be one that was not prepared. With a
    METHOD, such as fsq:16x, palu:8x or kivi:2, whole windows are scored, against the same weights likewise; or, with
    --tasks, how much the model still finds in long prompts. With --kv fsq:16x --refine-kv fsq:8x a code of 8x is
    resident in part, and the rest refines what is attended to most.
    """
    output = Output(as_json)
    unfit = _of_weights(tokens, k, dense, weight_cache, (residents, lag))
    if kv is not None and is_method(kv):
        fitted = (text, reference, calibration, calibration_tokens)
        asked = MethodCommand(folder, kv, *fitted, context or _METHOD_CONTEXT, windows, sequential, device)
        tiers = TierCommand(refine_kv, fraction, group, parse_miss(miss), kv_oracle, kv_cache, runtime_dir)
        _by_method(output, asked, tiers, unfit | {"--starts": starts}, tasks, (task_tokens, task_count, task_seed))
        return
    _refuse_together(_NO_METHOD, {"--sequential": sequential, "--calibration": calibration, "--tasks": tasks})
    if kv is not None and (options := parse_kv(kv, refine_kv, group, fraction, prenormalize, kv_select)) is not None:
        _refuse_together("--kv", unfit | {"--reference": reference})
        rest = (parse_starts(starts), parse_miss(miss), kv_oracle, kv_cache or _KV_CACHE, runtime_dir, read_ahead)
        _low_bit_kv(output, KvCommand(folder, text, options, context or _KV_CONTEXT, windows, *rest), kv_cache)
    else:
        how, on = (k, AboutMisses(parse_miss(miss), read_ahead, residents, lag)), device if dense else None
        _weights(output, _Model.open(folder, reference), (text, tokens, windows, on), how, (weight_cache, runtime_dir))


def _of_weights(
    tokens: int | None, k: int | None, dense: bool, weight_cache: str | None, late: tuple[int, float | None]
) -> _Given:
    """Options that only a run of refined weights has."""
    given: _Given = {"--tokens": tokens, "--k": k, "--dense": dense, "--weight-cache": weight_cache}
    return given | {"--residents": late[0] or None, "--lag": late[1]}


def _by_method(
    output: Output,
    asked: MethodCommand,
    tiers: TierCommand,
    unfit: _Given,
    tasks: str | None,
    sizes: tuple[int, int, int],
) -> None:
    through = {"--kv-oracle": tiers.oracle, "--kv-cache": tiers.kv_cache, "--runtime-dir": tiers.runtime_dir}
    if names_tiers(tiers.refine):
        _refuse_together("--refine-kv METHOD", unfit | {"--tasks": tasks})
        if tiers.oracle or tiers.runtime_dir is not None:
            _refuse_together("--kv-oracle" if tiers.oracle else "--runtime-dir", {"--kv-cache": tiers.kv_cache})
        run_eval_tiers(output, asked, tiers)
        return
    _refuse_together("--kv METHOD", unfit | through)
    if tasks is None:
        run_eval_method(output, asked)
    else:
        run_eval_tasks(output, asked, TaskCommand(tasks, *sizes))


def _low_bit_kv(output: Output, command: KvCommand, kv_cache: str | None) -> None:
    if command.runtime_dir is not None or command.oracle:
        _refuse_together("--kv-oracle" if command.oracle else "--runtime-dir", {"--kv-cache": kv_cache})
    run_eval_kv(output, command)


def _weights(
    output: Output,
    model: "_Model",
    scored: tuple[Path | None, int | None, int, str | None],
    asked: _Asked,
    through: tuple[str | None, Path | None],
) -> None:
    """Score weights, on a device whole windows at once if one is named."""
    text, tokens, windows, dense_device = scored
    if dense_device is None:
        _refined(output, model, (text, tokens or _TOKENS, windows), asked, *through)
    else:
        k, misses = asked
        _refuse_together("--dense", {"--residents": misses.residents or None, "--lag": misses.lag})
        _dense(output, model, (text, tokens or _DENSE_TOKENS, windows), k, dense_device)


def _refined(
    output: Output,
    model: "_Model",
    scored: tuple[Path | None, int, int],
    asked: _Asked,
    weight_cache: str | None,
    runtime_dir: Path | None,
) -> None:
    if runtime_dir is not None:
        _refuse_together("--runtime-dir", {"--weight-cache": weight_cache})
    (k, misses), manifest, cache_bytes = asked, model.prepared.manifest, model.cache_bytes(weight_cache)
    shift = misses.shift(manifest.shift)
    found = _through_daemon(model, _windows(model.prepared, *scored), asked, cache_bytes, runtime_dir)
    settings = {"tokens": scored[1], "windows": scored[2], **refined_by(manifest, k), "miss": str(misses.policy)}
    settings |= {"read_ahead": misses.ahead, "prefetches": found.session.weight_prefetches.to_json()}
    settings |= {"residents": misses.residents, "shift": shift}
    if misses.ahead:
        output.print(spoken_prefetches(found.session.weight_prefetches))
    if misses.residents:
        output.print(spoken_residents(found.refined.weight_resident_rate))
    _show(output, found, settings, spoken_refinement(manifest, k))


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
    asked: _Asked,
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
            k, misses = asked
            return evaluate(
                prepared,
                exact,
                windows,
                runtime_dir,
                k=k,
                miss=misses.policy,
                on_token=advance,
                ahead=misses.ahead,
                shift=misses.shift(prepared.manifest.shift),
                residents=misses.residents,
            )


def _refuse_together(option: str, others: Mapping[str, object]) -> None:
    """Refuse what was given of ``others``; a flag that is off was not."""
    for name, value in others.items():
        if value is not None and value is not False:
            raise MisuseError(name, f"together with {option}", "one of the two", "leave one out")


def _windows(prepared: "PreparedModel", text: Path | None, tokens: int, windows: int) -> list[list[int]]:
    from strataflux.client.evaluate.compare import cut_windows
    from strataflux.client.evaluate.text import python_prose, read_text

    words = python_prose() if text is None else read_text(text)
    subject = "pydoc_data.topics" if text is None else text
    return cut_windows(subject, prepared.tokenizer().encode(words).ids, tokens, windows)


def _dense(output: Output, model: _Model, scored: tuple[Path | None, int, int], k: int | None, device: str) -> None:
    from strataflux.client.cli.table import comparison_table
    from strataflux.client.evaluate.dense_run import evaluate_dense

    prepared, windows = model.prepared, _windows(model.prepared, *scored)
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
            "waits": found.session.waits,
            "wait_nanoseconds": found.session.wait_nanoseconds,
            "deadlines_exceeded": found.session.deadlines_exceeded,
            "bytes_read_source": "the daemon's control socket: reads.bytes",
        }
    )


def register(app: typer.Typer) -> None:
    """Add ``eval``."""
    app.command("eval")(_command)
