"""Registered shared memory regions by name: what system and CUDA shared memory have in common.

A kind of region says how one is registered, described and used; the table, the range checks and the
texts of the errors are the same for both.

Source: docs/protocol/features.md A1 and A6, docs/protocol/observed.md 13.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from neptrio.errors import AlreadyExists, Internal, InvalidArgument, NotFound

Region = TypeVar("Region")


class SharedMemoryRegions(Generic[Region]):
    """The regions of one kind. Lives on the trio thread.

    The table holds names only: what uses a region keeps it, so unregistering is safe at any time.
    """

    kind: str  # as the protocol calls it: "system" or "cuda"

    def __init__(self) -> None:
        self._regions: dict[str, Region] = {}

    def describe(self, region: Region) -> dict[str, Any]:
        """The row of `region` in a status reply."""
        raise NotImplementedError(f"{type(self).__name__}.describe")

    def has(self, name: str) -> bool:
        """Whether a region of that name is registered."""
        return name in self._regions

    def check_named(self, name: str) -> None:
        """Raises InvalidArgument for an empty name: told before anything that is wrong with the rest."""
        if not name:
            raise InvalidArgument(f"'region name' is necessary to register {self.kind} shared memory region")

    def check_new(self, name: str) -> None:
        """Raises InvalidArgument for an empty name, AlreadyExists for one that is taken."""
        self.check_named(name)
        if name in self._regions:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """The regions, sorted by name. Raises NotFound for an unknown one."""
        if name and name not in self._regions:
            raise NotFound(f"Unable to find {self.kind} shared memory region: '{name}'")
        return [
            self.describe(region) for key, region in sorted(self._regions.items()) if not name or key == name
        ]

    def unregister(self, name: str = "") -> None:
        """Forgets a region, or all of them; unknown names are fine. Memory in use stays until it is not."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()


def check_part(region: str, region_bytes: int, offset: int, byte_size: int) -> None:
    """Raises InvalidArgument unless a part, in bytes, is not empty and inside its region."""
    if offset < 0 or offset > region_bytes:
        raise InvalidArgument(f"Invalid offset for shared memory region: '{region}'")
    if byte_size <= 0 or offset + byte_size > region_bytes:
        raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{region}'")


def check_fits(output: str, needed: int, byte_size: int) -> None:
    """Raises Internal when an output of `needed` bytes was given a part of `byte_size`."""
    if needed > byte_size:
        raise Internal(
            f"shared memory size specified with the request for output '{output}' ({byte_size} bytes) should be at "
            f"least {needed} bytes to hold the results"
        )
