"""Compressed gRPC messages, bounded: what may be inflated, how far, and at what cost to others.

The problem: a kilobyte can inflate to a megabyte, and inflating a large message on the trio
thread stops every other client. The choice: a small message is inflated in place; a larger one in
a worker thread, and what large messages inflate to is counted server-wide, so later ones wait
until earlier requests are answered.

Rules:
 1. A message inflates to at most max(64 MiB, 100 times its own size), and never to more than
    INFLATED_LIMIT: anything else is a bomb and refused with RESOURCE_EXHAUSTED.
 2. Large inflated messages of all connections together hold at most BUDGET_BYTES plus one message
    per worker; reservations are returned when the request is answered or gone.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any

import trio

from neptrio.errors import Code, InvalidArgument, TritonError, Unsupported

INLINE_BYTES = 64 << 10
FREE_BYTES = 64 << 20
RATIO = 100
INFLATED_LIMIT = 1 << 30
BUDGET_BYTES = 512 << 20
WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
LEVELS = {"none": 0, "low": 1, "medium": 6, "high": 9}


def window_bits(encoding: bytes | None) -> int:
    """zlib's name for a grpc-encoding. Raises Unsupported."""
    bits = WINDOW_BITS.get(encoding or b"identity")
    if bits is None:
        name = (encoding or b"identity").decode("latin-1")
        raise Unsupported(f"a compressed message came with grpc-encoding '{name}', expected gzip or deflate")
    return bits


def inflate(message: bytes, bits: int, limit: int) -> bytes | None:
    """The message's content, None when it is longer than `limit`. Raises InvalidArgument."""
    inflater = zlib.decompressobj(bits)
    try:
        content = inflater.decompress(message, limit + 1)
    except zlib.error as error:
        raise InvalidArgument(f"cannot decompress the message: {error}") from None
    if len(content) > limit:
        return None
    if not inflater.eof:
        raise InvalidArgument("cannot decompress the message: it is cut off")
    if inflater.unused_data:
        raise InvalidArgument("cannot decompress the message: bytes follow its end")
    return content


def inflate_fully(message: bytes, bits: int) -> bytes:
    """The content of a large message, in a worker thread. Raises TritonError."""
    limit = min(INFLATED_LIMIT, max(FREE_BYTES, RATIO * len(message)))
    content = inflate(message, bits, limit)
    if content is None:
        raise TritonError(
            f"a compressed message of {len(message)} bytes inflates to more than {limit} bytes",
            Code.RESOURCE_EXHAUSTED,
        )
    return content


class InflateBudget:
    """What large inflated messages hold, server-wide."""

    def __init__(self, limit: int = BUDGET_BYTES, workers: int = 2) -> None:
        self.held = 0
        self._limit = limit
        self._waiting: deque[trio.Event] = deque()
        self._limiter = trio.CapacityLimiter(workers)

    async def inflate(self, message: bytes, bits: int) -> bytes:
        """Inflates in a worker thread; the caller owes release(len(result)). Raises TritonError."""
        async with self._limiter:
            while self.held > self._limit:
                event = trio.Event()
                self._waiting.append(event)
                await event.wait()
            content: bytes = await trio.to_thread.run_sync(inflate_fully, message, bits)
            self.held += len(content)
            return content

    def release(self, size: int) -> None:
        """A message of that size is gone."""
        self.held -= size
        while self._waiting and self.held <= self._limit:
            self._waiting.popleft().set()


def choose(level: str, accepted: bytes | None) -> bytes | None:
    """The encoding of responses for a compression level, among those the client takes.

    As in gRPC: low asks for gzip, medium and high for deflate, each falling back to the other.
    """
    if level == "none" or not accepted:
        return None
    offers = {part.strip() for part in accepted.split(b",")}
    order = (b"gzip", b"deflate") if level == "low" else (b"deflate", b"gzip")
    return next((encoding for encoding in order if encoding in offers), None)


def deflate(segments: list[Any], encoding: bytes, level: int) -> list[Any]:
    """A framed message (5-byte prefix first) compressed; unchanged when that would not shrink it."""
    whole = b"".join(memoryview(segment).cast("B") for segment in segments)
    body = memoryview(whole)[5:]
    compressor = zlib.compressobj(level, zlib.DEFLATED, WINDOW_BITS[encoding])
    small = compressor.compress(body) + compressor.flush()
    if len(small) >= len(body):
        return [whole]
    return [b"\1" + len(small).to_bytes(4, "big") + small]
