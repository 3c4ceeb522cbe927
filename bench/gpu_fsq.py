"""Attention to discrete codes on a Hopper GPU: right against float64, and how fast beside torch's in BF16.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python3 bench/gpu_fsq.py --out rows.json

Times are medians of replays of a CUDA graph that goes through several layers, all of them different, so that nothing
is read twice from a cache. Keys and values in BF16 take 4,096 bytes a token and layer: 8 KV heads of 128 channels, keys
normed; a ratio is 4,096 over the bytes of a code. Codes, decoders and queries are random. No row stands for anything
but the kernels it names: where one cannot run, its row says why. Sections can be chosen with ``--only``.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))  # only for this: folders there are named like packages
from tests.fakes.fsq_device import make_fsq_case, random_heads

sys.path.remove(str(HERE.parent))
from gpu_kernels import environment
from gpu_timing import Rows, relative_error

from strataflux.client.bench.replays import microseconds
from strataflux.kernels.fsq import FsqGrid
from strataflux.kernels.fsq_attention import FsqHeads
from strataflux.kernels.gpu.fsq_attend import (
    MOST_SHARED,
    FsqPlan,
    compile_fsq,
    default_plan,
    fsq_attend,
    fsq_mix,
    fsq_scores,
    join_instance,
    mix_instance,
    scores_instance,
    shared_bytes,
)
from strataflux.kernels.gpu.fsq_attend_triton import FsqRows, fsq_attend_triton
from strataflux.kernels.gpu.fsq_decoder import FsqDecoder, RebuildKind
from strataflux.kernels.gpu.fsq_merge import fsq_merge
from strataflux.kernels.gpu.fsq_work import FsqWork

CUDA: Final = torch.device("cuda")
KV_HEADS: Final = 8
FULL: Final = 4 * KV_HEADS * 128
RATIOS: Final = (8, 12, 16, 28, 32, 51, 97.5)
KINDS: Final[tuple[RebuildKind, ...]] = ("half", "int8", "fp8")
SHAPES: Final = ((1, 131072), (16, 32768))
WIDTHS, LENGTHS, GROUPS = (20, 84, 256, 682, 1024), (1, 63, 64, 65, 4097), (1, 2, 4)


class Plan(NamedTuple):
    """How a ratio's kernels are launched; None: the default."""

    teams: int | None = None
    stages: int | None = None
    score_splits: int | None = None
    mix_splits: int | None = None


class Layers:
    """Several layers' codes and decoders of one width."""

    def __init__(self, nbytes: int, kind: RebuildKind, batch: int, tokens: int, group: int) -> None:
        blocks = tokens // 64
        self.count = max(2, min(16, (160 << 20) // (batch * tokens * nbytes)))
        grid = FsqGrid.uniform(2 * nbytes, 16)
        heads = [
            random_heads(grid, KV_HEADS, 128, True, torch.device("cpu"), seed) for seed in range(min(4, self.count))
        ]
        self.decoders = [prepared(one, blocks, kind) for one in heads]
        self.codes = torch.randint(256, (self.count, batch, blocks, 64 * nbytes), dtype=torch.uint8, device=CUDA)
        self.lengths = torch.full((batch,), tokens, dtype=torch.int32, device=CUDA)
        self.queries = torch.randn(batch, KV_HEADS * group, 128, device=CUDA).half()
        self.out = torch.empty_like(self.queries)
        self.shape = (batch, KV_HEADS * group, grid, blocks)

    def work(self, plan: Plan) -> FsqWork:
        """Work memory for a plan."""
        shares, (scores, mix) = self.decoders[0].shares, plan[2:]
        return FsqWork(*self.shape, CUDA, shares=shares, score_splits=scores, mix_splits=mix)

    def launched(self, plan: Plan) -> list[FsqPlan]:
        """What the first kernel does by a plan; nothing where it does not fit."""
        return launched(self.decoders[0], self.shape[1], [plan])

    def each(self, body: Callable[[Tensor, FsqDecoder], object]) -> float:
        """Microseconds a layer."""
        pairs = [(self.codes[i], self.decoders[i % len(self.decoders)]) for i in range(self.count)]
        return microseconds(lambda: [body(*pair) for pair in pairs], replays=9) / self.count

    def times(self, plan: Plan) -> dict[str, float]:
        """Of the whole, and of its three parts alone."""
        work, (how,) = self.work(plan), self.launched(plan)

        def whole(codes: Tensor, decoder: FsqDecoder) -> None:
            fsq_attend(self.queries, codes, self.lengths, decoder, work, how)
            fsq_merge(work, decoder.values, self.out)

        return {
            "whole": self.each(whole),
            "scores": self.each(lambda codes, d: fsq_scores(self.queries, codes, self.lengths, d, work, how)),
            "mix": self.each(lambda codes, _: fsq_mix(codes, self.lengths, work)),
            "merge": self.each(lambda _, d: fsq_merge(work, d.values, self.out)),
        }


def prepared(heads: FsqHeads, blocks: int, kind: RebuildKind, device: torch.device = CUDA) -> FsqDecoder:
    """In one share where that fits, else in two."""
    decoder = FsqDecoder(heads, blocks, device, kind)
    return decoder if _fits(decoder, KV_HEADS, FsqPlan(1, 1)) else FsqDecoder(heads, blocks, device, kind, shares=2)


def _fits(decoder: FsqDecoder, heads: int, plan: FsqPlan) -> bool:
    return shared_bytes(decoder, heads, plan) <= MOST_SHARED


def launched(decoder: FsqDecoder, heads: int, plans: list[Plan]) -> list[FsqPlan]:
    """What the first kernel does by those plans that fit."""
    if not _fits(decoder, heads, FsqPlan(1, 1)):
        return []
    usual = default_plan(decoder, heads)
    found = [FsqPlan(plan.teams or usual.teams, plan.stages or usual.stages) for plan in plans]
    return [plan for plan in found if _fits(decoder, heads, plan)]


def bytes_of(ratio: float) -> int:
    """Bytes of a code at a ratio (fsq sizing: floor first)."""
    return int(FULL / ratio)


# --- right ------------------------------------------------------------------------------------------------------------


def build(
    rows: Rows, groups: tuple[int, ...], plans: list[Plan], ratios: tuple[float, ...], kinds: tuple[RebuildKind, ...]
) -> None:
    """Compile what other sections run, many at a time."""
    names, cpu = set(), torch.device("cpu")
    for nbytes in {width // 2 for width in WIDTHS} | {bytes_of(ratio) for ratio in ratios}:
        heads = random_heads(FsqGrid.uniform(2 * nbytes, 16), 1, 128, True, cpu)
        for kind in kinds:
            for group in {*groups, *GROUPS}:
                tried = [Plan(), *(plans if group in groups else [])]
                decoder = prepared(heads, 1, kind, cpu)
                work = FsqWork(1, group, heads.grid, 1, cpu, shares=decoder.shares)
                names.add(join_instance(decoder, work))
                names.add(mix_instance(work))
                names |= {scores_instance(decoder, work, plan) for plan in launched(decoder, group, tried)}
    with ThreadPoolExecutor(15) as pool:
        list(pool.map(compile_fsq, sorted(names)))
    rows.add("build", "compiled", instances=len(names))


def correct(rows: Rows, plans: list[Plan], kinds: tuple[RebuildKind, ...]) -> None:
    """All widths, lengths and groups; each launch must also repeat itself to the bit."""
    for kind in kinds:
        for width in WIDTHS:
            try:
                for name, (errors, equal) in _correct(kind, width, plans).items():
                    rows.add("correct", f"{kind} {width}", plan=name, worst=max(errors.values()), equal=equal,
                             errors=errors)  # fmt: skip
            except ValueError as error:
                rows.add("correct", f"{kind} {width}", refused=str(error))


def _correct(kind: RebuildKind, width: int, plans: list[Plan]) -> dict[str, tuple[dict[str, float], bool]]:
    """Errors by group and length, and whether launches gave equal bits, of every plan."""
    found: dict[str, tuple[dict[str, float], bool]] = {}
    for group in GROUPS:
        case = make_fsq_case(FsqGrid.uniform(width, 16), LENGTHS, KV_HEADS, group, 128, True, CUDA)
        decoder, sizes = prepared(case.heads, case.codes.shape[1], kind), (case.heads.grid, case.codes.shape[1])
        work, exactly = FsqWork(len(LENGTHS), KV_HEADS * group, *sizes, CUDA, shares=decoder.shares), case.exactly()
        for how in dict.fromkeys(launched(decoder, KV_HEADS * group, plans)):
            outs = [torch.full(case.queries.shape, torch.nan, device=CUDA) for _ in range(3)]
            for out in outs:
                fsq_attend(case.queries, case.codes, case.lengths, decoder, work, how)
                fsq_merge(work, decoder.values, out)
            errors, equal = found.get(str(tuple(how)), ({}, True))
            errors |= {f"{group}×{n}": relative_error(a, b) for n, a, b in zip(LENGTHS, outs[0], exactly, strict=True)}
            found[str(tuple(how))] = (errors, equal and all(torch.equal(outs[0], out) for out in outs))
    return found


def splits(rows: Rows) -> None:
    """Any number of splits gives the same but for rounding."""
    case = make_fsq_case(FsqGrid.uniform(256, 16), (4097, 700), KV_HEADS, 2, 128, True, CUDA)
    decoder = FsqDecoder(case.heads, case.codes.shape[1], CUDA, "half")
    outs = []
    for count in range(1, 17):
        blocks = case.codes.shape[1]
        work = FsqWork(2, 2 * KV_HEADS, case.heads.grid, blocks, CUDA, score_splits=count, mix_splits=count)
        outs.append(torch.empty(case.queries.shape, device=CUDA))
        fsq_attend(case.queries, case.codes, case.lengths, decoder, work)
        fsq_merge(work, decoder.values, outs[-1])
    rows.add("splits", "1 to 16", apart=max(relative_error(out, outs[0]) for out in outs),
             error=relative_error(outs[0], case.exactly()))  # fmt: skip


# --- speed ------------------------------------------------------------------------------------------------------------


def baselines(rows: Rows, best: dict[tuple[int, int, int], float], groups: tuple[int, ...]) -> None:
    """Every way torch has to attend with BF16 keys and values, one token a sequence."""
    for batch, tokens in SHAPES:
        for group in groups:
            q = torch.randn(batch, KV_HEADS * group, 1, 128, device=CUDA, dtype=torch.bfloat16)
            caches = [torch.randn(2, batch, KV_HEADS, tokens, 128, device=CUDA, dtype=torch.bfloat16) for _ in range(2)]
            times: dict[str, Any] = {}
            for name, call in ways(q, group).items():
                try:
                    times[name] = microseconds(lambda c=call: [c(k, v) for k, v in caches], replays=5) / 2  # type: ignore[misc]
                except Exception as error:  # a way that this torch does not have is told, too
                    times[name] = repr(error)[:100]
            best[batch, tokens, group] = min(t for t in times.values() if isinstance(t, float))
            fastest = best[batch, tokens, group]
            rows.add("baseline", f"BF16 {batch} × {tokens}, group {group}", best=fastest, microseconds=times,
                     terabytes_per_second=batch * tokens * FULL / fastest / 1e6)  # fmt: skip


def ways(q: Tensor, group: int) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Attention of one token's queries, by each of torch's ways."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attention = torch.nn.functional.scaled_dot_product_attention
    grouped = q.view(q.shape[0], KV_HEADS, group, 128)  # heads that share keys as positions of one head

    def sdpa(backend: Any, queries: Tensor, gqa: bool) -> Callable[[Tensor, Tensor], Tensor]:
        def call(k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return attention(queries, k, v, enable_gqa=gqa)

        return call

    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "native, gqa": lambda k, v: attention(q, k, v, enable_gqa=True)
    }
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        name = str(backend).rsplit(".", 1)[-1].lower()
        found[f"{name}, gqa"] = sdpa(backend, q, True)
        found[f"{name}, heads as positions"] = sdpa(backend, grouped, False)
    return found


def speed(
    rows: Rows, best: dict[tuple[int, int, int], float], groups: tuple[int, ...], plans: list[Plan],
    ratios: tuple[float, ...], kinds: tuple[RebuildKind, ...],
) -> None:  # fmt: skip
    """Each ratio by each kind, every plan; the fastest plan is the row's."""
    for batch, tokens in SHAPES:
        for group in groups:
            for ratio in ratios:
                for kind in kinds:
                    try:
                        rows.add("speed", f"{ratio} ×, {kind}, {batch} × {tokens}, group {group}",
                                 **_speed(bytes_of(ratio), kind, batch, tokens, group, plans, best))  # fmt: skip
                    except ValueError as error:
                        rows.add("speed", f"{ratio} ×, {kind}, {batch} × {tokens}", refused=str(error))


def _speed(
    nbytes: int, kind: RebuildKind, batch: int, tokens: int, group: int, plans: list[Plan],
    best: dict[tuple[int, int, int], float],
) -> dict[str, Any]:  # fmt: skip
    layers = Layers(nbytes, kind, batch, tokens, group)
    default_plan(layers.decoders[0], layers.shape[1])  # refuses what does not fit at all
    tried = {plan: layers.times(plan) for plan in plans if layers.launched(plan)}
    plan = min(tried, key=lambda p: tried[p]["whole"])
    took = tried[plan]
    work, flops = layers.work(plan), 2 * 2 * nbytes * KV_HEADS * 128 * batch * tokens
    return {
        "microseconds": took, "plan": plan._asdict(), "bytes": nbytes * batch * tokens,
        "times_sdpa": best.get((batch, tokens, group), 0.0) / took["whole"],
        "rebuild_teraflops": flops / took["scores"] / 1e6,
        "code_terabytes_per_second": nbytes * batch * tokens / took["whole"] / 1e6,
        "ran": [scores_instance(layers.decoders[0], work, *layers.launched(plan)), mix_instance(work)],
        "plans": {str(tuple(p)): {k: round(v, 1) for k, v in t.items()} for p, t in tried.items()},
    }  # fmt: skip


MIXED: Final = FsqGrid((8,) * 48 + (4,) * 112 + (2,) * 128 + (1,) * 80)
"""As many bytes as 28 x."""


def portable(rows: Rows, best: dict[tuple[int, int, int], float]) -> None:
    """The Triton kernel at 28 x, compiled: of 4 bits each, of mixed bits, and with a position for each token."""
    for name, grid, placed in (("4 bits", FsqGrid.uniform(292, 16), False), ("8, 4, 2, 1 bits", MIXED, False),
                               ("8, 4, 2, 1 bits, own positions", MIXED, True)):  # fmt: skip
        case = make_fsq_case(grid, (4097, 70), KV_HEADS, 2, 128, True, CUDA)
        order = torch.arange(case.codes.shape[1] * 64, dtype=torch.int32, device=CUDA).expand(2, -1).contiguous()
        out = torch.empty(case.queries.shape, device=CUDA)
        rows_of = FsqRows(case.heads, case.codes.shape[1], CUDA)
        work = FsqWork(2, 2 * KV_HEADS, grid, case.codes.shape[1], CUDA)
        fsq_attend_triton(case.queries, case.codes, case.lengths, rows_of, work, order if placed else None)
        fsq_merge(work, rows_of.values, out)
        error = relative_error(out, case.exactly())
        batch, tokens = SHAPES[0]
        codes = torch.randint(256, (8, batch, tokens // 64, 64 * grid.nbytes), dtype=torch.uint8, device=CUDA)
        long = FsqRows(case.heads, tokens // 64, CUDA)
        order = torch.arange(tokens, dtype=torch.int32, device=CUDA)[None]
        length = torch.full((batch,), tokens, dtype=torch.int32, device=CUDA)
        queries = case.queries[:1].contiguous()
        for splits in (33, 66):
            work = FsqWork(batch, 2 * KV_HEADS, grid, tokens // 64, CUDA, score_splits=splits)

            def body(work: FsqWork = work, placed: bool = placed, order: Tensor = order) -> None:
                for one in codes:
                    fsq_attend_triton(queries, one, length, long, work, order if placed else None)
                    fsq_merge(work, long.values, out[:1])

            took = microseconds(body, replays=5) / len(codes)
            rows.add("portable", f"{name}, 1 × {tokens}, {splits} splits", error=error, microseconds=took,
                     times_sdpa=best.get((batch, tokens, 2), 0.0) / took)  # fmt: skip


def ceilings(rows: Rows) -> None:
    """What products of matrices get here."""
    m, n = (torch.randn(8192, 8192, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    took = microseconds(lambda: torch.matmul(m, n), replays=5)
    rows.add("ceiling", "bf16 matrix product", teraflops=2 * 8192**3 / took / 1e6)


def tests(rows: Rows) -> None:
    """The kernels' tests where they are compiled."""
    files = [f"tests/kernels/test_gpu_fsq{which}.py" for which in ("", "_triton")]
    options = ["-c", os.devnull, "--rootdir", ".", "--import-mode=importlib", "-q", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    run = subprocess.run(command, capture_output=True, text=True, timeout=max(10.0, rows.left()))
    lines = run.stdout.splitlines()
    rows.add("tests", "kernels", summary=lines[-1:], detail=[s for s in lines if s[:3] == "E  "][:12],
             failed=[line for line in lines if line.startswith("FAILED")][:12])  # fmt: skip


def main() -> None:
    """Run every section within the time given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--groups", nargs="*", type=int, default=[2])
    parser.add_argument("--ratios", nargs="*", type=float, default=RATIOS)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--plans", nargs="*", default=[""], help=f"{','.join(Plan._fields)}; 0: the default")
    options = parser.parse_args()
    ratios, kinds = tuple(options.ratios), tuple(options.kinds)
    rows, groups = Rows(options.out, options.seconds), tuple(options.groups)
    plans = [Plan(*(int(part or 0) or None for part in plan.split(","))) for plan in options.plans]
    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    best: dict[tuple[int, int, int], float] = {}
    sections: dict[str, Callable[[], None]] = {
        "environment": lambda: environment(rows),
        "build": lambda: build(rows, groups, plans, ratios, kinds),
        "correct": lambda: correct(rows, plans, kinds),
        "splits": lambda: splits(rows),
        "baseline": lambda: baselines(rows, best, groups),
        "speed": lambda: speed(rows, best, groups, plans, ratios, kinds),
        "portable": lambda: portable(rows, best),
        "ceilings": lambda: ceilings(rows),
        "tests": lambda: tests(rows),
    }
    for name, body in sections.items():
        if not options.only or name in options.only:
            rows.run(name, body)
    rows.add("end", "all sections")


if __name__ == "__main__":
    main()
