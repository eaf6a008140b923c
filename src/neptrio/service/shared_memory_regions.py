"""What system and CUDA shared memory have in common: a table of regions by name, range checks and error texts.

A subclass for one kind of region says how such a region is registered and described.

Source: docs/protocol/features.md A1 and A6, docs/protocol/observed.md 13.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from neptrio.errors import AlreadyExists, Internal, InvalidArgument, NotFound
from neptrio.limits import shown

Region = TypeVar("Region")


class SharedMemoryRegions(Generic[Region]):
    """The regions of one kind. Trio thread only.

    The table only maps names to regions: requests that use a region hold a reference to it, so it may be
    unregistered at any time.
    """

    kind: str  # as the protocol calls it: "system" or "cuda"

    def __init__(self) -> None:
        self._regions: dict[str, Region] = {}
        self._beside: SharedMemoryRegions[Any] | None = None

    def share_names(self, other: SharedMemoryRegions[Any]) -> None:
        """A name is of a region of one kind only: requests say no more than the name."""
        self._beside, other._beside = other, self

    def describe(self, region: Region) -> dict[str, Any]:
        """The row of `region` in a status reply."""
        raise NotImplementedError(f"{type(self).__name__}.describe")

    def has(self, name: str) -> bool:
        """Whether a region of that name is registered."""
        return name in self._regions

    def named(self, name: str) -> Region:
        """The region of that name. Raises NotFound."""
        found = self._regions.get(name)
        if found is None:
            raise NotFound(f"Unable to find shared memory region: '{shown(name)}'")
        return found

    def check_named(self, name: str) -> None:
        """Raises InvalidArgument for an empty name. Called before other checks, so that this error comes first."""
        if not name:
            raise InvalidArgument(f"'region name' is necessary to register {self.kind} shared memory region")

    def check_new(self, name: str) -> None:
        """Raises InvalidArgument for an empty name, AlreadyExists for one that is registered."""
        self.check_named(name)
        if name in self._regions or (self._beside is not None and self._beside.has(name)):
            raise AlreadyExists(f"shared memory region '{shown(name)}' already in manager")

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """The regions, sorted by name. Raises NotFound for an unknown one."""
        if name and name not in self._regions:
            raise NotFound(f"Unable to find {self.kind} shared memory region: '{shown(name)}'")
        return [
            self.describe(region) for key, region in sorted(self._regions.items()) if not name or key == name
        ]

    def unregister(self, name: str = "") -> None:
        """Unregisters one region, or all without a name; an unknown name is no error. Memory in use stays open."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()


def check_part(region: str, region_bytes: int, offset: int, byte_size: int, empty: bool = False) -> None:
    """Raises InvalidArgument unless a part (in bytes) lies inside its region, and has bytes. `empty`: it need not have any,
    since it is of a tensor without elements."""
    if offset < 0 or offset > region_bytes:
        raise InvalidArgument(
            f"Invalid offset for shared memory region: '{shown(region)}' (it has {region_bytes} bytes, got offset {offset})"
        )
    if byte_size < 0 or (byte_size == 0 and not empty) or offset + byte_size > region_bytes:
        raise InvalidArgument(
            f"Invalid offset + byte size for shared memory region: '{shown(region)}' (it has {region_bytes} bytes, got offset "
            f"{offset} and byte size {byte_size})"
        )


def check_fits(output: str, needed: int, byte_size: int) -> None:
    """Raises Internal when an output of `needed` bytes does not fit into the `byte_size` bytes given for it."""
    if needed > byte_size:
        raise Internal(
            f"shared memory size specified with the request for output '{shown(output)}' ({byte_size} bytes) should be at "
            f"least {needed} bytes to hold the results"
        )
