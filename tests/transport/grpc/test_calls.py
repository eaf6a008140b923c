"""gRPC calls as frames: what is no call, what ends one, what a reply looks like."""

from __future__ import annotations

import gzip
import zlib
from functools import cache

import numpy as np
import pytest

from neptrio.transport.grpc.message_stream import percent_encode
from tests.support.embedded import EmbeddedServer
from tests.support.gate import Gate
from tests.support.infer_messages import identity, request, response
from tests.support.raw_http2 import INFER, LIVE, STREAM_INFER, RawClient, frame, message

OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED = 0, 1, 2, 3, 4
RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 8, 12, 13, 14


def test_a_reply(raw: RawClient) -> None:
    reply = raw.call(1, identity("a"))
    assert reply.headers[0] == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-accept-encoding": "identity, deflate, gzip",
    }
    assert reply.headers[1] == {"grpc-status": "0"}
    answer = response(*reply.messages)
    assert answer.id == "a" and answer.model_name == "identity" and answer.model_version == "1"
    assert [o.name for o in answer.outputs] == ["OUTPUT0", "OUTPUT1"]
    assert np.frombuffer(answer.raw_output_contents[1], np.int32).tolist() == list(range(1, 17))


@pytest.mark.parametrize("path", ["/inference.GRPCInferenceService/Nope", "/", "/x/y"])
def test_unknown_method(raw: RawClient, path: str) -> None:
    reply = raw.call(1, b"", path)
    assert reply.status == UNIMPLEMENTED and reply.text == ""
    assert raw.call(3, identity()).status == OK


@pytest.mark.parametrize(
    ("override", "http"),
    [
        ({":method": "GET"}, "405"),
        ({"content-type": None}, "415"),
        ({"content-type": "text/plain"}, "415"),
        ({"content-type": "application/grpc-web"}, "415"),
        ({"content-type": "application/grpc+json"}, "415"),
        ({"te": None}, "400"),
        ({"te": "gzip"}, "400"),
    ],
)
def test_no_grpc_call(raw: RawClient, override: dict[str, str | None], http: str) -> None:
    raw.send(raw.headers(1, override=override) + raw.data(1, message(identity())))
    reply = raw.finish(1)
    if reply.headers:
        assert reply.headers[-1][":status"] == http
        assert reply.status == UNKNOWN and reply.text.startswith("expected")
    else:  # malformed as HTTP/2 already (RFC 9113, 8.2.2): a stream error
        assert override.get("te") == "gzip" and reply.reset == 1
    assert raw.call(3, identity()).status == OK


@pytest.mark.parametrize("content_type", ["application/grpc+proto", "application/grpc;x=y"])
def test_content_types_of_grpc(raw: RawClient, content_type: str) -> None:
    raw.send(raw.headers(1, override={"content-type": content_type}) + raw.data(1, message(identity())))
    assert raw.finish(1).status == OK


def test_a_second_message_on_a_unary_call_is_refused(
    raw: RawClient, caplog: pytest.LogCaptureFixture
) -> None:
    for stream_id, path in ((1, INFER), (3, LIVE), (5, LIVE)):
        body = identity() if path == INFER else b""
        raw.send(raw.headers(stream_id, path) + raw.data(stream_id, message(body) + message(body)))
        reply = raw.finish(stream_id)
        assert reply.status == UNIMPLEMENTED and reply.text.endswith("got a second one")
    assert raw.call(7, b"", LIVE).status == OK
    # the handler, which runs behind all that, is told so as well
    assert not [record for record in caplog.records if record.exc_info]


def test_no_message_on_a_unary_call_is_refused(raw: RawClient) -> None:
    for stream_id, path in ((1, INFER), (3, LIVE)):
        raw.send(raw.headers(stream_id, path, end=True))
        reply = raw.finish(stream_id)
        assert reply.status == UNIMPLEMENTED and reply.text.endswith("got none")


def test_a_message_cut_off_is_refused(raw: RawClient) -> None:
    for i, body in enumerate((b"\0\0\0", b"\0\0\0\0\x09abc")):
        raw.send(raw.headers(2 * i + 1) + raw.data(2 * i + 1, body))
        reply = raw.finish(2 * i + 1)
        assert reply.status == INTERNAL and "middle of a message" in reply.text


def test_a_wrong_compression_flag_is_refused(raw: RawClient) -> None:
    raw.send(raw.headers(1) + raw.data(1, message(b"abc", 7), end=False))
    reply = raw.finish(1)
    assert reply.status == INTERNAL and "compression flag is 7" in reply.text


def test_a_message_above_the_limit_is_refused_by_its_prefix(raw: RawClient, server: EmbeddedServer) -> None:
    raw.send(raw.headers(1) + raw.data(1, b"\0\x80\0\0\0", end=False))
    reply = raw.finish(1)
    assert reply.status == RESOURCE_EXHAUSTED
    assert reply.text == "received message larger than max (2147483648 vs. 2147483647)"
    raw.until(lambda: raw.replies[1].reset is not None, "RST_STREAM: nobody reads the rest")
    assert raw.replies[1].reset == 0


def test_an_announced_message_costs_no_memory_until_it_comes(raw: RawClient, server: EmbeddedServer) -> None:
    for stream_id in range(1, 40, 2):  # 32 MiB each, for which there is room
        raw.send(raw.headers(stream_id) + raw.data(stream_id, b"\0\x02\0\0\0", end=False))
    assert raw.call(41, identity()).status == OK
    held = server.ask(server.grpc_held)
    assert held.open_calls == 20 and held.unfinished_request_bytes == 0
    for stream_id in range(1, 40, 2):
        raw.reset(stream_id)


def test_bytes_that_are_no_request(raw: RawClient) -> None:
    reply = raw.call(1, b"\xff\xff\xff\xff")
    assert reply.status == INVALID_ARGUMENT and "malformed message" in reply.text
    reply = raw.call(3, b"\x0a\x09ab", "/inference.GRPCInferenceService/ModelReady")
    assert reply.status == INVALID_ARGUMENT and "cannot parse" in reply.text


# ---------------------------------------------------------------- compression


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
@pytest.mark.parametrize("size", [100, 3 << 20])
def test_compressed_requests(raw: RawClient, encoding: str, compress: object, size: int) -> None:
    tensor = np.arange(size, dtype=np.uint8)
    body = message(compress(request("big", tensor)), 1)  # type: ignore[operator]
    raw.send(raw.headers(1, extra=[("grpc-encoding", encoding)]) + raw.data(1, body))
    reply = raw.finish(1)
    assert reply.status == OK
    assert response(*reply.messages).raw_output_contents[0] == tensor.tobytes()


@pytest.mark.parametrize("path", [INFER, STREAM_INFER, LIVE])
@pytest.mark.parametrize(
    ("encoding", "body", "status", "text"),
    [
        ("br", b"abc", UNIMPLEMENTED, "grpc-encoding 'br', expected gzip or deflate"),
        (None, b"abc", UNIMPLEMENTED, "grpc-encoding 'identity', expected gzip or deflate"),
        ("gzip", b"not gzip at all", INVALID_ARGUMENT, "cannot decompress"),
        ("gzip", gzip.compress(b"x" * 500, mtime=0)[:-5], INVALID_ARGUMENT, "cut off"),
        ("deflate", zlib.compress(b"x" * 500) + b"more", INVALID_ARGUMENT, "bytes follow its end"),
    ],
)
def test_bad_compression(
    raw: RawClient, path: str, encoding: str | None, body: bytes, status: int, text: str
) -> None:
    extra = [("grpc-encoding", encoding)] if encoding else []
    raw.send(raw.headers(1, path, extra) + raw.data(1, message(body, 1)))
    reply = raw.finish(1)
    assert reply.status == status and text in reply.text


@cache
def bomb() -> bytes:
    """A zlib stream of 66 MiB of zeros."""
    made = zlib.compressobj(1)
    body = b"".join(made.compress(bytes(1 << 20)) for _ in range(66)) + made.flush()
    assert len(body) < 400_000
    return body


@pytest.mark.parametrize("path", [INFER, STREAM_INFER, LIVE])
def test_a_bomb_is_refused(raw: RawClient, server: EmbeddedServer, path: str) -> None:
    raw.send(raw.headers(1, path, [("grpc-encoding", "deflate")]) + raw.data(1, message(bomb(), 1)))
    reply = raw.finish(1)
    assert (
        reply.status == RESOURCE_EXHAUSTED
        and f"inflates to more than {1 << (20 if path == LIVE else 26)} bytes" in reply.text
    )


# ---------------------------------------------------------------- deadlines and cancels


@pytest.mark.parametrize("value", ["0n", "20m", "20000u"])
@pytest.mark.parametrize("path", [INFER, STREAM_INFER])
def test_deadline(raw: RawClient, server: EmbeddedServer, path: str, value: str) -> None:
    raw.send(
        raw.headers(1, path, [("grpc-timeout", value)])
        + raw.data(1, message(identity(model="stuck")), end=path == INFER)
    )
    reply = raw.finish(1)
    assert reply.status == DEADLINE_EXCEEDED and reply.text == "Deadline Exceeded"
    assert not reply.messages


def test_deadline_while_the_request_is_still_on_its_way(raw: RawClient) -> None:
    raw.send(raw.headers(1, extra=[("grpc-timeout", "20m")]) + raw.data(1, b"\0\0\0\0\x09abc", end=False))
    assert raw.finish(1).status == DEADLINE_EXCEEDED


def test_a_deadline_that_is_met(raw: RawClient, server: EmbeddedServer) -> None:
    assert raw.call(1, identity(), extra=[("grpc-timeout", "1H")]).status == OK
    assert raw.call(3, b"", LIVE, extra=[("grpc-timeout", "99999999S")]).status == OK


@pytest.mark.parametrize("value", ["", "5", "m", "5x", "-5m", "123456789m", "1.5S"])
@pytest.mark.parametrize("path", [INFER, LIVE])
def test_a_malformed_deadline(raw: RawClient, value: str, path: str) -> None:
    reply = raw.call(1, identity(), path, extra=[("grpc-timeout", value)])
    assert reply.status == INVALID_ARGUMENT and "malformed grpc-timeout" in reply.text


def failures(server: EmbeddedServer, model: str) -> tuple[int, int]:
    """(succeeded, failed) requests of a model."""
    (plain,) = server.ask(server.server.verbs.statistics.model_statistics, model, "")["model_stats"]
    stats = plain["inference_stats"]
    return stats["success"]["count"], stats["fail"]["count"]


def test_rst_stream_cancels_what_is_queued(raw: RawClient, server: EmbeddedServer, gate: Gate) -> None:
    before = failures(server, "gate")
    for stream_id in range(1, 21, 2):
        raw.start(stream_id, identity(str(stream_id), "gate"))
    raw.sync()
    assert server.ask(server.inflight) == 10
    for stream_id in range(7, 21, 2):  # all but the executing one, and two more
        raw.reset(stream_id)
    raw.sync()
    assert server.ask(server.inflight) == 3
    gate.go("kkk")
    for stream_id in (1, 3, 5):
        assert raw.finish(stream_id).status == OK
    server.until_idle()
    after = failures(server, "gate")
    assert (after[0] - before[0], after[1] - before[1]) == (3, 7)


@pytest.mark.slow
def test_a_connection_that_goes_cancels_its_calls_only(raw: RawClient, server: EmbeddedServer) -> None:
    before = failures(server, "slow")
    with RawClient(server.grpc) as other:
        for stream_id in range(1, 2001, 2):
            other.start(stream_id, identity(model="slow"))
        other.sync()
        raw.start(1, identity("mine", "slow"))
        raw.sync()
    assert raw.finish(1).status == OK
    server.until_idle()
    after = failures(server, "slow")
    assert after[0] - before[0] + after[1] - before[1] == 1001
    assert 1 <= after[0] - before[0] < 100


# ---------------------------------------------------------------- metadata


def test_binary_metadata(raw: RawClient) -> None:
    extra = [("x-bin", "AP/+"), ("y-bin", "AA"), ("z", "plain")]
    assert raw.call(1, identity(), extra=extra).status == OK
    assert raw.call(3, b"", LIVE, extra=extra).status == OK
    reply = raw.call(5, b"", LIVE, extra=[("x-bin", "A")])
    assert reply.status == INVALID_ARGUMENT and "'x-bin' is not base64" in reply.text


@pytest.mark.slow
def test_too_much_metadata(raw: RawClient) -> None:
    reply = raw.call(1, identity(), extra=[("x", "y" * 4000)] * 3)
    assert reply.status == OK
    block = raw.encoder.encode(
        [(":method", "POST"), (":scheme", "http"), (":path", INFER), (":authority", "a"), ("x", "y" * 70000)]
    )
    raw.replies[3] = reply = type(reply)()
    raw.send(frame(1, 0x5, 3, block))
    raw.finish(3)
    assert reply.status == RESOURCE_EXHAUSTED and "metadata is too large" in reply.text
    assert raw.call(5, identity()).status == OK


def test_long_error_texts_fit_into_trailers(raw: RawClient) -> None:
    reply = raw.call(1, request("n" * 100_000))
    assert reply.status == INVALID_ARGUMENT and len(reply.text) < 300
    made = percent_encode("n" * 100_000)
    assert 6000 <= len(made) < 7000 and made.endswith(b"...")
    reply = raw.call(3, request("ü\n%" * 10))
    assert "%C3%BC%0A%25" in reply.text
