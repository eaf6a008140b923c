"""Cuts long work on the loop into slices, between which others are served.

The problem: a listing of thousands of models takes many milliseconds, and it cannot be made on another thread, because
what it lists belongs to the loop. The choice: it is made a row at a time, and whoever makes it rests when a slice is
used up. A slice is short when somebody waits: a request to a model's process passes the loop twice and would wait for
half of a long slice each time. While nobody waits, a rest buys nothing, and a pass of the loop for every few rows would
take a fifth of the time; so after LOOK_NS the sockets are looked at, which takes a microsecond. Behind a slice other
processes that wait for this core have it, too: one of them may be the model that the loop would have to wait for next,
and the system takes the core away from who computes on at its next tick only, up to 4 ms later.

Rules:
 1. A row is complete in itself: rows of one answer may be of different moments.
 2. Nobody may iterate over a container of the loop's across a rest, unless it is a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import trio

from neptrio.loop.offer_core import offer_core
from neptrio.request.infer_request import monotonic_ns

SLICE_NS = 250_000  # the longest slice: tasks that are not waited for by the poller have their turn too
LOOK_NS = 50_000  # from here on a slice ends when a socket, a model's process or a timer of trio's is waiting

# says whether anything waits that the poller would serve; set by the poller of this run of trio
waiting: trio.lowlevel.RunVar[Callable[[], object] | None] = trio.lowlevel.RunVar(
    "neptrio.waiting", default=None
)

# a descriptor that is readable then, for code that is compiled; -1: there is none
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
        self._waiting = waiting.get()
        self._begun = self._looked = monotonic_ns()

    @property
    def used_up(self) -> bool:
        """Whether others should run now."""
        now = monotonic_ns()
        if now - self._begun > SLICE_NS:
            return True
        if now - self._looked <= LOOK_NS or self._waiting is None:
            return False
        self._looked = now
        return bool(self._waiting())

    async def rest(self) -> None:
        """Lets others run, if the slice is used up."""
        if self.used_up:
            await self.pause()

    async def pause(self) -> None:
        """Lets others run, on the loop and on its core. The next slice begins afterwards."""
        await trio.lowlevel.checkpoint()
        offer_core()
        self._begun = self._looked = monotonic_ns()


async def in_slices(rows: Iterable[T], text: Callable[[T], bytes], separator: bytes = b"") -> bytes:
    """`text(row)` of each row, joined. `rows` may be a generator, whose work is cut as well."""
    return await gathered(map(text, rows), separator)


async def gathered(texts: Iterable[bytes], separator: bytes = b"") -> bytes:
    """The texts of a generator whose work is cut, joined."""
    slices = Slices()
    made: list[bytes] = []
    joined: list[bytes] = []  # those of each slice: thousands would take half a millisecond at the end
    for text in texts:
        made.append(text)
        if slices.used_up:
            joined.append(separator.join(made))
            made.clear()
            await slices.pause()
    if made:
        if joined:  # giving a long answer to the kernel takes as long as a slice
            await slices.pause()
        joined.append(separator.join(made))
    return separator.join(joined)
