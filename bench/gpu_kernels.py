"""Correctness against float64 and speed of each GPU kernel, with the machine's ceilings and baselines in the same run.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python3 bench/gpu_kernels.py --out rows.json

Times are medians of replays of a CUDA graph. Weights, records and inputs are random, and together larger than caches.
"""

import argparse
import ctypes
import itertools
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from gpu_records import bundle_kernels, layer_kernels, refine_kernels, select_kernels
from gpu_side import HostRange
from gpu_timing import SHAPES, Rows, relative_error

from strataflux.client.bench.replays import microseconds
from strataflux.kernels import cuda_build, lowbit_gemv, lowbit_gemv_stream
from strataflux.kernels.gpu.host_memory import device_attribute
from strataflux.kernels.lowbit_gemv import STRIP, LowbitWeights, Plan, StreamPlan, default_plan, gemv, gemv_reference

LAYERS = 32
VARIANTS = {"4-bit": (4, 128), "3-bit": (3, 128), "codebook 4": (4, 0), "codebook 3": (3, 0), "codebook 2": (2, 0)}
PLANS = [Plan(t, w, d) for t in (1, 2) for w in (4, 8, 16) for d in (1, 2, 4) if t * d < 8]
STREAMS = [StreamPlan(*p) for p in ((16, 2), (16, 3), (16, 4), (8, 4), (8, 6), (14, 2))]
CHECKED = [Plan(1, 8, 2), Plan(2, 4, 1)]
CHECKED_KINDS = [*VARIANTS.values(), (2, 64), (3, 64), (4, 64)]


def random_weights(rows: int, inputs: int, bits: int, group: int) -> LowbitWeights:
    """Weights of random codes, drawn as they are packed: every bit pattern is a code."""
    tiles, strips = 2 * -(-rows // 32), -(-inputs // STRIP)
    words = torch.randint(-(1 << 31), 1 << 31, (tiles, strips, bits, 32, 4), dtype=torch.int32, device="cuda")
    if group:
        shape = (tiles, strips, 8, STRIP // group, 2)
        scales = (torch.rand(shape, device="cuda") * 0.01 + 0.001).half().view(torch.int16).int()
        meta = scales | torch.randint(0, 1 << bits, shape, dtype=torch.int32, device="cuda") << 16
    else:
        halves = (torch.randn(16 * tiles, 1 << bits, device="cuda") * 0.02).half().view(torch.int16).int() & 0xFFFF
        meta = torch.cat((halves & 255, halves >> 8), dim=1).to(torch.uint8).view(torch.int32)
    return LowbitWeights(words, meta.contiguous(), rows, inputs, bits, group)


def environment(rows: Rows) -> None:
    """What ran where."""
    query = "name,driver_version,pcie.link.gen.current,pcie.link.width.current,clocks.max.sm"
    nvidia = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True
    )
    attributes = {
        name: device_attribute(name)
        for name in (
            "host_native_atomics", "pageable_memory_access", "can_use_host_pointer", "host_register",
            "pageable_uses_host_page_tables", "host_register_read_only",
        )
    }  # fmt: skip
    import cuda.bindings

    rows.add(
        "environment", torch.cuda.get_device_name(), gpu=nvidia.stdout.strip(), date=time.strftime("%Y-%m-%d"),
        python=platform.python_version(), kernel=platform.release(), torch=torch.__version__, triton=triton.__version__,
        bindings=cuda.bindings.__version__, **attributes,
    )  # fmt: skip


# --- ceilings ---------------------------------------------------------------------------------------------------------


@triton.jit
def _gather(source, offsets, out, count, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, WORDS)
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        address = (source + tl.load(offsets + i)).to(tl.pointer_type(tl.int32))
        value = tl.load(tl.multiple_of(address, 256) + lane)
        tl.store(out + i.to(tl.int64) * WORDS + lane, value)


@triton.jit
def _read(source, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros((BLOCK,), tl.int32)
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        total += tl.load(source + first + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def ceilings(rows: Rows) -> None:
    """Copy, read and matrix rates of the device, and what its link gathers from registered host memory."""
    a = torch.randint(0, 100, (1 << 29,), dtype=torch.int32, device="cuda")
    b = torch.empty_like(a)
    took = microseconds(lambda: b.copy_(a), replays=9)
    rows.add("ceiling", "copy", terabytes_per_second=2 * a.numel() * 4 / took / 1e6)
    out = torch.zeros(4096, dtype=torch.int32, device="cuda")
    best = min(
        microseconds(lambda c=count, w=warps: _read[(c,)](a, out, a.numel(), 4096, num_warps=w), replays=5)
        for count in (264, 528, 1056) for warps in (4, 8)
    )  # fmt: skip
    rows.add("ceiling", "read", terabytes_per_second=a.numel() * 4 / best / 1e6)
    m = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    n = torch.randn_like(m)
    took = microseconds(lambda: torch.matmul(m, n), replays=5)
    rows.add("ceiling", "bf16 matrix product", teraflops=2 * 8192**3 / took / 1e6)

    with HostRange("gather", 512 << 20) as memory:
        memory.array(ctypes.c_uint32, memory.size // 4)[:] = np.arange(memory.size // 4, dtype=np.uint32)
        for size in (512, 2048, 8192, 16384):
            count = min(4096, (16 << 20) // size)
            offsets = torch.randint(0, memory.size // size, (count,), device="cuda") * size
            out = torch.empty(count * size // 4, dtype=torch.int32, device="cuda")
            rates = {}
            for programs in (4, 8, 16, 32, 64, 132, 264):
                gather = lambda p=programs: _gather[(p,)](memory.seen_at, offsets, out, count, size // 4, num_warps=4)
                rates[programs] = round(count * size / microseconds(gather, replays=7) / 1e3, 2)
            expected = offsets[:, None] // 4 + torch.arange(size // 4, device="cuda")
            right = bool((out.view(count, -1) == expected).all())
            few = lambda: _gather[(64,)](memory.seen_at, offsets, out, 64, size // 4, num_warps=4)
            rows.add(
                "ceiling", f"link gather {size} B", access=memory.registration.access.value, right=right,
                gigabytes_per_second=rates, microseconds_for_64=microseconds(few),
            )  # fmt: skip
    pinned = torch.empty(256 << 20, dtype=torch.uint8).pin_memory()
    there = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    took = microseconds(lambda: there.copy_(pinned, non_blocking=True), replays=5)
    rows.add("ceiling", "copy from pinned host memory", gigabytes_per_second=there.numel() / took / 1e3)
    empty = torch.zeros(8, device="cuda")
    rows.add("ceiling", "100 small kernels in a graph", microseconds_each=microseconds(
        lambda: [empty.add_(1) for _ in range(100)]) / 100)  # fmt: skip


# --- low-bit products -------------------------------------------------------------------------------------------------


def instance(weights: LowbitWeights, plan: Plan | StreamPlan, batch: int, *, add: bool = False) -> tuple[Path, str]:
    """Source and name of what a product runs."""
    if isinstance(plan, StreamPlan):
        source = Path(lowbit_gemv_stream.__file__).with_suffix(".cu")
        return source, lowbit_gemv_stream.stream_instance(weights, plan, add=add)
    return Path(lowbit_gemv.__file__).with_suffix(".cu"), lowbit_gemv.instance_name(weights, plan, batch, add=add)


def build(rows: Rows) -> None:
    """Compile every instance that the checks and the sweep run, many at a time."""
    started = time.monotonic()
    wanted = set()
    for bits, group in CHECKED_KINDS:
        weights = random_weights(32, 256, bits, group)
        wanted |= {instance(weights, plan, 1) for plan in plans_of(group) if group != 64}
        for outputs, inputs in SHAPES.values() if group != 64 else ():
            tiles, strips = outputs // 16, inputs // STRIP
            shaped = weights._replace(words=weights.words[:1, :1].expand(tiles, strips, -1, -1, -1))
            wanted |= {instance(weights, default_plan(shaped, batch), batch) for batch in (1, 16)}
        for plan, batch, add in itertools.product(CHECKED, (1, 16), (False, True)):
            wanted.add(instance(weights, plan, batch, add=add))
    with ThreadPoolExecutor(14) as pool:
        list(pool.map(lambda one: cuda_build.compile_instance(*one, "sm_90"), sorted(wanted)))
    rows.add("gemv", "compiled", instances=len(wanted), seconds=time.monotonic() - started)


def plans_of(group: int) -> list[Plan | StreamPlan]:
    """What the sweep tries for one input."""
    return [*PLANS, *STREAMS] if group else [*PLANS]


def gemv_correct(rows: Rows) -> None:
    """Every variant, batches, plans and odd shapes, both paths, against float64."""
    worst = {"cuda": 0.0, "triton": 0.0}
    cases = list(itertools.product([(1000, 1152), (4096, 4096)], CHECKED_KINDS, (1, 5, 16)))
    for (outputs, inputs), (bits, group), batch in cases:
        weights = random_weights(outputs, inputs, bits, group)
        x = torch.randn(batch, inputs, device="cuda").half()
        expected = gemv_reference(weights, x)
        plans = [*CHECKED, CHECKED[0]._replace(early=False), default_plan(weights, batch)]
        if batch == 1 and group != 64:
            plans += [plan for plan in plans_of(group) if plan.warps <= -(-inputs // STRIP)]
        for plan in plans:
            y = torch.full((batch, outputs), torch.nan, device="cuda")
            gemv(weights, x, y, plan=plan, path="cuda")
            error = relative_error(y, expected)
            if plan in CHECKED:
                y.fill_(1.0)
                gemv(weights, x, y, plan=plan, path="cuda", add=True)
                error = max(error, relative_error(y - 1, expected), key=lambda v: v if v == v else torch.inf)
            worst["cuda"] = max(worst["cuda"], error)
            if not error < 1e-4:
                about = {"shape": (outputs, inputs), "bits": bits, "group": group, "batch": batch, "plan": tuple(plan)}
                rows.add("gemv", "WRONG", error=error, **about)
        if outputs == 1000:
            y = torch.full((batch, outputs), torch.nan, device="cuda")
            gemv(weights, x, y, path="triton")
            worst["triton"] = max(worst["triton"], relative_error(y, expected))
    runs = [torch.empty_like(y) for _ in range(20)]
    for run in runs:
        gemv(weights, x, run, path="cuda")
    repeated = all(torch.equal(run, runs[0]) for run in runs)
    rows.add("gemv", "correct", cases=len(cases), worst_error=worst, repeats_equal=repeated)


def many(make: Callable[[], LowbitWeights]) -> list[LowbitWeights]:
    """Enough different weights that a round through them does not fit in the cache."""
    first = make()
    return [first, *(make() for _ in range(max(3, int(3e8 / first.bytes))))]


def gemv_sweep(rows: Rows) -> None:
    """The fastest plan for each variant and shape, and what the early start is worth to it."""
    for variant, (bits, group) in VARIANTS.items():
        for name, (outputs, inputs) in SHAPES.items():
            weights = many(lambda o=outputs, i=inputs, b=bits, g=group: random_weights(o, i, b, g))
            x = torch.randn(1, inputs, device="cuda").half()
            y = torch.empty(1, outputs, device="cuda")
            times = {}
            for plan in plans_of(group):
                if isinstance(plan, Plan) and plan.depth > 1 and plan.warps * (plan.depth - 1) >= inputs // STRIP:
                    continue
                body = lambda p=plan: [gemv(w, x, y, plan=p, path="cuda") for w in weights]
                times[plan] = microseconds(body, replays=7) / len(weights)
            fast = sorted(times, key=lambda plan: times[plan])
            late = fast[0]._replace(early=False)
            without = microseconds(lambda: [gemv(w, x, y, plan=late, path="cuda") for w in weights]) / len(weights)
            rows.add(
                "gemv sweep", f"{variant} {name}", microseconds=times[fast[0]], without_early_start=without,
                terabytes_per_second=weights[0].bytes / times[fast[0]] / 1e6,
                plans=[(_short_name(plan), round(times[plan], 2)) for plan in fast[:8]], slowest=times[fast[-1]],
                default=round(times[default_plan(weights[0])], 2),
            )  # fmt: skip


def _short_name(plan: Plan | StreamPlan) -> str:
    return f"{'stream ' if isinstance(plan, StreamPlan) else ''}{tuple(plan)[:3]}"


def stack(rows: Rows) -> None:
    """All linear layers of Llama-3.1-8B, one token: BF16 and each variant, all weights different, one graph each."""
    xb = {i: torch.randn(1, i, device="cuda", dtype=torch.bfloat16) for _, i in SHAPES.values()}
    dense = [torch.randn(o, i, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS) for o, i in SHAPES.values()]
    size = sum(w.numel() * 2 for w in dense)
    base = {}
    for batch in (1, 4, 16):
        inputs = {i: torch.randn(batch, i, device="cuda", dtype=torch.bfloat16) for i in xb}
        base[batch] = microseconds(
            lambda x=inputs: [torch.nn.functional.linear(x[w.shape[1]], w) for w in dense], replays=7
        )
    as_vector = microseconds(lambda: [torch.mv(w, xb[w.shape[1]][0]) for w in dense], replays=7)
    rows.add("stack", "bf16", milliseconds={b: t / 1e3 for b, t in base.items()}, milliseconds_mv=as_vector / 1e3,
             terabytes_per_second=size / min(base[1], as_vector) / 1e6)  # fmt: skip
    base[1] = min(base[1], as_vector)
    for variant, (bits, group) in VARIANTS.items():
        layers = [random_weights(*shape, bits, group) for _ in range(LAYERS) for shape in SHAPES.values()]
        size = sum(w.bytes for w in layers)
        times = {}
        for batch in (1, 4, 16):
            x = {i: torch.randn(batch, i, device="cuda").half() for _, i in SHAPES.values()}
            y = {o: torch.empty(batch, o, device="cuda") for o, _ in SHAPES.values()}
            times[batch] = microseconds(
                lambda: [gemv(w, x[w.inputs], y[w.rows], path="cuda") for w in layers], replays=9
            )
        rows.add(
            "stack", variant, milliseconds={b: t / 1e3 for b, t in times.items()},
            speedup={b: round(base[b] / t, 3) for b, t in times.items()}, terabytes_per_second=size / times[1] / 1e6,
        )  # fmt: skip
        if variant == "4-bit":
            portable = microseconds(
                lambda: [gemv(w, x[w.inputs][:1], y[w.rows][:1], path="triton") for w in layers], replays=3
            )
            rows.add("stack", f"{variant}, portable path", milliseconds=portable / 1e3, speedup=base[1] / portable)


def child(rows: Rows, section: str, command: list[str], seconds: float) -> None:
    """Run another script with a limit of its own; its rows come through its output."""
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=min(seconds, rows.left()))
    for line in run.stdout.splitlines():
        rows.add(section, "line", text=line)
    if run.returncode:
        rows.add(section, "failed", error=run.stderr[-1500:])


def main() -> None:
    """Run every section within the time given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=175.0)
    parser.add_argument("--coherence", action="store_true", help="the proof of gpu_coherence.py, 60 seconds more")
    parser.add_argument("--only", nargs="+", default=[], help="sections")
    parser.add_argument("--variants", nargs="+", default=[], choices=list(VARIANTS), help="low-bit weights")
    options = parser.parse_args()
    rows = Rows(options.out, options.seconds + 110 * options.coherence)
    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    for name in set(VARIANTS) - set(options.variants or VARIANTS):
        del VARIANTS[name]
    sections: dict[str, Callable[[], None]] = {
        "environment": lambda: environment(rows),
        "build": lambda: build(rows),
        "stack": lambda: stack(rows),
        "refine": lambda: refine_kernels(rows),
        "layer": lambda: layer_kernels(rows),
        "bundle": lambda: bundle_kernels(rows),
        "select": lambda: select_kernels(rows),
        "gemv": lambda: gemv_correct(rows),
        "ceiling": lambda: ceilings(rows),
        "gemv sweep": lambda: gemv_sweep(rows),
        "gemlite": lambda: child(rows, "gemlite", [str(HERE / "gpu_gemlite.py")], 90),
    }
    for name, body in sections.items():
        if not options.only or name in options.only:
            rows.run(name, body)
    if options.coherence:
        coherence = [str(HERE / "gpu_coherence.py"), "--seconds", "60"]
        rows.run("coherence", lambda: child(rows, "coherence", coherence, 110))


if __name__ == "__main__":
    main()
