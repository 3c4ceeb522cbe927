"""What finetuning gives back to a model whose keys and values became discrete codes.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python bench/fsq_finetune.py \
        --model SmolLM2-135M-Instruct.Q4_1.gguf --text wikitext2-valid.txt --more moby-dick.txt --device cuda

Trains on the part of ``--text`` that is not scored, ``--more``, Python's own prose, and what the model itself writes
after stretches of the first; some of that is held out, and what does best there is kept. Each variant tries every
rate for a short while, if there are several, and trains on with the best. Prints one JSON object a row: conversion,
trials, and the trained codes; ``--save`` keeps them from minute to minute.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from fsq_sweep import divergence
from pack_model import join

from strataflux.client.evaluate.compare import cut_windows
from strataflux.client.evaluate.dense import dense_reference
from strataflux.client.evaluate.methods.fsq import InMemory
from strataflux.client.evaluate.text import python_prose, read_text
from strataflux.client.prepare.fsq import FsqSettings, code_bytes, convert
from strataflux.client.prepare.fsq_file import FsqAbout, load_codes, read_about, save_codes, weights_digest
from strataflux.client.prepare.fsq_tune import FsqTuning, TuneSettings
from strataflux.client.prepare.fsq_tune_model import FrozenModel, write_more
from strataflux.client.prepare.fsq_tune_text import Course, hold_out, overlapping
from strataflux.client.prepare.source import open_source
from strataflux.client.runtime.models import DecoderWeights
from strataflux.kernels.fsq import FsqLayer

HELD_OUT = 16
BEGAN = time.monotonic()


def main() -> None:
    options = parse()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as folder:
        source = open_source(join(options.model, Path(folder)))
        digest = weights_digest(source)
        weights = DecoderWeights.read(source).to(device)
        tokenizer = source.tokenizer()
    tokens = tokenizer.encode(read_text(options.text)).ids
    windows = cut_windows(options.text, tokens, options.window - 1, options.windows)
    references = [dense_reference(weights, window) for window in windows]
    text = tokens[options.windows * options.window :]
    given = torch.tensor(text[: options.sequences * 512]).view(-1, 512)
    made, held = sequences(options, FrozenModel(weights), tokenizer, text)
    course = Course(made, FrozenModel(weights).states, weights.config.hidden)
    trainer = Trainer(options, weights, digest, course, list(held.split(8)))
    limits = options.seconds * len(options.variants) if len(options.seconds) == 1 else options.seconds
    for variant, seconds in zip(options.variants, limits, strict=True):
        ratio, levels, bound = variant.split(":")
        settings = FsqSettings(code_bytes(weights.config, float(ratio)), int(levels), bound, options.metric)
        row: dict[str, object] = {"variant": variant, "nbytes": settings.nbytes, "metric": options.metric}
        row |= {"sequences": made.shape[0], "own_tokens": options.own * options.length}
        if options.start:
            saved = load_codes(options.start, weights.config, digest).to(device)
            codes, row["seconds_before"] = list(saved.layers), saved.about.tuned_seconds
        else:
            codes = [made.layer for made in convert(InMemory(weights), given, settings, device)]
        put({**row, "row": "saved" if options.start else "converted", **divergence(weights, codes, references)})
        best = best_rate(trainer, row, codes)
        path = options.save and options.save / f"{variant.replace(':', '-')}.safetensors"
        done = trainer.run(codes, best, seconds, settings, path)
        put({**row, "row": "trained", "rate": best, **told(done), **divergence(weights, done.result(), references)})


def best_rate(trainer: "Trainer", row: dict[str, object], codes: list[FsqLayer]) -> float:
    options = trainer.options
    if len(options.rates) == 1:
        return options.rates[0]
    tried = {rate: trainer.run(codes, rate, options.trial_seconds) for rate in options.rates}
    for rate, tuning in tried.items():
        put({**row, "row": "trial", "rate": rate, **told(tuning)})
    return min(tried, key=lambda rate: tried[rate].held_out_loss)


def sequences(
    options: argparse.Namespace, model: FrozenModel, tokenizer: Tokenizer, text: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is trained on [count, length]: the text but for what is held out, each token ``--times``, further texts once
    or ``--more-times``, and what the model itself goes on with after stretches of the former; and what is held out.
    """
    began, device = time.monotonic(), model.head.device
    train, held = hold_out(torch.tensor(text, device=device), HELD_OUT, options.length)
    parts = [overlapping(train, options.length, options.times)]
    for more in [*map(read_text, options.more), python_prose()]:
        tokens = torch.tensor(tokenizer.encode(more).ids, device=device)
        parts.append(overlapping(tokens, options.length, options.more_times))
    how = options.own, options.length, options.own_prompt, options.own_batch, options.seed
    made = torch.cat((*parts, write_more(model, train, *how)))
    print(f"{made.shape[0]} sequences in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return made, held


class Trainer:
    """Runs on one text."""

    def __init__(
        self,
        options: argparse.Namespace,
        weights: DecoderWeights,
        digest: str,
        course: Course,
        held: list[torch.Tensor],
    ) -> None:
        self.options, self.weights, self.digest, self.course, self.held = options, weights, digest, course, held

    def run(
        self,
        codes: list[FsqLayer],
        rate: float,
        seconds: float,
        made: FsqSettings | None = None,
        path: Path | None = None,
    ) -> FsqTuning:
        """With ``path``, codes are kept there, once a minute and at the end."""
        options = self.options
        until = options.deadline - (time.monotonic() - BEGAN)
        settings = TuneSettings(
            options.steps, rate, max(1.0, min(seconds, until)), recompute=options.recompute, check_every=options.check
        )
        tuning = FsqTuning(self.weights, codes, settings, held_out=self.held)
        kept = time.monotonic()

        def say(step: int, loss: float) -> None:
            nonlocal kept
            if step % options.check == 0:
                seen = f"step {step}: {loss:.4f}, held out {tuning.held_out_loss:.4f}, {tuning.seconds:.0f} s"
                print(seen, file=sys.stderr, flush=True)
            if made is not None and path is not None and time.monotonic() - kept > 60:
                self.keep(tuning, made, path)
                kept = time.monotonic()

        tuning.run(self.course.batches(options.batch, options.seed), say)
        if made is not None and path is not None:
            self.keep(tuning, made, path)
        return tuning

    def keep(self, done: FsqTuning, made: FsqSettings, path: Path) -> None:
        found = (done.held_out_before, done.held_out_loss)
        about = FsqAbout(made.nbytes, made.levels, made.bound, "original", self.digest)
        before = read_about(self.options.start).tuned_seconds if self.options.start else 0.0
        save_codes(path, done.result(), replace(about, tuned_seconds=before + done.seconds, held_out=found))


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """What :func:`sequences` asks for."""
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="further texts to train on")
    parser.add_argument("--length", type=int, default=1024, help="of a sequence to train on")
    parser.add_argument("--times", type=int, default=2, help="sequences that a token of --text is in")
    parser.add_argument("--more-times", type=int, default=1, help="sequences that a token of other texts is in")
    parser.add_argument("--own", type=int, default=0, help="sequences that the model writes")
    parser.add_argument("--own-batch", type=int, default=2048, help="of them at once")
    parser.add_argument("--seed", type=int, default=0, help="of what it writes, and of the order")
    parser.add_argument("--own-prompt", type=int, default=128, help="tokens of a text that each of them begins with")


def told(tuning: FsqTuning) -> dict[str, float]:
    found = {"steps": tuning.step, "seconds": round(tuning.seconds, 1)}
    return found | {"held_out_before": tuning.held_out_before, "held_out": tuning.held_out_loss}


def put(row: dict[str, object]) -> None:
    print(json.dumps(row), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="a .gguf file or its parts")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--variants", nargs="+", default=["8:0:clamp", "16:0:clamp"])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, nargs="+", default=[90], help="of training, all variants or each")
    parser.add_argument("--deadline", type=float, default=1e9, help="begin no training step after so many seconds")
    parser.add_argument("--trial-seconds", type=float, default=12, help="of training, a rate")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--check", type=int, default=20, help="steps between looks at held-out text")
    add_text_options(parser)
    parser.add_argument("--recompute", action="store_true", help="less memory, a quarter more time")
    parser.add_argument("--metric", default="auto", help="of conversion")
    parser.add_argument("--start", type=Path, help="saved codes to go on with, of the one variant")
    parser.add_argument("--save", type=Path, help="a folder for trained codes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
