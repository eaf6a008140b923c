"""Bytes of the server's budget for what a worker makes of one message.

The problem: the length of a text says little about what its tensors take: each number of `[0,0,0]` has two characters
and may become eight bytes. The choice: the text's length is reserved before it is read, as much again as the message
itself; what numbers take beyond that is reserved tensor by tensor, before memory for them is allocated.
"""

from __future__ import annotations

from collections.abc import Callable

from neptrio.errors import Cancelled
from neptrio.loop import threads
from neptrio.service.held_bytes import HeldBytes


class Kept:
    """What one call holds of the server's budget, for what its messages became."""

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self._size = 0
        self._over = False

    def keep(self, size: int) -> None:
        """Counts more bytes. Raises Overloaded, and Cancelled when the call is over: nobody would give them back."""
        if self._over:
            raise Cancelled
        self._held.keep(size)
        self._size += size

    def over(self) -> None:
        """The call is over, and with it what it held. May be called again."""
        self._over = True
        self._held.let_go(self._size)
        self._size = 0


class Reservation:
    """What one worker reserves. `keep(bytes)` counts them on the loop's thread, and raises Overloaded or Cancelled."""

    def __init__(self, keep: Callable[[int], None], size: int) -> None:
        """Reserves `size` bytes before the worker begins, on the loop's thread. Raises what `keep` raises."""
        self._keep = keep
        keep(size)
        self._left = size

    def reserve(self, size: int) -> None:
        """Called by the worker before it allocates `size` bytes. Raises what `keep` raises."""
        self._left -= size
        if self._left < 0:
            more, self._left = -self._left, 0
            threads.on_loop(self._keep, more)
