"""CUDA sources compiled for the host, with a thread of ours for each of a block's."""

import ctypes
import subprocess
from pathlib import Path

HEADER = Path(__file__).parents[1] / "kernels" / "warp_emulation.h"
FIBERS = HEADER.with_name("fiber_emulation.h")
"""The same with fibers: for kernels whose lanes exchange much, and for more than one warp's worth of them."""


def emulated(kernel: Path, source: str, folder: Path, header: Path = HEADER) -> ctypes.CDLL:
    """The library of a C++ source that is compiled behind the emulation and the kernel."""
    (folder / "case.cpp").write_text(f'#include "{header}"\n#include "{kernel}"\n{source}')
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", "-o", "case.so", "case.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "case.so"))
