"""Inflates and compresses data in small steps: no call takes long or makes more bytes than it was allowed.

The problem: zlib works on a whole body in one call that cannot be interrupted, and returns a copy of the input
it has not used; a body of many empty gzip members would be copied once per member. The choice: zlib is given
the body in pieces, the first of them small. What is copied is then a piece at most, and the work is
proportional to the body.

What is inflated is put into one buffer that grows by doubling, outside of the interpreter's lock. A gzip file's last bytes
say how long its content is, which saves the growing; nothing depends on whether that is true.

Nothing here knows of threads; the owner of an Inflater or a Deflater calls step() from one thread at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from neptrio.loop.yielding import yield_cpu

STEP_BYTES = 1 << 20  # most input bytes used and most output bytes made in a step; about 3 ms
STEP_CALLS = 1024  # most calls of zlib in a step: empty members make no bytes but take time
FIRST_ROOM = 64 << 10
MOST_TIMES = 1032  # times its length is what deflated data can become
FIRST_PIECE, PIECE = 512, 64 << 10  # bytes given to zlib: at the start of a member, and at most


class Undecodable(Exception):
    """The data is no valid compressed body. `left` is how many bytes follow its end, or -1 when it ends too early."""

    def __init__(self, reason: str, left: int = 0) -> None:
        super().__init__(reason)
        self.left = left


class TooLong(Exception):
    """The inflated content exceeds the limit."""


class Inflater:
    """Inflates one buffer; `made` grows with every step() until `done` is True, then `content` is complete.

    `data` is any buffer, `bits` zlib's window bits (they choose gzip or zlib format), `limit` the largest
    allowed content in bytes. With `members` further compressed members may follow the first, as in gzip files.
    """

    def __init__(self, bits: int, data: Any, limit: int, members: bool = False) -> None:
        self.made = 0  # bytes inflated so far
        self.done = False
        self._bits = bits
        self._data = memoryview(data).cast("B") if len(data) else memoryview(b"")
        self.limit = limit
        self._members = members
        self._at = 0
        self._buffer = np.empty(self._expected(), np.uint8)
        self._begin()

    @property
    def content(self) -> memoryview:
        """What was inflated so far."""
        return memoryview(self._buffer)[: self.made]  # type: ignore[arg-type]

    def _expected(self) -> int:
        """How much room to begin with. Pages that nothing is written to take no memory."""
        given = len(self._data)
        expected = 4 * given
        gzip = self._bits > zlib.MAX_WBITS
        if gzip and given >= 18:  # the last of several members says its own length only
            expected = max(given, int.from_bytes(self._data[-4:], "little"))
        return min(max(expected, FIRST_ROOM), MOST_TIMES * given + FIRST_ROOM, self.limit + 1)

    def _put(self, part: bytes) -> None:
        end = self.made + len(part)
        if end > len(self._buffer):
            grown = np.empty(min(max(2 * len(self._buffer), end), self.limit + 1), np.uint8)
            grown[: self.made] = self._buffer[: self.made]
            self._buffer = grown
        if part:
            self._buffer[self.made : end] = np.frombuffer(part, np.uint8)
        self.made = end

    def _begin(self) -> None:
        self._decoder = zlib.decompressobj(self._bits)
        self._piece = FIRST_PIECE

    def step(self, most: int = STEP_BYTES, calls: int = STEP_CALLS) -> bool:
        """Inflates up to `most` more bytes with up to `calls` calls of zlib; True when the content is complete.

        Raises Undecodable, and TooLong when the content exceeds the limit: no more than one byte beyond it is made.
        """
        begin, end = self._at, self.made + most
        while not self.done and calls and self._at - begin < STEP_BYTES and self.made < end:
            calls -= 1
            self._call(end - self.made)
        return self.done

    def _call(self, most: int) -> None:
        decoder = self._decoder
        piece = self._data[self._at : self._at + self._piece]
        try:
            part = decoder.decompress(piece, min(most, self.limit + 1 - self.made))
        except zlib.error as error:
            raise Undecodable(str(error)) from None
        # at the end of a member zlib may report the same unused bytes under both names
        self._at += len(piece) - len(decoder.unused_data if decoder.eof else decoder.unconsumed_tail)
        self._piece = min(2 * self._piece, PIECE)
        self._put(part)
        if self.made > self.limit:
            raise TooLong
        if len(part) > PIECE:
            yield_cpu()
        if decoder.eof:
            left = len(self._data) - self._at
            if left and not self._members:
                raise Undecodable(f"{left} bytes follow the compressed data", left)
            self.done = not left
            self._begin()
        elif not piece and not part:
            raise Undecodable("it ends before the compressed data does", -1)


class Deflater:
    """Compresses several buffers into one body, which is `out` once step() has returned True."""

    def __init__(self, bits: int, level: int, parts: Iterable[Any]) -> None:
        self.out: list[bytes] = []
        self._encoder = zlib.compressobj(level, zlib.DEFLATED, bits)
        views = [memoryview(part) for part in parts]
        self._parts = [view.cast("B") for view in views if view.nbytes]
        self._part = self._at = 0

    def step(self) -> bool:
        """Compresses some more input; True when the body is complete."""
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
