"""CUDA sources compiled for the host, with a fiber for each of a block's threads."""

import ctypes
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

FIBERS = Path(__file__).parents[1] / "kernels" / "fiber_emulation.h"


def emulated(kernel: Path, source: str, folder: Path, header: Path = FIBERS) -> ctypes.CDLL:
    """The library of a C++ source that is compiled behind the emulation and the kernel."""
    (folder / "case.cpp").write_text(f'#include "{header}"\n#include "{kernel}"\n{source}')
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-o", "case.so", "case.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "case.so"))


class EmulatedKernels:
    """Stands for ``load_function`` of a module: its launches run template instances of one source on the host."""

    def __init__(self, kernel: Path, instances: Sequence[str], folder: Path) -> None:
        text, runs = kernel.read_text(), []
        for number, instance in enumerate(instances):
            found = re.search(rf"\n{instance.split('<')[0]}\(([^)]*)\)", text)
            assert found, f"{instance} is no kernel of {kernel.name}"
            names = ", ".join(one.split()[-1].lstrip("*") for one in found[1].split(","))
            runs.append(
                f'extern "C" void run{number}(int grid, int threads, {found[1]}) '
                f"{{ run_blocks(grid, threads, [=] {{ {instance}({names}); }}); }}"
            )
        library = emulated(kernel, "\n".join(runs), folder)
        self._functions = {instance: library[f"run{number}"] for number, instance in enumerate(instances)}

    def __call__(self, source: Path, instance: str, device: int) -> "EmulatedFunction":
        """The function of an instance that was named."""
        return EmulatedFunction(self._functions[instance])


class EmulatedFunction:
    """As :class:`~strataflux.kernels.cuda_build.CudaFunction`."""

    def __init__(self, function: "ctypes._NamedFuncPointer") -> None:
        self._function = function

    def launch(
        self, blocks: int, threads: int, arguments: Sequence[np.generic], *, early: bool, shared_bytes: int = 0
    ) -> None:
        """Run it now."""
        kinds = {np.uint64: ctypes.c_uint64, np.int64: ctypes.c_int64, np.int32: ctypes.c_int32}
        self._function(blocks, threads, *(kinds[type(one)](one.item()) for one in arguments))

    def allow_shared(self, size: int) -> None:
        """There is always enough."""
