"""Early start of Triton kernels: begin while the kernel before still runs, and wait before reading what it wrote.

Programmatic dependent launch hides most of the time between two kernels of a stream. A kernel with ``EARLY`` set lets
the next one start at once and itself waits with ``gdc_wait`` before it touches anything that a kernel before it wrote;
what is constant (norms, tables) it may load before. Devices before compute capability 9.0 do not have that.
"""

from typing import Any

from torch import Tensor

from strataflux.kernels.cuda_build import device_capability

__all__ = ["early_options"]


def early_options(x: Tensor, early: bool) -> dict[str, Any]:
    """Launch options for a kernel with an ``EARLY`` constant that works where ``x`` lies."""
    if early and x.is_cuda and device_capability(x.get_device()) >= (9, 0):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
