"""The shared memory calls of GRPCInferenceService."""

from __future__ import annotations

from typing import Any

from neptrio._proto.inference import (
    CudaSharedMemoryRegisterResponse,
    CudaSharedMemoryStatusResponse,
    CudaSharedMemoryStatusResponseRegionStatus,
    CudaSharedMemoryUnregisterResponse,
    GrpcInferenceServiceBase,
    SystemSharedMemoryRegisterResponse,
    SystemSharedMemoryStatusResponse,
    SystemSharedMemoryStatusResponseRegionStatus,
    SystemSharedMemoryUnregisterResponse,
)
from neptrio.service import Services


class SharedMemoryHandlers(GrpcInferenceServiceBase):
    """The base of InferenceHandlers (service.py), which has the other methods of GRPCInferenceService."""

    _services: Services

    def _memory(self) -> Any:
        memory = self._services.shared_memory
        memory.check_allowed(change=True)
        return memory

    # where clients may not register regions there are none, as on a Triton server; HTTP says that they may not

    async def system_shared_memory_status(self, message: Any) -> SystemSharedMemoryStatusResponse:
        rows = self._services.shared_memory.system.status(message.name)
        return SystemSharedMemoryStatusResponse(
            regions={row["name"]: SystemSharedMemoryStatusResponseRegionStatus(**row) for row in rows}
        )

    async def system_shared_memory_register(self, message: Any) -> SystemSharedMemoryRegisterResponse:
        self._memory().system.register(message.name, message.key, message.offset, message.byte_size)
        return SystemSharedMemoryRegisterResponse()

    async def system_shared_memory_unregister(self, message: Any) -> SystemSharedMemoryUnregisterResponse:
        self._memory().system.unregister(message.name)
        return SystemSharedMemoryUnregisterResponse()

    async def cuda_shared_memory_status(self, message: Any) -> CudaSharedMemoryStatusResponse:
        rows = self._services.shared_memory.cuda.status(message.name)
        return CudaSharedMemoryStatusResponse(
            regions={row["name"]: CudaSharedMemoryStatusResponseRegionStatus(**row) for row in rows}
        )

    async def cuda_shared_memory_register(self, message: Any) -> CudaSharedMemoryRegisterResponse:
        cuda = self._memory().cuda
        await cuda.register(message.name, message.raw_handle, message.device_id, message.byte_size)
        return CudaSharedMemoryRegisterResponse()

    async def cuda_shared_memory_unregister(self, message: Any) -> CudaSharedMemoryUnregisterResponse:
        self._memory().cuda.unregister(message.name)
        return CudaSharedMemoryUnregisterResponse()
