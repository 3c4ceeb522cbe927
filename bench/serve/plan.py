"""What is raced: stores, budgets and cells."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strataflux.proto.store_format import StoreManifest

__all__ = ["SKEWS", "Cell", "Records", "Stage", "base_stage", "big_stage", "trace_stage"]

SKEWS = (0.6, 0.9, 1.2)
"""Zipf exponents of the steps."""


@dataclass(frozen=True)
class Records:
    """Where the records lie: all of one section of a store's file, which every rival is filled from."""

    path: Path
    folder: Path
    """The store's."""
    offset: int
    stride: int
    record_bytes: int
    count: int

    @classmethod
    def of(cls, manifest: StoreManifest) -> "Records":
        section = manifest.sections[0]
        return cls(
            manifest.records_path, manifest.folder, section.offset, section.stride, section.record_bytes, section.count
        )

    def rows(self, first: int, count: int) -> NDArray[np.uint8]:
        """u8 [count, record_bytes], mapped."""
        mapped = np.memmap(self.path, np.uint8, "r", self.offset, (self.count, self.stride))
        return mapped[first : first + count, : self.record_bytes]


@dataclass(frozen=True)
class Cell:
    """One measurement of one rival."""

    kind: str
    """hits, hits_whole, latency, cold, miss or steps."""
    sessions: int = 1
    skew: float | None = None
    """None: the stage's trace."""

    @property
    def label(self) -> str:
        skew = "" if self.skew is None else f" zipf {self.skew:g}"
        return f"{self.kind}{skew}{'' if self.sessions == 1 else f' x{self.sessions}'}"


@dataclass(frozen=True)
class Stage:
    """A store, the RAM for it, and what is measured with it."""

    name: str
    records: int
    record_bytes: int
    budget_bytes: int
    cells: tuple[Cell, ...]
    lookups_per_step: int
    trace: NDArray[np.int64] | None = None
    """[steps, look-ups] record numbers, -1 for none; None: made streams."""

    @property
    def hot(self) -> int:
        """Records that every rival can keep at once: neighbours, of half the budget. A slot is at least 256 bytes."""
        return min(self.budget_bytes // (2 * max(self.record_bytes, 256)), self.records // 2)


def base_stage(records: int, record_bytes: int, budget_bytes: int, sessions: tuple[int, ...], step: int) -> Stage:
    """Everything there is, with one store."""
    cells = [Cell(kind) for kind in ("hits", "hits_whole", "latency", "cold", "miss")]
    cells += [Cell("steps", 1, skew) for skew in SKEWS]
    cells += [Cell("steps", count, SKEWS[1]) for count in sessions if count > 1]
    return Stage("base", records, record_bytes, budget_bytes, tuple(cells), step)


def big_stage(records: int, record_bytes: int, budget_bytes: int, step: int) -> Stage:
    """Many small records: what a look-up costs as the store grows."""
    cells = (Cell("hits"), Cell("latency"), Cell("steps", 1, SKEWS[1]))
    return Stage("big", records, record_bytes, budget_bytes, cells, step)


def trace_stage(name: str, keys: NDArray[np.int64], records: int, record_bytes: int, share: float) -> Stage:
    """A recorded trace over as many records as it has, with RAM for a share of them."""
    budget = max(int(share * records) * max(record_bytes, 256), 1 << 20)
    return Stage(name, records, record_bytes, budget, (Cell("steps"),), keys.shape[1], keys)
