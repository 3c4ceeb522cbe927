"""Attention to a low-bit KV cache on a GPU: right against float64, and how fast at long contexts beside BF16.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python3 bench/gpu_kv.py --out rows.json

Times are medians of replays of a CUDA graph that goes through several layers, all of them different, so that nothing
is read twice from a cache. Shapes are one layer of Llama-3.1-8B: 32 query heads, 8 KV heads, 128 channels. Codes,
scales, records and queries are random. Sections can be chosen with ``--only``.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from gpu_kernels import ceilings, environment
from gpu_kv_data import KV_HEADS, Layers, attend_exactly, device_cache, selected_exactly
from gpu_timing import Rows, relative_error

from strataflux.client.bench.long_context import LongSetup, bench_long_context
from strataflux.client.bench.replays import microseconds
from strataflux.client.kv_options import KvOptions
from strataflux.client.runtime.cuda.decoder import GraphDecoder
from strataflux.client.runtime.cuda.random_model import SHAPES
from strataflux.kernels import cuda_build
from strataflux.kernels.gpu import kv_attend as kv_attend_module
from strataflux.kernels.gpu.kv_attend import instance_name, kv_attend
from strataflux.kernels.gpu.kv_encode import kv_encode
from strataflux.kernels.gpu.kv_merge import kv_merge
from strataflux.kernels.gpu.kv_work import KvWork
from strataflux.kernels.kv_encode import KvFormat

CUDA = torch.device("cuda")
HEADS = 32
CONTEXT = 131072
REFINED = {2: KvFormat(2, 2, 128, 4, 4, 2), 4: KvFormat(2, 2, 128, 4, 4, 4)}
PLAIN = [KvFormat(2, 2, 128), KvFormat(3, 2, 128), KvFormat(4, 4, 128), KvFormat(2, 1, 128)]
FRACTIONS = [Fraction(1, 128), Fraction(1, 256)]


def tests(rows: Rows) -> None:
    """The kernel tests where the kernels are compiled, several processes at a time: compilation is what takes long."""
    parts = [
        *(("attend", f"triton and ({which})") for which in ("numbers0 or numbers1", "numbers2 or stored", "numbers4")),
        ("attend", "triton and (numbers3 or told)"),
        ("attend", "not triton"),
        *(("refine", which) for which in ("form0", "form1", "form2", "form3", "not form")),
        *(("encode", which) for which in ("form0", "form1", "not form0 and not form1")),
    ]
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "--import-mode=importlib", "-q",
               "-p", "no:cacheprovider"]  # fmt: skip
    running = [
        subprocess.Popen([*command, "-k", which, f"tests/kernels/test_gpu_kv_{name}.py"], stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for name, which in parts
    ]  # fmt: skip
    deadline = time.monotonic() + min(110, rows.left())
    for (name, which), run in zip(parts, running, strict=True):
        try:
            lines = run.communicate(timeout=max(1.0, deadline - time.monotonic()))[0].splitlines()
        except subprocess.TimeoutExpired:
            run.kill()
            lines = ["ran out of time"]
        rows.add("tests", f"{name}: {which}", summary=lines[-1:], detail=[s for s in lines if s[:3] == "E  "][:12],
                 failed=[line for line in lines if line.startswith("FAILED")][:12])  # fmt: skip


def build(rows: Rows) -> None:
    """Compile the instances that other sections run, many at a time."""
    names = {instance_name(form, 4, 0) for form in PLAIN} | {
        instance_name(form, 4, g) for g, form in REFINED.items()} | {
        instance_name(form, group, 0) for form, _, group, _ in CHECKED}  # fmt: skip
    source = Path(kv_attend_module.__file__).with_suffix(".cu")
    with ThreadPoolExecutor(14) as pool:
        images = list(pool.map(lambda name: cuda_build.compile_instance(source, name, "sm_90"), sorted(names)))
    rows.add("build", "compiled", instances=len(names), bytes=[len(image) for image, _ in images])


CHECKED = [
    (KvFormat(2, 2, 128), 8, 4, (131070, 5)),
    (KvFormat(3, 2, 128), 8, 4, (5000, 130, 127, 128, 256)),
    (KvFormat(4, 4, 128), 2, 8, (20000, 383)),
    (KvFormat(1, 1, 128), 2, 5, (9999,) * 16),
    (KvFormat(2, 3, 64), 3, 3, (7777, 0, 640)),
    (KvFormat(4, 1, 64), 8, 1, (12345,)),
]
"""Form, KV heads, query heads for each, positions of a batch."""


def correct(rows: Rows) -> None:
    """Both paths, odd lengths, batches and head counts, against float64."""
    for form, kv_heads, group, positions in CHECKED:
        layers = Layers(form, 1, kv_heads, group, positions)
        cache = layers.cache(0)
        found = {}
        for path in ("cuda", "triton") if len(positions) == 5 else ("cuda",):
            work = KvWork(form, len(positions), kv_heads * group, kv_heads, layers.tiles, CUDA)
            outs = []
            for _ in range(3):
                kv_attend(*layers.new(0), layers.positions, cache, work, path=path)  # type: ignore[arg-type]
                outs.append(torch.empty(len(positions), kv_heads * group, form.head_dim, device=CUDA))
                kv_merge(work, outs[-1])
            errors = [
                relative_error(outs[0][i], attend_exactly(layers, 0, i).output) for i in range(len(positions))
            ]  # fmt: skip
            found[path] = {"worst": max(errors), "equal": all(torch.equal(outs[0], out) for out in outs)}
        about = f"{form.key_bits}/{form.value_bits}, {kv_heads} × {group} heads of {form.head_dim}, {len(positions)} to"
        rows.add("correct", f"{about} {max(positions)}", **found)


def refined_correct(rows: Rows) -> None:
    """Selection, look-up and refinement at 128K against float64, everything present."""
    for tokens, form in REFINED.items():
        with device_cache(form, 1, (CONTEXT - 1,)) as layers:
            for fraction in FRACTIONS[:1]:
                work = layers.work(refiners=32)
                out = torch.empty(1, HEADS, 128, device=CUDA)
                layers.chain(0, work, fraction, out, early=False)
                torch.cuda.synchronize()
                plain = attend_exactly(layers, 0, 0)
                chosen, gaps = selected_exactly(plain.shares, work.selected_groups(fraction, work.tiles), layers, work)
                exactly = attend_exactly(layers, 0, 0, chosen)
                again = torch.empty_like(out)
                layers.chain(0, work, fraction, again, early=True)
                rows.add(
                    "refined", f"groups of {tokens}, {fraction}", error=relative_error(out[0], exactly.output),
                    moved=relative_error(plain.output, exactly.output), selection=gaps, lookups=layers.lookups(),
                    repeats_equal=bool(torch.equal(out, again)),
                )  # fmt: skip


# --- speed ------------------------------------------------------------------------------------------------------------


def baselines(rows: Rows) -> dict[int, float]:
    """The fastest way torch has to attend with BF16 keys and values, one token, and its bytes over time."""
    best = {}
    for length in (CONTEXT, 32768, 8192):
        copies = max(2, (400 << 20) // (length * KV_HEADS * 128 * 4))
        q = torch.randn(1, HEADS, 1, 128, device=CUDA, dtype=torch.bfloat16)
        caches = [torch.randn(2, 1, KV_HEADS, length, 128, device=CUDA, dtype=torch.bfloat16) for _ in range(copies)]
        times = {}
        for name, call in ways(q).items():
            try:
                times[name] = microseconds(lambda c=call: [c(k, v) for k, v in caches], replays=7) / copies  # type: ignore[misc]
            except Exception as error:  # a way that this torch does not have is a row, too
                times[name + ": " + repr(error)[:120]] = float("inf")
        best[length] = min(times.values())
        rows.add("baseline", f"BF16 {length}", microseconds=times, best=best[length],
                 terabytes_per_second=length * KV_HEADS * 128 * 4 / best[length] / 1e6)  # fmt: skip
    return best


def ways(q: Tensor) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Attention of one token's queries [1, 32, 1, 128], by each of torch's ways."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attention = torch.nn.functional.scaled_dot_product_attention
    grouped = q.view(1, KV_HEADS, HEADS // KV_HEADS, 128)  # heads that share keys as positions of one head

    def sdpa(backend: Any, queries: Tensor, gqa: bool) -> Callable[[Tensor, Tensor], Tensor]:
        def call(k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return attention(queries, k, v, enable_gqa=gqa)

        return call

    def products(k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(grouped, k.transpose(-1, -2)) * 128**-0.5
        return torch.matmul(scores.softmax(-1), v)

    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"products": products}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        name = str(backend).rsplit(".", 1)[-1].lower()
        found[f"{name}, gqa"] = sdpa(backend, q, True)
        found[f"{name}, heads as positions"] = sdpa(backend, grouped, False)
    return found


def attention(rows: Rows, best: dict[int, float]) -> None:
    """Resident precision: each width at 128K, by splits; and shorter contexts."""
    for form, length in [*((form, CONTEXT) for form in PLAIN), (PLAIN[0], 32768), (PLAIN[0], 8192)]:
        layers = Layers(form, 4 if length == CONTEXT else 8, KV_HEADS, HEADS // KV_HEADS, (length - 1,))
        out = torch.empty(1, HEADS, 128, device=CUDA, dtype=torch.float16)
        times = {}
        for splits in (16, 24, 33, 41, 49, 66):
            work = KvWork(form, 1, HEADS, KV_HEADS, layers.tiles, CUDA, splits=splits)
            for early in (True, False) if splits in (33, 49) else (True,):

                def body(work: KvWork = work, early: bool = early) -> None:
                    for i in range(layers.count):
                        kv_attend(*layers.new(i), layers.positions, layers.cache(i), work, early=early)
                        kv_merge(work, out, early=early)

                times[splits, early] = microseconds(body, replays=9) / layers.count
        alone = microseconds(lambda: [kv_attend(*layers.new(i), layers.positions, layers.cache(i), work)
                                      for i in range(layers.count)], replays=9) / layers.count  # fmt: skip
        fastest = min(times.values())
        rows.add(
            "attention", f"{form.key_bits}/{form.value_bits} {length}", microseconds=fastest, bytes=layers.layer_bytes,
            terabytes_per_second=layers.layer_bytes / fastest / 1e6, times_bf16=best.get(length, 0.0) / fastest,
            by_splits={f"{s}{'' if e else ' late'}": round(t, 2) for (s, e), t in times.items()}, without_merge=alone,
        )  # fmt: skip


def refinement(rows: Rows) -> None:
    """Select, look up, refine and merge on top, all records in registered host memory."""
    for tokens, form in REFINED.items():
        with device_cache(form, 2, (CONTEXT - 1,)) as layers:
            out = torch.empty(1, HEADS, 128, device=CUDA, dtype=torch.float16)
            for refiners in (16, 32):
                work = layers.work(refiners)
                for fraction in FRACTIONS:
                    rows.add("refinement", f"groups of {tokens}, {fraction}, {refiners} refiners",
                             **layers.times(work, fraction, out))  # fmt: skip
            layers.bring()
            rows.add("refinement", f"groups of {tokens}, 1/128, 32 refiners, all in device memory",
                     **layers.times(layers.work(32), FRACTIONS[0], out))  # fmt: skip
            layers.drop(0.2)
            rows.add("refinement", f"groups of {tokens}, 1/128, 32 refiners, 20% missing, in device memory",
                     **layers.times(layers.work(32), FRACTIONS[0], out))  # fmt: skip


def encoding(rows: Rows) -> None:
    """A step in which a tile of each of 32 layers and 8 heads is encoded, its records into registered host memory."""
    form = REFINED[2]
    layers = Layers(form, 32, KV_HEADS, 1, (512,), exact_layers=True)
    staged = torch.empty(32 * KV_HEADS * form.groups_per_tile * form.record_bytes, dtype=torch.uint8).pin_memory()
    staging, none = torch.tensor([staged.data_ptr()], device=CUDA), torch.zeros(1, dtype=torch.int64, device=CUDA)
    idle = torch.tensor([511], dtype=torch.int32, device=CUDA)

    def body(positions: Tensor, to: Tensor) -> None:
        tails = layers.exact[2], layers.exact[3]
        kv_encode(positions, form, layers.keys, layers.values, layers.table, *tails, to)

    rows.add(
        "encode", f"2/2 + 4/4, groups of {form.group_tokens}", bytes=staged.numel(),
        microseconds=microseconds(lambda: body(layers.positions, staging)),
        without_records=microseconds(lambda: body(layers.positions, none)),
        nothing_to_do=microseconds(lambda: body(idle, none)),
    )  # fmt: skip


def step(rows: Rows) -> None:
    """Whole steps of Llama-3.1-8B's shape at 128K, and each kernel's part of them: how often, and microseconds."""
    config, plain = SHAPES["llama-3.1-8b"], KvOptions(2, 2)
    store = plain.slots_of(config, CONTEXT + 64)
    setups = {
        "1/128": LongSetup(plain, CONTEXT, rounds=3),
        "1/256": LongSetup(replace(plain, fraction=Fraction(1, 256)), CONTEXT, rounds=2, float16=False),
        "groups of 16": LongSetup(replace(plain, group_tokens=16), CONTEXT, rounds=2, float16=False),
        **{
            f"{share}% hot": LongSetup(
                plain, CONTEXT, rounds=2, float16=False, hot_bytes=store * share // 100 + (64 << 20)
            )
            for share in (100, 90, 50)
        },
    }
    for name, setup in setups.items():
        bench_long_context(
            config, setup, CUDA, lambda row, n=name: rows.add("step", f"{row.pop('name')}, {n}", **row), profiled
        )


def profiled(decoder: GraphDecoder) -> dict[str, Any]:
    """Kernels of three steps, those that take most first."""
    decoder.reset(decoder.position - 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            decoder.launch()
        decoder.wait()
    averages = sorted(profiler.key_averages(), key=lambda one: -one.self_device_time_total)
    parts = [(one.key[:50], one.count // 3, round(one.self_device_time_total / one.count, 2)) for one in averages]
    return {"kernels": parts[:16]}


def main() -> None:
    """Run every section within the time given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=230.0)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    rows = Rows(options.out, options.seconds)
    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    best: dict[int, float] = {}
    sections: dict[str, Callable[[], None]] = {
        "environment": lambda: environment(rows),
        "build": lambda: build(rows),
        "correct": lambda: correct(rows),
        "baseline": lambda: best.update(baselines(rows)),
        "attention": lambda: attention(rows, best),
        "refined": lambda: refined_correct(rows),
        "refinement": lambda: refinement(rows),
        "step": lambda: step(rows),
        "encode": lambda: encoding(rows),
        "ceilings": lambda: ceilings(rows),
        "tests": lambda: tests(rows),
    }
    for name, body in sections.items():
        if not options.only or name in options.only:
            rows.run(name, body)
    rows.add("end", "all sections")


if __name__ == "__main__":
    main()
