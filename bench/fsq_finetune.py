"""What finetuning gives back to a model whose keys and values became discrete codes.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python bench/fsq_finetune.py \
        --model SmolLM2-135M-Instruct.Q4_1.gguf --text wikitext2-valid.txt --more moby-dick.txt --device cuda

Trains on the part of ``--text`` that is not scored, ``--more`` and the prose that Python ships. Prints one JSON object
a row: before and after, for each ratio and bound.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from pack_model import join

from strataflux.client.evaluate.compare import cut_windows, join_scores
from strataflux.client.evaluate.dense import dense_reference, score_logits
from strataflux.client.evaluate.fsq import fsq_logits
from strataflux.client.evaluate.text import python_prose, read_text
from strataflux.client.prepare.fsq import FsqSettings, code_bytes, convert
from strataflux.client.prepare.fsq_tune import FsqTuning, TuneSettings, random_sequences
from strataflux.client.prepare.source import open_source
from strataflux.client.runtime.models import DecoderWeights
from strataflux.kernels.fsq import FsqLayer


def main() -> None:
    options = parse()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as folder:
        source = open_source(join(options.model, Path(folder)))
        weights = DecoderWeights.read(source).to(device)
        tokenizer = source.tokenizer()
        tokens = tokenizer.encode(read_text(options.text)).ids
        references = [
            dense_reference(weights, window)
            for window in cut_windows(options.text, tokens, options.window - 1, options.windows)
        ]
        train = tokens[options.windows * options.window :]
        for text in [*map(read_text, options.more), python_prose()]:
            train += tokenizer.encode(text).ids
        given = torch.tensor(train[: options.sequences * 512]).view(-1, 512)
        train = torch.tensor(train, device=device)

        def kl(codes: list[FsqLayer]) -> float:
            return join_scores([score_logits(fsq_logits(weights, codes, r.tokens[:-1]), r) for r in references]).kl

        for variant in options.variants:
            ratio, levels, bound = variant.split(":")
            settings = FsqSettings(code_bytes(source.config, float(ratio)), int(levels), bound)
            codes = [made.layer for made in convert(source, given, settings, device)]
            row = {"ratio": float(ratio), "levels": int(levels), "bound": bound, "nbytes": settings.nbytes}
            row |= {"train_tokens": len(train), "kl_before": kl(codes), "rate": options.rate}
            print(row, file=sys.stderr, flush=True)
            began, history = time.monotonic(), list[float]()
            tuning = FsqTuning(weights, codes, TuneSettings(options.steps, options.rate))

            def told(step: int, loss: float) -> None:
                history.append(loss)
                if step % 100 == 0:
                    seconds = time.monotonic() - began
                    print(f"step {step}: {sum(history[-100:]) / 100:.4f}, {seconds:.0f} s", file=sys.stderr, flush=True)

            limited = within(began + options.seconds, random_sequences(train, options.batch, options.length, 0))
            tuning.run(limited, told)
            row |= {"steps": tuning.step, "tokens": tuning.step * options.batch * options.length}
            row |= {"seconds": time.monotonic() - began, "kl_after": kl(tuning.result()), "loss": history[-100:][::10]}
            print(json.dumps(row), flush=True)


def within(until: float, batches):
    for batch in batches:
        if time.monotonic() > until:
            return
        yield batch


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="a .gguf file or its parts")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--more", type=Path, nargs="*", default=[])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--variants", nargs="+", default=["8:16:tanh", "8:0:clamp", "16:16:tanh", "16:0:clamp"])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop each variant after so long")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rate", type=float, default=1e-3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
