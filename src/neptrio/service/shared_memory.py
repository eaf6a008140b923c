"""Registered shared memory regions of both kinds under one name space, as codecs and backends use them.

Off unless the server was started with --allow-client-shm=true, as in tritonserver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from neptrio.errors import Unsupported
from neptrio.request.file_part import LargeFiles
from neptrio.request.infer_request import Tensor
from neptrio.service.cuda_shared_memory import CudaSharedMemory
from neptrio.service.system_shared_memory import SystemRegion, SystemSharedMemory
from neptrio.settings import Settings


class SharedMemoryService:
    """Registered regions: `system` in /dev/shm, `cuda` in device memory."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._allowed = settings.allow_client_shm
        self.system = SystemSharedMemory()
        self.cuda = CudaSharedMemory()
        self.system.share_names(self.cuda)

    def close(self) -> None:
        """Unregisters every region: the server is about to end."""
        self.system.unregister()
        self.cuda.unregister()

    def check_allowed(self, change: bool = False) -> None:
        """Raises Unsupported when --allow-client-shm is off; with `change` (a registration or its removal) also Denied
        when the server is --read-only."""
        if not self._allowed:
            raise Unsupported(
                "shared memory is not enabled; start the server with --allow-client-shm=true to let clients "
                "register regions"
            )
        if change:
            self._settings.change("registering shared memory")

    def input_tensor(
        self, name: str, dtype: int, shape: tuple[int, ...], region: str, offset: int, size: int
    ) -> Tensor:
        """An input that lies in a region. Raises NotFound, InvalidArgument or Unsupported."""
        self.check_allowed()
        if self.system.has(region):
            return self.system.input_tensor(name, dtype, shape, region, offset, size)
        return self.cuda.input_tensor(name, dtype, shape, region, offset, size)

    @property
    def large(self) -> LargeFiles:
        """Says which requests may name parts of regions that workers should read."""
        return self.system.large

    def input_reader(
        self, name: str, dtype: int, shape: tuple[int, ...], region: str, offset: int, size: int
    ) -> Callable[[], Tensor]:
        """What input_tensor() does, in two parts: this one on the loop's thread; any thread may call what it returns.
        Both raise as input_tensor() does."""
        self.check_allowed()
        if self.system.has(region):
            return self.system.reader(name, dtype, shape, region, offset, size)
        tensor = self.cuda.input_tensor(name, dtype, shape, region, offset, size)
        return lambda: tensor

    def output_region(self, region: str) -> Any:
        """The region of that name, to be asked for when the request comes: its output goes there, whatever is registered under
        the name when it is ready. Raises NotFound or Unsupported."""
        self.check_allowed()
        return self.system.named(region) if self.system.has(region) else self.cuda.named(region)

    def output_place(self, region: Any, offset: int, size: int, needed: int, output: str) -> Any:
        """(address, owner) of the device memory for an output of `needed` bytes, None when `region` is not on a GPU.

        Raises InvalidArgument when it does not fit.
        """
        if isinstance(region, SystemRegion):
            return None
        return self.cuda.output_place(region, offset, size, needed, output)

    def write_output(self, tensor: Tensor, region: Any, offset: int, size: int) -> Tensor:
        """Puts an output into a region of output_region(); returns the tensor that the response names, without data.

        Raises InvalidArgument, Internal or Unavailable. Does nothing to an output that a model on the region's GPU has
        already written there.
        """
        self.output_writer(tensor, region, offset, size)()
        return Tensor(tensor.name, tensor.dtype, tensor.shape, b"")

    def output_writer(self, tensor: Tensor, region: Any, offset: int, size: int) -> Callable[[], None]:
        """What write_output() does, in two parts: this one on the loop's thread; any thread may call what it returns.
        Both raise as write_output() does."""
        if isinstance(region, SystemRegion):
            return self.system.writer(tensor, region, offset, size)
        return self.cuda.writer(tensor, region, offset, size)
