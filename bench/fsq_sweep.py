"""What a model loses when its keys and values become discrete codes, without training: by bytes, levels and bounds.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python bench/fsq_sweep.py \
        --model SmolLM2-135M-Instruct.Q4_1.gguf --text wikitext2-valid.txt --device cuda > rows.jsonl

Prints one JSON object a row; the unconverted model is the reference of every divergence. Codes are made on the part of
the text that is not scored, or on another text (``--calibration``). Needs torch and what opens the model; no compiler.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from pack_model import join

from strataflux.client.evaluate.compare import cut_windows, join_scores
from strataflux.client.evaluate.dense import dense_reference, score_logits
from strataflux.client.evaluate.fsq import FsqTiers, fsq_logits, recall_of_tiers
from strataflux.client.evaluate.methods.fsq import InMemory
from strataflux.client.evaluate.scoring import Reference
from strataflux.client.evaluate.text import read_text
from strataflux.client.prepare.fsq import Conversion, FsqSettings, code_bytes, convert
from strataflux.client.prepare.fsq_tiers import divide_codes
from strataflux.client.prepare.source import open_source
from strataflux.client.runtime.models import DecoderWeights, WeightSource
from strataflux.kernels.fsq import FsqLayer

VARIANTS = [
    (ratio, levels, bound)
    for ratio in (2, 4, 8, 16, 32)
    for levels, bound in ((4, "clamp"), (16, "tanh"), (16, "clamp"), (256, "clamp"), (0, "clamp"))
]
TIERS = [Fraction(1, n) for n in (128, 64, 32, 16)]


def main() -> None:
    options = parse()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as folder:
        source = open_source(join(options.model, Path(folder)))
        weights = DecoderWeights.read(source).to(device)
        tokenizer = source.tokenizer()
    source = InMemory(weights)
    tokens = tokenizer.encode(read_text(options.text)).ids
    windows = cut_windows(options.text, tokens, options.window - 1, options.windows)
    references = [dense_reference(weights, window) for window in windows]
    given = calibration(options, tokenizer, tokens)
    put(
        {"row": "reference", "ppl": join_scores([r.score for r in references]).perplexity, "calibration": given.numel()}
    )
    for ratio, levels, bound in VARIANTS:
        if ratio not in (options.ratios or [ratio]) or levels not in (options.levels or [levels]):
            continue
        settings = FsqSettings(code_bytes(source.config, ratio), levels, bound)
        measure(source, weights, given, references, settings, {"ratio": ratio})
        if (ratio, levels, bound) == (8, 16, "clamp"):
            for other in ({"metric": "output"}, {"sequential": False}):
                measure(source, weights, given, references, replace(settings, **other), {"ratio": ratio, **other})
        if levels == 0:
            for metric in ("balanced", "divergence"):
                named = {"ratio": ratio, "metric": metric}
                measure(source, weights, given, references, replace(settings, metric=metric), named)
        if options.tiers and (ratio, levels) == (8, 0):
            measured_tiers(source, weights, given, references, settings)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="a .gguf file, its parts, or a folder")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, help="another text to make codes on")
    parser.add_argument("--sequences", type=int, default=128, help="of 512 tokens, for making codes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--tiers", action="store_true", help="8 × by direction in two tiers, too")
    parser.add_argument("--ratios", type=lambda text: [float(part) for part in text.split(",")])
    parser.add_argument("--levels", type=lambda text: [int(part) for part in text.split(",")], help="0: by direction")
    return parser.parse_args()


def calibration(options: argparse.Namespace, tokenizer: Tokenizer, tokens: Sequence[int]) -> Tensor:
    if options.calibration is None:
        rest = tokens[options.windows * options.window :]
    else:
        rest = tokenizer.encode(read_text(options.calibration)).ids
    count = min(options.sequences, len(rest) // 512)
    return torch.tensor(rest[: count * 512]).view(count, 512)


def put(row: dict[str, object]) -> None:
    print(json.dumps(row), flush=True)


def divergence(weights: DecoderWeights, codes: Sequence[FsqLayer | FsqTiers], references: Sequence[Reference]) -> dict:
    scores = join_scores([score_logits(fsq_logits(weights, codes, r.tokens[:-1]), r) for r in references])
    return {"kl": scores.kl, "kl_top": scores.kl_top, "ppl": scores.perplexity}


def describe(settings: FsqSettings) -> dict[str, object]:
    return {"nbytes": settings.nbytes, "levels": settings.levels, "bound": settings.bound}


def measure(
    source: WeightSource,
    weights: DecoderWeights,
    given: Tensor,
    references: Sequence[Reference],
    settings: FsqSettings,
    named: dict[str, object],
) -> list[Conversion]:
    began = time.monotonic()
    made = convert(source, given, settings, weights.embedding.device)
    seconds = time.monotonic() - began
    found = divergence(weights, [one.layer for one in made], references)
    errors = {
        "key_error": [round(c.key_error, 4) for c in made],
        "value_error": [round(c.value_error, 4) for c in made],
    }
    grid = made[0].layer.grid
    shape = {"width": grid.width, "rank": made[0].rank, "seconds": round(seconds, 1)}
    put({"row": "code", **named, **describe(settings), **shape, **found, **errors})
    print(f"{named} {describe(settings)}: kl {found['kl']:.4f}", file=sys.stderr)
    return made


def measured_tiers(
    source: WeightSource,
    weights: DecoderWeights,
    given: Tensor,
    references: Sequence[Reference],
    settings: FsqSettings,
) -> None:
    """The same code with half its bytes resident and the rest refining what is attended to most."""
    device = weights.embedding.device
    codes = [one.layer for one in convert(source, given, settings, device)]
    divided = divide_codes(source, codes, given, settings.nbytes // 2, device)
    put({"row": "coarse", **describe(settings), **divergence(weights, [one.coarse for one in divided], references)})
    for fraction in TIERS:
        for group in (1, 4, 8):
            tiers = [FsqTiers(one.coarse, one.whole, fraction, group) for one in divided]
            row = {"row": "tiers", **describe(settings), "fraction": str(fraction), "group": group}
            put({**row, **divergence(weights, tiers, references)})
        recall = recall_of_tiers(weights, tiers, references[0].tokens[:-1])
        put({"row": "recall", **describe(settings), "fraction": str(fraction), "group": 8, "by_layer": recall})


if __name__ == "__main__":
    main()
