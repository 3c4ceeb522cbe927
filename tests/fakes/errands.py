"""Errands beside a product of no consequence: on a GPU, or in the emulation of its source."""

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from strataflux.kernels.gpu.errands import Errands
from strataflux.kernels.lowbit_gemv import Plan, gemv, pack_scaled
from tests.fakes.emulation import emulated

THREADS = (32, 128, 512)
ROOM = 72
_SOURCE = Path(__file__).parents[2] / "kernels" / "lowbit_gemv.cu"


def needs_compiler() -> None:
    """Skip where CUDA sources cannot be compiled for the host."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the CUDA source for the host with")


def errand_emulation(folder: Path) -> ctypes.CDLL:
    """The source of errands for the host, in blocks of each of ``THREADS``."""
    needs_compiler()
    runs = [
        f"""extern "C" void run{threads}(int blocks, const Errand* errands, int count) {{
          run_blocks(blocks, {threads}, [=] {{
            run_errands<{threads}>(errands, count, blockIdx.x, (float*)block_memory);
          }});
        }}"""
        for threads in THREADS
    ]
    return emulated(_SOURCE, "\n".join(runs), folder)


def run_beside(errands: Errands, threads: int, library: Callable[[], ctypes.CDLL], room: int = ROOM) -> None:
    """Run them in blocks of ``threads`` threads; ``library`` and ``room`` are for where there is no GPU."""
    if not torch.cuda.is_available():
        table, blocks = errands.table(threads, room, torch.device("cpu"))
        library()[f"run{threads}"](blocks, ctypes.c_void_p(table.data_ptr()), len(errands.items))
        return
    codes = torch.randint(0, 16, (32, 256), dtype=torch.uint8, device="cuda")
    scales = torch.rand(32, 2, device="cuda").half()
    weights = pack_scaled(codes, scales, torch.zeros_like(scales).byte(), 4, 128)
    x, y = torch.randn(1, 256, device="cuda").half(), torch.full((1, 32), torch.nan, device="cuda")
    gemv(weights, x, y, plan=Plan(2, threads // 32, 1), path="cuda", errands=errands)
    alone = torch.full_like(y, torch.nan)
    gemv(weights, x, alone, plan=Plan(2, threads // 32, 1), path="cuda")
    assert torch.equal(y, alone)
