"""What training codes in two tiers gives to what is resident of them, and to a part of it refined.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python bench/fsq_tune_tiers.py \
        --model SmolLM2-135M-Instruct.Q4_1.gguf --text wikitext2-valid.txt --more moby-dick.txt --device cuda \
        --codes 8-0-clamp.safetensors --plain 16-0-clamp.safetensors

Begins with codes of one tier (``fsq_finetune.py --save``), divides them and trains both tiers together. Prints one JSON
object a row, all as if nothing missed: plain codes of both sizes, then tiers as divided and as trained, and how much of
the way from the smaller to the larger plain codes refinement goes; ``--save`` keeps the tiers from minute to minute.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from fsq_finetune import add_text_options, sequences
from fsq_sweep import divergence
from pack_model import join

from strataflux.client.evaluate.compare import cut_windows
from strataflux.client.evaluate.dense import dense_reference
from strataflux.client.evaluate.fsq import FsqTiers, recall_of_tiers
from strataflux.client.evaluate.methods.fsq import InMemory
from strataflux.client.evaluate.scoring import Reference
from strataflux.client.evaluate.text import read_text
from strataflux.client.fsq_blocks import BLOCK_TOKENS
from strataflux.client.prepare.fsq import code_bytes
from strataflux.client.prepare.fsq_file import FsqAbout, load_codes, save_codes, weights_digest
from strataflux.client.prepare.fsq_tiers import divide_codes
from strataflux.client.prepare.fsq_tune import TuneSettings
from strataflux.client.prepare.fsq_tune_model import FrozenModel
from strataflux.client.prepare.fsq_tune_text import Course
from strataflux.client.prepare.fsq_tune_tiers import TierTuning
from strataflux.client.prepare.source import open_source
from strataflux.client.runtime.models import DecoderWeights
from strataflux.kernels.fsq_nested import FsqTier

BEGAN = time.monotonic()


@dataclass(frozen=True)
class Measure:
    """The windows, and the divergences of plain codes of both sizes there."""

    options: argparse.Namespace
    weights: DecoderWeights
    references: Sequence[Reference]
    small: float
    large: float

    def put(self, stage: str, tiers: Sequence[FsqTier]) -> None:
        for name, codes in (("resident", [t.coarse for t in tiers]), ("whole", [t.whole for t in tiers])):
            put({"row": stage, "part": name, **divergence(self.weights, codes, self.references)})
        for group in self.options.groups:
            for block in (0, BLOCK_TOKENS):
                asked = [FsqTiers(t.coarse, t.whole, self.options.fraction, group, block) for t in tiers]
                found = divergence(self.weights, asked, self.references)
                row = {"row": stage, "part": "refined", "fraction": str(self.options.fraction), "group": group}
                row |= {"block": block, "recovered": (self.small - found["kl"]) / (self.small - self.large), **found}
                put(row)
            asked = [FsqTiers(t.coarse, t.whole, self.options.fraction, group) for t in tiers]
            recall = recall_of_tiers(self.weights, asked, self.references[0].tokens[:-1])
            put({"row": stage, "part": "recall", "group": group, "by_layer": [round(one, 4) for one in recall]})


def main() -> None:
    options = parse()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as folder:
        source = open_source(join(options.model, Path(folder)))
        digest = weights_digest(source)
        weights = DecoderWeights.read(source).to(device)
        tokenizer = source.tokenizer()
    large, small = (load_codes(path, weights.config, digest).to(device) for path in (options.codes, options.plain))
    tokens = tokenizer.encode(read_text(options.text)).ids
    windows = cut_windows(options.text, tokens, options.window - 1, options.windows)
    references = [dense_reference(weights, window) for window in windows]
    kl = {}
    for codes in (small, large):
        found = divergence(weights, codes.layers, references)
        kl[codes.about.nbytes] = found["kl"]
        put({"row": "plain", "nbytes": codes.about.nbytes, "tuned_seconds": codes.about.tuned_seconds, **found})
    measure = Measure(options, weights, references, *(kl[codes.about.nbytes] for codes in (small, large)))
    text = tokens[options.windows * options.window :]
    given = torch.tensor(text[: options.sequences * 512]).view(-1, 512)
    size = code_bytes(weights.config, options.resident)
    tiers = divide_codes(InMemory(weights), large.layers, given, size, device)
    measure.put("divided", tiers)
    made, held = sequences(options, FrozenModel(weights), tokenizer, text)
    about = replace(large.about, resident_nbytes=size)
    measure.put("trained", trained(options, weights, tiers, made, list(held.split(8)), about))


def trained(
    options: argparse.Namespace,
    weights: DecoderWeights,
    tiers: list[FsqTier],
    made: torch.Tensor,
    held: list[torch.Tensor],
    about: FsqAbout,
) -> list[FsqTier]:
    course = Course(made, FrozenModel(weights).states, weights.config.hidden)
    seconds = max(1.0, min(options.seconds, options.deadline - (time.monotonic() - BEGAN)))
    settings = TuneSettings(10**6, options.rate, seconds, recompute=options.recompute, check_every=options.check)
    tuning = TierTuning(weights, tiers, settings, held_out=held)
    kept = time.monotonic()

    def keep() -> None:
        if options.save is not None:
            told = replace(about, tuned_seconds=about.tuned_seconds + tuning.seconds)
            save_codes(
                options.save, tuning.result(), replace(told, held_out=(tuning.held_out_before, tuning.held_out_loss))
            )

    def say(step: int, loss: float) -> None:
        nonlocal kept
        if step % options.check == 0:
            seen = f"step {step}: {loss:.4f}, held out {tuning.held_out_loss:.4f}, {tuning.seconds:.0f} s"
            print(seen, file=sys.stderr, flush=True)
        if time.monotonic() - kept > 60:
            keep()
            kept = time.monotonic()

    tuning.run(course.batches(options.batch, options.seed), say)
    keep()
    found = {"before": tuning.held_out_before, "after": tuning.held_out_loss}
    put({"row": "training", "rate": options.rate, "steps": tuning.step, "seconds": tuning.seconds, "held_out": found})
    return tuning.result()


def put(row: dict[str, object]) -> None:
    print(json.dumps(row), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="a .gguf file, its parts, or a folder")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--codes", type=Path, required=True, help="to divide")
    parser.add_argument("--plain", type=Path, required=True, help="of the resident size, to compare with")
    parser.add_argument("--resident", type=float, default=16, help="ratio of what is resident")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--fraction", type=Fraction, default=Fraction(1, 32))
    parser.add_argument("--groups", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 8])
    parser.add_argument("--sequences", type=int, default=128, help="of 512 tokens, to divide by")
    parser.add_argument("--seconds", type=float, default=180, help="of training")
    parser.add_argument("--deadline", type=float, default=1e9, help="begin no training step after so many seconds")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--check", type=int, default=20, help="steps between looks at held-out text")
    add_text_options(parser)
    parser.add_argument("--recompute", action="store_true", help="less memory, a quarter more time")
    parser.add_argument("--save", type=Path, help="a file for trained tiers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
