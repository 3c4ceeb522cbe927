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
from gpu_side import BenchSide, HostRange
from gpu_timing import Rows, microseconds, relative_error

from strataflux.kernels import cuda_build, lowbit_gemv
from strataflux.kernels.gpu.bundle import bundle_reference, bundle_scratch, record_bytes, refine_bundles
from strataflux.kernels.gpu.host_memory import device_attribute
from strataflux.kernels.gpu.refine import RefinePlan, refine
from strataflux.kernels.gpu.select import Selection, score_thresholds, select_and_look_up
from strataflux.kernels.gpu.step import begin_step, end_step
from strataflux.kernels.lowbit_gemv import STRIP, LowbitWeights, Plan, gemv, gemv_reference
from strataflux.kernels.select import select_reference
from strataflux.proto import layout

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Outputs and inputs of the projection sets of Llama-3.1-8B."""
LAYERS = 32
VARIANTS = {"4-bit": (4, 128), "3-bit": (3, 128), "codebook 4": (4, 0), "codebook 3": (3, 0), "codebook 2": (2, 0)}
PLANS = [Plan(t, w, d) for t in (1, 2) for w in (4, 8, 16) for d in (1, 2, 4) if t * d < 8]
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

    memory = HostRange("gather", 512 << 20)
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


def build(rows: Rows) -> None:
    """Compile every instance that the checks and the sweep run, many at a time."""
    started = time.monotonic()
    names = set()
    for bits, group in CHECKED_KINDS:
        weights = random_weights(32, 256, bits, group)
        names |= {lowbit_gemv.instance_name(weights, plan, 1, add=False) for plan in PLANS if group != 64}
        for plan, batch, add in itertools.product(CHECKED, (1, 16), (False, True)):
            names.add(lowbit_gemv.instance_name(weights, plan, batch, add=add))
    source = Path(lowbit_gemv.__file__).with_suffix(".cu")
    with ThreadPoolExecutor(14) as pool:
        list(pool.map(lambda name: cuda_build.compile_instance(source, name, "sm_90"), sorted(names)))
    rows.add("gemv", "compiled", instances=len(names), seconds=time.monotonic() - started)


def gemv_correct(rows: Rows) -> None:
    """Every variant, batches, plans and odd shapes, both paths, against float64."""
    worst = {"cuda": 0.0, "triton": 0.0}
    cases = list(itertools.product([(1000, 1152), (4096, 4096)], CHECKED_KINDS, (1, 5, 16)))
    for (outputs, inputs), (bits, group), batch in cases:
        weights = random_weights(outputs, inputs, bits, group)
        x = torch.randn(batch, inputs, device="cuda").half()
        expected = gemv_reference(weights, x)
        plans = [*CHECKED, CHECKED[0]._replace(early=False)]
        if batch == 1 and group != 64:
            plans += PLANS
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


def gemv_sweep(rows: Rows, best: dict[tuple[str, str], Plan]) -> None:
    """The fastest plan for each variant and shape, and what the early start is worth to it."""
    for variant, (bits, group) in VARIANTS.items():
        for name, (outputs, inputs) in SHAPES.items():
            weights = many(lambda o=outputs, i=inputs, b=bits, g=group: random_weights(o, i, b, g))
            x = torch.randn(1, inputs, device="cuda").half()
            y = torch.empty(1, outputs, device="cuda")
            times = {}
            for plan in PLANS:
                if plan.depth > 1 and plan.warps * (plan.depth - 1) >= inputs // STRIP:
                    continue
                body = lambda p=plan: [gemv(w, x, y, plan=p, path="cuda") for w in weights]
                times[plan] = microseconds(body, replays=7) / len(weights)
            fast = sorted(times, key=lambda plan: times[plan])
            best[variant, name] = fast[0]
            late = fast[0]._replace(early=False)
            without = microseconds(lambda: [gemv(w, x, y, plan=late, path="cuda") for w in weights]) / len(weights)
            rows.add(
                "gemv sweep", f"{variant} {name}", microseconds=times[fast[0]], without_early_start=without,
                terabytes_per_second=weights[0].bytes / times[fast[0]] / 1e6,
                plans=[(tuple(plan)[:3], round(times[plan], 2)) for plan in fast[:6]], slowest=times[fast[-1]],
            )  # fmt: skip


def stack(rows: Rows, best: dict[tuple[str, str], Plan]) -> None:
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
        layers = [(n, random_weights(*SHAPES[n], bits, group)) for _ in range(LAYERS) for n in SHAPES]
        size = sum(w.bytes for _, w in layers)
        times = {}
        for batch in (1, 4, 16):
            x = {i: torch.randn(batch, i, device="cuda").half() for _, i in SHAPES.values()}
            y = {o: torch.empty(batch, o, device="cuda") for o, _ in SHAPES.values()}
            plans = {n: best.get((variant, n)) for n in SHAPES}
            times[batch] = microseconds(
                lambda: [gemv(w, x[w.inputs], y[w.rows], plan=plans[n], path="cuda") for n, w in layers], replays=9
            )
        rows.add(
            "stack", variant, milliseconds={b: t / 1e3 for b, t in times.items()},
            speedup={b: round(base[b] / t, 3) for b, t in times.items()}, terabytes_per_second=size / times[1] / 1e6,
        )  # fmt: skip
        if variant == "4-bit":
            portable = microseconds(
                lambda: [gemv(w, x[w.inputs][:1], y[w.rows][:1], path="triton") for _, w in layers], replays=3
            )
            rows.add("stack", f"{variant}, portable path", milliseconds=portable / 1e3, speedup=base[1] / portable)


# --- select, refine, bundles ------------------------------------------------------------------------------------------


def select_kernels(rows: Rows) -> None:
    """Selection with look-up: right, and its time per projection set with hits and with a fifth of misses."""
    records = 40 * 14336
    side = BenchSide(records, 256, ring_log2=18)
    thresholds = score_thresholds(torch.device("cuda"))
    for width, k in ((4096, 16), (4096, 32), (14336, 16), (14336, 32), (1000, 5)):
        x = torch.randn(40, width, device="cuda")
        x[:, ::97] = x[:, 1:2]
        for missing in (0.0, 0.2):
            side.words[:] = side.entries
            absent = np.random.default_rng(1).random(records) < missing
            side.words[absent] = layout.ENTRY_ABSENT
            selections = [Selection(k, width, torch.device("cuda")) for _ in range(40)]
            side.block[8] = side.block[9] = side.block[10] = 0  # TAIL, LIMIT, DROPPED
            begin_step(side.block)
            for i, selection in enumerate(selections):
                select_and_look_up(x[i], side.block, thresholds, selection, 0, i * width)
            end_step(side.block)
            torch.cuda.synchronize()
            wrong, asked = 0, set()
            for i, selection in enumerate(selections):
                channels, scores = select_reference(x[i].cpu(), k)
                oids = channels + i * width
                found = dict(zip(selection.channels.tolist(), selection.addresses.tolist(), strict=True))
                expected = {
                    int(c): 0 if absent[o] else int(side.record_addresses[o])
                    for c, o in zip(channels, oids, strict=True)
                }
                wrong += found != expected
                asked |= {int(s) << 48 | int(o) for o, s in zip(oids, scores, strict=True) if absent[o]}
            tail = int(side.session_page["ring_tail"][0])
            pushed = {int(entry) & ((1 << 56) - 1) for entry in side.ring[:tail]}
            times = {}
            for warps in (1, 2, 4, 8, 16):
                side.block[8] = 0

                def body(warps: int = warps) -> None:
                    begin_step(side.block)
                    for i, selection in enumerate(selections):
                        select_and_look_up(x[i], side.block, thresholds, selection, 0, i * width, warps=warps)
                    end_step(side.block)

                times[warps] = round(microseconds(body) / 40, 2)
            rows.add(
                "select", f"width {width}, k {k}, {missing:.0%} missing", wrong_selections=wrong,
                requests_right=pushed == asked and tail == len(asked), microseconds_by_warps=times,
            )  # fmt: skip


def refine_kernels(rows: Rows) -> None:
    """Refinement in place: right, repeatable, and its rate by plan, all records present."""
    for name, (outputs, inputs) in SHAPES.items():
        size = outputs // 2
        records = (400 << 20) // size
        side = BenchSide(records, size)
        random = np.random.default_rng(2)
        side.slots.array(ctypes.c_uint64, side.slots.size // 8)[:] = random.integers(0, 1 << 63, side.slots.size // 8)
        scale = torch.rand(outputs, device="cuda") * 0.01
        for k in (16, 32) if name != "gate_up" else (16,):
            selections = [Selection(k, inputs, torch.device("cuda")) for _ in range(16)]
            count = selections[0].channels.numel()
            picks = [torch.from_numpy(random.permutation(records)[:count]) for _ in selections]
            for selection, pick in zip(selections, picks, strict=True):
                selection.channels.copy_(torch.randperm(inputs)[:count])
                selection.addresses.copy_(side.record_addresses[pick])
            x = torch.randn(inputs, device="cuda")
            raw = side.slots.array(ctypes.c_uint8, side.slots.size)
            chosen = np.stack([raw[o : o + size] for o in side.record_offsets[picks[0].numpy()]])
            taken = torch.from_numpy(chosen).cuda()
            codes = torch.stack((taken & 15, taken >> 4), dim=-1).flatten(1).double() - 8
            expected = scale.double() * (x[selections[0].channels.long()].double() @ codes)
            worst, equal, rates = 0.0, True, {}
            for blocks, split, programs in itertools.product(
                (
                    (16, 32, 4),
                    (32, 32, 4),
                    (64, 32, 4),
                    (64, 32, 8),
                    (16, 64, 4),
                    (32, 64, 4),
                    (64, 64, 8),
                    (32, 128, 8),
                ),
                (1, 2, 4),
                (16, 32, 64, 132),
            ):
                plan = RefinePlan(programs, blocks[0], blocks[1], split, blocks[2])
                units = -(-outputs // (8 * plan.words)) * split
                if (programs > 16 and units <= programs // 2) or (split > 1 and units > 2 * 132):
                    continue
                y = torch.zeros(outputs, device="cuda")
                refine(y, x, selections[0], scale, plan)
                worst = max(worst, relative_error(y, expected))
                if split == 1:
                    again = torch.zeros_like(y)
                    refine(again, x, selections[0], scale, plan)
                    equal &= bool(torch.equal(y, again))
                took = microseconds(lambda p=plan: [refine(y, x, s, scale, p) for s in selections], replays=5) / 16
                rates[plan] = (round(took, 2), round(count * size / took / 1e3, 2))
            order = sorted(rates, key=lambda plan: rates[plan][0])
            ordered = [plan for plan in order if plan.split == 1]
            few = [plan for plan in order if plan.programs <= 16]
            rows.add(
                "refine", f"{name} k {k}", bytes=count * size, worst_error=worst, repeats_equal=equal,
                best=[(tuple(p), *rates[p]) for p in order[:4]],
                best_ordered=[(tuple(p), *rates[p]) for p in ordered[:3]],
                best_16_programs=[(tuple(p), *rates[p]) for p in few[:2]],
            )  # fmt: skip
        side.close()


def bundle_kernels(rows: Rows) -> None:
    """Neuron bundles of Llama-3.1-8B: right, and their rate by plan."""
    d_model, neurons, k = 4096, 14336, 12
    size = record_bytes(d_model)
    side = BenchSide(8 * neurons // 4, size)
    raw = side.slots.array(ctypes.c_uint8, side.slots.size)
    random = np.random.default_rng(3)
    raw[:] = random.integers(0, 256, raw.size, dtype=np.uint8)
    for offset in side.record_offsets:
        raw[offset + 2 * d_model : offset + size] = np.full(3, 0.003, np.float32).view(np.uint8)
    selections = [Selection(k, neurons, torch.device("cuda")) for _ in range(8)]
    count = selections[0].channels.numel()
    picks = [random.permutation(len(side.record_offsets))[:count] for _ in selections]
    for selection, pick in zip(selections, picks, strict=True):
        selection.channels.copy_(torch.randperm(neurons)[:count])
        selection.addresses.copy_(side.record_addresses[pick])
    x, down_scale = torch.randn(d_model, device="cuda"), torch.rand(d_model, device="cuda") * 0.01
    g, u = torch.randn(2, neurons, device="cuda")
    factors = bundle_scratch(selections[0])
    records = torch.from_numpy(np.stack([raw[o : o + size] for o in side.record_offsets[picks[0]]])).cuda()
    chosen = selections[0].channels.long()
    expected = bundle_reference(x, g[chosen], u[chosen], records, down_scale)
    times, worst = {}, 0.0
    for plan in ((16, 32, 4), (32, 32, 4), (64, 32, 8), (32, 64, 8), (64, 16, 4), (128, 32, 8)):
        y = torch.zeros(d_model, device="cuda")
        refine_bundles(y, x, g, u, selections[0], down_scale, factors, plan)
        worst = max(worst, relative_error(y, expected))
        took = microseconds(
            lambda p=plan: [refine_bundles(y, x, g, u, s, down_scale, factors, p) for s in selections], replays=5
        ) / 8  # fmt: skip
        times[plan] = (round(took, 2), round(count * size / took / 1e3, 2))
    order = sorted(times, key=lambda plan: times[plan])
    side.close()
    rows.add("bundle", f"k {k}", bytes=count * size, worst_error=worst, best=[(p, *times[p]) for p in order[:4]])


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
    parser.add_argument("--seconds", type=float, default=470.0)
    parser.add_argument("--replays", type=int, default=1_000_000, help="of the coherence proof")
    options = parser.parse_args()
    rows = Rows(options.out, options.seconds)
    best: dict[tuple[str, str], Plan] = {}
    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    rows.run("environment", lambda: environment(rows))
    rows.run("gemv", lambda: build(rows))
    rows.run("gemv", lambda: gemv_correct(rows))
    rows.run("ceiling", lambda: ceilings(rows))
    rows.run("gemv sweep", lambda: gemv_sweep(rows, best))
    rows.run("stack", lambda: stack(rows, best))
    rows.run("select", lambda: select_kernels(rows))
    rows.run("bundle", lambda: bundle_kernels(rows))
    coherence = [str(HERE / "gpu_coherence.py"), "--replays", str(options.replays), "--seconds", "60"]
    rows.run("coherence", lambda: child(rows, "coherence", coherence, 110))
    rows.run("gemlite", lambda: child(rows, "gemlite", [str(HERE / "gpu_gemlite.py")], 90))
    rows.run("refine", lambda: refine_kernels(rows))


if __name__ == "__main__":
    main()
