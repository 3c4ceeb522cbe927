"""The baseline beside ours: int4 weights in groups of 128, multiplied by gemlite (PyPI, optional)."""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from strataflux.kernels.gpu.errands import Errands

__all__ = ["GemliteLinear", "gemlite_version"]

_GROUP = 128


def gemlite_version() -> str | None:
    """The installed version, or None."""
    if importlib.util.find_spec("gemlite") is None:
        return None
    import gemlite  # type: ignore[import-not-found, unused-ignore]

    return str(gemlite.__version__)


class GemliteLinear:
    """Random int4 weights [rows, inputs]; a :class:`~strataflux.client.runtime.cuda.linear.Linear`."""

    x_dtype = y_dtype = torch.float16

    def __init__(self, rows: int, inputs: int, device: torch.device) -> None:
        """Draw and pack them."""
        from gemlite.helper import A16Wn  # type: ignore[import-not-found, unused-ignore]

        codes = torch.randint(0, 16, (rows, inputs), dtype=torch.uint8, device=device)
        scales = torch.rand(rows, inputs // _GROUP, device=device).half() * 0.002 + 0.001
        make: Any = A16Wn(device=str(device), dtype=torch.float16)
        self._layer: Any = make.from_weights(codes, scales, torch.full_like(scales, 8), 4, _GROUP)
        self.rows, self.inputs = rows, inputs
        self.bytes = rows * inputs // 2 + 2 * scales.numel() * 2

    def multiply(self, x: Tensor, y: Tensor, *, early: bool, errands: Errands | None = None) -> Tensor:  # noqa: ARG002
        """The product, in a tensor of its own: copying it to ``y`` would slow the baseline down."""
        product: Tensor = self._layer(x[None])
        return product[0]
