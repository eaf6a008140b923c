"""The CUDA shared memory extension: regions of another process's device memory, by IPC handle.

A region is opened once at registration and closed when it has been unregistered and the last
tensor that views it is gone, so unregistering during use is safe. Inputs in a region are views
of it (Tensor.memory_kind 2); kernel models on that GPU read them where they lie and copy their
outputs there on the device: nothing passes through the host.

Source: spec/features.md A6, spec/observed.md 13.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neptrio import datatypes
from neptrio._cext.request import Tensor, tensor_at
from neptrio.backends.kernel import device
from neptrio.errors import AlreadyExists, Internal, InvalidArgument, NotFound, TritonError

HANDLE_SIZE = 64  # bytes of a CUipcMemHandle


class CudaRegion:
    """An opened region; closes itself when nothing refers to it any more."""

    def __init__(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        self.name = name
        self.device_id = device_id
        self.byte_size = byte_size
        self._gpu = device.Device.get(device_id)
        driver = self._driver = self._gpu._driver
        handle = driver.CUipcMemHandle()
        handle.reserved = raw_handle
        self.address = 0
        with _current(driver, self._gpu.context):
            self.address = int(
                device.call(
                    driver.cuIpcOpenMemHandle(
                        handle, driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
                    ),
                    "opening the memory handle",
                )
            )
            _, size = device.call(driver.cuMemGetAddressRange(self.address), "reading the allocation's size")
        if int(size) < byte_size:
            self.close()
            raise InvalidArgument(f"the allocation has {int(size)} bytes, the region asks for {byte_size}")

    def close(self) -> None:
        """Unmaps the memory. Errors are ignored: the other process may be gone."""
        if self.address and not self._gpu.broken:
            with _current(self._driver, self._gpu.context):
                self._driver.cuIpcCloseMemHandle(self.address)
        self.address = 0

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.close()


class _current:
    """A context made current for a few calls on a thread that has another (or none)."""

    def __init__(self, driver: Any, context: Any) -> None:
        self._driver = driver
        self._context = context

    def __enter__(self) -> None:
        device.call(self._driver.cuCtxPushCurrent(self._context), "making the context current")

    def __exit__(self, *_: object) -> None:
        self._driver.cuCtxPopCurrent()


@dataclass(frozen=True)
class CudaSharedMemoryStatistics:
    """Registered regions and their bytes."""

    regions: int
    bytes: int


class CudaSharedMemory:
    """Registered CUDA regions by name. Lives on the trio thread."""

    def __init__(self, opened: Any = CudaRegion) -> None:
        """`opened(name, raw_handle, device_id, byte_size)` opens a region; tests give their own."""
        self._open = opened
        self._regions: dict[str, Any] = {}

    def statistics(self) -> CudaSharedMemoryStatistics:
        """How much is registered."""
        return CudaSharedMemoryStatistics(
            len(self._regions), sum(r.byte_size for r in self._regions.values())
        )

    def has(self, name: str) -> bool:
        """Whether a region of that name is registered."""
        return name in self._regions

    def register(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """Opens a region. Raises AlreadyExists or InvalidArgument."""
        if not name:
            raise InvalidArgument("'region name' is necessary to register cuda shared memory region")
        if name in self._regions:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        problem = ""
        if len(raw_handle) != HANDLE_SIZE:
            problem = f"the raw handle must have {HANDLE_SIZE} bytes, got {len(raw_handle)}"
        elif byte_size <= 0:
            problem = f"byte_size must be above 0, got {byte_size}"
        if not problem:
            try:
                self._regions[name] = self._open(name, raw_handle, device_id, byte_size)
                return
            except TritonError as error:
                problem = str(error)
        raise InvalidArgument(f"failed to register shared memory region: invalid args ({problem})")

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """The regions, sorted by name. Raises NotFound for an unknown one."""
        if name and name not in self._regions:
            raise NotFound(f"Unable to find cuda shared memory region: '{name}'")
        return [
            {"name": r.name, "device_id": r.device_id, "byte_size": r.byte_size}
            for key, r in sorted(self._regions.items())
            if not name or key == name
        ]

    def unregister(self, name: str = "") -> None:
        """Forgets a region, or all of them; unknown names are fine. Memory in use stays until it is not."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def _place(self, region: str, offset: int, size: int) -> Any:
        found = self._regions.get(region)
        if found is None:
            raise NotFound(f"Unable to find shared memory region: '{region}'")
        if offset < 0 or offset > found.byte_size:
            raise InvalidArgument(f"Invalid offset for shared memory region: '{region}'")
        if size <= 0 or offset + size > found.byte_size:
            raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{region}'")
        return found

    def input_tensor(
        self, name: str, dtype: int, shape: tuple[int, ...], region: str, offset: int, size: int
    ) -> Tensor:
        """An input as a view of device memory. Raises NotFound or InvalidArgument."""
        found = self._place(region, offset, size)
        if dtype == datatypes.BYTES:
            raise InvalidArgument(f"input '{name}': BYTES tensors can't be in a CUDA shared memory region")
        return tensor_at(name, dtype, shape, found.address + offset, size, found, 2, found.device_id)

    def output_place(self, region: str, offset: int, size: int, needed: int, output: str) -> Any:
        """(address, owner) of where an output goes, None when the region is not one of these."""
        if region not in self._regions:
            return None
        found = self._place(region, offset, size)
        if needed > size:
            raise Internal(
                f"shared memory size specified with the request for output '{output}' ({size} bytes) should be at "
                f"least {needed} bytes to hold the results"
            )
        return found.address + offset, found
