"""What running ahead of misses brings in the running system: a real daemon, a cache too small, misses skipped or not.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python bench/ahead.py run --model SmolLM2-135M-Instruct.Q4_1.gguf \
        --kv-text moby-dick.txt --text wikitext2-valid.txt --out rows.jsonl kv:5%:lru:skip:0 kv:5%:lru:skip:1
    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python bench/ahead.py report rows.jsonl

A case is KIND:CACHE:POLICY:MISS:BLOCKS, for weights with :LAG or :LAG:RESIDENTS after it if there is any. ``kv``
keeps the weights exact and the KV cache in 2/2 bits, 4/4 refined on 1/128 of groups of 4 tokens, and scores the last
256 tokens of each window of 8,192. ``weights`` refines a prepared model (made first, where --prepared names none) and
scores --tokens of each of --windows. CACHE is the daemon's RAM as a share of all records, POLICY what leaves it (or
``default``), MISS as of ``--miss`` (with ``/`` for its ``:``), BLOCKS as of ``--read-ahead``, LAG the blocks by which
what refines ``o`` and ``down`` is added later, RESIDENTS as of ``--residents``. Every case has a daemon of its own
and runs on the CPUs of this process, so that cases can run beside one another, each pinned to its own CPUs.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from strataflux.cache_policy.miss import parse_miss_policy
from strataflux.client.cli.options import parse_cache
from strataflux.client.evaluate.kv_run import cut_kv_windows, evaluate_kv
from strataflux.client.evaluate.run import evaluate
from strataflux.client.evaluate.text import read_text
from strataflux.client.kv_options import KvOptions
from strataflux.client.launch import PrivateDaemon
from strataflux.client.prefetches import PrefetchCounts
from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.source import ModelSource, open_source
from strataflux.client.prepare.write import prepare
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.schemes import store_slot_bytes
from strataflux.client.session_stats import SessionStats

KV = KvOptions(2, 2)
GRACE_SECONDS = 60.0


@dataclass(frozen=True)
class Case:
    """What is run."""

    kind: str
    cache: str
    policy: str
    miss: str
    blocks: float
    lag: float = 0.0
    residents: int = 0

    @property
    def chosen(self) -> str | None:
        """The policy, None for whatever is the daemon's default."""
        return None if self.policy == "default" else self.policy

    @classmethod
    def parse(cls, text: str) -> "Case":
        """``KIND:CACHE:POLICY:MISS:BLOCKS[:LAG[:RESIDENTS]]``."""
        kind, share, policy, miss, *rest = text.split(":")
        if kind not in ("kv", "weights"):
            raise argparse.ArgumentTypeError(f"{kind!r}: kv or weights")
        blocks, lag, residents = (*rest, *("0", "0", "0")[len(rest) :])
        waits = str(parse_miss_policy(miss.replace("/", ":")))
        return cls(kind, share, policy, waits, float(blocks), float(lag), int(residents))


class Told:
    """Says how far a case is, at the layers' and tokens' pace."""

    def __init__(self, name: str) -> None:
        self._name, self._began, self._tokens = name, time.perf_counter(), 0

    def layer(self) -> None:
        """Nothing to say."""

    def block(self) -> None:
        """Nothing to say."""

    def token(self) -> None:
        """A line each 64."""
        self._tokens += 1
        if self._tokens % 64 == 0:
            print(f"{self._name}: {self._tokens} tokens, {time.perf_counter() - self._began:.0f} s", file=sys.stderr)


@cache
def source_of(model: Path) -> ModelSource:
    """The model, opened once."""
    return open_source(model)


@cache
def exact_weights(model: Path) -> DecoderWeights:
    """The model's weights, read once."""
    return DecoderWeights.read(source_of(model))


def main() -> None:
    """Run cases, or tell what came of them."""
    options = parse()
    if options.do == "report":
        rows = [json.loads(line) for path in options.rows for line in path.read_text().splitlines()]
        print("\n".join(report(rows)))
        return
    with prepared_model(options) as prepared:
        for case in options.cases:
            began = time.perf_counter()
            row = run_kv(case, options) if case.kind == "kv" else run_weights(case, options, prepared)
            row |= {"seconds": time.perf_counter() - began, "cpus": sorted(os.sched_getaffinity(0))}
            with options.out.open("a") as file:
                file.write(json.dumps(asdict(case) | row) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="do", required=True)
    run = parts.add_parser("run")
    run.add_argument("cases", nargs="+", type=Case.parse, metavar="CASE")
    run.add_argument("--model", type=Path, required=True)
    run.add_argument("--text", type=Path, required=True, help="what weights are scored on")
    run.add_argument("--kv-text", type=Path, help="what KV caches are scored on; by default the same")
    run.add_argument("--prepared", type=Path, help="for weights; made for the occasion if left out")
    run.add_argument("--context", type=int, default=8192)
    run.add_argument("--starts", type=lambda text: [int(one) for one in text.split(",")], default=[5000])
    run.add_argument("--tokens", type=int, default=512)
    run.add_argument("--windows", type=int, default=1)
    run.add_argument("--out", type=Path, required=True, help="rows are added to it")
    told = parts.add_parser("report")
    told.add_argument("rows", nargs="+", type=Path)
    return parser.parse_args()


@contextmanager
def prepared_model(options: argparse.Namespace) -> Iterator[PreparedModel | None]:
    """The prepared model, if a case asks for one."""
    if all(case.kind == "kv" for case in options.cases):
        yield None
    elif options.prepared is not None:
        yield open_prepared(options.prepared)
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield prepare(source_of(options.model), Path(folder) / "prepared", PrepareSettings())


def run_kv(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """One case of a KV cache."""
    weights = exact_weights(options.model)
    text = options.kv_text or options.text
    tokens = source_of(options.model).tokenizer().encode(read_text(text)).ids
    windows = cut_kv_windows(text, tokens, options.context, len(options.starts), options.starts)
    slots = parse_cache(case.cache, KV.slots_of(weights.config, options.context), "CACHE")
    room = KV.daemon_bytes(weights.config, slots)
    with PrivateDaemon(
        [], weight_cache_bytes=0, kv_cache_bytes=room, grace_seconds=GRACE_SECONDS, policy=case.chosen
    ) as daemon:
        found = evaluate_kv(
            weights,
            windows,
            KV,
            daemon.runtime_dir,
            miss=parse_miss_policy(case.miss),
            progress=Told(f"kv {case.cache}"),
            ahead=case.blocks,
        )
    assert found.session is not None
    scores = {"kl": found.refined.kl, "base_kl": found.base.kl, "kls": found.refined.divergence.tolist()}
    rates = {"hit_rate": found.hit_rate, "tokens_per_second": found.tokens_per_second}
    return scores | rates | counts_of(found.session, found.session.kv_prefetches)


def run_weights(case: Case, options: argparse.Namespace, prepared: PreparedModel | None) -> dict[str, Any]:
    """One case of refined weights."""
    assert prepared is not None
    tokens = prepared.tokenizer().encode(read_text(options.text)).ids
    windows = cut_kv_windows(options.text, tokens, options.tokens, options.windows, None)
    room = parse_cache(case.cache, store_slot_bytes(prepared.config, prepared.sets), "CACHE")
    with PrivateDaemon(
        [prepared.store], weight_cache_bytes=room, grace_seconds=GRACE_SECONDS, policy=case.chosen
    ) as daemon:
        found = evaluate(
            prepared,
            exact_weights(options.model),
            windows,
            daemon.runtime_dir,
            k=None,
            miss=parse_miss_policy(case.miss),
            on_token=Told(f"weights {case.cache}").token,
            ahead=case.blocks,
            shift={name: case.lag if name in ("o", "down") else 0.0 for name in SETS},
            residents=case.residents,
        )
    row, base = found.refined, found.base
    scores = {"kl": row.score.kl, "base_kl": base.score.kl, "kls": row.score.divergence.tolist()}
    rates = {"hit_rate": row.weight_hit_rate, "resident_rate": row.weight_resident_rate}
    rates |= {"tokens_per_second": row.tokens_per_second}
    return scores | rates | counts_of(found.session, found.session.weight_prefetches)


def counts_of(stats: SessionStats, prefetches: PrefetchCounts) -> dict[str, Any]:
    """What the session counted."""
    names = ("waits", "wait_nanoseconds", "deadlines_exceeded", "steps_invalid", "dropped")
    return {name: getattr(stats, name) for name in names} | {"prefetches": prefetches.to_json()}


def report(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table for the documentation."""
    yield "| kind | cache | policy | miss | ahead | lag | residents | hit rate | KL | tokens/s | read, used | waits |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for row in sorted(rows, key=lambda row: (row["kind"], float(row["cache"].rstrip("%")), -row["kl"])):
        useful, fills = row["prefetches"]["useful"], row["prefetches"]["fills"]
        ahead = "–" if not fills else f"{fills}, {useful:.0%}" if useful is not None else f"{fills}"
        waited = f"{row['waits']}, {row['wait_nanoseconds'] / 1e6:.0f} ms" if row["waits"] else "–"
        yield (
            f"| {row['kind']} | {row['cache']} | {row['policy']} | {row['miss']} | {row['blocks']:g} | "
            f"{row['lag']:g} | {resident(row)} | {row['hit_rate']:.1%} | {row['kl']:.4f} | "
            f"{row['tokens_per_second']:.1f} | {ahead} | {waited} |"
        )


def resident(row: dict[str, Any]) -> str:
    """How many channels per 1,024 might refine beside those selected, and how many did for each that was looked up."""
    asked = row.get("residents", 0)
    return f"{asked}: {row['resident_rate']:.2f}" if asked else "–"


if __name__ == "__main__":
    main()
