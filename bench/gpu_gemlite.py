"""Baseline: linear layers of Llama-3.1-8B with gemlite's int4 weights, groups of 128, one token, a graph a shape."""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timing import relative_error

from strataflux.client.bench.replays import microseconds

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LAYERS, GROUP = 32, 128


def main() -> None:
    """Time each shape over as many different weights as exceed the cache."""
    import gemlite
    from gemlite.helper import A16Wn

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(SHAPES), choices=list(SHAPES), help="it tunes each for long")
    chosen = parser.parse_args().only
    total = 0.0
    for name in chosen:
        rows, inputs = SHAPES[name]
        make = A16Wn(device="cuda:0", dtype=torch.float16)
        layers = []
        for _ in range(1 + max(3, int(3e8 / (rows * inputs / 2)))):
            codes = torch.randint(0, 16, (rows, inputs), dtype=torch.uint8, device="cuda")
            scales = torch.rand(rows, inputs // GROUP, device="cuda").half() * 0.01
            zeros = torch.full_like(scales, 8)
            layers.append(make.from_weights(codes, scales, zeros, 4, GROUP))
        x = torch.randn(1, inputs, device="cuda").half()
        weights = ((codes.double().view(rows, -1, GROUP) - 8) * scales.double()[..., None]).view(rows, inputs)
        error = relative_error(layers[-1](x), x.double() @ weights.t())
        took = microseconds(lambda layers=layers, x=x: [layer(x) for layer in layers]) / len(layers)
        total += took * LAYERS
        print(f"{name}: {took:.2f} us, error {error:.1e}", flush=True)
    print(
        f"gemlite {gemlite.__version__} int4, {LAYERS} layers of {', '.join(chosen)}: {total / 1e3:.4f} ms", flush=True
    )


if __name__ == "__main__":
    main()
