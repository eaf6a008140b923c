"""Compressed data in steps: no call takes long, none makes more than it was asked for.

zlib takes a whole body in one call, in which nobody can stop it, and hands back a copy of what it has not
looked at: a body of many empty gzip members is copied once per member. Here zlib is given the body piece by
piece, small ones first, so that what is copied is a piece and the work is in proportion to the body.

Nothing here knows of threads; whoever owns an Inflater or a Deflater calls step() from one thread at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

STEP_BYTES = 1 << 20  # taken in and made in a step, at most: about 3 ms
STEP_CALLS = 1024  # of zlib in a step: many empty members make no bytes but take time
FIRST_PIECE, PIECE = 512, 64 << 10  # given to zlib at once, at a member's beginning and later


class Undecodable(Exception):
    """The data is not what it says it is; `left` bytes follow its end, -1: it ends too early."""

    def __init__(self, reason: str, left: int = 0) -> None:
        super().__init__(reason)
        self.left = left


class TooLong(Exception):
    """There is more in it than the limit."""


class Inflater:
    """The content of compressed data, as it comes to light.

    `data` is any buffer, `bits` zlib's name of the format, `limit` the bytes of content that are taken.
    With `members`, data of the same kind may follow the end: gzip's members.
    """

    def __init__(self, bits: int, data: Any, limit: int, members: bool = False) -> None:
        self.content = bytearray()
        self.done = False
        self._bits = bits
        self._data = memoryview(data).cast("B") if len(data) else memoryview(b"")
        self._limit = limit
        self._members = members
        self._at = 0
        self._begin()

    def _begin(self) -> None:
        self._decoder = zlib.decompressobj(self._bits)
        self._piece = FIRST_PIECE

    def step(self, most: int = STEP_BYTES, calls: int = STEP_CALLS) -> bool:
        """Inflates up to `most` bytes more; True once there is nothing more to come.

        Raises Undecodable, and TooLong before more than one byte beyond the limit was made.
        """
        begin, end = self._at, len(self.content) + most
        while not self.done and calls and self._at - begin < STEP_BYTES and len(self.content) < end:
            calls -= 1
            self._call(end - len(self.content))
        return self.done

    def _call(self, most: int) -> None:
        decoder = self._decoder
        piece = self._data[self._at : self._at + self._piece]
        try:
            part = decoder.decompress(piece, min(most, self._limit + 1 - len(self.content)))
        except zlib.error as error:
            raise Undecodable(str(error)) from None
        # at the end zlib may show the same bytes under both names
        self._at += len(piece) - len(decoder.unused_data if decoder.eof else decoder.unconsumed_tail)
        self._piece = min(2 * self._piece, PIECE)
        self.content += part
        if len(self.content) > self._limit:
            raise TooLong
        if decoder.eof:
            left = len(self._data) - self._at
            if left and not self._members:
                raise Undecodable(f"{left} bytes follow the compressed data", left)
            self.done = not left
            self._begin()
        elif not piece and not part:
            raise Undecodable("it ends before the compressed data does", -1)


class Deflater:
    """Buffers, one after the other, as one compressed body; `out` is it when step() has returned True."""

    def __init__(self, bits: int, level: int, parts: Iterable[Any]) -> None:
        self.out: list[bytes] = []
        self._encoder = zlib.compressobj(level, zlib.DEFLATED, bits)
        views = [memoryview(part) for part in parts]
        self._parts = [view.cast("B") for view in views if view.nbytes]
        self._part = self._at = 0

    def step(self) -> bool:
        """Compresses some more; True once all of it is there."""
        room = STEP_BYTES
        while self._part < len(self._parts):
            if not room:
                return False
            piece = self._parts[self._part][self._at : self._at + room]
            self.out.append(self._encoder.compress(piece))
            room -= len(piece)
            self._at += len(piece)
            if self._at == len(self._parts[self._part]):
                self._part, self._at = self._part + 1, 0
        self.out.append(self._encoder.flush())
        return True
