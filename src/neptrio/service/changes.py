"""When a change that a verb makes may be answered.

The problem: front ends have copies of some settings and of what models there are. Whoever has changed something and sends the
next request may reach any of them, whichever port the change came by. The choice: who makes a change enters changed(), which
returns when nobody works with an older copy any more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager


class Changes:
    """Who has to know of a change before it is answered."""

    def __init__(self) -> None:
        self.announce: Callable[[], Awaitable[None]] | None = None  # None: nobody else has a copy

    @asynccontextmanager
    async def changed(self) -> AsyncIterator[None]:
        """Around what changes models, or settings of traces and the log. A change that fails may have been made in part, so it
        is announced, too."""
        try:
            yield
        finally:
            if self.announce is not None:
                await self.announce()
