"""``strataflux generate``: text from a prepared model, refined if a daemon serves it."""

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from strataflux.client.cli.options import (
    ChannelsOption,
    JsonOption,
    MissOption,
    PreparedArgument,
    RuntimeDirOption,
    parse_miss,
)
from strataflux.client.cli.output import Output, print_note, progress
from strataflux.client.errors import DaemonUnavailableError, RefusedError

if TYPE_CHECKING:
    from pathlib import Path

    from strataflux.cache_policy.miss import MissPolicy
    from strataflux.client.prepare.prepared import PreparedModel
    from strataflux.client.refined import RefinedModel
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
    runtime_dir: RuntimeDirOption = None,
    require_daemon: Annotated[
        bool, typer.Option("--require-daemon", help="Fail when no daemon serves this model, not go on unrefined.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Go on from a prompt, as a stream of text.

    Without a daemon that serves this model the text is that of the low-bit weights alone, and a note says so.
    """
    from strataflux.client.prepare.prepared import open_prepared
    from strataflux.client.runtime.decoder import Decoder
    from strataflux.client.runtime.generation import Sampling, generate_tokens, special_tokens, text_pieces
    from strataflux.client.runtime.models import DecoderWeights
    from strataflux.client.runtime.threads import decoding_threads

    output = Output(as_json)
    sampling, policy = Sampling(temperature, top_p, seed), parse_miss(miss)
    prepared = open_prepared(folder)
    tokenizer = prepared.tokenizer()
    given = tokenizer.encode(prompt).ids
    with progress("reading the model"):
        weights = DecoderWeights.read(prepared)
    context = len(given) + max_tokens
    with decoding_threads(), ExitStack() as stack:
        model = _attach(prepared, weights, context, runtime_dir, k, policy, require_daemon)
        advance = Decoder(weights, context).step if model is None else stack.enter_context(model).step
        tokens = generate_tokens(advance, given, max_tokens, sampling, special_tokens(tokenizer))
        pieces = []
        for piece in text_pieces(tokenizer, tokens):
            pieces.append(piece)
            if not as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()
        stats = None if model is None else model.stats()
    if not as_json:
        sys.stdout.write("\n")
    hit_rate = stats.hits / stats.lookups if stats and stats.lookups else None
    manifest = prepared.manifest
    output.result(
        {
            "text": "".join(pieces),
            "refined": stats is not None,
            "weight_hit_rate": hit_rate,
            "k": manifest.k if k is None else k,
            "shift": manifest.shift,
            "mlp_scheme": manifest.mlp_scheme,
        }
    )


def _attach(
    prepared: "PreparedModel",
    weights: "DecoderWeights",
    context: int,
    runtime_dir: "Path | None",
    k: int | None,
    policy: "MissPolicy",
    required: bool,
) -> "RefinedModel | None":
    from strataflux.client.refined import RefinedModel

    try:
        return RefinedModel.attach(prepared, weights, context=context, runtime_dir=runtime_dir, k=k, miss=policy)
    except (DaemonUnavailableError, RefusedError) as error:
        if required:
            raise
        print_note(f"not refined: {error.subject}: {error.found}; {error.remedy}")
        return None


def register(app: typer.Typer) -> None:
    """Add ``generate``."""
    app.command("generate")(_command)
