"""Codes in two tiers through a daemon: how much divergence refinement takes away, by what the cache holds.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python bench/fsq_tiers.py --model SmolLM2-135M-Instruct.Q4_1.gguf \
        --text wikitext2-valid.txt --groups 1,4 --caches 10%,100% > rows.jsonl

Prints one JSON object a row: plain codes of the two sizes, tiers as if nothing missed, and through a daemon of its own
that skips what is absent. Codes are made on the part of the text that is not scored, or were saved (``--codes``) by
``fsq_finetune.py``, and are divided here, or by ``fsq_tune_tiers.py``; ``--plain`` takes saved ones of both sizes to
compare with. ``recovered`` is of the way from the resident tier to the whole code, ``recovered_of_plain`` of that from
the smaller to the larger plain code. Decoding is on the processor.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from fsq_sweep import calibration, divergence
from pack_model import join

from strataflux.cache_policy.miss import Skip
from strataflux.client.cli.options import parse_cache
from strataflux.client.evaluate.compare import cut_windows
from strataflux.client.evaluate.dense import dense_reference
from strataflux.client.evaluate.fsq_run import TierEvaluation, evaluate_tiers
from strataflux.client.evaluate.methods.fsq import InMemory
from strataflux.client.evaluate.text import read_text
from strataflux.client.fsq_refined import TierOptions
from strataflux.client.launch import PrivateDaemon
from strataflux.client.prepare.fsq import FsqSettings, code_bytes, convert
from strataflux.client.prepare.fsq_file import load_codes, weights_digest
from strataflux.client.prepare.fsq_tiers import divide_codes
from strataflux.client.prepare.source import open_source
from strataflux.client.runtime.models import DecoderWeights
from strataflux.kernels.fsq import FsqLayer


def main() -> None:
    options = parse()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as folder:
        opened = open_source(join(options.model, Path(folder)))
        weights = DecoderWeights.read(opened)
        tokens = opened.tokenizer().encode(read_text(options.text)).ids
        given = calibration(options, opened.tokenizer(), tokens)
        source = InMemory(weights.to(device))
        digest = weights_digest(opened)
        saved = None if options.codes is None else load_codes(options.codes, weights.config, digest)
    references = [
        dense_reference(weights, window)
        for window in cut_windows(options.text, tokens, options.window - 1, options.windows)
    ]

    def plain(layers: Sequence[FsqLayer]) -> float:
        """On the processor, where tiers decode."""
        found = divergence(weights, [one.to(torch.device("cpu")) for one in layers], references)
        put({"row": "plain", "nbytes": max(one.grid.nbytes for one in layers), **found})
        return found["kl"]

    def converted(ratio: int) -> list[FsqLayer]:
        settings = FsqSettings(code_bytes(weights.config, ratio), 0, "clamp")
        return [one.layer for one in convert(source, given, settings, device)]

    compared = [load_codes(path, weights.config, digest).layers for path in options.plain]
    codes = converted(8) if saved is None else [one.to(device) for one in saved.layers]
    if saved is None and not compared:
        compared = [converted(16), codes]
    way = [plain(layers) for layers in compared]
    if saved is not None and saved.tiers:
        tiers = list(saved.tiers)
    else:
        size = code_bytes(weights.config, 16)
        tiers = [one.to(torch.device("cpu")) for one in divide_codes(source, codes, given, size, device)]
    for group in options.groups:
        asked = TierOptions(options.fraction, group)
        if not options.decoded_only:
            found = evaluate_tiers(weights, tiers, references, asked, None, miss=Skip(), on_token=lambda: None)
            put(row(asked, "no misses", found, way))
        for cache in options.caches:
            wanted = parse_cache(cache, asked.slots_of(tiers, options.window - 1), "--caches")
            daemon = PrivateDaemon(
                [], weight_cache_bytes=0, kv_cache_bytes=asked.daemon_bytes(tiers, wanted), grace_seconds=60.0
            )
            with daemon:
                path = daemon.runtime_dir
                found = evaluate_tiers(weights, tiers, references, asked, path, miss=Skip(), on_token=lambda: None)
            put(row(asked, cache, found, way))


def row(asked: TierOptions, cache: str, found: TierEvaluation, way: Sequence[float]) -> dict[str, object]:
    told = {"row": "tiers", "fraction": str(asked.fraction), "group": asked.group_tokens, "cache": cache}
    kl = {"coarse_kl": found.coarse.kl, "whole_kl": found.whole.kl, "refined_kl": found.refined.kl}
    counts = found.counts
    session = None if counts is None else counts.session
    return {
        **told,
        **kl,
        "recovered": found.recovered,
        "recovered_of_plain": (way[0] - found.refined.kl) / (way[0] - way[1]) if len(way) > 1 else None,
        "tokens": found.refined.tokens,
        "recall_by_layer": found.recall,
        "lookups": counts and counts.lookups,
        "hit_rate": counts and counts.hit_rate,
        "blocks_unrefined": counts and counts.blocks_unrefined,
        "engine": session and session.engine,
        "direct_io": session and session.direct_io,
        "steps_invalid": session and session.steps_invalid,
    }


def put(told: dict[str, object]) -> None:
    print(json.dumps(told), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="a .gguf file, its parts, or a folder")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, help="another text to make codes on")
    parser.add_argument("--sequences", type=int, default=128, help="of 512 tokens, for making codes")
    parser.add_argument("--codes", type=Path, help="codes of 8 ×, saved, in two tiers or to be divided")
    parser.add_argument(
        "--plain", type=Path, nargs=2, default=[], help="saved codes of 16 × and of 8 × to compare with"
    )
    parser.add_argument("--device", default="cpu", help="where codes are made")
    parser.add_argument("--windows", type=int, default=1)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--fraction", type=Fraction, default=Fraction(1, 32))
    parser.add_argument("--groups", type=lambda text: [int(part) for part in text.split(",")], default=[1])
    parser.add_argument("--decoded-only", action="store_true", help="leave out what nothing missed would give")
    parser.add_argument("--caches", type=lambda text: text.split(","), default=["10%"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
