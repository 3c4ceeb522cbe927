"""What finetuning gives back to a model whose keys and values became discrete codes.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python bench/fsq_finetune.py \
        --model SmolLM2-135M-Instruct.Q4_1.gguf --text wikitext2-valid.txt --more moby-dick.txt --device cuda

Trains on the part of ``--text`` that is not scored, ``--more`` and Python's own prose; some of that text is
held out, and what does best there is kept. Each variant tries every rate for a short while and trains on with the best.
Prints one JSON object a row: conversion, each trial, and the trained codes, which ``--save`` keeps.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from fsq_sweep import divergence
from pack_model import join

from strataflux.client.evaluate.compare import cut_windows
from strataflux.client.evaluate.dense import dense_reference
from strataflux.client.evaluate.methods.fsq import InMemory
from strataflux.client.evaluate.text import python_prose, read_text
from strataflux.client.prepare.fsq import FsqSettings, code_bytes, convert
from strataflux.client.prepare.fsq_file import FsqAbout, save_codes, weights_digest
from strataflux.client.prepare.fsq_tune import FsqTuning, TuneSettings, hold_out, random_sequences
from strataflux.client.prepare.source import open_source
from strataflux.client.runtime.models import DecoderWeights
from strataflux.kernels.fsq import FsqLayer

HELD_OUT = 16


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
    for more in [*map(read_text, options.more), python_prose()]:
        text += tokenizer.encode(more).ids
    train, held = hold_out(torch.tensor(text, device=device), HELD_OUT, options.length)
    trainer = Trainer(options, weights, train, list(held.split(8)))
    for variant in options.variants:
        ratio, levels, bound = variant.split(":")
        settings = FsqSettings(code_bytes(weights.config, float(ratio)), int(levels), bound)
        codes = [made.layer for made in convert(InMemory(weights), given, settings, device)]
        row = {"variant": variant, "nbytes": settings.nbytes, "train_tokens": len(train)}
        put({**row, "row": "converted", **divergence(weights, codes, references)})
        tried = {rate: trainer.run(codes, rate, options.trial_seconds) for rate in options.rates}
        for rate, tuning in tried.items():
            put({**row, "row": "trial", "rate": rate, **told(tuning)})
        best = min(tried, key=lambda rate: tried[rate].held_out_loss)
        done = trainer.run(codes, best, options.seconds)
        trained = done.result()
        put({**row, "row": "trained", "rate": best, **told(done), **divergence(weights, trained, references)})
        if options.save:
            about = FsqAbout(
                settings.nbytes, settings.levels, settings.bound, "original", digest, tuned_seconds=done.seconds
            )
            save_codes(options.save / f"{variant.replace(':', '-')}.safetensors", trained, about)


class Trainer:
    """Runs on one text."""

    def __init__(
        self, options: argparse.Namespace, weights: DecoderWeights, text: torch.Tensor, held: list[torch.Tensor]
    ) -> None:
        self.options, self.weights, self.text, self.held = options, weights, text, held

    def run(self, codes: list[FsqLayer], rate: float, seconds: float) -> FsqTuning:
        options = self.options
        settings = TuneSettings(options.steps, rate, seconds, recompute=options.recompute)
        tuning = FsqTuning(self.weights, codes, settings, held_out=self.held)

        def say(step: int, loss: float) -> None:
            if step % 20 == 0:
                seen = f"step {step}: {loss:.4f}, held out {tuning.held_out_loss:.4f}, {tuning.seconds:.0f} s"
                print(seen, file=sys.stderr, flush=True)

        tuning.run(random_sequences(self.text, options.batch, options.length, 0), say)
        return tuning


def told(tuning: FsqTuning) -> dict[str, float]:
    return {"steps": tuning.step, "seconds": round(tuning.seconds, 1), "held_out": tuning.held_out_loss}


def put(row: dict[str, object]) -> None:
    print(json.dumps(row), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="a .gguf file or its parts")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--more", type=Path, nargs="*", default=[])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--variants", nargs="+", default=["8:0:clamp", "16:0:clamp"])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=90, help="of training, a variant")
    parser.add_argument("--trial-seconds", type=float, default=12, help="of training, a rate")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--recompute", action="store_true", help="less memory, a quarter more time")
    parser.add_argument("--save", type=Path, help="a folder for trained codes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
