"""Large bodies of the ASGI app, which come and go in pieces: neither is copied as a whole in one go.

The problem: copying 16 MiB takes the loop for 4 to 8 ms, more than half of which is memory that is touched for the first time. A body
that grew as it came was copied whenever its memory ended, and an answer was joined to be sent. The choice: a body that was
announced has its memory from the beginning, one that was not is gathered in pieces and put together in slices; an
answer goes to its client in pieces, between which others have their turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from neptrio.errors import InvalidArgument
from neptrio.loop.slices import Slices
from neptrio.transport.rest.asgi import Send

LARGE = 1 << 20  # bytes; smaller bodies grow as they come
PIECE = 256 << 10


class IncomingBody:
    """The body of a request while it comes in parts."""

    def __init__(self, length: int = -1) -> None:
        """`length`: the bytes that were announced, -1 if none were."""
        self.size = 0
        # numpy does not touch the memory, so pages are used only as the body arrives
        self._memory = np.empty(length, np.uint8) if length > LARGE else None
        self._pieces: list[bytearray] = []
        self._last: Any = b""

    def add(self, part: bytes) -> None:
        """Takes the next part. Raises InvalidArgument for more than was announced."""
        at, self.size = self.size, self.size + len(part)
        if self._memory is not None:
            if self.size > len(self._memory):
                raise InvalidArgument(f"the body is longer than its Content-Length, {len(self._memory)}")
            self._memory[at : self.size] = np.frombuffer(part, np.uint8)
            return
        if not self._last:
            self._last = bytearray()
        self._last += part  # not a list of all parts: of one-byte parts there would be too many
        if len(self._last) >= PIECE:
            self._pieces.append(self._last)
            self._last = b""

    async def whole(self) -> Any:
        """All of it, in one buffer."""
        if self._memory is not None:
            return memoryview(self._memory[: self.size])  # type: ignore[arg-type]
        if not self._pieces:
            return self._last
        made = np.empty(self.size, np.uint8)
        at = 0
        slices = Slices()
        for piece in (*self._pieces, self._last):
            made[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
            await slices.rest()
        self._pieces.clear()
        return memoryview(made)  # type: ignore[arg-type]


async def send_in_pieces(send: Send, parts: Iterable[Any]) -> None:
    """Sends the body of an answer, as ASGI wants it."""
    slices = Slices()
    for part in parts:
        view = memoryview(part)
        if not view.nbytes:
            continue
        view = view.cast("B")
        for at in range(0, len(view), PIECE):
            piece = bytes(view[at : at + PIECE])
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await slices.rest()
    await send({"type": "http.response.body", "body": b""})
