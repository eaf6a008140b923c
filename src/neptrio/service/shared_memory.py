"""Shared memory regions, as codecs and backends see them: one name space over the kinds of regions.

Off unless the server was started with --allow-client-shm=true, as in tritonserver.
"""

from __future__ import annotations

from neptrio._cext.request import Tensor
from neptrio.errors import Unsupported
from neptrio.service.cuda_shared_memory import CudaSharedMemory
from neptrio.settings import Settings


class SharedMemoryService:
    """Registered regions. `cuda` holds those in device memory."""

    def __init__(self, settings: Settings) -> None:
        self._allowed = settings.allow_client_shm
        self.cuda = CudaSharedMemory()

    def check_allowed(self) -> None:
        """Raises Unsupported when the server does not take regions from clients."""
        if not self._allowed:
            raise Unsupported(
                "shared memory is not enabled; start the server with --allow-client-shm=true to let clients "
                "register regions"
            )

    def input_tensor(
        self, name: str, dtype: int, shape: tuple[int, ...], region: str, offset: int, size: int
    ) -> Tensor:
        """An input that lies in a region. Raises NotFound, InvalidArgument or Unsupported."""
        self.check_allowed()
        return self.cuda.input_tensor(name, dtype, shape, region, offset, size)
