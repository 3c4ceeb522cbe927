"""Which budgets of each projection set keep a share of the base's tokens a second, and what each set costs alone.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python3 bench/gpu_search.py --out rows.json

Weights and records are random, of Llama-3.1-8B's shape, all records pinned. What is measured is a whole step.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from gpu_kernels import environment
from gpu_timing import Rows

from strataflux.client.bench.decode import PinnedRecords
from strataflux.client.bench.replays import tokens_per_second
from strataflux.client.runtime.cuda.budget import Budget
from strataflux.client.runtime.cuda.random_model import SHAPES, Base, random_model
from strataflux.client.runtime.cuda.refined import make_decoder
from strataflux.client.runtime.models import SETS
from strataflux.kernels.refine import record_bytes
from strataflux.kernels.topk import selected_count

CUDA = torch.device("cuda")
CONFIG = SHAPES["llama-3.1-8b"]
WAYS: list[dict[str, Any]] = [{}, {"errands_below": 1025}, {"errands_below": 0}]
"""How the search lets sets be refined: as decoders choose, by errands alone, on side lanes alone."""


def search(rows: Rows, base: Base, share: float = 0.95) -> None:
    """Which budgets of each set keep ``share`` of the base: the sets that cost least for what they refine come first.

    A set's price is what it costs alone; then budgets grow, the set that costs least a byte first, as long as the
    measured share allows. The base is measured before and after, so that a drift of clocks is seen.
    """
    model = random_model(CONFIG, base, CUDA)
    with PinnedRecords(CONFIG, CUDA) as records:

        def rate(k: dict[str, int], shift: float, limits: dict[str, Any]) -> float:
            budget = replace(Budget(dict.fromkeys(SETS, 0) | k, dict.fromkeys(SETS, shift)), **limits)
            return tokens_per_second(make_decoder(model, 64, records.block if k else None, budget), 64, 2)

        alone = rate({}, 0.0, {})
        empty = rate({"o": 0}, 1.5, {})
        rows.add("search", f"{base}, alone", tokens_per_second=alone, nothing_selected=empty / alone)
        for k, shift in itertools.product((1, 4, 8), (1.5, 2.0)):
            common = rate(dict.fromkeys(SETS, k), shift, {})
            rows.add("search", f"{base}, k {k}, shift {shift}", of_base=common / alone)
        kept = {name: {k: rate({name: k}, 1.5, {}) / alone for k in (1, 8)} for name in SETS}
        for name, shares in kept.items():
            rows.add("search", f"{base}, {name} alone", of_base={f"k {k}": share for k, share in shares.items()})
        order = sorted(SETS, key=lambda name: (1 - kept[name][8]) / bytes_of({name: 8}))
        best: dict[str, Any] = {"bytes": 0}
        for shift, limits in itertools.product((1.5, 2.0), WAYS):
            if rows.left() < 30:
                break
            k = _grown(order, lambda k, s=shift, way=limits: rate(k, s, way) / alone, share)  # type: ignore[misc]
            size = bytes_of(k)
            rows.add("search", f"{base}, shift {shift}, {limits}", k=k, bytes=size)
            best = max(best, {"bytes": size, "k": k, "shift": shift, "ways": limits}, key=lambda one: one["bytes"])
        again = rate({}, 0.0, {})
        if "k" in best:
            best["of_base"] = rate(best["k"], best["shift"], best["ways"]) / again
        rows.add("search", f"{base}, best at {share}", **best, base_again=again / alone)


def _grown(order: list[str], kept: Callable[[dict[str, int]], float], share: float) -> dict[str, int]:
    """Budgets that grow set by set, doubling, until none can grow any more."""
    k: dict[str, int] = {}
    open_sets = list(order)
    while open_sets:
        name = open_sets[0]
        larger = k | {name: 2 * k[name] if name in k else 1}
        if larger[name] <= 64 and kept(larger) >= share:
            k = larger
            open_sets.append(open_sets.pop(0))
        else:
            open_sets.pop(0)
    return k


def bytes_of(k: dict[str, int]) -> int:
    """Bytes of records that a step selects."""
    shapes = {name: CONFIG.set_shape(name) for name in k}
    return CONFIG.layers * sum(
        selected_count(k[name], inputs) * record_bytes(outputs) for name, (outputs, inputs) in shapes.items()
    )


def main() -> None:
    """Search for each base within the time given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--base", nargs="+", default=["4-bit"])
    options = parser.parse_args()
    rows = Rows(options.out, options.seconds)
    torch.zeros(1, device="cuda")
    rows.run("environment", lambda: environment(rows))
    for base in options.base:
        rows.run("search", lambda b=base: search(rows, b))  # type: ignore[misc]
    rows.add("end", "all sections")


if __name__ == "__main__":
    main()
