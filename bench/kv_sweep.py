"""The accuracy of a low-bit KV cache by bits, fraction and group size, as if no refinement ever missed.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python bench/kv_sweep.py \
        --model SmolLM2-135M-Instruct.Q4_1.gguf --text moby-dick.txt --device cuda

Needs torch and what opens the model (gguf and tokenizers, or safetensors); no daemon, no compiler. ``--model`` also
takes the parts that ``pack_model.py`` makes of a file. Windows start at
given tokens of the text; all but the last 256 of each are prefilled, those are scored against the same model with a
float16 cache. Writes one JSON object to --out, or to stdout; the table goes to stderr.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from pack_model import join

from strataflux.client.evaluate.kv import DenseKv, prefill, score_exact, score_low_bit
from strataflux.client.evaluate.scoring import Score
from strataflux.client.prepare.source import open_source
from strataflux.client.runtime.models import DecoderWeights, LayerWeights
from strataflux.kernels.kv_encode import KvFormat

SCORED = 256
ZERO = Fraction(0)
Row = tuple[str, str, Fraction, int]
"""Resident bits, refinement bits, fraction of groups, tokens of a group."""

SWEEP: dict[tuple[str, str, bool], list[tuple[Fraction, int]]] = {
    ("2/2", "4/4", False): [
        (ZERO, 4),
        *((Fraction(1, n), 4) for n in (256, 128, 64, 32, 16)),
        *((Fraction(1, n), 2) for n in (128, 64)),
        (Fraction(1), 4),
    ],
    ("2/2", "2/2", False): [(Fraction(1, 128), 4)],
    ("2/2", "1/1", False): [(Fraction(1, 128), 4)],
    ("2/2", "4/4", True): [(ZERO, 4), (Fraction(1, 128), 4)],
    ("3/2", "4/4", False): [(ZERO, 4), (Fraction(1, 128), 4), (Fraction(1, 128), 2)],
    ("3/3", "4/4", False): [(ZERO, 4), (Fraction(1, 128), 4), (Fraction(1, 128), 2)],
    ("4/2", "4/4", False): [(ZERO, 4), (Fraction(1, 128), 4)],
    ("2/1", "0/1", False): [(ZERO, 2), (Fraction(1, 16), 2)],
}
"""(resident, refinement, prenormalized) → fractions and groups. Fraction 0 is the base alone."""


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        source = open_source(join(options.model, Path(folder)))
        weights = on_device(DecoderWeights.read(source), options.device)
        tokens = source.tokenizer().encode(options.text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    scores: dict[str, list[Score]] = {}
    for start in options.starts:
        began = time.perf_counter()
        window = tokens[start : start + options.context + 1]
        if len(window) <= options.context:
            sys.exit(f"the text has {len(tokens)} tokens; a window of {options.context + 1} at {start} needs more")
        for name, score in scores_of(weights, window, options):
            scores.setdefault(name, []).append(score)
            print(f"{start:7d}  {name:34s} kl {score.kl:.5f}  ppl {score.perplexity:.3f}", file=sys.stderr, flush=True)
        print(f"{start:7d}  done in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    report(scores, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="a .gguf file, its parts, or a folder")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--starts", type=integers, default=(5000, 60_000, 120_000, 180_000))
    parser.add_argument("--only", type=lambda text: text.split(","), default=None, help="resident bits, as 2/2,3/2")
    parser.add_argument("--fractions", nargs="+", help="of groups of 4 tokens, as 0 1/128, instead of the table's")
    parser.add_argument("--kept-steps", type=int, nargs="+", default=[0], help="0: a token refines what it selects")
    parser.add_argument("--exact-tail", action="store_true", help="keep blocks exact that fill up while scoring")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def on_device(weights: DecoderWeights, device: str) -> DecoderWeights:
    layers = [
        LayerWeights(
            layer.attention_norm.to(device),
            layer.mlp_norm.to(device),
            {name: matrix.to(device) for name, matrix in layer.projections.items()},
            window=layer.window,
        )
        for layer in weights.layers
    ]
    embedding = weights.embedding.to(device)
    head = embedding if weights.config.tied_head else weights.head.to(device)
    return replace(weights, embedding=embedding, norm=weights.norm.to(device), head=head, layers=layers)


def scores_of(
    weights: DecoderWeights, window: Sequence[int], options: argparse.Namespace
) -> Iterator[tuple[str, Score]]:
    split = len(window) - 1 - SCORED
    prefilled = prefill(weights, window[:split])
    reference = score_exact(weights, prefilled, window[split:])
    yield "fp16", reference.score
    for (resident, refined, prenormalized), points in sweep(options).items():
        form = format_of(weights.config.head_dim, resident, refined, prenormalized)
        dense = DenseKv(weights, prefilled, form, not options.exact_tail)
        for (fraction, group), kept in product(points, options.kept_steps):
            if fraction or kept == options.kept_steps[0]:
                score = score_low_bit(dense, reference, fraction, group, kept)
                yield name_of(form, fraction, group) + (f", {kept} steps before" if fraction and kept else ""), score


def sweep(options: argparse.Namespace) -> dict[tuple[str, str, bool], list[tuple[Fraction, int]]]:
    """What of the table is asked for; other fractions are of groups of 4 tokens and the widest refinement."""
    if options.fractions:
        chosen = [(Fraction(text), 4) for text in options.fractions]
        return {(resident, "4/4", False): chosen for resident in options.only or ["2/2"]}
    return {key: points for key, points in SWEEP.items() if options.only is None or key[0] in options.only}


def format_of(head_dim: int, resident: str, refined: str, prenormalized: bool) -> KvFormat:
    (key, value), (fine_key, fine_value) = (map(int, text.split("/")) for text in (resident, refined))
    return KvFormat(key, value, head_dim, fine_key, fine_value, 4, prenormalized)


def name_of(form: KvFormat, fraction: Fraction, group: int) -> str:
    resident = f"{form.key_bits}/{form.value_bits}{' prenormalized' if form.prenormalize else ''}"
    if not fraction:
        return f"{resident} base"
    return f"{resident} +{form.refine_key_bits}/+{form.refine_value_bits} {fraction} of {group}"


def report(scores: dict[str, list[Score]], options: argparse.Namespace) -> None:
    rows = {
        name: {
            "kl": float(np.mean([one.kl for one in parts])),
            "kl_top_1024": float(np.mean([one.kl_top for one in parts])),
            "ppl": float(np.exp(np.mean([one.surprise.mean() for one in parts]))),
            "kl_by_window": [one.kl for one in parts],
        }
        for name, parts in scores.items()
    }
    found = {
        "context": options.context,
        "starts": options.starts,
        "scored": SCORED,
        "device": options.device,
        "torch": torch.__version__,
        "rows": rows,
    }
    for name, row in rows.items():
        print(f"{name:34s} ppl {row['ppl']:8.3f}  kl {row['kl']:.5f}  top {row['kl_top_1024']:.5f}", file=sys.stderr)
    text = json.dumps(found, indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
