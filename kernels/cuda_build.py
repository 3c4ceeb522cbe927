"""CUDA C++ compiled at run time: from a source file beside this one to a function that can be launched.

NVRTC compiles one template instance at a time for the device at hand; its machine code is kept in the private folder
for compiled code (:mod:`strataflux.proto.compiled`) under a digest of source, options and compiler version. Both NVRTC
and the driver are reached through ``cuda.bindings``, which every CUDA build of torch brings along; nothing of it is
imported where no GPU is used.

A :class:`CudaFunction` belongs to the CUDA context it was loaded in; each device's instances are made once a process.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from strataflux.proto.compiled import cache_folder

__all__ = [
    "CudaError",
    "CudaFunction",
    "compile_instance",
    "cuda_available",
    "device_capability",
    "has_fast_path",
    "load_function",
    "multiprocessors",
]

_ALWAYS_ALLOWED: Final = 40 << 10
"""Bytes of shared memory that a block may ask for without asking before: 48 KiB less what a source declares itself."""


class CudaError(RuntimeError):
    """NVRTC or the driver refused a call; the message names the call and its reason."""


@cache
def cuda_available() -> bool:
    """Whether this process can compile and launch: a CUDA device, and ``cuda.bindings`` to reach it."""
    if not torch.cuda.is_available():
        return False
    try:
        import cuda.bindings.driver
        import cuda.bindings.nvrtc  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def device_capability(device: int) -> tuple[int, int]:
    """Compute capability of a device; asked once a process."""
    return torch.cuda.get_device_capability(device)


@cache
def multiprocessors(device: int) -> int:
    """How many a device has; asked once a process."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def has_fast_path(x: torch.Tensor) -> bool:
    """Whether kernels in CUDA C++ run where ``x`` lies."""
    return x.is_cuda and cuda_available() and device_capability(x.get_device()) >= (8, 0)


class CudaFunction:
    """A function on one device. Launches go to torch's current stream, so they can be captured in a graph."""

    def __init__(self, image: bytes, symbol: str) -> None:
        """Load ``symbol`` of the machine code ``image`` into the current context."""
        from cuda.bindings import driver

        # fixed after construction
        self._module = _checked("cuModuleLoadData", driver.cuModuleLoadData(image))
        self._function = _checked("cuModuleGetFunction", driver.cuModuleGetFunction(self._module, symbol.encode()))
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        self._early = early
        # changed by allow_shared
        self._allowed = _ALWAYS_ALLOWED

    def launch(
        self, blocks: int, threads: int, arguments: Sequence[np.generic], *, early: bool, shared_bytes: int = 0
    ) -> None:
        """Queue one launch of a one-dimensional grid.

        Args:
            blocks: number of blocks.
            threads: threads a block.
            arguments: NumPy scalars, each of exactly the parameter's type; pointers as uint64.
            early: let it start while the kernel before it still runs (it must wait before it reads that one's
                results); devices before compute capability 9.0 do not have that.
            shared_bytes: shared memory a block beyond what the function declares; more than 48 KiB only after
                :meth:`allow_shared`.

        Raises:
            CudaError: the driver refused the launch.
        """
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.sharedMemBytes = shared_bytes
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.hStream = torch.cuda.current_stream().cuda_stream
        if early:
            config.attrs = [self._early]
            config.numAttrs = 1
        values = [np.array([argument]) for argument in arguments]
        pointers = np.array([value.ctypes.data for value in values], np.uint64)
        _checked("cuLaunchKernelEx", driver.cuLaunchKernelEx(config, self._function, pointers.ctypes.data, 0))

    def allow_shared(self, size: int) -> None:
        """Let launches ask for up to ``size`` bytes of shared memory.

        Raises:
            CudaError: the device has less a block.
        """
        from cuda.bindings import driver

        if size > self._allowed:
            self._set(driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, size)
            self._allowed = size

    def _set(self, attribute: Any, value: int) -> None:
        from cuda.bindings import driver

        _checked("cuFuncSetAttribute", driver.cuFuncSetAttribute(self._function, attribute, value))


@cache
def load_function(source: Path, instance: str, device: int) -> CudaFunction:
    """The template instance ``instance`` (a C++ name expression) of ``source`` on a device; made once.

    Raises:
        CudaError: it does not compile, or the driver does not take it.
    """
    major, minor = device_capability(device)
    with torch.cuda.device(device):
        return CudaFunction(*compile_instance(source, instance, f"sm_{major}{minor}"))


def compile_instance(source: Path, instance: str, architecture: str) -> tuple[bytes, str]:
    """Machine code of a template instance, and the symbol it has in it; from the cache where it was made before.

    Needs no GPU, and may run in several threads at once.

    Raises:
        CudaError: it does not compile; the message holds the compiler's log.
    """
    from cuda.bindings import nvrtc

    text = source.read_bytes()
    headers = _included(source, text)
    parts = (text, *headers.values()) if headers else text
    digest = hashlib.sha256(repr((parts, instance, architecture, nvrtc.nvrtcVersion())).encode()).hexdigest()
    kept = cache_folder(__name__) / f"{digest}.cubin"
    if not kept.exists():
        image, symbol = _compile(text, headers, source.name, instance, architecture)
        _write_whole(kept, symbol + b"\n" + image)
    symbol, _, image = kept.read_bytes().partition(b"\n")
    return image, symbol.decode()


def _included(source: Path, text: bytes) -> dict[bytes, bytes]:
    """Texts of the files that ``source`` includes, by the names it has for them, and of those that they include."""
    found = {}
    for name in re.findall(rb'^#include "([\w./]+)"', text, re.MULTILINE):
        path = source.parent / name.decode()
        found[name] = path.read_bytes()
        found |= _included(path, found[name])
    return found


def _compile(
    text: bytes, headers: dict[bytes, bytes], name: str, instance: str, architecture: str
) -> tuple[bytes, bytes]:
    from cuda.bindings import nvrtc

    made = nvrtc.nvrtcCreateProgram(text, name.encode(), len(headers), list(headers.values()), list(headers))
    program = _checked("nvrtcCreateProgram", made)
    _checked("nvrtcAddNameExpression", nvrtc.nvrtcAddNameExpression(program, instance.encode()))
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status):
        log = bytes(_checked("nvrtcGetProgramLogSize", nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CudaError(f"{name} did not compile as {instance} for {architecture}: {log.decode(errors='replace')}")
    symbol = bytes(_checked("nvrtcGetLoweredName", nvrtc.nvrtcGetLoweredName(program, instance.encode())))
    image = bytes(_checked("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program)))
    _checked("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(program, image))
    _checked("nvrtcDestroyProgram", nvrtc.nvrtcDestroyProgram(program))
    return image, symbol


def _write_whole(path: Path, content: bytes) -> None:
    # Another process may compile the same: each writes its own file, and the last rename wins with equal bytes.
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def _checked(call: str, result: tuple[Any, ...]) -> Any:
    """The value of a ``cuda.bindings`` call (status, value), or its error as ours."""
    if int(result[0]):
        raise CudaError(f"{call} failed: {result[0].name}")
    return result[1] if len(result) > 1 else None
