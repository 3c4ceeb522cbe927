"""Tokens a second of whole decode steps on a device, side by side in one run: random weights of a well-known shape.

Baselines run in the same step and graph: BF16 matrices with torch, and gemlite's int4 where it is installed. Ours runs
bare, and refined from a store of random records in pinned memory, at a ladder of budgets and at each shift.
"""

import gc
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from strataflux.client.bench.gemlite_linear import GemliteLinear, gemlite_version
from strataflux.client.bench.replays import tokens_per_second
from strataflux.client.prepare.prepared import store_sections
from strataflux.client.runtime.cuda.block import DeviceBlock
from strataflux.client.runtime.cuda.budget import Budget
from strataflux.client.runtime.cuda.model import DeviceModel
from strataflux.client.runtime.cuda.pinned_store import PinnedStore, random_records
from strataflux.client.runtime.cuda.random_model import BASES, Base, random_model
from strataflux.client.runtime.cuda.refined import make_decoder
from strataflux.client.runtime.models import SETS, ModelConfig
from strataflux.client.runtime.shifted import SHIFTS
from strataflux.kernels.refine import record_bytes
from strataflux.kernels.topk import selected_count

__all__ = ["DecodeSetup", "PinnedRecords", "Row", "bench_decode"]

Row = dict[str, Any]


@dataclass(frozen=True)
class DecodeSetup:
    """What is measured."""

    bases: tuple[Base, ...] = ("4-bit", "3-bit")
    baselines: bool = True
    budgets: tuple[int, ...] = (8, 16)
    """Common budgets that are measured at every shift, so that shifts can be compared."""
    shifts: tuple[float, ...] = SHIFTS
    share: float = 0.95
    """Of the base's tokens a second: the largest budget that keeps it is searched."""
    largest: int = 64
    """Budgets beyond this are not tried."""
    tokens: int = 64
    rounds: int = 5
    start: int = 0
    """Position of the first token: what was before is zeros."""
    programs: int = 64
    early: bool = True
    hot_bytes: int = 0
    """Device memory for the records used most."""


def bench_decode(
    config: ModelConfig, setup: DecodeSetup, device: torch.device, on_row: Callable[[Row], object] = lambda _: None
) -> list[Row]:
    """Measure; each row is given out as soon as it is there.

    Raises:
        MisuseError: heads without a kernel. FailureError: the store cannot be pinned.
    """
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        on_row(row)

    bench = _Bench(config, setup, device)
    reference = 0.0
    for row in bench.baselines() if setup.baselines else ():
        reference = reference or row["tokens_per_second"]
        add(row | {"of_bf16": row["tokens_per_second"] / reference})
    with PinnedRecords(config, device, setup.hot_bytes) as records:
        for base in setup.bases:
            for row in bench.base(base, records):
                rate = row.get("tokens_per_second")
                ratio = {"of_bf16": rate / reference} if reference and rate else {}
                add(row | ratio | {"access": records.store.access})
    return rows


class PinnedRecords:
    """``with``: a whole store of random records is there inside, and ``block`` shows it."""

    def __init__(self, config: ModelConfig, device: torch.device, hot_bytes: int = 0) -> None:
        """Begin to make it, for the weights of a shape."""
        self.block = DeviceBlock(device)
        self.store = PinnedStore(store_sections(config), random_records(), self.block, hot_bytes=hot_bytes)

    def __enter__(self) -> Self:
        self.store.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()


class _Bench:
    def __init__(self, config: ModelConfig, setup: DecodeSetup, device: torch.device) -> None:
        self._config, self._setup, self._device = config, setup, device

    def baselines(self) -> Iterator[Row]:
        model = random_model(self._config, "bf16", self._device)
        yield {"name": "bf16", "bytes": model.linear_bytes, **self._time(model, None, Budget.common(0))}
        del model
        _tidy()
        if version := gemlite_version():
            model = _with_gemlite(random_model(self._config, "codebook-2", self._device))
            yield {"name": f"gemlite {version} int4", "bytes": model.linear_bytes} | self._time(
                model, None, Budget.common(0)
            )
            del model
            _tidy()

    def base(self, base: Base, records: PinnedRecords) -> Iterator[Row]:
        """The base alone, then refined: budgets at each shift, and the largest budget that keeps the share."""
        model = random_model(self._config, base, self._device)
        bits, group = BASES[base]
        alone = self._time(model, None, Budget.common(0))
        yield {"name": base, "bits": bits, "group": group, "bytes": model.linear_bytes, **alone}
        for shift in self._setup.shifts:
            measured: dict[int, Row] = {}
            for k in self._setup.budgets:
                measured[k] = yield from self._refined(model, records, base, k, shift, alone)
            largest = yield from self._largest(model, records, base, shift, alone, measured)
            yield {"name": f"{base}, largest k", "shift": shift, "k": largest, "share": self._setup.share}
        del model
        _tidy()

    def _largest(
        self, model: DeviceModel, records: PinnedRecords, base: str, shift: float, alone: Row, measured: dict[int, Row]
    ) -> Generator[Row, None, int]:
        """Doubling, then bisection; a larger budget is taken to be slower. 0: not even one channel."""
        fits, fails = 0, self._setup.largest + 1
        while fails - fits > 1:
            k = max(1, 2 * fits) if fails > self._setup.largest else (fits + fails) // 2
            k = min(k, fails - 1)
            if k not in measured:
                measured[k] = yield from self._refined(model, records, base, k, shift, alone)
            if measured[k]["of_base"] >= self._setup.share:
                fits = k
            else:
                fails = k
        return fits

    def _refined(
        self, model: DeviceModel, records: PinnedRecords, base: str, k: int, shift: float, alone: Row
    ) -> Generator[Row, None, Row]:
        """One row, which is also the result."""
        found = self._time(model, records, Budget.common(k, shift, self._setup.programs))
        size = _record_bytes(self._config, k)
        row = {"name": f"{base}, refined", "k": k, "shift": shift, "record_bytes": size, **found}
        row["of_base"] = found["tokens_per_second"] / alone["tokens_per_second"]
        row["gigabytes_per_second"] = size * found["tokens_per_second"] / 1e9
        yield row
        return row

    def _time(self, model: DeviceModel, records: PinnedRecords | None, budget: Budget) -> Row:
        setup = self._setup
        context = setup.start + setup.tokens
        decoder = make_decoder(model, context, records.block if records else None, budget, early=setup.early)
        hot = records.store.hot if records else None
        before = (hot.hits, hot.misses) if hot else (0, 0)
        between = records.store.refresh if records and hot else lambda: None
        rate = tokens_per_second(decoder, setup.tokens, setup.rounds, setup.start, between)
        del decoder
        _tidy()
        found: Row = {"tokens_per_second": rate, "milliseconds": 1e3 / rate}
        if hot:
            hits, misses = hot.hits - before[0], hot.misses - before[1]
            found |= {"hot_bytes": hot.bytes, "hot_share": hits / max(1, hits + misses)}
        return found


def _record_bytes(config: ModelConfig, k: int) -> int:
    """Bytes of records that a step selects."""
    shapes = map(config.set_shape, SETS)
    return config.layers * sum(selected_count(k, inputs) * record_bytes(outputs) for outputs, inputs in shapes)


def _with_gemlite(model: DeviceModel) -> DeviceModel:
    layers = [
        replace(layer, linears=[GemliteLinear(one.rows, one.inputs, model.device) for one in layer.linears])
        for layer in model.layers
    ]
    return replace(model, layers=layers)


def _tidy() -> None:
    """Give device memory back between models that would not fit beside each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
