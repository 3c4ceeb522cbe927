"""What fetch lead and lag win and cost through a daemon: waits, speed and divergence by shift and miss policy.

    python bench/shifts.py PREPARED --reference MODEL [--text FILE] [--k 32] [--tokens 256] [--cache 10]
        [--wait-ms 50] [--rounds 3] [--out FILE]

All four projection sets are shifted alike. Each row has a daemon of its own, whose cache holds --cache percent of the
store and is empty at the first token, and scores the same tokens; rounds repeat all rows, medians are told. ``waits``
and ``wait_ms`` are of a step. Prints a table, and one JSON object to --out.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from strataflux.cache_policy.miss import MissPolicy, Skip, Wait
from strataflux.client.evaluate.compare import cut_windows, reference_of, require_same_dimensions
from strataflux.client.evaluate.scoring import Reference, score
from strataflux.client.evaluate.text import python_prose, read_text
from strataflux.client.launch import PrivateDaemon
from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.prepare.source import open_source
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.runtime.shifted import SHIFTS
from strataflux.client.runtime.threads import decoding_threads
from strataflux.client.schemes import store_slot_bytes


@dataclass(frozen=True)
class Row:
    """One way to decode the text."""

    miss: str
    shift: float
    kl: float
    tokens_per_second: float
    hit_rate: float
    """Of records, when they were asked for."""
    waits: float
    wait_ms: float


@dataclass(frozen=True)
class Case:
    """What all rows share."""

    prepared: PreparedModel
    weights: DecoderWeights
    reference: Reference
    cache_bytes: int
    k: int


def main() -> None:
    options = parse()
    prepared = open_prepared(options.prepared)
    reference = expected(prepared, options)
    weights = DecoderWeights.read(prepared)
    cache = round(options.cache / 100 * store_slot_bytes(prepared.config, prepared.sets))
    case = Case(prepared, weights, reference, cache, options.k)
    cases = [(miss, blocks) for miss in (Wait(options.wait_ms / 1e3), Skip()) for blocks in SHIFTS]
    found: dict[tuple[str, float], list[Row]] = {(str(miss), blocks): [] for miss, blocks in cases}
    for _ in range(options.rounds):
        for miss, blocks in cases:
            found[str(miss), blocks].append(measure(case, miss, blocks))
            print(found[str(miss), blocks][-1], file=sys.stderr)
    rows = [median(one) for one in found.values()]
    show(rows)
    if options.out:
        options.out.write_text(json.dumps({"rows": [asdict(row) for row in rows], "tokens": options.tokens}, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fetch lead and lag through a daemon.")
    parser.add_argument("prepared", type=Path)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--cache", type=float, default=10.0)
    parser.add_argument("--wait-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def expected(prepared: PreparedModel, options: argparse.Namespace) -> Reference:
    source = open_source(options.reference)
    require_same_dimensions(source.config, prepared.config)
    words = python_prose() if options.text is None else read_text(options.text)
    ids = prepared.tokenizer().encode(words).ids
    (window,) = cut_windows(options.text or "pydoc_data.topics", ids, options.tokens, 1)
    return reference_of(DecoderWeights.read(source), window)


def measure(case: Case, miss: MissPolicy, blocks: float) -> Row:
    with PrivateDaemon([case.prepared.store], weight_cache_bytes=case.cache_bytes) as daemon:
        attached = RefinedModel.attach(
            case.prepared,
            case.weights,
            context=len(case.reference.tokens),
            runtime_dir=daemon.runtime_dir,
            k=case.k,
            shift=dict.fromkeys(SETS, blocks),
            miss=miss,
        )
        with decoding_threads(), attached as model:
            scored, stats = score(model.step, case.reference), model.stats()
            return Row(
                miss=str(miss),
                shift=blocks,
                kl=scored.kl,
                tokens_per_second=model.steps / model.seconds,
                hit_rate=stats.hits / stats.lookups,
                waits=stats.waits / model.steps,
                wait_ms=stats.wait_nanoseconds / 1e6 / model.steps,
            )


def median(rows: Sequence[Row]) -> Row:
    numbers = ("kl", "tokens_per_second", "hit_rate", "waits", "wait_ms")
    return Row(
        rows[0].miss, rows[0].shift, *(statistics.median(getattr(row, name) for row in rows) for name in numbers)
    )


def show(rows: Sequence[Row]) -> None:
    print(f"{'miss':<10}{'s':>5}{'KL':>8}{'tokens/s':>10}{'hits':>8}{'waits':>8}{'ms':>8}")
    for row in rows:
        print(
            f"{row.miss:<10}{row.shift:>5g}{row.kl:>8.3f}{row.tokens_per_second:>10.2f}{row.hit_rate:>8.1%}"
            f"{row.waits:>8.1f}{row.wait_ms:>8.2f}"
        )


if __name__ == "__main__":
    main()
