"""Large bodies come and go in pieces, and nothing of them is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio

from neptrio.errors import InvalidArgument
from neptrio.transport.rest.large_body import LARGE, PIECE, IncomingBody, send_in_pieces

CONTENT = bytes(range(256)) * ((LARGE + PIECE) // 256) + b"the end"


@pytest.mark.parametrize("announced", [len(CONTENT), -1, LARGE // 2])
@pytest.mark.parametrize("size", [7_001, 64 << 10, PIECE, LARGE])
def test_a_body_is_what_its_parts_were(announced: int, size: int) -> None:
    body = IncomingBody(announced)
    for at in range(0, len(CONTENT), size):
        body.add(CONTENT[at : at + size])
        body.add(b"")
        assert body.size == min(at + size, len(CONTENT))
    assert bytes(trio.run(body.whole)) == CONTENT


def test_a_small_body() -> None:
    body = IncomingBody()
    for part in (b"", b"a", b"bc"):
        body.add(part)
    assert bytes(trio.run(body.whole)) == b"abc"


def test_a_body_that_ends_before_its_announced_length() -> None:
    body = IncomingBody(len(CONTENT))
    body.add(b"abc")
    assert bytes(trio.run(body.whole)) == b"abc"


def test_more_than_was_announced() -> None:
    body = IncomingBody(LARGE + 1)
    body.add(bytes(LARGE))
    with pytest.raises(InvalidArgument, match="longer than its Content-Length, 1048577"):
        body.add(b"ab")


def test_an_answer_is_sent_in_pieces() -> None:
    sent: list[dict[str, Any]] = []

    async def send(event: dict[str, Any]) -> None:
        sent.append(event)

    numbers = np.arange(PIECE, dtype=np.int32).reshape(2, -1)
    empty = np.empty((0, 3), np.float32)
    trio.run(send_in_pieces, send, [b"head", empty, numbers, memoryview(b"tail")])
    assert b"".join(event["body"] for event in sent) == b"head" + numbers.tobytes() + b"tail"
    assert max(len(event["body"]) for event in sent) == PIECE
    assert [event.get("more_body", False) for event in sent] == [True] * 6 + [False]
