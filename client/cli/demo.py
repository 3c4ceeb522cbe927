"""``strataflux demo``: see a low-bit model get its accuracy back."""

import time
from typing import TYPE_CHECKING

import typer

from strataflux.client.cli.options import JsonOption
from strataflux.client.cli.output import EXIT_FAILURE, Output, progress

if TYPE_CHECKING:
    from pathlib import Path

    from strataflux.client.demo.run import Demo, DemoSettings
    from strataflux.client.prepare.prepared import PreparedModel
    from strataflux.client.prepare.source import ModelSource

__all__ = ["register"]

_NAMES = {
    "reference": "reference",
    "base": "3-bit base",
    "refined_skip": "refined, skip",
    "refined_wait": "refined, wait",
    "refined_kv": "refined, KV too",
}
_FACTS = {
    "reference_is": "the dequantized Q4_1 weights of the model file",
    "misses": "skip keeps the low-bit weights for what is not in the cache; wait sleeps until it is, for half a second "
    "at most, and its hit rate counts as missed what was waited for",
    "kv": "the last row keeps its KV cache in 2 bits, too, but for the first 128 and the newest 1 to 128 tokens, and "
    "gives 4 more bits to one in 16 of its groups of 4 tokens; the other rows' KV caches are exact",
    "caches": "each refined row has a daemon of its own, whose cache is empty at the first token",
    "speeds": "tokens/s are of token-by-token steps: of the whole text for refined rows, of the sentence for the "
    "others, whose text is scored in one pass",
    "bytes_read_source": "each daemon's control socket, reads.bytes, after the scored tokens",
}


def _command(as_json: JsonOption = False) -> None:
    """Prepare a small real model in 3 bits, decode it through a daemon, and show what refinement gives back.

    The prepared model stays in your cache folder for the next time; the daemons and all else are gone at the end.
    """
    from strataflux.client.demo.model import model_file
    from strataflux.client.demo.run import DemoSettings, run_demo
    from strataflux.client.prepare.source import open_source

    output, settings, started = Output(as_json), DemoSettings(), time.monotonic()
    source = model_file()
    with progress("reading the model"):
        model = open_source(source)
    prepared, made = _prepared(source, model)
    prepare_seconds = time.monotonic() - started
    demo = run_demo(model, prepared, settings, progress)
    demo.seconds.update(prepare=prepare_seconds, total=time.monotonic() - started)
    _show(output, demo, settings)
    _emit(output, demo, settings, prepared, made)
    if demo.leftovers.names:
        raise typer.Exit(EXIT_FAILURE)


def _prepared(source: "Path", model: "ModelSource") -> "tuple[PreparedModel, bool]":
    """The prepared model, and whether it was made just now."""
    from strataflux.client.demo.model import cache_folder, find_prepared, make_prepared
    from strataflux.client.prepare.settings import PrepareSettings
    from strataflux.client.prepare.write import prepare_steps

    settings = PrepareSettings()
    folder = cache_folder(source, settings)
    with progress("checking the prepared model"):
        found = find_prepared(folder)
    if found is not None:
        return found, False
    with progress("preparing the model in 3 bits, once", prepare_steps(model.config, settings)) as advance:
        return make_prepared(model, folder, settings, advance), True


def _show(output: Output, demo: "Demo", settings: "DemoSettings") -> None:
    from strataflux.client.cli.table import comparison_table
    from strataflux.client.demo.model import MODEL_NAME

    session = demo.sessions["refined_skip"]
    output.print(
        f"\n{MODEL_NAME}, 3 bits in groups of 64, k = {settings.k} channels per 1,024; {settings.tokens} tokens of "
        f"pydoc_data.topics\nRAM cache {demo.cache_bytes / 1e6:.1f} MB, {settings.cache_share:.0%} of the refinement "
        f"bits; engine {session.engine}, {session.direct_io} reads\n"
    )
    output.print(comparison_table({_NAMES[name]: row for name, row in demo.rows.items()}))
    for name in demo.sessions:
        output.print(f"{_NAMES[name]}: KL is {_ratio(demo, name):.2f} of the base's")
    output.print(f"\nThe reference: {_FACTS['reference_is']}.")
    for name, label in {"misses": "Misses", "kv": "KV", "caches": "Caches", "speeds": "Speeds"}.items():
        output.print(f"{label}: {_FACTS[name]}.")
    output.print()
    for name, sentence in demo.sentences.items():
        output.print(f"[bold]{_NAMES[name]}[/]: ", sentence)
    left = ", ".join(demo.leftovers.names) or "nothing"
    output.print(f"\n{demo.seconds['total']:.0f} s; the daemons have stopped and left {left} behind")


def _ratio(demo: "Demo", name: str) -> float:
    return demo.rows[name].score.kl / demo.rows["base"].score.kl


def _emit(output: Output, demo: "Demo", settings: "DemoSettings", prepared: "PreparedModel", made: bool) -> None:
    from strataflux.client.demo.model import MODEL_NAME

    rows = {name: row.to_json() | {"sentence": demo.sentences[name]} for name, row in demo.rows.items()}
    for name, session in demo.sessions.items():
        rows[name] |= {
            "kl_ratio": _ratio(demo, name),
            "waits": session.waits,
            "deadlines_exceeded": session.deadlines_exceeded,
            "steps_invalid": session.steps_invalid,
        }
    output.result(
        {
            "model": MODEL_NAME,
            **rows,
            "tokens": settings.tokens,
            "k": settings.k,
            "cache_bytes": demo.cache_bytes,
            "kv_cache_bytes": demo.kv_cache_bytes,
            "store_slot_bytes": demo.store_bytes,
            "engine": demo.sessions["refined_skip"].engine,
            "direct_io": demo.sessions["refined_skip"].direct_io,
            "prepared": prepared.folder,
            "prepared_now": made,
            "seconds": demo.seconds,
            **_FACTS,
            "leftovers": len(demo.leftovers.names),
            "leftover_names": demo.leftovers.names,
        }
    )


def register(app: typer.Typer) -> None:
    """Add ``demo``."""
    app.command("demo")(_command)
