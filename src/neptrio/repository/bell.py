"""Tells waiting tasks that the readiness of models may have changed; they look for themselves.

Rule: who notes `rings` before it looks and waits with that number misses no ring in between.
"""

from __future__ import annotations

import trio


class Bell:
    """Rung and waited for on the trio thread."""

    def __init__(self) -> None:
        self.rings = 0
        self._event: trio.Event | None = None  # only while somebody waits

    def ring(self) -> None:
        """Wakes whoever waits."""
        self.rings += 1
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self, seen: int) -> None:
        """Returns once there were more than `seen` rings."""
        while self.rings == seen:
            if self._event is None:
                self._event = trio.Event()
            await self._event.wait()
