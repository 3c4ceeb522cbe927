"""What a kernel's function asks of the driver, with a stand-in for that."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from strataflux.kernels.cuda_build import CudaFunction


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of shared memory that the driver was told of."""
    sizes: list[int] = []

    def set_attribute(_: Any, __: Any, size: int) -> tuple[int]:
        sizes.append(size)
        return (0,)

    driver = SimpleNamespace(
        cuModuleLoadData=lambda _: (0, "module"),
        cuModuleGetFunction=lambda _, __: (0, "function"),
        CUlaunchAttribute=lambda: SimpleNamespace(value=SimpleNamespace()),
        CUlaunchAttributeID=SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6),
        CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8),
        cuFuncSetAttribute=set_attribute,
    )
    bindings = ModuleType("cuda.bindings")
    setattr(bindings, "driver", driver)  # noqa: B010 (modules have no such attribute)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return sizes


def test_the_driver_is_told_of_shared_memory_that_might_not_fit_beside_a_sources_own(allowed: list[int]) -> None:
    function = CudaFunction(b"", "kernel")
    for kib in (30, 44, 44, 41, 100):
        function.allow_shared(kib << 10)
    assert allowed == [44 << 10, 100 << 10]
