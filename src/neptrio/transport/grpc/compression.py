"""Compressed gRPC messages, bounded: what may be inflated, how far, and at what cost to others.

The problem: a kilobyte can inflate to a megabyte, and inflating a large message on the trio
thread stops every other client. The choice: a small message is inflated in place; a larger one by
the workers (loop.inflate_budget), which count what it inflates to together with the REST front's bodies.

A message inflates to at most max(64 MiB, 100 times its own size), and never to more than
INFLATED_LIMIT: anything else is a bomb and refused with RESOURCE_EXHAUSTED.
"""

from __future__ import annotations

from typing import Any

from neptrio.codec.inflate import Deflater, Inflater, TooLong, Undecodable
from neptrio.codec.inflate_budget import InflateBudget
from neptrio.errors import Code, InvalidArgument, TritonError, Unsupported

INLINE_BYTES = 64 << 10  # that are taken in and made at once
INLINE_CALLS = 32
FREE_BYTES = 64 << 20
RATIO = 100
INFLATED_LIMIT = 1 << 30
PREFIX_BYTES = 5
WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
LEVELS = {"none": 0, "low": 1, "medium": 6, "high": 9}


def window_bits(encoding: bytes | None) -> int:
    """zlib's name for a grpc-encoding. Raises Unsupported."""
    bits = WINDOW_BITS.get(encoding or b"identity")
    if bits is None:
        name = (encoding or b"identity").decode("latin-1")
        raise Unsupported(f"a compressed message came with grpc-encoding '{name}', expected gzip or deflate")
    return bits


def inflater(message: bytes, bits: int) -> Inflater:
    """What inflates a message; `done` if that was so little work that it is over already.

    Raises TritonError as refusal() makes it.
    """
    made = Inflater(bits, message, limit_of(message))
    if len(message) <= INLINE_BYTES:
        try:
            made.step(INLINE_BYTES, INLINE_CALLS)
        except (Undecodable, TooLong) as error:
            raise refusal(message, error) from None
    return made


def limit_of(message: bytes) -> int:
    """How much a message may inflate to."""
    return min(INFLATED_LIMIT, max(FREE_BYTES, RATIO * len(message)))


def refusal(message: bytes, error: Undecodable | TooLong) -> TritonError:
    """What a client is told of a message that cannot be inflated."""
    if isinstance(error, TooLong):
        return TritonError(
            f"a compressed message of {len(message)} bytes inflates to more than {limit_of(message)} bytes",
            Code.RESOURCE_EXHAUSTED,
        )
    if error.left < 0:
        return InvalidArgument("cannot decompress the message: it is cut off")
    if error.left:
        return InvalidArgument("cannot decompress the message: bytes follow its end")
    return InvalidArgument(f"cannot decompress the message: {error}")


async def inflate_later(budget: InflateBudget, message: bytes, made: Inflater) -> bytearray:
    """The rest of a message that is not small, by the workers; the caller owes budget.release(len(result)).

    Raises TritonError.
    """
    try:
        return await budget.inflate(made)
    except (Undecodable, TooLong) as error:
        raise refusal(message, error) from None


def choose(level: str, accepted: bytes | None) -> bytes | None:
    """The encoding of responses for a compression level, among those the client takes.

    As in gRPC: low asks for gzip, medium and high for deflate, each falling back to the other.
    """
    if level == "none" or not accepted:
        return None
    offers = {part.strip() for part in accepted.split(b",")}
    order = (b"gzip", b"deflate") if level == "low" else (b"deflate", b"gzip")
    return next((encoding for encoding in order if encoding in offers), None)


class FrameDeflater:
    """A framed message (5-byte prefix first) compressed; unchanged when that would not shrink it."""

    def __init__(self, segments: list[Any], encoding: bytes, level: int) -> None:
        self._segments = segments
        self._size = sum(memoryview(segment).nbytes for segment in segments) - PREFIX_BYTES
        first, *others = segments  # the prefix is a segment's beginning, never cut
        self._deflater = Deflater(
            WINDOW_BITS[encoding], level, [memoryview(first).cast("B")[PREFIX_BYTES:], *others]
        )

    def step(self) -> bool:
        """As of Deflater."""
        return self._deflater.step()

    @property
    def segments(self) -> list[Any]:
        """The frame, once step() has returned True."""
        small = self._deflater.out
        length = sum(len(part) for part in small)
        if length >= self._size:
            return self._segments
        return [b"\1" + length.to_bytes(4, "big"), *small]
