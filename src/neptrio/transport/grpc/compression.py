"""Compressed gRPC messages: inflates them within limits, and compresses replies.

The problem: a kilobyte can inflate to a megabyte, and inflating a large message on the trio thread makes every other
client wait. The choice: a small message is inflated at once; workers inflate larger ones (codec.inflate_budget), and
the inflated bytes are counted together with those of REST bodies.

A message may inflate to the larger of 64 MiB and 100 times its own size, and never to more than INFLATED_LIMIT. One
that inflates to more is meant to fill the memory, and is refused with RESOURCE_EXHAUSTED.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neptrio.codec.inflate import Deflater, Inflater, TooLong, Undecodable
from neptrio.errors import Code, InvalidArgument, TritonError, Unsupported
from neptrio.limits import shown
from neptrio.transport.infer_call import CALLS_HERE, INFLATED_HERE

if TYPE_CHECKING:
    from neptrio.transport.grpc.connection import GrpcConnection

DEFLATED_HERE = 64 << 10  # bytes; workers compress larger answers
FREE_BYTES = 64 << 20
RATIO = 100
INFLATED_LIMIT = 1 << 30
PREFIX_BYTES = 5
WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
LEVELS = {"none": 0, "low": 1, "medium": 6, "high": 9}


def inflater(message: bytes, encoding: bytes | None, most: int = INFLATED_LIMIT) -> Inflater:
    """What inflates a message, which may become `most` bytes. Raises Unsupported for an encoding that is not known."""
    bits = WINDOW_BITS.get(encoding or b"identity")
    if bits is None:
        name = (encoding or b"identity").decode("latin-1")
        raise Unsupported(
            f"a compressed message came with grpc-encoding '{shown(name)}', expected gzip or deflate"
        )
    return Inflater(bits, message, min(most, INFLATED_LIMIT, max(FREE_BYTES, RATIO * len(message))))


def refusal(message: bytes, error: Undecodable | TooLong, most: int) -> TritonError:
    """The error for the client whose message cannot be inflated."""
    if isinstance(error, TooLong):
        return TritonError(
            f"a compressed message of {len(message)} bytes inflates to more than {most} bytes",
            Code.RESOURCE_EXHAUSTED,
        )
    if error.left < 0:
        return InvalidArgument("cannot decompress the message: it is cut off")
    if error.left:
        return InvalidArgument("cannot decompress the message: bytes follow its end")
    return InvalidArgument(f"cannot decompress the message: {error}")


async def inflated(message: bytes, encoding: bytes | None, most: int, connection: GrpcConnection) -> bytes:
    """The message of a call other than inference, which may become `most` bytes. Raises TritonError."""
    made = inflater(message, encoding, most)
    try:
        if len(message) > INFLATED_HERE or not made.step(INFLATED_HERE, CALLS_HERE):
            await connection.services.inflating.inflate(made, connection)
            connection.services.inflating.release(made.made)
    except (Undecodable, TooLong) as error:
        raise refusal(message, error, made.limit) from None
    return bytes(made.content)


def choose(level: str, accepted: bytes | None) -> bytes | None:
    """The encoding of responses for a compression level ("none", "low", "medium", "high"), among those in the client's
    grpc-accept-encoding; None for no compression.

    Like gRPC's own implementation, low prefers gzip, and medium and high prefer deflate.
    """
    if level == "none" or not accepted:
        return None
    offers = {part.strip() for part in accepted.split(b",")}
    order = (b"gzip", b"deflate") if level == "low" else (b"deflate", b"gzip")
    return next((encoding for encoding in order if encoding in offers), None)


class FrameDeflater:
    """Compresses a framed message, which begins with gRPC's 5-byte prefix. Keeps it as it is if it would not shrink."""

    def __init__(self, segments: list[Any], encoding: bytes, level: str) -> None:
        self._segments = segments
        self._size = sum(memoryview(segment).nbytes for segment in segments) - PREFIX_BYTES
        first, *others = segments  # the first segment has the whole prefix
        self._deflater = Deflater(
            WINDOW_BITS[encoding], LEVELS[level], [memoryview(first).cast("B")[PREFIX_BYTES:], *others]
        )

    def done_here(self) -> bool:
        """Compresses a small message at once; False for one that is left to workers."""
        return self._size <= DEFLATED_HERE and self._deflater.step()

    def step(self) -> bool:
        """Compresses the next part, like Deflater.step(). Returns True when all is done."""
        return self._deflater.step()

    @property
    def segments(self) -> list[Any]:
        """The framed message to send. Only after step() has returned True."""
        small = self._deflater.out
        length = sum(len(part) for part in small)
        if length >= self._size:
            return self._segments
        return [b"\1" + length.to_bytes(4, "big"), *small]
