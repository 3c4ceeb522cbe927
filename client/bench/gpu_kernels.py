"""Times of the GPU kernels at a model's shapes: products beside BF16, selection, and refinement from pinned memory."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from strataflux.client.bench.gemlite_linear import GemliteLinear, gemlite_version
from strataflux.client.bench.replays import microseconds
from strataflux.client.prepare.prepared import store_sections
from strataflux.client.runtime.cuda.attention import HalfCache
from strataflux.client.runtime.cuda.block import DeviceBlock
from strataflux.client.runtime.cuda.linear import DenseLinear, Linear, LowbitLinear
from strataflux.client.runtime.cuda.pinned_store import PinnedStore, random_records
from strataflux.client.runtime.cuda.random_model import BASES, random_lowbit
from strataflux.client.runtime.models import SETS, ModelConfig
from strataflux.client.weights import record_bases
from strataflux.kernels.gpu.errands import Add, Errands, Fetch, Select
from strataflux.kernels.gpu.fetch import Staging
from strataflux.kernels.gpu.refine import RefinePlan, refine
from strataflux.kernels.gpu.select import score_thresholds, select_and_look_up
from strataflux.kernels.gpu.step import begin_step, end_step
from strataflux.kernels.refine import record_bytes

__all__ = ["bench_kernels"]

_ROUND_BYTES = 3e8
"""Different weights of one round: more than any cache holds."""


def bench_kernels(config: ModelConfig, k: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """One row a kernel and projection set: microseconds, and bytes over time.

    Raises:
        FailureError: the records cannot be pinned.
    """
    for name in SETS:
        yield from _products(name, *config.set_shape(name), device)
    yield from _attention(config, device)
    block = DeviceBlock(device)
    one_layer = store_sections(config, SETS)[: len(SETS)]
    store = PinnedStore(one_layer, random_records(), block)
    try:
        store.wait()
        for number, name in enumerate(SETS):
            outputs, inputs = config.set_shape(name)
            first = int(record_bases(config, SETS)[name][0])
            row = _refinement(block, number, outputs, inputs, first, k)
            yield {"name": f"refinement {name}", "k": k, "access": store.access, **row}
    finally:
        torch.cuda.synchronize(device)
        store.close()


def _products(name: str, outputs: int, inputs: int, device: torch.device) -> Iterator[dict[str, Any]]:
    yield _product(f"bf16 {name}", lambda: DenseLinear(torch.randn(outputs, inputs, device=device).bfloat16()), device)
    if gemlite_version():
        yield _product(f"gemlite int4 {name}", lambda: GemliteLinear(outputs, inputs, device), device)
    for base, (bits, group) in BASES.items():
        weights = lambda b=bits, g=group: LowbitLinear(random_lowbit(outputs, inputs, b, g, device))  # noqa: E731
        yield _product(f"{base} {name}", weights, device)


def _product(name: str, make: Any, device: torch.device) -> dict[str, Any]:
    """Time of one product, taken over a round of different weights."""
    first: Linear = make()
    linears = [first, *(make() for _ in range(max(3, int(_ROUND_BYTES / first.bytes))))]
    x = torch.randn(first.inputs, device=device).to(first.x_dtype)
    y = torch.zeros(first.rows, dtype=first.y_dtype, device=device)
    took = microseconds(lambda: [linear.multiply(x, y, early=True) for linear in linears]) / len(linears)
    return {"name": name, "microseconds": took, "terabytes_per_second": first.bytes / took / 1e6}


def _attention(config: ModelConfig, device: torch.device) -> Iterator[dict[str, Any]]:
    cache = HalfCache(config, 4096, device)
    queries, keys, values = (
        torch.randn(n, config.head_dim, device=device).half() for n in (config.heads, config.kv_heads, config.kv_heads)
    )
    out = torch.zeros(config.heads * config.head_dim, dtype=torch.float16, device=device)
    now = torch.zeros(1, dtype=torch.int32, device=device)
    layers = range(config.layers)
    for position in (0, 4095):
        now.fill_(position)

        def attend() -> None:
            for layer in layers:
                cache.attend(layer, queries, keys, values, now, out, early=True)

        took = microseconds(attend)
        yield {"name": f"attention, position {position}", "microseconds": took / config.layers}


def _refinement(block: DeviceBlock, number: int, outputs: int, inputs: int, first: int, k: int) -> dict[str, Any]:
    """Selection with look-up and refinement in place as launches of their own, and each errand beside the product."""
    device, rounds = block.tensor.device, 16
    thresholds, size = score_thresholds(device), record_bytes(outputs)
    xs = torch.randn(rounds, inputs, device=device).half()
    stagings = [Staging(k, inputs, size, device) for _ in range(rounds)]
    y, scale = torch.zeros(outputs, device=device), torch.rand(outputs, device=device)
    linears = [LowbitLinear(random_lowbit(outputs, inputs, *BASES["4-bit"], device)) for _ in range(rounds)]
    product, plan = torch.zeros(outputs, device=device), RefinePlan(64, 32, 32, 1, 4)
    pairs = list(zip(xs, stagings, strict=True))

    def select() -> None:
        begin_step(block.tensor)
        for x, staging in pairs:
            select_and_look_up(x, block.tensor, thresholds, staging.selection, 0, first)
        end_step(block.tensor)

    def refine_in_place() -> None:
        for x, staging in pairs:
            refine(y, x, staging.selection, scale, plan)

    def beside(errands: list[Errands | None]) -> Callable[[], None]:
        def multiply() -> None:
            begin_step(block.tensor)
            for linear, x, one in zip(linears, xs, errands, strict=True):
                linear.multiply(x, product, early=True, errands=one)
            end_step(block.tensor)

        return multiply

    bodies = {
        "select": select,
        "refine in place": refine_in_place,
        "product": beside([None] * rounds),
        "with select": beside(
            [Errands([Select(x, None, block.tensor, thresholds, one.selection, 0, first)]) for x, one in pairs]
        ),
        "with fetch": beside([Errands([Fetch(one, 0, one.pieces)]) for _, one in pairs]),
        "with add": beside([Errands([Add(x, one, scale, y)]) for x, one in pairs]),
    }
    moved = stagings[0].selection.channels.numel() * size
    found: dict[str, Any] = {name: microseconds(body) / rounds for name, body in bodies.items()}
    return {"set": SETS[number], "bytes": moved, **found}
