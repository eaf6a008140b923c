"""Which front end accepts the next connection: one that has about the fewest.

The problem: all front ends wait at the same listening sockets, and whoever wakes first would take all that have come. A
client that opens its connections in one go would have one core, however many front ends there are. A listening
socket for each would spread connections by a hash, not evenly, and one that ends would leave its clients waiting. The
choice: each front end writes how many connections it has into a table that all of them see, and stands back
for a moment while another has clearly fewer, which is awake for the same reason.

Rules:
 1. A front end has its turn while it has less than SLACK connections, or a quarter, more than whoever has fewest. So
    the one with the fewest always has its turn, and a few at a time are accepted without looking up.
 2. Standing back is for a moment (transport.accept): one that is stuck or stopped holds up nobody for longer.
 3. Nothing else depends on the table. A front end that writes nonsense into it can make others wait for that moment,
    or be left with more of the connections, which it could accept in any case.
"""

from __future__ import annotations

import mmap

from triton_python_backend_utils._process.reserved import sealed_memory

ABSENT = 0xFFFFFFFF  # in the place of a front end that does not accept
SLACK = 2
ITEM = 4  # bytes


class ConnectionCounts:
    """The table: a number for each front end."""

    def __init__(self, descriptor: int, front_ends: int) -> None:
        """Maps the table of so many behind `descriptor`, which stays the caller's. Raises OSError."""
        self._numbers = memoryview(mmap.mmap(descriptor, ITEM * front_ends)).cast("I")

    @classmethod
    def create(cls, front_ends: int) -> tuple[ConnectionCounts, int]:
        """A table in which all of so many are absent, and its descriptor. Raises OSError."""
        descriptor = sealed_memory("neptrio-connections", ITEM * front_ends)
        counts = cls(descriptor, front_ends)
        for number in range(front_ends):
            counts.absent(number)
        return counts, descriptor

    def absent(self, number: int) -> None:
        """That front end accepts nothing."""
        self._numbers[number] = ABSENT

    def tell(self, number: int, connections: int) -> None:
        """That front end accepts, and has so many."""
        self._numbers[number] = connections

    def fewest(self) -> int:
        """The connections of whoever has fewest; ABSENT when nobody accepts."""
        return min(self._numbers)


class ConnectionBalance:
    """One front end's view of it."""

    def __init__(self, counts: ConnectionCounts, number: int) -> None:
        self._counts = counts
        self._number = number
        self._connections = 0

    def has(self, connections: int) -> None:
        """So many are open or about to be."""
        self._connections = connections
        self._counts.tell(self._number, connections)

    def accepts_next(self) -> bool:
        """Whether to accept the next connection (rule 1)."""
        fewest = self._counts.fewest()
        return self._connections < fewest + max(SLACK, fewest // 4)
