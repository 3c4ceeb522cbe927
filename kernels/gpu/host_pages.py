"""Host memory in pages of two megabytes, for the device too: one translated address reaches 512 times as far.

Registered memory is mapped for the device in pages of 4 KiB, however large the host's are. Records that lie scattered
over gigabytes then cost the device a walk through its page tables each. The driver maps large pages only for memory
that it makes itself; that is this process's alone.
"""

import ctypes
from typing import Any

from strataflux.kernels.cuda_build import CudaError

__all__ = ["HostPages"]


class HostPages:
    """``size`` bytes, reachable at :attr:`address` by this process and by kernels, until :meth:`close`.

    Attributes:
        view: the bytes; void after :meth:`close`.
    """

    def __init__(self, size: int) -> None:
        """Allocate, on the memory node next to the current device.

        Raises:
            CudaError: the driver or the device has no such memory, or not so much.
        """
        from cuda.bindings import driver

        device = _checked("cuCtxGetDevice", driver.cuCtxGetDevice())
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
        node = max(0, int(_checked("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(attribute, device))))
        kinds, pinned = driver.CUmemLocationType, driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted = driver.CUmemAllocationProp()
        wanted.type = pinned
        wanted.location.type, wanted.location.id = kinds.CU_MEM_LOCATION_TYPE_HOST_NUMA, node
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        step = int(_checked("cuMemGetAllocationGranularity", driver.cuMemGetAllocationGranularity(wanted, least)))
        # fixed after construction
        self.size = -(-size // step) * step
        self._handle = _checked("cuMemCreate", driver.cuMemCreate(self.size, wanted, 0))
        self.address = 0
        try:
            self.address = int(_checked("cuMemAddressReserve", driver.cuMemAddressReserve(self.size, step, 0, 0)))
            _checked("cuMemMap", driver.cuMemMap(self.address, self.size, 0, self._handle, 0))
            reach = []
            for kind, number in ((kinds.CU_MEM_LOCATION_TYPE_DEVICE, int(device)), (wanted.location.type, node)):
                one = driver.CUmemAccessDesc()
                one.location.type, one.location.id = kind, number
                one.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                reach.append(one)
            _checked("cuMemSetAccess", driver.cuMemSetAccess(self.address, self.size, reach, len(reach)))
        except CudaError:
            self.close()
            raise
        self.view = memoryview((ctypes.c_uint8 * size).from_address(self.address)).cast("B")

    def close(self) -> None:
        """Give the memory back; no kernel may be under way that reads it. Idempotent."""
        from cuda.bindings import driver

        if self.address:
            driver.cuMemUnmap(self.address, self.size)
            driver.cuMemAddressFree(self.address, self.size)
        if self._handle is not None:
            driver.cuMemRelease(self._handle)
        self.address, self._handle = 0, None


def _checked(call: str, result: tuple[Any, ...]) -> Any:
    if int(result[0]):
        raise CudaError(f"{call} failed: {result[0].name}")
    return result[1] if len(result) > 1 else None
