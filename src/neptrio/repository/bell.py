"""Lets tasks wait until the readiness of some model may have changed; they then check for themselves.

Rule: read `rings`, then check, then wait(rings). A ring in between is not missed.
"""

from __future__ import annotations

import trio


class Bell:
    """A counter of changes that tasks can wait for. Trio thread only."""

    def __init__(self) -> None:
        self.rings = 0
        self._event: trio.Event | None = None  # exists only while somebody waits

    def ring(self) -> None:
        """Wakes all who wait."""
        self.rings += 1
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self, seen: int) -> None:
        """Returns when `rings` exceeds `seen`."""
        while self.rings == seen:
            if self._event is None:
                self._event = trio.Event()
            await self._event.wait()
