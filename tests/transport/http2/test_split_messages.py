"""Large messages whose raw contents are received in buffers of their own: cut anywhere, whole or malformed, they say
the same as in one piece."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from neptrio.codec.split_message import SplitMessage
from neptrio.transport.grpc.message_stream import GrpcStream
from neptrio.transport.http2.stream import Account

NO_MEMORY = 30_000  # bytes for which the source has none


class Session:
    """As much of a session as a stream needs."""

    def __init__(self) -> None:
        self.account = Account()

    def output_ready(self, stream: GrpcStream) -> None:
        pass


class Keeper(GrpcStream):
    """Keeps what it is given."""

    def __init__(self, session: Any) -> None:
        super().__init__(session, 1, None)  # type: ignore[arg-type]  # nobody reads headers
        self.kept: list[Any] = []
        self.asked: list[tuple[str, str]] = []
        self.source_of = self._source

    def _source(self, model: str, version: str) -> Any:
        self.asked.append((model, version))
        return None if model == "none" else lambda size: None if size == NO_MEMORY else bytearray(size)

    def on_message(self, message: Any, compressed: bool) -> None:
        self.kept.append(message)


def varint(n: int) -> bytes:
    out = b""
    while n >= 128:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def received(body: bytes, cuts: list[int]) -> tuple[Keeper, Any]:
    session = Session()
    stream = Keeper(session)
    whole = b"\0" + len(body).to_bytes(4, "big") + body
    at = [0, *cuts, len(whole)]
    for begin, end in itertools.pairwise(at):
        stream.receive(whole[begin:end])
    assert session.account.in_bytes == 0 and stream.input_held == 0
    (message,) = stream.kept
    return stream, message


def random_cuts(chance: random.Random, size: int) -> list[int]:
    return sorted(chance.randrange(size) for _ in range(chance.randrange(6)))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_split_has_the_bytes_of_the_message(seed: int) -> None:
    chance = random.Random(seed)
    head = field(1, b"model") + field(2, b"3") + field(5, bytes(chance.randrange(300)))
    raws = [chance.randbytes(chance.choice([0, 1, 127, 128, NO_MEMORY, 40_000])) for _ in range(4)]
    raws[0] = chance.randbytes(40_000)
    body = head + b"".join(field(7, raw) for raw in raws)
    stream, message = received(body, random_cuts(chance, len(body)))
    assert isinstance(message, SplitMessage) and len(message) == len(body)
    assert message.head == head and [bytes(raw) for raw in message.raws] == raws
    assert stream.asked == [("model", "3")]
    assert all(isinstance(raw, bytes) for raw in message.raws if len(raw) in (0, NO_MEMORY))


@pytest.mark.parametrize("seed", range(100))
def test_what_cannot_be_split_comes_in_one_piece(seed: int) -> None:
    chance = random.Random(seed)
    head = field(1, b"model") + field(5, b"x" * 100)
    raw = field(7, chance.randbytes(40_000))
    body = chance.choice(
        [
            head + raw + field(3, b"id"),
            head + raw + field(7, b"more") + field(3, b"id") + raw,
            head + raw + b"\x3a",
            head + raw + b"\x3a\xff",
            head + raw + b"\x3a\xff\xff\xff\xff\xff\xff\xff" + bytes(100),
            head + raw + b"\x3a\x7f" + bytes(126),
            head + b"\x3a\xff\xff\xff\x7f" + bytes(40_000),
            head + b"\x38\x01" + raw,
            head + b"\xba\x00" + raw,
            raw[:2] * 3 + raw,
            field(1, b"none") + raw,
            field(1, b"\xff") + raw,
            head + field(5, b"BYTES") + raw,
            head + field(5, bytes(20_000)) + raw,
            head + field(5, bytes(40_000)),
            bytes(40_000),
            head + raw + field(7, b"") * 300,
            chance.randbytes(40_000),
        ]
    )
    _, message = received(body, random_cuts(chance, len(body)))
    assert message == body


def test_small_and_compressed_messages_are_not_split() -> None:
    body = field(1, b"model") + field(7, bytes(30_000))
    stream, message = received(body, [])
    assert message == body and not stream.asked
    stream = Keeper(Session())
    body = field(1, b"model") + field(7, bytes(50_000))
    stream.receive(b"\1" + len(body).to_bytes(4, "big") + body)
    assert stream.kept == [body] and not stream.asked


def test_a_call_that_ends_gives_the_memory_back() -> None:
    session = Session()
    stream = Keeper(session)
    body = field(1, b"model") + field(7, bytes(50_000))
    stream.receive(b"\0" + len(body).to_bytes(4, "big") + body[:40_000])
    assert session.account.in_bytes == 40_000
    stream.reset_by_peer(8)
    assert session.account.in_bytes == 0 and not stream.kept
