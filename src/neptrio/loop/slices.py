"""Cuts long work on the loop into slices, between which others are served.

The problem: a listing of thousands of models takes many milliseconds, and it cannot be made on another thread, because
what it lists belongs to the loop. The choice: it is made a row at a time, and whoever makes it rests when a slice is
used up.

Rules:
 1. A row is complete in itself: rows of one answer may be of different moments.
 2. Nobody may iterate over a container of the loop's across a rest, unless it is a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import trio

from neptrio.request.infer_request import monotonic_ns

SLICE_NS = 250_000

# a descriptor that is readable when anything waits that the poller would serve; set by the poller of this run of trio
waiting_fd: trio.lowlevel.RunVar[int] = trio.lowlevel.RunVar("neptrio.waiting_fd", default=-1)

T = TypeVar("T")


def waiting_descriptor() -> int:
    """The descriptor of this run of trio; -1 outside of one, where the code of connections is tried without a server."""
    try:
        return waiting_fd.get()
    except RuntimeError:
        return -1


class Slices:
    """The clock of one piece of work."""

    def __init__(self) -> None:
        self._begun = monotonic_ns()

    @property
    def used_up(self) -> bool:
        """Whether others should run now."""
        return monotonic_ns() - self._begun > SLICE_NS

    async def rest(self) -> None:
        """Lets others run, if the slice is used up."""
        if self.used_up:
            await self.pause()

    async def pause(self) -> None:
        """Lets others run. The next slice begins afterwards."""
        await trio.lowlevel.checkpoint()
        self._begun = monotonic_ns()


async def in_slices(rows: Iterable[T], text: Callable[[T], bytes], separator: bytes = b"") -> bytes:
    """`text(row)` of each row, joined. `rows` may be a generator, whose work is cut as well."""
    return await gathered(map(text, rows), separator)


async def gathered(texts: Iterable[bytes], separator: bytes = b"") -> bytes:
    """The texts of a generator whose work is cut, joined."""
    slices = Slices()
    made: list[bytes] = []
    for text in texts:
        made.append(text)
        await slices.rest()
    return separator.join(made)
