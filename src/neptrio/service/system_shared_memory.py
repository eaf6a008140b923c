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
from neptrio.errors import AlreadyExists, Internal, InvalidArgument, NotFound

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
        if offset > self.byte_size:
            raise InvalidArgument(f"Invalid offset for shared memory region: '{self.name}'")
        if byte_size == 0 or offset + byte_size > self.byte_size:
            raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{self.name}'")
        begin = self.offset + offset
        return self.mapping.view[begin : begin + byte_size]


class SystemSharedMemory:
    """Registered regions by name. Lives on the trio thread."""

    def __init__(self) -> None:
        self._regions: dict[str, SystemRegion] = {}

    def has(self, name: str) -> bool:
        """Whether a region of that name is registered."""
        return name in self._regions

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Maps a region. Raises AlreadyExists, InvalidArgument or Internal."""
        if not name:
            raise InvalidArgument("'region name' is necessary to register system shared memory region")
        if name in self._regions:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
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

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """The regions, sorted by name. Raises NotFound for an unknown one."""
        if name and name not in self._regions:
            raise NotFound(f"Unable to find system shared memory region: '{name}'")
        return [
            {"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.byte_size}
            for key, r in sorted(self._regions.items())
            if not name or key == name
        ]

    def unregister(self, name: str = "") -> None:
        """Forgets a region, all of them without a name. Unknown names are fine."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def input_tensor(
        self, name: str, dtype: int, shape: tuple[int, ...], region: str, offset: int, size: int
    ) -> Tensor:
        """An input as a view of its region. Raises InvalidArgument when it is not inside."""
        return Tensor(name, dtype, shape, self._regions[region].part(offset, size))

    def write_output(self, tensor: Tensor, region: str, offset: int, size: int) -> None:
        """Writes an output into its region. Raises InvalidArgument or Internal when it does not fit."""
        target = self._regions[region].part(offset, size)
        if tensor.nbytes > size:
            raise Internal(
                f"shared memory size specified with the request for output '{tensor.name}' ({size} bytes) "
                f"should be at least {tensor.nbytes} bytes to hold the results"
            )
        target[: tensor.nbytes] = memoryview(tensor)
