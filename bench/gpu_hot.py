"""Whole steps with a hot tier: tokens a second by how much of the store is in device memory, and by how far channels
have favourites.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python3 bench/gpu_hot.py --out rows.json

Weights and records are random, of Llama-3.1-8B's shape. Inputs of random weights have no favourites, so each channel
gets a factor of its own, exp(spread · normal): through the norms that ``qkv`` and ``gate_up`` read, and through the
rows that the inputs of ``o`` and ``down`` come from. What part of the look-ups then falls to the tier is measured;
recorded selections of a small model stand beside it in docs/PERFORMANCE.md. Every step appends another token.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from gpu_kernels import environment
from gpu_timing import Rows

from strataflux.client.bench.decode import PinnedRecords
from strataflux.client.runtime.cuda.budget import Budget
from strataflux.client.runtime.cuda.decoder import GraphDecoder
from strataflux.client.runtime.cuda.linear import LowbitLinear
from strataflux.client.runtime.cuda.model import DeviceLayer, DeviceModel
from strataflux.client.runtime.cuda.random_model import SHAPES, random_model
from strataflux.client.runtime.cuda.refined import make_decoder
from strataflux.client.runtime.models import ModelConfig
from strataflux.kernels.lowbit_gemv import LowbitWeights

TINY = replace(
    SHAPES["llama-3.2-1b"], hidden=64, intermediate=64, layers=2, heads=1, kv_heads=1, head_dim=64, vocabulary=64,
    rope_divisors=(),
)  # fmt: skip
BUDGETS = ((8, 1.5), (16, 1.0))
"""Channels of 1,024, and blocks of lead and lag: the one goes by errands, the other on side lanes."""


def factors(count: int, spread: float, device: torch.device) -> Tensor:
    """A factor for each channel, [count] float32, of mean square 1."""
    found = torch.exp(spread * torch.randn(count, device=device))
    return found / found.square().mean().sqrt()


def scale_rows(weights: LowbitWeights, by: Tensor) -> None:
    """Multiply rows of scaled weights, in place: their scales, where ``by`` is [rows] float32."""
    tiles = weights.words.shape[0]
    padded = torch.ones(16 * tiles, device=by.device)
    padded[: weights.rows] = by
    each = padded.view(tiles, 2, 8).transpose(1, 2)[:, None, :, None, :]
    scales = (weights.meta & 0xFFFF).to(torch.int16).view(torch.float16).float()
    changed = (scales * each).half().view(torch.int16).int() & 0xFFFF
    weights.meta.copy_(weights.meta & ~0xFFFF | changed)


def favour(config: ModelConfig, layer: DeviceLayer, spread: float) -> None:
    """Give a layer's channels factors of their own, wherever they are selected from."""
    device = layer.attention_norm.device
    for norm in (layer.attention_norm, layer.mlp_norm):
        norm.copy_(factors(config.hidden, spread, device))
    qkv, gate_up = layer.linears[0], layer.linears[2]
    assert isinstance(qkv, LowbitLinear)
    assert isinstance(gate_up, LowbitLinear)
    values = config.kv_heads * config.head_dim
    for linear, count in ((qkv, values), (gate_up, config.intermediate)):  # the last rows are values, and what is gated
        by = torch.ones(linear.rows, device=device)
        by[-count:] = factors(count, spread, device)
        scale_rows(linear.weights, by)


def favoured_model(config: ModelConfig, spread: float, device: torch.device) -> DeviceModel:
    """A 4-bit model whose channels have favourites; norms are its own."""
    model = random_model(config, "4-bit", device)
    layers = [
        replace(one, attention_norm=one.attention_norm.clone(), mlp_norm=one.mlp_norm.clone()) for one in model.layers
    ]
    for layer in layers:
        favour(config, layer, spread)
    return replace(model, layers=layers)


def rate(decoder: GraphDecoder, tokens: int, rounds: int, between: Callable[[], object]) -> float:
    """Median tokens a second; the first round warms up, the tier too."""
    found, vocabulary = [], decoder.step.model.config.vocabulary
    for number in range(rounds + 1):
        decoder.reset()
        decoder.wait()
        began = time.perf_counter()
        for i in range(tokens):
            decoder.launch((number * tokens + i) * 7919 % vocabulary)
            between()
        decoder.wait()
        found.append(tokens / (time.perf_counter() - began))
    return statistics.median(found[1:])


def hot_tier(
    rows: Rows, config: ModelConfig, device: torch.device, spread: float, shares: list[int], tokens: int
) -> None:
    """One model: its base, then each part of the store in the tier."""
    model = favoured_model(config, spread, device)
    base = rate(make_decoder(model, tokens, None, Budget.common(0)), tokens, 2, lambda: None)
    rows.add("hot tier", f"spread {spread}, base", tokens_per_second=base)
    whole = 0
    for share in shares:
        if rows.left() < 15:
            break
        with PinnedRecords(config, device, whole * share // 100) as records:
            whole, hot = whole or records.store.bytes, records.store.hot
            for k, shift in BUDGETS:
                decoder = make_decoder(model, tokens, records.block, Budget.common(k, shift))
                records.store.warm()
                rate(decoder, tokens, 1, records.store.refresh)  # the tier takes in what is used
                before = (hot.hits, hot.misses) if hot else (0, 0)
                got = rate(decoder, tokens, 2, records.store.refresh)
                hits, misses = (hot.hits - before[0], hot.misses - before[1]) if hot else (0, 0)
                rows.add("hot tier", f"spread {spread}, {share} % in the tier, k {k}, shift {shift}",
                         tokens_per_second=got, of_base=got / base, hot_bytes=hot.bytes if hot else 0,
                         hot_share=hits / max(1, hits + misses))  # fmt: skip
                decoder.wait()


def main() -> None:
    """Measure each spread within the time given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--spread", type=float, nargs="+", default=[1.0, 0.5])
    parser.add_argument("--share", type=int, nargs="+", default=[0, 10, 25], help="%% of the store; the first is 0")
    parser.add_argument("--tiny", action="store_true", help="two very small layers on this processor: does it run?")
    options = parser.parse_args()
    rows = Rows(options.out, options.seconds)
    config, device, tokens = (TINY, torch.device("cpu"), 2) if options.tiny else (
        SHAPES["llama-3.1-8b"], torch.device("cuda"), 64)  # fmt: skip
    if not options.tiny:
        rows.run("environment", lambda: environment(rows))
    for spread in options.spread:
        rows.run("hot tier", lambda s=spread: hot_tier(rows, config, device, s, options.share, tokens))  # type: ignore[misc]
    rows.add("end", "all sections")


if __name__ == "__main__":
    main()
