"""The grpclib Stream contract: what a handler sees, what becomes of what it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import trio
from grpclib.const import Cardinality, Handler, Status

from neptrio._proto.inference import ServerLiveRequest, ServerLiveResponse
from tests.support.embedded import EmbeddedServer
from tests.support.infer_messages import identity
from tests.support.raw_http2 import LIVE, RawClient, message

WATCH = "/grpc.health.v1.Health/Watch"


@pytest.fixture
def mounted(server: EmbeddedServer) -> Iterator[Any]:
    """mount(function): serves it as the handler of /test/Echo."""

    def mount(function: Any, cardinality: Cardinality = Cardinality.STREAM_STREAM) -> str:
        handler = Handler(function, cardinality, ServerLiveRequest, ServerLiveResponse)
        server.ask(server.grpc_server.handlers.__setitem__, b"/test/Echo", handler)
        return "/test/Echo"

    yield mount
    server.ask(server.grpc_server.handlers.pop, b"/test/Echo", None)


@pytest.fixture
def late(server: EmbeddedServer) -> Iterator[Any]:
    """late(): from here on the handlers are there. Before that, the server is as one that just started."""
    front = server.grpc_server
    server.until(front.handlers_loaded.is_set, "the handlers")
    held = dict(front.handlers)

    def begin() -> None:
        front.handlers_loaded = trio.Event()
        front.handlers.clear()

    def end() -> None:
        front.handlers |= held
        front.handlers_loaded.set()

    server.ask(begin)
    yield lambda: server.ask(end)
    server.ask(end)


def test_calls_wait_for_the_handlers(raw: RawClient, late: Any) -> None:
    """Calls that come while the handlers are being imported; infer requests do not wait for that."""
    raw.send(raw.headers(1, LIVE) + raw.data(1, message(b"")))
    raw.send(raw.headers(3, "/test/None") + raw.data(3, message(b"")))
    raw.send(raw.headers(5, LIVE) + raw.data(5, message(b"") + message(b"")))
    raw.send(raw.headers(7, WATCH) + raw.data(7, message(b"")))
    assert raw.call(9, identity()).status == 0
    assert not any(raw.replies[stream].headers for stream in (1, 3, 5, 7))
    late()
    assert raw.finish(1).messages == [b"\x08\x01"]
    assert raw.finish(3).status == 12 and raw.replies[3].text == ""
    assert raw.finish(5).status == 12 and "got a second one" in raw.replies[5].text
    raw.until(lambda: raw.replies[7].messages == [b"\x08\x01"], "SERVING")
    raw.reset(7)


def test_handlers_see_metadata_deadline_and_peer(raw: RawClient, mounted: Any) -> None:
    seen: dict[str, Any] = {}

    async def handler(stream: Any) -> None:
        seen.update(
            metadata=list(stream.metadata.items()),
            remaining=stream.deadline.time_remaining(),
            agent=stream.user_agent,
            peer=stream.peer.addr(),
            messages=[m async for m in stream],
        )
        await stream.send_initial_metadata(metadata={"a": "1", "b-bin": b"\0\xff"})
        await stream.send_message(ServerLiveResponse(live=True))
        await stream.send_trailing_metadata(
            status=Status.DATA_LOSS, status_message="50 % lost", metadata={"c": "2", "d-bin": b"\1"}
        )

    path = mounted(handler)
    extra = [("x-bin", "AP8=,AQ"), ("y", "z"), ("y", "zz"), ("grpc-timeout", "100S")]
    raw.send(raw.headers(1, path, extra) + raw.data(1, message(b"") + message(b"")))
    reply = raw.finish(1)
    assert seen["metadata"] == [("x-bin", b"\0\xff"), ("x-bin", b"\1"), ("y", "z"), ("y", "zz")]
    assert 90 < seen["remaining"] <= 100 and seen["agent"] == "raw" and seen["peer"][0] == "127.0.0.1"
    assert len(seen["messages"]) == 2
    assert reply.headers[0]["a"] == "1" and reply.headers[0]["b-bin"] == "AP8"
    assert reply.messages == [b"\x08\x01"]
    assert reply.status == 15 and reply.text == "50 %25 lost"
    assert reply.headers[-1]["c"] == "2" and reply.headers[-1]["d-bin"] == "AQ"


def test_a_handler_that_raises(raw: RawClient, mounted: Any) -> None:
    async def handler(stream: Any) -> None:
        raise RuntimeError("kaputt")

    reply = raw.call(1, b"", mounted(handler))
    assert reply.status == 13 and reply.text == "RuntimeError: kaputt"
    assert raw.call(3, identity()).status == 0


def test_a_handler_that_cancels(raw: RawClient, mounted: Any) -> None:
    async def handler(stream: Any) -> None:
        await stream.cancel()

    raw.start(1, b"", mounted(handler))
    assert raw.finish(1).reset == 8


def test_a_handler_waits_for_a_client_that_does_not_read(server: EmbeddedServer, mounted: Any) -> None:
    sent = []

    async def handler(stream: Any) -> None:
        for i in range(1000):
            sent.append(i)
            await stream.send_message(b"\0" * 100_000)

    path = mounted(handler, Cardinality.UNARY_STREAM)
    with RawClient(server.grpc, credit=False) as client:
        client.start(1, b"", path)
        server.until(lambda: len(sent) > 5, "some are sent")
        client.sync()
        assert len(sent) < 20  # 1 MiB of messages wait, not 100 MB
        client.reset(1)
        server.until_idle()
        assert len(sent) < 20
