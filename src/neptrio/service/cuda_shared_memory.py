"""The CUDA shared memory extension: clients register device memory of theirs by its IPC handle.

An input in a region is a tensor with memory kind GPU_MEMORY. Models that take device memory read it in place;
for other models it is copied to the host. Kernel models on the same GPU write their outputs directly into the
region; outputs of other models are copied there when the response is sent.

Rules:
 1. A region is opened once at registration and closed when it has been unregistered and the last tensor
    that views it is gone, so unregistering during use is safe.
 2. A region keeps its GPU's context open, like a model on that GPU does.
 3. When the GPU's context breaks, its regions are lost: using one is an error that says so.
 4. The trio thread makes no call of the driver: regions are opened on a worker thread, and closed on the device's.

Source: docs/protocol/features.md A6, docs/protocol/observed.md 13.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import neptrio.request.device_memory as device_memory
from neptrio import datatypes
from neptrio.backends.kernel import device
from neptrio.errors import AlreadyExists, InvalidArgument, TritonError, Unavailable
from neptrio.limits import shown
from neptrio.loop import threads
from neptrio.request.infer_request import MemoryKind, Tensor, tensor_at
from neptrio.service.shared_memory_regions import SharedMemoryRegions, check_fits, check_part

HANDLE_SIZE = 64  # bytes of a CUipcMemHandle
GPU = int(MemoryKind.GPU_MEMORY)


class CudaRegion:
    """An opened region; it is closed when nothing refers to it any more."""

    def __init__(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        self.name = name
        self.device_id = device_id
        self.byte_size = byte_size
        self.address = 0
        self._gpu: device.Device | None = device.Device.get(device_id)
        self.device_pool = self._gpu.pool
        try:
            self._open(raw_handle)
        except BaseException:
            self.close()
            raise

    def _open(self, raw_handle: bytes) -> None:
        gpu = self._gpu
        assert gpu is not None
        driver = gpu._driver
        handle = driver.CUipcMemHandle()
        # some releases of cuda-bindings do not expose the handle's bytes as an attribute
        ctypes.memmove(int(handle.getPtr()), raw_handle, HANDLE_SIZE)
        with gpu.current():
            lazily = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
            opened = device.call(driver.cuIpcOpenMemHandle(handle, lazily), "opening the memory handle")
            self.address = int(opened)
            base, size = device.call(
                driver.cuMemGetAddressRange(self.address), "reading the allocation's size"
            )
        # a client's memory may begin inside the block that is shared
        room = int(base) + int(size) - self.address
        if room < self.byte_size:
            raise InvalidArgument(f"the allocation has {room} bytes, the region asks for {self.byte_size}")

    @property
    def lost(self) -> bool:
        """True when the GPU's context has broken, which invalidates the memory (rule 3)."""
        return bool(self.device_pool.broken)

    def close(self) -> None:
        """Unmaps the memory, on the device's thread. Errors are ignored: the process that owns it may be gone."""
        gpu, self._gpu = self._gpu, None
        if gpu is None:
            return
        if self.address and not gpu.pool.broken:
            gpu.later(partial(_unmap, gpu, self.address))
        self.address = 0
        gpu.release()

    def __del__(self) -> None:
        if getattr(self, "_gpu", None) is not None:
            self.close()


def _unmap(gpu: device.Device, address: int) -> None:
    if not gpu.pool.broken:
        with gpu.current():
            gpu._driver.cuIpcCloseMemHandle(address)


@dataclass(frozen=True)
class CudaSharedMemoryStatistics:
    """How many regions are registered, and their bytes."""

    regions: int
    bytes: int


class CudaSharedMemory(SharedMemoryRegions[Any]):
    """Registered CUDA regions by name. Lives on the trio thread."""

    kind = "cuda"

    def __init__(self, opened: Any = CudaRegion) -> None:
        """`opened(name, raw_handle, device_id, byte_size)` opens a region; tests replace it."""
        super().__init__()
        self._open = opened

    def statistics(self) -> CudaSharedMemoryStatistics:
        """The current numbers."""
        return CudaSharedMemoryStatistics(
            len(self._regions), sum(r.byte_size for r in self._regions.values())
        )

    async def register(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """Opens a region, on a thread: the driver may take long. Raises AlreadyExists or InvalidArgument."""
        self.check_new(name)
        problem = ""
        if len(raw_handle) != HANDLE_SIZE:
            problem = f"the raw handle must have {HANDLE_SIZE} bytes, got {len(raw_handle)}"
        elif byte_size <= 0:
            problem = f"byte_size must be above 0, got {byte_size}"
        if not problem:
            try:
                opened = await threads.run(
                    self._open, name, raw_handle, device_id, byte_size, abandon_on_cancel=True
                )
                self.check_new(name)  # somebody else may have been quicker
                self._regions[name] = opened
                return
            except (AlreadyExists, threads.NoThread):
                raise
            except TritonError as error:
                problem = str(error)
        raise InvalidArgument(f"failed to register shared memory region: invalid args ({problem})")

    def describe(self, region: Any) -> dict[str, Any]:
        return {"name": region.name, "device_id": region.device_id, "byte_size": region.byte_size}

    def _check(self, region: Any, offset: int, size: int, empty: bool) -> None:
        if getattr(region, "lost", False):
            raise Unavailable(
                f"shared memory region '{shown(region.name)}' was lost when GPU {region.device_id} failed"
            )
        check_part(region.name, region.byte_size, offset, size, empty)

    def input_tensor(
        self, name: str, dtype: int, shape: tuple[int, ...], region: str, offset: int, size: int
    ) -> Tensor:
        """An input as a view of device memory. Raises NotFound or InvalidArgument."""
        found = self.named(region)
        self._check(found, offset, size, 0 in shape)
        if dtype == datatypes.BYTES:
            raise InvalidArgument(
                f"input '{shown(name)}': BYTES tensors can't be in a CUDA shared memory region"
            )
        return tensor_at(name, dtype, shape, found.address + offset, size, found, 2, found.device_id)

    def output_place(self, region: Any, offset: int, size: int, needed: int, output: str) -> Any:
        """(address, owner) of the device memory for an output."""
        self._check(region, offset, size, needed == 0)
        check_fits(output, needed, size)
        return region.address + offset, region

    def writer(self, tensor: Tensor, region: Any, offset: int, size: int) -> Callable[[], None]:
        """Copies an output into its region, unless the model has already written it there, in two parts: this one checks whether
        it fits, and any thread may call what it returns. Both raise InvalidArgument, Unavailable or Internal."""
        address, found = self.output_place(region, offset, size, tensor.nbytes, tensor.name)
        if tensor.dtype == datatypes.BYTES:
            raise InvalidArgument(
                f"output '{tensor.name}': BYTES tensors can't be in a CUDA shared memory region"
            )

        def write() -> None:
            if tensor.memory_kind == GPU and tensor.memory_id == found.device_id:
                if tensor.address != address:
                    found.device_pool.copy(address, tensor.address, tensor.nbytes)
            else:
                found.device_pool.store(address, memoryview(device_memory.on_host(tensor)))

        return write
