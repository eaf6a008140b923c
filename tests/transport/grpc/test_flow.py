"""Flow control both ways, large messages, many streams, clients that do not read."""

from __future__ import annotations

import queue
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.support.embedded import EmbeddedServer
from tests.support.infer_messages import identity, request, response
from tests.support.raw_http2 import RawClient, message
from tests.transport.conftest import SESSIONS

INITIAL_WINDOW_SIZE = 4
HUGE = 2**31 - 1


def test_a_window_of_one_byte(server: EmbeddedServer) -> None:
    with RawClient(server.grpc, settings={INITIAL_WINDOW_SIZE: 1}, credit=False) as client:
        client.start(1, identity("one"))
        reply = client.replies[1]
        while not reply.done:
            client.read()
            if not reply.done:
                client.window(1, 1)
        assert reply.status == 0
        assert response(*reply.messages).id == "one"


def test_a_window_of_zero_opened_late(server: EmbeddedServer) -> None:
    with RawClient(server.grpc, settings={INITIAL_WINDOW_SIZE: 0}, credit=False) as client:
        client.start(1, identity())
        client.until(lambda: client.replies[1].headers, "headers, which need no window")
        client.sync()
        assert not client.replies[1].data
        client.send(b"\0\0\6\4\0\0\0\0\0" + b"\0\4\0\0\xff\xff")  # SETTINGS: the window of every stream
        assert client.finish(1).status == 0


def test_a_huge_window_and_a_large_reply(server: EmbeddedServer) -> None:
    with RawClient(server.grpc, settings={INITIAL_WINDOW_SIZE: HUGE}, credit=False) as client:
        client.window(0, HUGE - 65535)
        tensor = np.arange(3 << 20, dtype=np.uint8)
        reply = client.call(1, request("big", tensor))
        assert response(*reply.messages).raw_output_contents[0] == tensor.tobytes()


def test_the_connection_window_is_shared_fairly(server: EmbeddedServer) -> None:
    """A stream whose client gives it no window holds nobody else back."""
    with RawClient(server.grpc, settings={INITIAL_WINDOW_SIZE: 100}, credit=False) as client:
        client.start(1, identity("stuck"))
        client.until(lambda: len(client.replies[1].data) >= 100, "as much as the window allows")
        client.sync()
        assert len(client.replies[1].data) == 100
        client.start(3, identity("free"))
        client.window(3, 1000)
        assert client.finish(3).status == 0
        client.window(1, 1000)
        assert client.finish(1).status == 0


@pytest.mark.slow
def test_the_servers_windows(server: EmbeddedServer) -> None:
    with RawClient(server.grpc) as client:
        assert client.server_settings[INITIAL_WINDOW_SIZE] == 4 << 20
        assert client.server_settings[3] == 2048  # MAX_CONCURRENT_STREAMS
        tensor = np.arange(4_000_000, dtype=np.uint8)
        for stream_id in range(1, 41, 2):  # 80 MB: needs credit back for connection and streams
            client.start(stream_id, request("big", tensor))
            assert response(*client.finish(stream_id).messages).raw_output_contents[0] == tensor.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_64_mib_both_ways(server: EmbeddedServer, stream: bool) -> None:
    tensor = np.frombuffer(np.random.default_rng(1).bytes(64 << 20), np.uint8)
    given = grpcclient.InferInput("INPUT0", tensor.shape, "UINT8")
    given.set_data_from_numpy(tensor)
    with grpcclient.InferenceServerClient(server.grpc) as client:
        if stream:
            answers: queue.SimpleQueue[object] = queue.SimpleQueue()
            client.start_stream(lambda result, error: answers.put(error or result))
            client.async_stream_infer("big", [given])
            # without a limit, as infer() below: a failure comes here, too, and client and server share a GIL, which
            # on busy processors makes 128 MiB a matter of minutes
            result = answers.get()
            client.stop_stream()
        else:
            result = client.infer("big", [given])
        assert np.array_equal(result.as_numpy("OUTPUT0"), tensor)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_1000_calls_at_once_on_one_connection(raw: RawClient, server: EmbeddedServer) -> None:
    ids = range(1, 2001, 2)
    raw.send(b"".join(raw.headers(i) + raw.data(i, message(identity(str(i)))) for i in ids))
    raw.until(lambda: all(raw.replies[i].done for i in ids), "1000 answers")
    assert {response(*raw.replies[i].messages).id for i in ids} == {str(i) for i in ids}


@pytest.mark.slow
def test_1000_calls_open_at_once(raw: RawClient, server: EmbeddedServer) -> None:
    ids = range(1, 2001, 2)
    raw.send(b"".join(raw.headers(i) + raw.data(i, message(identity(str(i))), end=False) for i in ids))
    raw.sync()
    assert server.ask(server.grpc_held).open_calls == 1000
    raw.send(b"".join(raw.data(i, b"") for i in ids))
    raw.until(lambda: all(raw.replies[i].done for i in ids), "1000 answers")
    assert all(raw.replies[i].status == 0 for i in ids)


@pytest.mark.slow
def test_more_streams_than_allowed_are_refused(raw: RawClient, server: EmbeddedServer) -> None:
    """2048 are told to the client; the 2049th is a stream error (or, h2, the end of the connection)."""
    raw.send(b"".join(raw.headers(2 * i + 1) for i in range(2048)))
    raw.sync()
    raw.send(raw.headers(4097))
    last = raw.replies[4097]
    raw.until(lambda: last.reset is not None or raw.goaway is not None, "a refusal")
    with RawClient(server.grpc) as other:
        assert other.call(1, identity()).status == 0


@pytest.mark.slow
@pytest.mark.parametrize("window", [65535, HUGE])
def test_a_client_that_does_not_read(server: EmbeddedServer, window: int) -> None:
    """Replies of 60 MB that nobody reads: a bounded part is made, the rest is parked, nothing is lost.

    With small windows they pile up in the streams, with huge ones behind the socket.
    """
    tensor = np.arange(3_900_000, dtype=np.uint8)
    ids = range(1, 33, 2)
    with RawClient(server.grpc, settings={INITIAL_WINDOW_SIZE: window}) as client:
        if window == HUGE:
            client.window(0, HUGE - 65535)
        for stream_id in ids:
            client.start(stream_id, request("big", tensor, request_id=str(stream_id)))
        server.until(lambda: server.grpc_held().parked_calls > 0, "calls are parked")
        with RawClient(server.grpc) as other:
            assert other.call(1, identity()).status == 0  # nobody else notices
        held = server.ask(server.grpc_held)
        assert held.unsent_reply_bytes <= (32 << 20) + 2 * len(tensor)
        for stream_id in ids:
            reply = client.finish(stream_id)
            assert reply.status == 0 and response(*reply.messages).id == str(stream_id)


@pytest.mark.slow
def test_a_client_that_does_not_read_and_goes(server: EmbeddedServer) -> None:
    tensor = np.arange(3_900_000, dtype=np.uint8)
    with RawClient(server.grpc) as client:
        for stream_id in range(1, 33, 2):
            client.start(stream_id, request("big", tensor))
        server.until(lambda: server.grpc_held().parked_calls > 0, "calls are parked")
    server.until_idle()
    with RawClient(server.grpc) as other:
        assert other.call(1, identity()).status == 0


@pytest.mark.slow
@pytest.mark.parametrize("session", SESSIONS)
@pytest.mark.parametrize("complete", [False, True])
def test_unfinished_requests_of_all_clients_are_bounded(
    grpc_repository: Path, session: str, complete: bool
) -> None:
    """Above the limit the client that was silent longest loses its call; the others go on."""
    limit, part = 8 << 20, 3 << 20
    with EmbeddedServer(grpc_repository, session, grpc_max_unfinished_bytes=limit) as server:

        def held() -> int:
            return server.grpc_held().unfinished_request_bytes

        announced = part if complete else 100 << 20  # complete: the message is whole, the call is not
        start = b"\0" + announced.to_bytes(4, "big") + bytes(part)
        clients = [RawClient(server.grpc) for _ in range(4)]
        try:
            for number, client in enumerate(clients):
                client.send(client.headers(1) + client.data(1, start, end=False, size=16384))
                client.sync()
                if number < 2:
                    server.until(lambda n=number: held() == part * (n + 1), "the bytes are counted")
            for client in clients[:2]:
                assert client.finish(1).status == 8
                assert client.replies[1].text.startswith(f"the server holds more than {limit} bytes")
            assert not clients[2].replies[1].done and not clients[3].replies[1].done
            assert server.ask(held) == 2 * part
            # a neighbour is served, the client that lost its call too
            for client in (clients[0], clients[3]):
                assert client.call(3, identity()).status == 0
            clients[2].reset(1)
            server.until(lambda: held() == part, "the cancelled call's bytes are let go")
        finally:
            for client in clients:
                client.close()
        server.until_idle()
