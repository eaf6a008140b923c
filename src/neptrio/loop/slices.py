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

SLICE_NS = 250_000  # a request that goes to a model process waits for two of them

T = TypeVar("T")


class Slices:
    """The clock of one piece of work."""

    def __init__(self) -> None:
        self._begun = monotonic_ns()

    @property
    def used_up(self) -> bool:
        """Whether rest() would rest."""
        return monotonic_ns() - self._begun > SLICE_NS

    async def rest(self) -> None:
        """Lets others run, if the slice is used up."""
        if self.used_up:
            await trio.lowlevel.checkpoint()
            self._begun = monotonic_ns()


async def in_slices(rows: Iterable[T], text: Callable[[T], bytes]) -> list[bytes]:
    """`text(row)` of each row. `rows` may be a generator, whose work is cut as well."""
    slices = Slices()
    made = []
    for row in rows:
        made.append(text(row))
        await slices.rest()
    return made
