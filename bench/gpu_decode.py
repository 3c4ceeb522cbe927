"""The decode step on a GPU: right, and how fast; every section stands alone, and rows are written as they come.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python3 bench/gpu_decode.py --out rows.json

With ``--model PART...`` (a GGUF file, or the parts that pack_model.py makes of one) a real model is prepared, its
divergence on the GPU is compared with that of the CPU's definition, and ``strataflux generate --device cuda`` runs
through a real daemon. Sections can be chosen with ``--only``.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from gpu_kernels import environment
from gpu_timing import Rows, relative_error

from strataflux.client.bench.decode import DecodeSetup, bench_decode
from strataflux.client.bench.gpu_kernels import bench_kernels
from strataflux.client.bench.replays import tokens_per_second
from strataflux.client.prepare.prepared import store_sections
from strataflux.client.runtime.cuda.attention import HalfCache
from strataflux.client.runtime.cuda.block import DeviceBlock
from strataflux.client.runtime.cuda.budget import Budget
from strataflux.client.runtime.cuda.decoder import GraphDecoder
from strataflux.client.runtime.cuda.lanes import InlineLanes
from strataflux.client.runtime.cuda.model import DeviceModel, load_prepared
from strataflux.client.runtime.cuda.pinned_store import PinnedStore, random_records
from strataflux.client.runtime.cuda.random_model import SHAPES, random_model
from strataflux.client.runtime.cuda.refined import DeviceDecoder, make_decoder
from strataflux.client.runtime.cuda.refinement import Refinement
from strataflux.client.runtime.cuda.sampling import Sampler
from strataflux.client.runtime.cuda.step import Step
from strataflux.client.runtime.generation import Sampling
from strataflux.client.runtime.models import SETS
from strataflux.client.runtime.shifted import SHIFTS

CUDA = torch.device("cuda")
SMALL = replace(SHAPES["llama-3.2-1b"], layers=6)
WAYS: dict[str, dict[str, Any]] = {
    "errands": {"errands_below": 1025, "errands_from": 0.5},
    "side lanes": {"errands_below": 0},
}


def tests(rows: Rows) -> None:
    """The kernel tests where the kernels are compiled, and those that only a GPU can run."""
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "--import-mode=importlib", "-q",
               "-p", "no:cacheprovider", "tests/gpu", "tests/kernels"]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=min(240, rows.left()))
    lines = run.stdout.splitlines()
    rows.add("tests", "pytest", summary=lines[-1:], failed=[line for line in lines if line.startswith("FAILED")][:20],
             detail=[line for line in lines if line.startswith("E  ")][:30], errors=run.stderr[-500:])  # fmt: skip


def inline_decoder(model: DeviceModel, block: DeviceBlock, budget: Budget, context: int) -> GraphDecoder:
    """The same step on one stream, nothing started early: what the lanes are compared with."""
    lanes = InlineLanes()
    refining = Refinement(model, block, 0, budget, lanes)
    return GraphDecoder(Step(model, HalfCache(model.config, context, CUDA), refining, Sampler(Sampling(), CUDA), lanes))


def lanes(rows: Rows) -> None:
    """Replays with lanes and early starts against one stream in program order, at each shift, 200 tokens each."""
    model = random_model(SMALL, "4-bit", CUDA)
    for shift, (way, limits) in itertools.product((*SHIFTS, None), WAYS.items()):
        shifts = dict.fromkeys(SETS, shift) if shift is not None else dict(zip(SETS, (1.0, 0.5, 2.0, 1.5), strict=True))
        budget = replace(Budget(dict.fromkeys(SETS, 16), shifts, ordered=True), **limits)
        found = {}
        for name in ("inline", "lanes", "early"):
            block = DeviceBlock(CUDA)
            decoder = inline_decoder(model, block, budget, 256) if name == "inline" else make_decoder(
                model, 256, block, budget, early=name == "early")  # fmt: skip
            store = PinnedStore(store_sections(SMALL), random_records(), block)
            store.wait()
            logits = []
            for i in range(200):
                decoder.launch(i * 37 % SMALL.vocabulary)
                logits.append(decoder.step.logits.clone())
            found[name] = torch.stack(logits).float()
            hits = block.weight_lookups()
            decoder.wait()
            store.close()
        rows.add(
            "lanes", f"shift {shift}, {way}", hits=hits,
            finite=bool(torch.isfinite(found["inline"]).all()), size=float(found["inline"].abs().mean()),
            **{name: relative_error(found[name], found["inline"]) for name in ("lanes", "early")},
            **{f"equal {name}": bool(torch.equal(found[name], found["inline"])) for name in ("lanes", "early")},
        )  # fmt: skip


def profile(rows: Rows) -> None:
    """Where a step's time goes: each kernel's share of three replays."""
    config = SHAPES["llama-3.1-8b"]
    model, block = random_model(config, "4-bit", CUDA), DeviceBlock(CUDA)
    store = PinnedStore(store_sections(config), random_records(), block)
    store.wait()
    variants: dict[str, tuple[DeviceBlock | None, Budget]] = {
        "base": (None, Budget.common(0)),
        "k 8, shift 0": (block, Budget.common(8)),
        "k 8, shift 1": (block, Budget.common(8, 1.0)),
        "k 8, shift 1.5": (block, Budget.common(8, 1.5)),
    }
    for name, (shown, budget) in variants.items():
        decoder = make_decoder(model, 64, shown, budget)
        decoder.launch(1)
        decoder.wait()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(3):
                decoder.launch()
            decoder.wait()
        averages = sorted(profiler.key_averages(), key=lambda one: -one.self_device_time_total)
        shares = [(one.key[:60], one.count // 3, round(one.self_device_time_total / one.count, 2)) for one in averages]
        rows.add("profile", name, kernels=shares[:22])
    store.close()


def decode(rows: Rows, shape: str, setup: DecodeSetup) -> None:
    """bench decode, a row at a time."""
    bench_decode(SHAPES[shape], setup, CUDA, lambda row: rows.add(f"decode {shape}", row.pop("name"), **row))


def kernels(rows: Rows) -> None:
    """bench kernels, a row at a time."""
    for row in bench_kernels(SHAPES["llama-3.1-8b"], 16, CUDA):
        rows.add("kernels", row.pop("name"), **row)


def routes(rows: Rows) -> None:
    """What early starts are worth, how many programs should refine in place, and when errands do better than lanes."""
    config = SHAPES["llama-3.1-8b"]
    model, block = random_model(config, "4-bit", CUDA), DeviceBlock(CUDA)
    store = PinnedStore(store_sections(config), random_records(), block)
    store.wait()

    def add(name: str, shown: DeviceBlock | None, budget: Budget, *, early: bool = True) -> None:
        decoder = make_decoder(model, 64, shown, budget, early=early)
        rows.add("routes", name, tokens_per_second=tokens_per_second(decoder, 64, 3))

    for early in (True, False):
        add(f"base, early {early}", None, Budget.common(0), early=early)
    for count in (32, 128):
        add(f"in place by {count} programs, k 8", block, Budget.common(8, 0.0, count))
    for shift, k, (way, limits) in itertools.product((0.5, 1.0, 1.5, 2.0), (1, 4, 8, 16), WAYS.items()):
        add(f"shift {shift}, k {k}, {way}", block, replace(Budget.common(k, shift), **limits))
    add("early False, shift 1.5, k 8", block, Budget.common(8, 1.5), early=False)
    store.close()


SANITIZED = (
    "tests/kernels/test_gpu_errands.py", "tests/kernels/test_gpu_select.py", "tests/kernels/test_gpu_norm.py",
    "tests/kernels/test_gpu_gate.py", "tests/kernels/test_gpu_heads.py", "tests/kernels/test_gpu_attention.py",
    "tests/kernels/test_gpu_greedy.py", "tests/kernels/test_gpu_refine.py", "tests/kernels/test_gpu_fetch.py",
    "tests/kernels/test_gpu_kv_refine.py", "-k", "not (kv_refine and triton)",
)  # fmt: skip
"""Tests of small operands: a checked kernel takes a hundred times as long."""


def sanitizer(rows: Rows, limit: float) -> None:
    """compute-sanitizer over kernel tests: accesses out of bounds or misaligned, and races in shared memory. Calls that
    the driver refuses are left out: bindings ask it for functions that it does not have.
    """
    if shutil.which("compute-sanitizer") is None:
        rows.add("sanitizer", "skipped", reason="no compute-sanitizer on this machine")
        return
    # Each allocation by itself: beyond the end of a tensor within a pool there would be another tensor.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tools_left, tool in ((2, "memcheck"), (1, "racecheck")):
        command = ["compute-sanitizer", "--tool", tool, "--print-limit", "20",
                   "--show-backtrace", "no", *(["--report-api-errors", "no"] if tool == "memcheck" else []),
                   sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "--import-mode=importlib", "-q",
                   "-p", "no:cacheprovider", *SANITIZED]  # fmt: skip
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as told:
            try:
                code = subprocess.run(
                    command,
                    stdout=told,
                    stderr=told,
                    env=environment,
                    timeout=min(limit, rows.left() / tools_left),
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
            told.seek(0)
            lines = told.read().splitlines()
        rows.add("sanitizer", tool, code=code, seconds=time.monotonic() - began, last=lines[-4:],
                 failed=[line for line in lines if line.startswith(("FAILED", "ERROR"))][:10],
                 said=[line for line in lines if line.startswith("=========")][:40])  # fmt: skip


def prepared_model(rows: Rows, parts: list[Path], folder: Path) -> Path:
    """The model in ``parts``, prepared at 3 bits."""
    model = folder / "model.gguf"
    with model.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole)
    started = time.monotonic()
    run = strataflux("prepare", str(model), str(folder / "prepared"), "--bits", "3", "--group", "64", limit=rows.left())
    rows.add("model", "prepare", seconds=time.monotonic() - started, code=run.returncode, errors=run.stderr[-800:])
    return folder / "prepared"


def strataflux(*words: str, limit: float) -> "subprocess.CompletedProcess[str]":
    """The command, in a process of its own."""
    command = [sys.executable, "-c", "from strataflux.client.cli.main import main; main()", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=max(10.0, min(300.0, limit)))


def divergence(rows: Rows, folder: Path, source: Path, count: int = 384) -> None:
    """Mean KL of replayed steps on the GPU against that of the definition in float32, the same tokens, no misses."""
    from strataflux.client.evaluate.dense import DenseModel, dense_logits, dense_reference, score_logits
    from strataflux.client.evaluate.text import python_prose
    from strataflux.client.prepare.prepared import open_prepared
    from strataflux.client.prepare.refinement import read_refinement
    from strataflux.client.prepare.source import open_source
    from strataflux.client.runtime.models import DecoderWeights

    prepared = open_prepared(folder)
    tokens = prepared.tokenizer().encode(python_prose()).ids[: count + 1]
    reference = dense_reference(DecoderWeights.read(open_source(source)), tokens)
    weights = DecoderWeights.read(prepared)
    refinement = [{name: value for name, value in layer.items() if name in SETS} for layer in read_refinement(prepared)]
    model = load_prepared(prepared, CUDA)
    cases: list[tuple[str, int, float]] = [("base", 0, 0.0), ("k 32", 32, 0.0), ("k 32, shift 1", 32, 1.0)]
    for name, k, shift in cases:
        budget = Budget.common(k, shift)
        dense = DenseModel(weights, refinement if k else (), dict.fromkeys(SETS, k), shift=budget.shift)
        expected = score_logits(dense_logits(dense, tokens[:-1]), reference)
        with DeviceDecoder(prepared, model, context=count, budget=budget) as decoder:
            decoder.pin()
            decoder.wait_until_pinned()
            began = time.monotonic()
            logits = torch.stack([decoder.advance(token) for token in tokens[:-1]])
            took = time.monotonic() - began
            rate = decoder.hit_rate().rate
        found = score_logits(logits, reference)
        rows.add("divergence", name, tokens=count, kl_gpu=found.kl, kl_cpu=expected.kl, ratio=found.kl / expected.kl,
                 perplexity_gpu=found.perplexity, perplexity_cpu=expected.perplexity, hit_rate=rate,
                 milliseconds_a_token=1e3 * took / count)  # fmt: skip


def generation(rows: Rows, folder: Path) -> None:
    """``strataflux generate`` on the GPU: without a daemon, through a real one, pinned, and what is refused."""
    from strataflux.client.launch import PrivateDaemon

    prompt, few = "The capital of France is", ("--max-tokens", "48", "--json")
    cases: dict[str, tuple[str, ...]] = {
        "no daemon": ("--runtime-dir", str(folder.parent), "--device", "cuda"),
        "dedicated": ("--device", "cuda", "--platform", "dedicated", "--k", "32"),
        "wait is refused": ("--device", "cuda", "--miss", "wait:5"),
        "cpu, no daemon": (
            "--runtime-dir",
            str(folder.parent),
        ),
    }
    for name, words in cases.items():
        told(rows, name, strataflux("generate", str(folder), prompt, *few, *words, limit=rows.left()))
    store = folder / "refine"
    with PrivateDaemon([store], weight_cache_bytes=48 << 20) as daemon:
        for name in ("first", "again", "more"):
            words = ("--runtime-dir", str(daemon.runtime_dir), "--require-daemon", "--device", "cuda", "--k", "32")
            tokens = "400" if name == "more" else "48"
            run = strataflux(
                "generate", str(folder), prompt, "--json", "--max-tokens", tokens, *words, limit=rows.left()
            )
            told(rows, f"unified, {name}", run)
        run = strataflux("generate", str(folder), prompt, "--max-tokens", "24", *words, limit=rows.left())
        rows.add("generation", "as a person sees it", out=run.stdout[-300:], err=run.stderr[-300:])


def told(rows: Rows, name: str, run: "subprocess.CompletedProcess[str]") -> None:
    """What a command said."""
    values: dict[str, Any] = {"code": run.returncode, "errors": run.stderr[-400:]}
    try:
        values |= json.loads(run.stdout)
    except ValueError:
        values["out"] = run.stdout[-400:]
    rows.add("generation", name, **values)


def sampled(rows: Rows, folder: Path) -> None:
    """Tokens drawn on the GPU: the same from the same seed, others from another."""
    words = ("generate", str(folder), "The capital of France is", "--max-tokens", "24", "--json", "--device", "cuda",
             "--runtime-dir", str(folder.parent), "--temperature", "0.8", "--top-p", "0.9")  # fmt: skip
    for seed in ("3", "3", "4"):
        told(rows, f"sampled, seed {seed}", strataflux(*words, "--seed", seed, limit=rows.left()))


def with_model(rows: Rows, parts: list[Path], chosen: Callable[[str], bool]) -> None:
    """What needs a real model; it is prepared first."""
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepared_model(rows, parts, Path(folder))
        sections = {
            "divergence": lambda: divergence(rows, prepared, Path(folder) / "model.gguf"),
            "sampled": lambda: sampled(rows, prepared),
            "generation": lambda: generation(rows, prepared),
        }
        for name, body in sections.items():
            if chosen(name):
                rows.run(name, body)


def main() -> None:
    """Run every section within the time given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=280.0)
    parser.add_argument("--model", type=Path, nargs="+", default=[])
    parser.add_argument("--only", nargs="+", default=[])
    options = parser.parse_args()

    def chosen(name: str) -> bool:
        return not options.only or name in options.only

    rows = Rows(options.out, options.seconds)
    torch.zeros(1, device="cuda")
    quick = DecodeSetup(bases=("4-bit",), rounds=3)
    more = DecodeSetup(bases=("3-bit", "codebook-3"), baselines=False, shifts=(0.0, 1.5), budgets=(8,), rounds=3)
    qwen = DecodeSetup(bases=("4-bit",), shifts=(0.0, 1.5), budgets=(8,), rounds=3)
    sections: dict[str, Callable[[], None]] = {
        "environment": lambda: environment(rows),
        "lanes": lambda: lanes(rows),
        "decode": lambda: decode(rows, "llama-3.1-8b", quick),
        "profile": lambda: profile(rows),
        "routes": lambda: routes(rows),
        "kernels": lambda: kernels(rows),
        "tests": lambda: tests(rows),
        "decode more": lambda: decode(rows, "llama-3.1-8b", more),
        "decode qwen": lambda: decode(rows, "qwen3-8b", qwen),
        "sanitizer": lambda: sanitizer(rows, 100.0),
    }  # fmt: skip
    if options.model:
        sections = {
            "environment": sections["environment"],
            "model": lambda: with_model(rows, options.model, chosen),
            **sections,
        }
    for name, body in sections.items():
        if chosen(name) or name == "model":
            rows.run(name, body)


if __name__ == "__main__":
    main()
