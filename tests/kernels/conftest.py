"""Kernels are tested where they run: on the GPU if there is one, else through Triton's interpreter."""

import ctypes

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Where kernels of these tests run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def errand_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The CUDA source of errands, for the host."""
    from tests.fakes.errands import errand_emulation

    return errand_emulation(tmp_path_factory.mktemp("errands"))
