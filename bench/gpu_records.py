"""Selection, refinement and neuron bundles from host memory: right, and how fast; a part of gpu_kernels.py."""

import ctypes
import itertools
from typing import Any

import numpy as np
import torch
from gpu_side import BenchSide, HostRange
from gpu_timing import SHAPES, Rows, relative_error
from numpy.typing import NDArray
from torch import Tensor

from strataflux.client.bench.replays import microseconds
from strataflux.client.runtime.cuda.random_model import random_lowbit
from strataflux.kernels.gpu.bundle import bundle_reference, bundle_scratch, record_bytes, refine_bundles
from strataflux.kernels.gpu.errands import Add, Errands, Fetch
from strataflux.kernels.gpu.fetch import PIECE_BYTES, Staging
from strataflux.kernels.gpu.refine import RefinePlan, refine
from strataflux.kernels.gpu.select import Selection, score_thresholds, select_and_look_up
from strataflux.kernels.gpu.step import begin_step, end_step
from strataflux.kernels.lowbit_gemv import StreamPlan, gemv
from strataflux.kernels.select import select_reference
from strataflux.proto import layout

REFINE_BLOCKS = [(32, 32, 4), (64, 32, 8), (32, 64, 4), (64, 64, 8), (32, 128, 8)]
"""Records and words of a program's block, and its warps."""


def select_kernels(rows: Rows) -> None:
    """Selection with look-up: right, and its time per projection set with hits and with a fifth of misses."""
    records = 40 * 14336
    with BenchSide(records, 256, ring_log2=18) as side:
        for width, k in ((4096, 16), (4096, 32), (14336, 16), (14336, 32), (1000, 5)):
            x = torch.randn(40, width, device="cuda")
            x[:, ::97] = x[:, 1:2]
            for missing in (0.0, 0.2):
                side.words[:] = side.entries
                absent = np.random.default_rng(1).random(records) < missing
                side.words[absent] = layout.ENTRY_ABSENT
                for path in ("cuda", "triton"):
                    found = _select_case(side, x, k, absent, path)
                    rows.add("select", f"{path}, width {width}, k {k}, {missing:.0%} missing", **found)


def _select_case(side: BenchSide, x: Tensor, k: int, absent: NDArray[np.bool_], path: Any) -> dict[str, Any]:
    """What one path selects for 40 inputs, against the reference, and how long it takes for each."""
    width = x.shape[1]
    thresholds = score_thresholds(torch.device("cuda"))
    selections = [Selection(k, width, torch.device("cuda")) for _ in x]

    def step() -> None:
        begin_step(side.block)
        for i, selection in enumerate(selections):
            select_and_look_up(x[i], side.block, thresholds, selection, 0, i * width, path=path)
        end_step(side.block)

    side.block[8] = side.block[9] = side.block[10] = 0  # TAIL, LIMIT, DROPPED
    step()
    torch.cuda.synchronize()
    wrong, asked = 0, set()
    for i, selection in enumerate(selections):
        channels, scores = select_reference(x[i].cpu(), k)
        oids = channels + i * width
        found = dict(zip(selection.channels.tolist(), selection.addresses.tolist(), strict=True))
        pairs = list(zip(channels.tolist(), oids.tolist(), scores.tolist(), strict=True))
        wrong += found != {c: 0 if absent[o] else int(side.record_addresses[o]) for c, o, _ in pairs}
        asked |= {s << 48 | o for _, o, s in pairs if absent[o]}
    tail = int(side.session_page["ring_tail"][0])
    pushed = {int(entry) & ((1 << 56) - 1) for entry in side.ring[:tail]}
    side.block[8] = 0
    return {
        "wrong_selections": wrong,
        "requests_right": pushed == asked and tail == len(asked),
        "microseconds": microseconds(step) / len(selections),
    }


def refine_kernels(rows: Rows) -> None:
    """Refinement in place: right, repeatable, and its rate by plan, all records present."""
    for name, (outputs, _) in SHAPES.items():
        size = outputs // 2
        records = (400 << 20) // size
        with BenchSide(records, size) as side:
            _refine_shape(rows, name, side)


def _refine_shape(rows: Rows, name: str, side: BenchSide) -> None:
    """One projection set: each plan's result against the definition, and the best plans."""
    outputs, inputs = SHAPES[name]
    size = outputs // 2
    records = (400 << 20) // size
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
        for blocks, split, programs in itertools.product(REFINE_BLOCKS, (1, 2, 4), (16, 32, 64, 132)):
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


def bundle_kernels(rows: Rows) -> None:
    """Neuron bundles of Llama-3.1-8B: right, and their rate by plan."""
    neurons, size = 14336, record_bytes(4096)
    with BenchSide(8 * neurons // 4, size) as side:
        _bundles(rows, side)


def _bundles(rows: Rows, side: BenchSide) -> None:
    d_model, neurons, k = 4096, 14336, 12
    size = record_bytes(d_model)
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
    rows.add("bundle", f"k {k}", bytes=count * size, worst_error=worst, best=[(p, *times[p]) for p in order[:4]])


def layer_kernels(rows: Rows) -> None:
    """What a step refines of a layer of Llama-3.1-8B, all four sets at k 16: fetched in one launch and added in the
    next, by errands of two small products; right, and the rate of it all.
    """
    count, k, device = 8, 16, torch.device("cuda")
    random = np.random.default_rng(4)
    weights = random_lowbit(32, 2048, 4, 128, device)
    small, out = torch.randn(1, 2048, device=device).half(), torch.zeros(1, 32, device=device)
    with HostRange("layer", 1 << 30) as memory:
        raw = memory.array(ctypes.c_uint64, memory.size // 8)
        raw[:] = np.tile(random.integers(0, 1 << 63, 1 << 20), raw.size >> 20)
        layers = [[_Staged(shape, k, memory, random) for shape in SHAPES.values()] for _ in range(count)]
        fetches = [Errands([Fetch(one.staging, 0, one.staging.pieces) for one in layer]) for layer in layers]
        adds = [Errands([Add(one.x, one.staging, one.scale, one.y) for one in layer]) for layer in layers]

        def run(lists: list[list[Errands]]) -> None:
            for together in zip(*lists, strict=True):
                for errands in together:
                    gemv(weights, small, out, plan=StreamPlan(8, 1), errands=errands)

        run([fetches, adds])
        torch.cuda.synchronize()
        worst = max(one.error(memory) for layer in layers for one in layer)
        moved = sum(one.staging.pieces * PIECE_BYTES for one in layers[0])
        alone = microseconds(lambda: [gemv(weights, small, out, plan=StreamPlan(8, 1)) for _ in layers]) / count
        for name, lists in {"fetch": [fetches], "fetch and add": [fetches, adds]}.items():
            took = microseconds(lambda lists=lists: run(lists)) / count  # type: ignore[misc]
            rows.add("layer", name, bytes=moved, microseconds=took, gigabytes_per_second=moved / took / 1e3,
                     worst_error=worst, product_alone=alone)  # fmt: skip


class _Staged:
    """One set's records, selected at random from anywhere in ``memory``, and what they are added to."""

    def __init__(self, shape: tuple[int, int], k: int, memory: HostRange, random: np.random.Generator) -> None:
        outputs, inputs = shape
        device, slot = torch.device("cuda"), layout.slot_bytes(outputs // 2)
        self.staging = Staging(k, inputs, outputs // 2, device)
        count = self.staging.selection.channels.numel()
        self._offsets = random.permutation(memory.size // slot)[:count] * slot
        self.staging.selection.addresses.copy_(torch.from_numpy(memory.seen_at + self._offsets))
        self.staging.selection.channels.copy_(torch.randperm(inputs)[:count])
        self.x, self.scale = torch.randn(inputs, device=device).half(), torch.rand(outputs, device=device) * 0.01
        self.y = torch.zeros(outputs, device=device)

    def error(self, memory: HostRange) -> float:
        """Of the sums, against the definition; they were added once."""
        size = self.y.numel() // 2
        raw = memory.array(ctypes.c_uint8, memory.size)
        taken = torch.from_numpy(np.stack([raw[o : o + size] for o in self._offsets])).cuda()
        codes = torch.stack((taken & 15, taken >> 4), dim=-1).flatten(1).double() - 8
        chosen = self.x[self.staging.selection.channels.long()].double()
        return relative_error(self.y, self.scale.double() * (chosen @ codes))
