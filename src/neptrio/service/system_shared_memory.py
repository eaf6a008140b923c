"""System shared memory: tensors that client and server exchange through /dev/shm, without a copy on the wire.

The object is opened once, when its region is registered. An input is read from it when its request comes; an
output is written into it, and the response carries no data.

The problem with mapping it: the object belongs to its client, who may shorten it, or fill /dev/shm while the
object has holes. The next access to a missing page would end the server with SIGBUS. The choice: reads and
writes are system calls, which return an error instead (cext/request/file_part.pyx). The price is one copy of
each input.

Rules:
 1. A region stays open while a request uses it, even when it is unregistered, or its name is given to another. An
    input that was read does not need it any more; for an output it is looked up when the request comes.
 2. Nothing outside [offset, offset + byte_size) of a registered region is ever read or written.
 3. Keys name objects of /dev/shm, never paths: a slash inside a key is refused, links are not followed.
 4. A part that the object no longer has is an error of the request that names it, and of no other.
 5. Regions, those that only requests still use included, may use half of the process's file descriptors, and all inputs
    together a bounded amount of memory.

Source: docs/protocol/features.md A1 and A6, docs/protocol/observed.md 13.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import neptrio.request.device_memory as device_memory
import neptrio.request.file_part as file_part
from neptrio.codec.shared_memory import LARGE_BYTES
from neptrio.errors import Code, Internal, InvalidArgument, TritonError
from neptrio.limits import shown
from neptrio.observe import memory_limit
from neptrio.request.infer_request import Tensor
from neptrio.service.shared_memory_regions import SharedMemoryRegions, check_fits, check_part

RESERVED_PREFIX = "triton_python_backend_shm_region_"
FOLDER = "/dev/shm"
INPUT_BYTES = 60  # of a request: it takes no fewer to name a part, in a message of gRPC or in JSON


def default_input_limit() -> int:
    """Half of the container's memory or the machine's, in bytes."""
    return memory_limit.share(2, at_least=0)


class _File:
    """An open object of /dev/shm; closed when the last reference to it goes."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True)
class SystemRegion:
    """A registered piece of POSIX shared memory."""

    name: str
    key: str
    offset: int
    byte_size: int
    file: _File

    def at(self, offset: int, byte_size: int, empty: bool) -> int:
        """The offset of a part within the object. Raises InvalidArgument when it is not inside the region."""
        check_part(self.name, self.byte_size, offset, byte_size, empty)
        return self.offset + offset

    def size(self) -> int:
        """The current size of the object in bytes."""
        return os.fstat(self.file.fd).st_size

    def shorter(self, end: int) -> InvalidArgument:
        """The error for a request with a part that ends at `end`, beyond the current end of the object."""
        return InvalidArgument(
            f"shared memory region '{self.name}' has become shorter: its object '{self.key}' has {self.size()} bytes, "
            f"the request's part ends at {end}; give it its size again, or register the region anew"
        )


class SystemSharedMemory(SharedMemoryRegions[SystemRegion]):
    """Registered regions by name. Lives on the trio thread."""

    kind = "system"

    def __init__(self, input_limit: int | None = None) -> None:
        """`input_limit`: bytes that inputs of all unfinished requests may use together."""
        super().__init__()
        self._input_limit = default_input_limit() if input_limit is None else input_limit
        self.large = file_part.LargeFiles()
        self._open: WeakSet[_File] = WeakSet()

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Opens a region. Raises AlreadyExists, InvalidArgument, Internal, or RESOURCE_EXHAUSTED (rule 5)."""
        self.check_named(name)
        without_slashes = key.lstrip("/")
        if not without_slashes:
            raise InvalidArgument(
                f"cannot register shared memory region '{shown(name)}' with key '{shown(key)}' as the key has no name"
            )
        if without_slashes.startswith(RESERVED_PREFIX):
            raise InvalidArgument(
                f"cannot register shared memory region '{shown(name)}' with key '{shown(key)}' as the key contains the "
                f"reserved prefix '{RESERVED_PREFIX}'"
            )
        self.check_new(name)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        if 0 < most <= len(self._open):
            raise _exhausted(
                f"failed to register shared memory region '{shown(name)}': {len(self._open)} regions are registered or used "
                "by requests, which is half of the server's file descriptors; unregister some, or start it with a higher "
                "`ulimit -n`"
            )
        plain = key.removeprefix("/")
        if "/" in plain or plain in (".", "..") or "\0" in plain:
            raise Internal(f"Unable to open shared memory region: '{shown(key)}'")
        try:
            # another process may hold a lease on the object, for which open() would wait until it gives that up
            fd = os.open(f"{FOLDER}/{plain}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except BlockingIOError:
            raise Internal(
                f"Unable to open shared memory region: '{key}': another process holds a lease on it; register it again "
                "when that has been given up"
            ) from None
        except OSError as error:
            why = f": {error.strerror}" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
            raise Internal(f"Unable to open shared memory region: '{shown(key)}'{why}") from None
        region = SystemRegion(name, key, offset, byte_size, _File(fd))
        if byte_size <= 0 or offset + byte_size > region.size():
            raise InvalidArgument(
                f"failed to register shared memory region '{shown(name)}': invalid args (its object has {region.size()} bytes, "
                f"got offset {offset} and byte_size {byte_size})"
            )
        self._regions[name] = region
        self._open.add(region.file)
        self._look_at_sizes()

    def _look_at_sizes(self) -> None:
        """A request may name the largest region as often as it has room for."""
        largest = max((region.byte_size for region in self._regions.values()), default=0)
        self.large.least = INPUT_BYTES * (LARGE_BYTES // largest + 1) if largest else sys.maxsize

    def unregister(self, name: str = "") -> None:
        """Unregisters one region, or all without a name. With no region left, memory kept for inputs is released."""
        super().unregister(name)
        self._look_at_sizes()
        if not self._regions:
            file_part.trim()

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
        """An input, read from its region. Raises InvalidArgument when it is not inside the region, RESOURCE_EXHAUSTED
        when the inputs of unfinished requests use too much memory."""
        return self.reader(name, dtype, shape, region, offset, size)()

    def reader(
        self, name: str, dtype: int, shape: tuple[int, ...], region: str, offset: int, size: int
    ) -> Callable[[], Tensor]:
        """What input_tensor() does, in two parts: this one looks the region up, and any thread may call what it returns.
        Both raise as input_tensor() does."""
        found = self._regions[region]
        begin = found.at(offset, size, 0 in shape)

        def read() -> Tensor:
            held = self.large.held
            if held + size > self._input_limit:
                raise _exhausted(
                    f"no room for input '{shown(name)}' of {size} bytes: inputs from shared memory take {held} bytes, and may "
                    f"take {self._input_limit}; send the request again when others are answered"
                )
            try:
                part = file_part.read(found.file.fd, begin, size, self.large)
            except OSError as error:
                raise Internal(
                    f"cannot read shared memory region '{shown(region)}': {error.strerror}"
                ) from None
            except MemoryError as error:
                raise _exhausted(f"no room for input '{shown(name)}': {error}") from None
            if part is None:
                raise found.shorter(begin + size)
            return Tensor(name, dtype, shape, part, True)

        return read

    def writer(self, tensor: Tensor, region: SystemRegion, offset: int, size: int) -> Callable[[], None]:
        """Writes an output into its region, in two parts: this one checks whether it fits, and any thread may call what it
        returns. Both raise InvalidArgument or Internal when it does not."""
        begin = region.at(offset, size, tensor.nbytes == 0)
        check_fits(tensor.name, tensor.nbytes, size)
        if begin + size > region.size():  # writing beyond the end would make the object larger
            raise region.shorter(begin + size)

        def write() -> None:
            try:
                file_part.write(region.file.fd, begin, device_memory.on_host(tensor))
            except OSError as error:
                raise Internal(
                    f"cannot write to shared memory region '{shown(region.name)}': {error.strerror}"
                ) from None

        return write


def _exhausted(message: str) -> TritonError:
    return TritonError(message, Code.RESOURCE_EXHAUSTED)
