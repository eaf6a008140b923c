"""System shared memory: tensors that client and server exchange through /dev/shm, without a copy on the wire.

A region is mapped once at registration. An input lies in a region as it is: requests view it. An
output is written into the region and leaves the response without data.

Rules:
 1. A region stays mapped while a request uses it, however early it is unregistered: tensors hold
    the mapping, the table only its name.
 2. Nothing outside [offset, offset + byte_size) of a registered region is ever read or written.
 3. Keys name objects of /dev/shm, never paths: a slash inside a key is refused, links are not followed.

Source: spec/features.md A1 and A6, spec/observed.md 13.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

from neptrio._cext.request import Tensor
from neptrio.errors import Internal, InvalidArgument
from neptrio.service.shared_memory_regions import SharedMemoryRegions, check_fits, check_part

RESERVED_PREFIX = "triton_python_backend_shm_region_"
FOLDER = "/dev/shm"


class _Mapping:
    """One mmap; unmapped when the last tensor over it is gone."""

    def __init__(self, fd: int, length: int) -> None:
        self.memory = mmap.mmap(fd, length)
        self.view = memoryview(self.memory)

    def __del__(self) -> None:
        try:
            self.view.release()
            self.memory.close()
        except BufferError:  # still exported: the interpreter is going down
            pass


@dataclass(frozen=True)
class SystemRegion:
    """A registered piece of POSIX shared memory."""

    name: str
    key: str
    offset: int
    byte_size: int
    mapping: _Mapping

    def part(self, offset: int, byte_size: int) -> memoryview:
        """A writable view of a part. Raises InvalidArgument when it is not inside."""
        check_part(self.name, self.byte_size, offset, byte_size)
        begin = self.offset + offset
        return self.mapping.view[begin : begin + byte_size]


class SystemSharedMemory(SharedMemoryRegions[SystemRegion]):
    """Registered regions by name. Lives on the trio thread."""

    kind = "system"

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Maps a region. Raises AlreadyExists, InvalidArgument or Internal."""
        self.check_new(name)
        invalid = InvalidArgument(f"failed to register shared memory region '{name}': invalid args")
        plain = key.removeprefix("/")
        if not plain or "/" in plain or plain in (".", "..") or "\0" in plain:
            raise Internal(f"Unable to open shared memory region: '{key}'")
        if plain.startswith(RESERVED_PREFIX):
            raise InvalidArgument(
                f"cannot register shared memory region '{name}' with key '{key}' as the key contains the "
                f"reserved prefix '{RESERVED_PREFIX}'"
            )
        try:
            fd = os.open(f"{FOLDER}/{plain}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            raise Internal(f"Unable to open shared memory region: '{key}'") from None
        try:
            if byte_size <= 0 or offset + byte_size > os.fstat(fd).st_size:
                raise invalid
            mapping = _Mapping(fd, offset + byte_size)
        except OSError as error:
            raise Internal(f"failed to map shared memory region '{name}': {error.strerror}") from None
        finally:
            os.close(fd)
        self._regions[name] = SystemRegion(name, key, offset, byte_size, mapping)

    def describe(self, region: SystemRegion) -> dict[str, Any]:
        return {
            "name": region.name,
            "key": region.key,
            "offset": region.offset,
            "byte_size": region.byte_size,
        }

    def input_tensor(
        self, name: str, dtype: int, shape: tuple[int, ...], region: str, offset: int, size: int
    ) -> Tensor:
        """An input as a view of its region. Raises InvalidArgument when it is not inside."""
        return Tensor(name, dtype, shape, self._regions[region].part(offset, size))

    def write_output(self, tensor: Tensor, region: str, offset: int, size: int) -> None:
        """Writes an output into its region. Raises InvalidArgument or Internal when it does not fit."""
        target = self._regions[region].part(offset, size)
        check_fits(tensor.name, tensor.nbytes, size)
        target[: tensor.nbytes] = memoryview(tensor)
