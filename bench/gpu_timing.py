"""What the GPU benchmarks share: rows flushed as they come, errors against float64."""

import gc
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Outputs and inputs of the projection sets of Llama-3.1-8B."""


class Rows:
    """Results, written whole to a file after each, so that a run that is cut short leaves what it had."""

    def __init__(self, path: Path | None, seconds: float) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []
        self._started = time.monotonic()
        self._seconds = seconds

    def add(self, section: str, name: str, **values: Any) -> None:
        """Print and keep one result."""
        row = {"section": section, "name": name, "at": round(time.monotonic() - self._started, 1), **values}
        self._rows.append(row)
        print(
            f"{section} | {name} | " + ", ".join(f"{key} {_short(value)}" for key, value in values.items()), flush=True
        )
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._rows, indent=1))

    def left(self) -> float:
        """Seconds until the run's time is over."""
        return self._seconds - (time.monotonic() - self._started)

    def run(self, section: str, body: Callable[[], None]) -> None:
        """Run a section; what it raises becomes a row, and the next section runs all the same."""
        if self.left() < 5:
            self.add(section, "skipped", reason="the run's time is over")
            return
        try:
            body()
        except Exception as error:
            self.add(section, "failed", error=repr(error)[:1500], where=traceback.format_exc()[-1500:])
        gc.collect()  # what a failed section still held: its memory, and the registrations of that
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:
            self.add(section, "left an error behind", error=repr(error)[:500])


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found - expected‖ / ‖expected‖ in float64; a NaN stays a NaN."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())
