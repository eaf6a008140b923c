"""The budget of bytes (--max-held-bytes) and bodies of which only a part has come: what is let in is held as a whole."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import pytest

from tests.support.raw_http2 import RawClient
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

SIZE = 3_000_000
FIRST = 40_000  # bytes that come at once
GOOD_SECONDS = 0.01  # that the server may rely on a sum


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("announced")
    write_model(repository, "plain", identity_config("TYPE_UINT8", "-1", 1, 1))
    with ServerProcess(repository, "--max-held-bytes=4500000") as process:
        yield process


class Sender:
    """A connection with one request, whose body comes in two parts."""

    def __init__(self, server: ServerProcess, road: str) -> None:
        self.grpc = road == "grpc"
        self.client = RawClient(server.grpc if self.grpc else server.http)
        fields: dict[str, str | None] = {"te": None, "content-type": "application/json", "user-agent": None}
        extra = [("content-length", str(SIZE)), ("inference-header-content-length", "10")]
        head = (
            self.client.headers(1)
            if self.grpc
            else self.client.headers(1, "/v2/models/plain/infer", extra, override=fields)
        )
        prefix = b"\0" + struct.pack(">I", SIZE) if self.grpc else b""
        self.client.send(head + self.client.data(1, prefix + b" " * FIRST, end=False))
        self.client.sync()

    def outcome(self) -> str:
        """The status that the request got."""
        reply = self.client.replies[1]
        self.client.until(lambda: reply.done, "an answer")
        return str(reply.status) if self.grpc else reply.headers[0][":status"]

    def rest(self) -> None:
        """Sends the rest of the body, as the windows allow."""
        left = SIZE - FIRST
        while left:
            part = min(left, 16384)
            left -= part
            self.client.send(self.client.data(1, b" " * part, end=not left))
            self.client.sync()


@pytest.mark.parametrize(("road", "wrong", "full"), [("http2", "400", "503"), ("grpc", "3", "14")])
def test_the_room_of_a_body_that_is_coming_is_taken(
    server: ServerProcess, road: str, wrong: str, full: str
) -> None:
    first = Sender(server, road)
    asked = time.monotonic()
    until(lambda: time.monotonic() - asked > 2 * GOOD_SECONDS, "the sum is made anew")
    second = Sender(server, road)
    assert second.outcome() == full
    second.client.close()
    first.rest()
    assert first.outcome() == wrong, "it was let in, and is no request"
    first.client.close()
    third = Sender(server, road)  # what was counted is free again
    third.rest()
    assert third.outcome() == wrong
    third.client.close()
