"""CUDA sources compiled for the host, with a fiber for each of a block's threads."""

import ctypes
import subprocess
from pathlib import Path

FIBERS = Path(__file__).parents[1] / "kernels" / "fiber_emulation.h"


def emulated(kernel: Path, source: str, folder: Path, header: Path = FIBERS) -> ctypes.CDLL:
    """The library of a C++ source that is compiled behind the emulation and the kernel."""
    (folder / "case.cpp").write_text(f'#include "{header}"\n#include "{kernel}"\n{source}')
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-o", "case.so", "case.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "case.so"))
