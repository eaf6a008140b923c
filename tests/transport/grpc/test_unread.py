"""A burst of small requests with large answers, from a client that reads none of them.

All of it is accepted before the first answer exists, so nothing could be parked: what the answers may take is
bounded where they are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.backends.python.models import config, python_model
from tests.support.embedded import EmbeddedServer
from tests.support.infer_messages import identity, request, response, stream_response
from tests.support.raw_http2 import STREAM_INFER, RawClient, message
from tests.support.repository import identity_config, write_model
from tests.transport.conftest import SESSIONS

LIMIT = 48 << 20
LARGE = 2 << 20
BURST = 64
FIT = LIMIT // LARGE  # an answer is a few bytes more than its tensor
ERROR = "the client does not read its answers"
MODEL = f"""
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        out = [np.zeros((1, {LARGE}), np.uint8) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in out]
"""
TOGETHER = f"dynamic_batching {{ preferred_batch_size: [ {BURST} ] max_queue_delay_microseconds: 60000000 }}"


@pytest.fixture(params=SESSIONS)
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    text = config("INPUT0:TYPE_UINT8:1", f"OUT:TYPE_UINT8:{LARGE}", BURST, TOGETHER)
    python_model(tmp_path, "large", MODEL, text)  # the burst is one batch: its answers come at one moment
    write_model(tmp_path, "identity", identity_config())
    with EmbeddedServer(tmp_path, request.param, grpc_max_unread_bytes=LIMIT) as made:
        yield made
        made.until_idle()
        assert made.ask(lambda: made.grpc_server.totals.out_bytes) == 0


def small(name: int) -> bytes:
    return request("large", np.zeros((1, 1), np.uint8), request_id=str(name))


def check_bounded(server: EmbeddedServer) -> None:
    """It holds no more than it may, and nobody else notices."""
    held = server.ask(server.grpc_held).unsent_reply_bytes
    assert LIMIT - LARGE < held < LIMIT + LARGE
    with RawClient(server.grpc) as other:
        assert other.call(1, identity()).status == 0


@pytest.mark.slow
def test_unary_calls(server: EmbeddedServer) -> None:
    ids = range(1, 2 * BURST, 2)
    with RawClient(server.grpc) as client:
        client.send(b"".join(client.headers(i) + client.data(i, message(small(i))) for i in ids))
        server.until(lambda: server.grpc_held().unsent_reply_bytes > 0, "the batch is answered")
        server.until(lambda: server.inflight() == 0, "all of it")
        check_bounded(server)
        answered = refused = 0
        for stream_id in ids:
            reply = client.finish(stream_id)
            if reply.status == 0:
                assert response(*reply.messages).id == str(stream_id)
                answered += 1
            else:
                assert reply.status == 8 and reply.text.startswith(ERROR)
                refused += 1
        assert (answered, refused) == (FIT, BURST - FIT)
        # a client that has read is served again
        client.send(b"".join(client.headers(i + 200) + client.data(i + 200, message(small(i))) for i in ids))
        assert client.finish(201).status == 0


@pytest.mark.slow
def test_a_stream(server: EmbeddedServer) -> None:
    """The stream stays open, and its answers stay in order."""
    with RawClient(server.grpc) as client:
        client.send(client.headers(1, STREAM_INFER))
        client.send(b"".join(client.data(1, message(small(i)), end=False) for i in range(BURST)))
        server.until(lambda: server.grpc_held().unsent_reply_bytes > 0, "the batch is answered")
        server.until(lambda: server.inflight() == 0, "all of it")
        check_bounded(server)
        reply = client.replies[1]
        client.until(lambda: len(reply.messages) == BURST, "all answers")
        answers = [stream_response(body) for body in reply.messages]
        assert [a.infer_response.id for a in answers] == [str(i) for i in range(BURST)]
        errors = [a.error_message for a in answers]
        assert not any(errors[:FIT]) and all(e.startswith(ERROR) for e in errors[FIT:])
        client.send(client.data(1, b""))
        assert client.finish(1).status == 0


@pytest.mark.slow
@pytest.mark.parametrize("path", ["unary", "stream"])
def test_a_client_that_goes_leaves_nothing(server: EmbeddedServer, path: str) -> None:
    with RawClient(server.grpc) as client:
        if path == "unary":
            for i in range(1, 2 * BURST, 2):
                client.start(i, small(i))
        else:
            client.send(client.headers(1, STREAM_INFER))
            client.send(b"".join(client.data(1, message(small(i)), end=False) for i in range(BURST)))
        server.until(lambda: server.grpc_held().unsent_reply_bytes > 0, "the batch is answered")
    server.until_idle()
    assert server.ask(lambda: server.grpc_server.totals.out_bytes) == 0
