"""What multiplies by a projection set's weights in a step: packed low-bit weights, or plain matrices beside them."""

from typing import Protocol

import torch
from torch import Tensor

from strataflux.kernels.gpu.errands import Errands
from strataflux.kernels.lowbit_gemv import LowbitWeights, Plan, StreamPlan, default_plan, gemv

__all__ = ["DenseLinear", "Linear", "LowbitLinear"]


class Linear(Protocol):
    """A matrix [rows, inputs] on the device, in whatever form."""

    rows: int
    inputs: int
    x_dtype: torch.dtype
    """Type of its input."""
    y_dtype: torch.dtype
    """Type of the buffer that :meth:`multiply` takes."""
    bytes: int
    """Device memory that one product has to read."""

    def multiply(self, x: Tensor, y: Tensor, *, early: bool, errands: Errands | None = None) -> Tensor:
        """The product [rows] with ``x`` [inputs]: in ``y``, or in a tensor of its own that a captured graph keeps.

        Queued on the current stream. ``early``: it may start while the kernel before still runs. ``errands`` are run
        beside it; only weights that can be refined are given any.
        """


class LowbitLinear:
    """Packed weights and the kernel for them."""

    x_dtype = torch.float16
    y_dtype = torch.float32

    def __init__(self, weights: LowbitWeights, plan: Plan | StreamPlan | None = None) -> None:
        """Use ``plan``, or what suits the shape."""
        self.rows, self.inputs, self.bytes = weights.rows, weights.inputs, weights.bytes
        self.weights = weights
        self._plan = plan or default_plan(weights)

    def multiply(self, x: Tensor, y: Tensor, *, early: bool, errands: Errands | None = None) -> Tensor:
        """As :class:`Linear`; the result is in ``y``."""
        plan = self._plan._replace(early=early and self._plan.early)
        gemv(self.weights, x[None], y[None], plan=plan, errands=errands)
        return y


class DenseLinear:
    """A matrix of 16-bit floats, multiplied by torch: the baseline."""

    def __init__(self, weight: Tensor) -> None:
        """Keep ``weight`` [rows, inputs]."""
        self.rows, self.inputs = weight.shape
        self.x_dtype = self.y_dtype = weight.dtype
        self.bytes = weight.numel() * weight.itemsize
        self._transposed = weight.t()

    def multiply(self, x: Tensor, y: Tensor, *, early: bool, errands: Errands | None = None) -> Tensor:  # noqa: ARG002
        """As :class:`Linear`; the result is in ``y``. When it starts, torch decides by itself."""
        torch.mm(x[None], self._transposed, out=y[None])
        return y
