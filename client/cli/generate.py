"""``strataflux generate``: text from a prepared model, refined if a daemon serves it."""

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strataflux.client.cli.kv_options import (
    FractionOption,
    GroupOption,
    KvOption,
    KvSelectOption,
    PrenormalizeOption,
    RefineKvOption,
    parse_kv,
)
from strataflux.client.cli.options import (
    ChannelsOption,
    HotTierOption,
    JsonOption,
    MissOption,
    PreparedArgument,
    RuntimeDirOption,
    parse_cache,
    parse_miss,
    refined_by,
)
from strataflux.client.cli.output import Output, print_note, progress
from strataflux.client.cli.read_ahead import AboutMisses, LagOption, ReadAheadOption, ResidentsOption
from strataflux.client.errors import DaemonUnavailableError, MisuseError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tokenizers import Tokenizer

    from strataflux.client.kv import RefinedKVCache
    from strataflux.client.kv_options import KvOptions
    from strataflux.client.prepare.prepared import PreparedModel
    from strataflux.client.refined import RefinedModel
    from strataflux.client.runtime.generation import Sampling
    from strataflux.client.runtime.models import DecoderWeights

__all__ = ["register"]


def _command(
    folder: PreparedArgument,
    prompt: Annotated[str, typer.Argument(help="The text to go on from.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the most probable tokens with this much in all.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    k: ChannelsOption = None,
    miss: MissOption = "skip",
    read_ahead: ReadAheadOption = 0.0,
    residents: ResidentsOption = 0,
    lag: LagOption = None,
    runtime_dir: RuntimeDirOption = None,
    require_daemon: Annotated[
        bool, typer.Option("--require-daemon", help="Fail when no daemon serves this model, not go on unrefined.")
    ] = False,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    platform: Annotated[
        str, typer.Option("--platform", help="With cuda: unified (a daemon's cache) or dedicated (all records pinned).")
    ] = "unified",
    hot_tier: HotTierOption = None,
    kv: KvOption = None,
    refine_kv: RefineKvOption = "4/4",
    group: GroupOption = 4,
    fraction: FractionOption = "1/128",
    kv_select: KvSelectOption = "step",
    prenormalize: PrenormalizeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go on from a prompt, as a stream of text.

    Without a daemon that serves this model the text is that of the low-bit weights alone, and a note says so.
    """
    from strataflux.client.prepare.prepared import open_prepared
    from strataflux.client.runtime.generation import Sampling

    if device not in ("cpu", "cuda"):
        raise MisuseError("--device", repr(device), "cpu or cuda", "choose one")
    if platform not in ("unified", "dedicated"):
        raise MisuseError("--platform", repr(platform), "unified or dedicated", "choose one")
    output = Output(as_json)
    sampling = Sampling(temperature, top_p, seed)
    misses = AboutMisses(parse_miss(miss), read_ahead, residents, lag)
    cache = None if kv is None else parse_kv(kv, refine_kv, group, fraction, prenormalize, kv_select)
    prepared = open_prepared(folder)
    text = _Text(prepared.tokenizer(), prompt, max_tokens, prepared.config.context, as_json)
    if device == "cuda":
        _require_captured(misses)
        said = _on_cuda(prepared, text, sampling, k, platform, runtime_dir, require_daemon, cache, hot_tier)
    else:
        said = _on_cpu(prepared, text, sampling, k, misses, runtime_dir, require_daemon, cache)
    output.result(said | refined_by(prepared.manifest, k))


def _require_captured(misses: AboutMisses) -> None:
    """Refuse what a captured step does not do."""
    for option, found, only, why in (
        ("--miss", str(misses.policy), "skip", "a captured step waits for nothing"),
        ("--read-ahead", f"{misses.ahead:g}", "0", "captured steps ask by misses"),
        ("--residents", f"{misses.residents}", "0", "captured steps refine by what they select"),
        ("--lag", f"{misses.lag or 0:g}", "0", "captured steps that may miss add what is there at once"),
    ):
        if found != only:
            raise MisuseError(option, found, only, f"{why}; use --device cpu")


class _Text:
    """What is given, and what comes of it."""

    def __init__(self, tokenizer: "Tokenizer", prompt: str, max_tokens: int, most: int, as_json: bool) -> None:
        from strataflux.client.runtime.generation import special_tokens

        self.given = tokenizer.encode(prompt).ids
        self.stop = special_tokens(tokenizer)
        self.max_tokens = _room(len(self.given), max_tokens, most)
        self._tokenizer, self._silent = tokenizer, as_json

    @property
    def context(self) -> int:
        """Positions it takes at most."""
        return len(self.given) + self.max_tokens

    def tell(self, tokens: "Iterator[int]") -> str:
        """Write the text of ``tokens`` as it comes, unless it is for JSON; all of it."""
        from strataflux.client.runtime.generation import text_pieces

        pieces = []
        for piece in text_pieces(self._tokenizer, tokens):
            pieces.append(piece)
            if not self._silent:
                sys.stdout.write(piece)
                sys.stdout.flush()
        if not self._silent:
            sys.stdout.write("\n")
        return "".join(pieces)


def _room(given: int, asked: int, most: int) -> int:
    """Tokens that may come: none at a position beyond the ``most`` that the model was made for."""
    if given >= most:
        raise MisuseError("prompt", f"{given} tokens", f"less than the model's {most} positions", "shorten it")
    if given + asked > most:
        print_note(f"at most {most - given} tokens: the model has {most} positions, and the prompt takes {given}")
    return min(asked, most - given)


def _on_cpu(
    prepared: "PreparedModel",
    text: _Text,
    sampling: "Sampling",
    k: int | None,
    misses: AboutMisses,
    runtime_dir: "Path | None",
    required: bool,
    kv: "KvOptions | None",
) -> dict[str, Any]:
    from strataflux.client.runtime.decoder import Decoder
    from strataflux.client.runtime.generation import generate_tokens
    from strataflux.client.runtime.models import DecoderWeights
    from strataflux.client.runtime.threads import decoding_threads

    with progress("reading the model"):
        weights = DecoderWeights.read(prepared)
    with decoding_threads(), ExitStack() as stack:
        model = _attach(prepared, weights, text.context, runtime_dir, k, misses, required, kv)
        if model is None:
            cache = None if kv is None else _unrefined_cache(weights, text.context, kv)
            advance = Decoder(weights, text.context, cache=cache).step
        else:
            advance = stack.enter_context(model).step
        told = text.tell(generate_tokens(advance, text.given, text.max_tokens, sampling, text.stop))
        stats = None if model is None else model.stats()
    said: dict[str, Any] = {"text": told, "refined": stats is not None, "weight_hit_rate": None}
    if stats and stats.lookups > stats.kv_lookups:
        said["weight_hit_rate"] = (stats.hits - stats.kv_hits) / (stats.lookups - stats.kv_lookups)
    if kv is not None:
        said["kv_hit_rate"] = stats.kv_hits / stats.kv_lookups if stats and stats.kv_lookups else None
    return said


def _unrefined_cache(weights: "DecoderWeights", context: int, kv: "KvOptions") -> "RefinedKVCache":
    """A cache in low bits whose records nobody takes."""
    from strataflux.client.kv import RefinedKVCache
    from strataflux.client.kv_blocks import KvBlocks
    from strataflux.client.kv_options import blocks_for

    blocks = KvBlocks(weights.config, kv.form(weights.config.head_dim), blocks_for(context))
    return RefinedKVCache(blocks, context)


def _attach(
    prepared: "PreparedModel",
    weights: "DecoderWeights",
    context: int,
    runtime_dir: "Path | None",
    k: int | None,
    misses: AboutMisses,
    required: bool,
    kv: "KvOptions | None",
) -> "RefinedModel | None":
    from strataflux.client.refined import RefinedModel

    try:
        return RefinedModel.attach(
            prepared,
            weights,
            context=context,
            runtime_dir=runtime_dir,
            k=k,
            shift=misses.shift(prepared.manifest.shift),
            miss=misses.policy,
            kv=kv,
            ahead=misses.ahead,
            residents=misses.residents,
        )
    except (DaemonUnavailableError, RefusedError) as error:
        if required:
            raise
        print_note(f"not refined: {error.subject}: {error.found}; {error.remedy}")
        return None


def _on_cuda(
    prepared: "PreparedModel",
    text: _Text,
    sampling: "Sampling",
    k: int | None,
    platform: str,
    runtime_dir: "Path | None",
    required: bool,
    kv: "KvOptions | None",
    hot_tier: str | None,
) -> dict[str, Any]:
    from strataflux.client.cli.generate_device import DeviceRun, tokens_on, told_of
    from strataflux.client.schemes import store_slot_bytes

    hot_bytes = 0
    if hot_tier is not None:
        hot_bytes = parse_cache(hot_tier, store_slot_bytes(prepared.config, prepared.sets), "--hot-tier")
    run = DeviceRun(platform, k, runtime_dir, required, text.max_tokens, sampling, kv, hot_bytes)
    with ExitStack() as stack:
        tokens, decoder = tokens_on(stack, prepared, text.given, run, text.stop)
        said = {"text": text.tell(tokens)} | told_of(decoder, run)
    if said["refined"]:
        print_note(f"{said['weight_hit_rate']:.1%} of records were there ({said['device']}, {said['access']})")
    return said


def register(app: typer.Typer) -> None:
    """Add ``generate``."""
    app.command("generate")(_command)
