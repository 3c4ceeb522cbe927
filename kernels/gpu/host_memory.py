"""Host memory that kernels read or write in place: how it is reached, and the registration that makes it reachable.

Memory of the daemon is mapped read-only and registered as such, so that no kernel can write to it. Where a device
cannot register read-only memory it may still reach pageable memory through the host's page tables; that mode is
slower and is reported as what it is. Where it has neither, registration is refused: memory is never mapped writable
for a kernel's sake, and nothing is copied behind anybody's back.
"""

from enum import Enum

from strataflux.kernels.cuda_build import CudaError

__all__ = ["Access", "HostRegistration", "device_attribute"]

_REGISTER_MAPPED, _REGISTER_READ_ONLY = 2, 8
_ATTRIBUTES = {
    "shared_bytes_per_multiprocessor": 81,
    "host_native_atomics": 86,
    "pageable_memory_access": 88,
    "can_use_host_pointer": 91,
    "shared_bytes_of_a_block": 97,
    "host_register": 99,
    "pageable_uses_host_page_tables": 100,
    "host_register_read_only": 113,
}


class Access(Enum):
    """How kernels reach a piece of host memory."""

    REGISTERED_READ_ONLY = "registered read-only"
    REGISTERED = "registered"
    PAGEABLE = "pageable"


def device_attribute(name: str, device: int = 0) -> int:
    """A device attribute of the CUDA driver: what decides how host memory can be reached, and shared memory.

    Raises:
        CudaError: the driver does not answer.
        KeyError: no such name; see ``_ATTRIBUTES``.
    """
    from cuda.bindings import runtime

    attribute = runtime.cudaDeviceAttr(_ATTRIBUTES[name])
    status, value = runtime.cudaDeviceGetAttribute(attribute, device)
    if int(status):
        raise CudaError(f"cudaDeviceGetAttribute({name}) failed: {status.name}")
    return int(value)


class HostRegistration:
    """One range of host memory, reachable by kernels at its own address until :meth:`close`.

    Close it before the memory is unmapped: the driver would keep the address, refuse whatever is registered there next,
    and fail an allocation of device memory that meets it.
    """

    def __init__(self, address: int, size: int, *, writable: bool) -> None:
        """Register ``size`` bytes at ``address``, both multiples of 4,096.

        Raises:
            CudaError: the device can reach it in no way that is allowed; the message says what was tried.
        """
        # fixed after construction
        self.address = address
        self.size = size
        flags = _REGISTER_MAPPED | (0 if writable else _REGISTER_READ_ONLY)
        from cuda.bindings import runtime

        (status,) = runtime.cudaHostRegister(address, size, flags)
        self._registered = int(status) == 0
        if self._registered and device_attribute("can_use_host_pointer"):
            self.access = Access.REGISTERED if writable else Access.REGISTERED_READ_ONLY
            return
        # A refusal is answered here; left in the runtime it would be raised by the next library that asks.
        runtime.cudaGetLastError()
        self.close()
        if device_attribute("pageable_memory_access"):
            self.access = Access.PAGEABLE
        else:
            raise CudaError(
                f"{size} bytes of {'writable' if writable else 'read-only'} host memory: cudaHostRegister answered "
                f"{status.name} and the device has no access to pageable memory; use the CPU path"
            )

    def close(self) -> None:
        """Take the registration back; no kernel that uses it may be under way. Idempotent.

        Raises:
            CudaError: the driver refuses; the memory must then stay mapped.
        """
        if self._registered:
            self._registered = False
            from cuda.bindings import runtime

            (status,) = runtime.cudaHostUnregister(self.address)
            if int(status):
                runtime.cudaGetLastError()
                raise CudaError(f"cudaHostUnregister failed: {status.name}")
