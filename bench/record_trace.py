"""Record which weight channels a model selects, one array a layer and projection set, for ``strataflux simulate``.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python bench/record_trace.py MODEL OUT.npz

MODEL is what ``strataflux prepare`` reads; the text is Python's own prose, from token --first on. The model runs
unquantized, all positions in one pass; the selections are those of the same states token by token.
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from strataflux.client.evaluate.text import python_prose
from strataflux.client.prepare.source import open_source
from strataflux.client.runtime.block import run_block
from strataflux.client.runtime.models import DecoderWeights, LayerWeights
from strataflux.client.runtime.rope import rotary_table
from strataflux.kernels.select import select_channels


def selected(x: NDArray[np.float32], k: int) -> NDArray[np.int16]:
    """[tokens, channels selected] of the rows of ``x``."""
    rows = []
    for row in x:
        indices, scores = np.empty(len(row), np.int64), np.empty(len(row), np.uint8)
        rows.append(indices[: select_channels(row, k, indices, scores)])
    return np.array(rows, np.int16)


def record(weights: DecoderWeights, tokens: list[int], k: int) -> dict[str, NDArray[np.int16]]:
    trace: dict[str, NDArray[np.int16]] = {}

    def project(index: int, layer: LayerWeights, name: str, x: Tensor) -> Tensor:
        trace[f"{index}.{name}"] = selected(x[0].numpy(), k)
        return linear(x, layer.projections[name])

    with torch.inference_mode():
        turns = rotary_table(weights.config, len(tokens))
        hidden = weights.embedding[tokens][None]
        for index, layer in enumerate(weights.layers):
            hidden = run_block(weights.config, layer, hidden, turns, partial(project, index, layer))
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--first", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=768)
    options = parser.parse_args()
    source = open_source(options.model)
    ids = source.tokenizer().encode(python_prose(), add_special_tokens=False).ids
    tokens = ids[options.first : options.first + options.tokens]
    if not tokens:
        parser.error(f"--first {options.first} is past the text's {len(ids)} tokens")
    np.savez_compressed(options.out, **record(DecoderWeights.read(source), tokens, options.k))  # type: ignore[arg-type]
    print(f"{len(tokens)} tokens in {options.out}")


if __name__ == "__main__":
    main()
