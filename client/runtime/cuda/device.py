"""Which device, and whether a model fits it: told before anything is loaded, with what is needed for what."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from strataflux.client.errors import FailureError, MisuseError
from strataflux.client.kv_options import KvOptions
from strataflux.client.runtime.cuda.attention import HalfCache
from strataflux.client.runtime.cuda.low_bit_cache import LowBitCache
from strataflux.client.runtime.models import SETS, ModelConfig
from strataflux.kernels.cuda_build import CudaError
from strataflux.proto.extras import install_command

__all__ = ["MemoryNeed", "explained", "memory_need", "require_cuda", "require_memory"]

_DEVICE_ERRORS = (CudaError, getattr(torch, "AcceleratorError", CudaError))  # older torch raises RuntimeError itself
_GIB = 1 << 30
_WORK_BYTES = 1 << 29
"""For buffers of a step, libraries and what packing needs beside its result."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of device memory, by what they are for."""

    weights: int
    embeddings: int
    cache: int
    hot_tier: int = 0

    @property
    def total(self) -> int:
        """All of it, working memory included."""
        return self.weights + self.embeddings + self.cache + self.hot_tier + _WORK_BYTES

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "embeddings and head": self.embeddings,
            "keys and values": self.cache,
            "hot records": self.hot_tier,
            "work": _WORK_BYTES,
        }
        return ", ".join(f"{size / _GIB:.2f} GiB for {name}" for name, size in parts.items() if size)


def memory_need(
    config: ModelConfig, bits_per_weight: float, context: int, kv: KvOptions | None = None, hot_bytes: int = 0
) -> MemoryNeed:
    """What decoding ``context`` positions takes with projections of so many bits a weight."""
    outputs_inputs = [config.set_shape(name) for name in SETS]
    weights = config.layers * sum(outputs * inputs for outputs, inputs in outputs_inputs)
    embeddings = (1 if config.tied_head else 2) * 2 * config.vocabulary * config.hidden
    rotary = 8 * config.head_dim * context
    cache = HalfCache.bytes_for(config, context) if kv is None else LowBitCache.bytes_for(config, context, kv)
    return MemoryNeed(int(weights * bits_per_weight / 8), embeddings, cache + rotary, hot_bytes)


def require_cuda() -> torch.device:
    """The current CUDA device.

    Raises:
        FailureError: there is none that works.
    """
    if not torch.cuda.is_available():
        reason = "a torch without CUDA" if torch.version.cuda is None else "no CUDA device that answers"
        raise FailureError("--device cuda", reason, "an NVIDIA GPU and its driver", "use --device cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    with explained("--device cuda"):
        torch.zeros(1, device=device)
    return device


def require_memory(device: torch.device, need: MemoryNeed) -> None:
    """Refuse what will not fit.

    Raises:
        FailureError: with what is needed for what.
    """
    free, whole = torch.cuda.mem_get_info(device)
    if need.total > free:
        found = f"{free / _GIB:.2f} of {whole / _GIB:.2f} GiB free"
        raise FailureError("device memory", found, f"{need.total / _GIB:.2f} GiB: {need}", "lower --context, or --bits")


@contextlib.contextmanager
def explained(subject: str) -> Iterator[None]:
    """Errors of CUDA, and shapes without a kernel, as this client's own: the one place where they become that.

    Raises:
        FailureError: for what the driver or the device refused. MisuseError: for a shape without a kernel.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise FailureError(subject, f"out of memory: {error}", "more free device memory", "lower --context") from error
    except _DEVICE_ERRORS as error:
        raise FailureError(subject, str(error), "a driver and device that take it", "use --device cpu") from error
    except ImportError as error:
        raise FailureError(subject, str(error), "the gpu extra", install_command("gpu")) from error
    except MisuseError:
        raise
    except ValueError as error:
        raise MisuseError(subject, str(error), "a shape with a kernel", "use --device cpu") from error
