"""ModelStreamInfer: errors in the stream, order, half-close, cancel, strict errors, back-pressure."""

from __future__ import annotations

import gzip
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from neptrio.transport.grpc import stream_infer as grpc_stream_infer
from tests.support.embedded import EmbeddedServer
from tests.support.gate import Gate
from tests.support.infer_messages import identity, identity_inputs, request, stream_response
from tests.support.raw_http2 import STREAM_INFER, RawClient, message
from tests.support.streams import Answers

CANCELLED, NOT_FOUND, INVALID_ARGUMENT = 1, 5, 3


def open_stream(
    client: RawClient, stream_id: int, *bodies: bytes, end: bool = False, strict: bool = False
) -> None:
    extra = [("triton_grpc_error", "true")] if strict else []
    payload = b"".join(message(body) for body in bodies)
    client.send(client.headers(stream_id, STREAM_INFER, extra) + client.data(stream_id, payload, end=end))


def answers(client: RawClient, stream_id: int, n: int) -> list[Any]:
    """The first n responses of a stream."""
    reply = client.replies[stream_id]
    client.until(lambda: len(reply.messages) >= n or reply.done, f"{n} answers")
    return [stream_response(body) for body in reply.messages]


def test_half_close_answers_everything(raw: RawClient) -> None:
    open_stream(
        raw,
        1,
        *(identity(str(i), "slow") for i in range(3)),
        *(identity(str(i)) for i in range(3, 50)),
        end=True,
    )
    reply = raw.finish(1)
    assert reply.status == 0
    made = [stream_response(body) for body in reply.messages]
    assert [m.infer_response.id for m in made] == [str(i) for i in range(50)]
    assert all(m.infer_response.parameters["triton_final_response"].bool_param for m in made)
    assert all(m.error_message == "" for m in made)


def test_a_stream_without_requests(raw: RawClient) -> None:
    raw.send(raw.headers(1, STREAM_INFER, end=True))
    reply = raw.finish(1)
    assert reply.status == 0 and not reply.data


def test_order_is_that_of_the_requests(raw: RawClient, gate: Gate) -> None:
    """The fast answers wait behind the one that does not come, on the same stream only."""
    open_stream(raw, 1, identity("a", "gate"), identity("b"), identity("c", "nope"), identity("d"))
    open_stream(raw, 3, identity("other"))
    assert answers(raw, 3, 1)[0].infer_response.id == "other"
    assert not raw.replies[1].data
    gate.go()
    made = answers(raw, 1, 4)
    assert [m.infer_response.id for m in made] == ["a", "b", "c", "d"]
    assert made[2].error_message == "Request for unknown model: 'nope' is not found"
    raw.reset(1)
    raw.reset(3)


def test_errors_carry_the_id_and_the_stream_goes_on(raw: RawClient) -> None:
    wrong = np.zeros((1, 15), np.int32)
    open_stream(
        raw,
        1,
        identity("unknown", "nope"),
        request("identity", wrong, wrong, request_id="shape"),
        identity("parameter", triton_x=True),
        b"\xff\xff",
        identity("fine"),
    )
    made = answers(raw, 1, 5)
    assert [m.infer_response.id for m in made] == ["unknown", "shape", "parameter", "", "fine"]
    texts = [m.error_message for m in made]
    assert texts[0] == "Request for unknown model: 'nope' is not found"
    assert texts[1].startswith(
        "[request id: shape] unexpected shape for input 'INPUT0' for model 'identity'."
    )
    assert "keys starting with 'triton_' are reserved" in texts[2]
    assert texts[3].startswith("malformed message")
    assert texts[4] == ""
    for m in made[:4]:  # before a model took it: no name, no flag, no outputs
        assert m.infer_response.model_name == "" and not m.infer_response.parameters
    raw.send(raw.data(1, b""))
    assert raw.finish(1).status == 0


@pytest.mark.parametrize(
    ("bad", "status"), [(identity("x", "nope"), NOT_FOUND), (b"\xff\xff", INVALID_ARGUMENT)]
)
def test_strict_errors_end_the_stream(
    raw: RawClient, server: EmbeddedServer, bad: bytes, status: int
) -> None:
    open_stream(raw, 1, identity("a", "stuck"), identity("b", "stuck"), bad, identity("c"), strict=True)
    reply = raw.finish(1)
    assert reply.status == status and not reply.messages
    server.until_idle()


def test_strict_streams_without_errors(raw: RawClient) -> None:
    open_stream(raw, 1, identity("a"), identity("b"), end=True, strict=True)
    reply = raw.finish(1)
    assert reply.status == 0 and len(reply.messages) == 2


@pytest.mark.parametrize("value", ["false", "TRUE", ""])
def test_only_true_makes_errors_strict(raw: RawClient, value: str) -> None:
    raw.send(
        raw.headers(1, STREAM_INFER, [("triton_grpc_error", value)])
        + raw.data(1, message(identity("x", "nope")))
    )
    assert raw.finish(1).status == 0


def test_cancel_ends_everything_of_that_stream_only(
    raw: RawClient, server: EmbeddedServer, gate: Gate
) -> None:
    open_stream(raw, 1, *(identity(f"a{i}", "gate") for i in range(100)))
    assert gate.started() == ["a0"]
    open_stream(raw, 3, *(identity(f"b{i}", "gate") for i in range(2)), end=True)
    raw.sync()
    assert server.ask(server.inflight) == 102
    raw.reset(1)
    raw.sync()
    assert server.ask(server.inflight) == 3  # the one that executes, and those of the other stream
    gate.go("kkk")
    reply = raw.finish(3)
    assert reply.status == 0
    assert [stream_response(m).infer_response.id for m in reply.messages] == ["b0", "b1"]
    server.until_idle()


def test_empty_final_response_adds_nothing_for_ordinary_models(raw: RawClient) -> None:
    open_stream(raw, 1, identity("a", triton_enable_empty_final_response=True), end=True)
    reply = raw.finish(1)
    assert len(reply.messages) == 1
    open_stream(raw, 3, identity("a", triton_enable_empty_final_response=5), end=True)
    (made,) = [stream_response(m) for m in raw.finish(3).messages]
    assert made.error_message == (
        "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param."
    )


def test_compressed_messages_of_all_sizes_keep_their_order(raw: RawClient) -> None:
    """Large ones are inflated in a worker thread; those behind them wait."""
    sizes = [10, 3 << 20, 10, 1 << 20, 20]
    tensors = [np.arange(n, dtype=np.uint8) for n in sizes]
    bodies = [gzip.compress(request("big", t, request_id=str(i)), 1) for i, t in enumerate(tensors)]
    payload = b"".join(message(body, 1) for body in bodies)
    raw.send(raw.headers(1, STREAM_INFER, [("grpc-encoding", "gzip")]) + raw.data(1, payload))
    reply = raw.finish(1)
    assert reply.status == 0
    made = [stream_response(m).infer_response for m in reply.messages]
    assert [(m.id, m.raw_output_contents[0]) for m in made] == [
        (str(i), t.tobytes()) for i, t in enumerate(tensors)
    ]


REFUSED_AT_ONCE = 1500  # more than Python calls may be inside of each other, and than are taken at once


def test_messages_that_are_refused_at_once_behind_one_that_a_worker_inflates(raw: RawClient) -> None:
    large = gzip.compress(request("nope", np.zeros(1 << 20, np.uint8), request_id="large"))
    payload = message(large, 1) + message(b"") * REFUSED_AT_ONCE
    raw.send(raw.headers(1, STREAM_INFER, [("grpc-encoding", "gzip")]) + raw.data(1, payload))
    reply = raw.finish(1)
    assert reply.status == 0
    made = [stream_response(body) for body in reply.messages]
    assert [m.infer_response.id for m in made] == ["large", *[""] * REFUSED_AT_ONCE]
    assert all("is not found" in m.error_message for m in made)


def test_messages_that_are_refused_at_once_when_the_answers_before_them_are_read(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_stream_infer, "STREAM_OUTPUT_BYTES", 1000)
    with RawClient(server.grpc, settings={4: 0}) as client:
        client.send(client.headers(1, STREAM_INFER) + client.data(1, message(b"") * REFUSED_AT_ONCE))
        client.sync()
        monkeypatch.setattr(grpc_stream_infer, "STREAM_OUTPUT_BYTES", 1 << 20)
        client.window(1, 1 << 20)
        reply = client.finish(1)
        assert reply.status == 0 and len(reply.messages) == REFUSED_AT_ONCE


@pytest.mark.slow
def test_a_stream_that_is_not_read_stops_being_read(server: EmbeddedServer) -> None:
    """4 MB requests and nobody reads the answers: the server withholds credit, then goes on."""
    tensor = np.arange(3_900_000, dtype=np.uint8)
    n = 14
    with RawClient(server.grpc) as client:
        client.send(client.headers(1, STREAM_INFER))
        window = client.server_settings[4]
        sent = 0
        payload = b"".join(message(request("big", tensor, request_id=str(i))) for i in range(n))
        # as far as the stream's window goes without reading replies, which nobody gives window for
        client.credit = False
        reply = client.replies[1]

        def room() -> int:
            given = sum(
                f.window_increment
                for f in client.frames
                if type(f).__name__ == "WindowUpdateFrame" and f.stream_id == 1
            )
            return window + given - sent

        while sent < len(payload):
            if room() <= 0:
                client.sync()
                if room() <= 0:
                    break
            part = payload[sent : sent + min(room(), 1 << 20)]
            client.send(client.data(1, part, end=False))
            sent += len(part)
        assert sent < len(payload), "the server took everything although nobody reads"
        held = server.ask(server.grpc_held)
        assert held.unsent_reply_bytes <= grpc_stream_infer.STREAM_OUTPUT_BYTES + 3 * len(tensor)
        client.credit = True
        client.window(0, 1 << 30)
        client.window(1, 1 << 30)
        while sent < len(payload):
            client.until(lambda: room() > 0, "credit for the rest")
            part = payload[sent : sent + min(room(), 1 << 20)]
            client.send(client.data(1, part, end=False))
            sent += len(part)
        client.send(client.data(1, b""))
        client.finish(1)
        assert [stream_response(m).infer_response.id for m in reply.messages] == [str(i) for i in range(n)]


def test_answers_behind_a_slow_one_stop_the_reading_too(
    raw: RawClient, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for the head of the stream, and the requests after them are not looked at."""
    monkeypatch.setattr(grpc_stream_infer, "STREAM_HELD_BYTES", 20_000)
    deliver, stream = grpc_stream_infer.StreamInfer._deliver, []
    head: list[Any] = []

    def slow_head(self: Any, entry: Any, *rest: Any) -> None:
        if not head and entry.request.id == "0":
            stream.append(self)
            head.append(lambda: deliver(self, entry, *rest))
        else:
            deliver(self, entry, *rest)

    monkeypatch.setattr(grpc_stream_infer.StreamInfer, "_deliver", slow_head)
    bodies = [request("big", np.zeros(30_000, np.uint8), request_id=str(i)) for i in range(8)]
    open_stream(raw, 1, bodies[0])
    server.until(lambda: head, "the head is answered, and held")
    raw.send(raw.data(1, message(bodies[1]), end=False))
    server.until(lambda: stream[0]._held_bytes > 30_000, "the second answer waits")
    raw.send(raw.data(1, b"".join(map(message, bodies[2:]))))
    server.until(lambda: len(stream[0]._waiting) == 6, "the other requests wait")
    assert not raw.replies[1].messages
    server.ask(lambda: (head[0](), stream[0]._connection.flush_soon()))
    reply = raw.finish(1)
    assert [stream_response(m).infer_response.id for m in reply.messages] == [str(i) for i in range(8)]
    assert stream[0]._held_bytes == 0


def test_the_real_client(server: EmbeddedServer) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client) as answers:
        client.async_stream_infer("nope", identity_inputs(), request_id="bad")
        client.async_stream_infer("identity", identity_inputs(), request_id="good")
        assert "'nope' is not found" in str(answers.error())
        assert answers.result().get_response().id == "good"
    strict = {"triton_grpc_error": "true"}
    with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client, headers=strict) as answers:
        client.async_stream_infer("nope", identity_inputs(), request_id="bad")
        assert answers.error().status() == "StatusCode.NOT_FOUND"
    with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client):
        for i in range(50):
            client.async_stream_infer("slow", identity_inputs(), request_id=str(i))
        client.stop_stream(cancel_requests=True)
    server.until_idle()
