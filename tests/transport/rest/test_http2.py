"""REST over HTTP/2 and TLS, and what must stay within a connection."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.certificates import Certificates
from tests.support.http import Http1, Http2
from tests.support.raw_http2 import frame
from tests.support.server import ServerProcess
from tests.support.waiting import until
from tests.transport.http1.test_http1 import GOOD
from tests.transport.rest.conftest import in_flight

INFER = "/v2/models/simple/infer"
SLOW = "/v2/models/slow/infer"


def serves(server: ServerProcess) -> None:
    """The server answers on every front and holds nothing."""
    with Http2(server.http) as client:
        assert client.request("POST", INFER, GOOD).status == 200
    with Http1(server.http) as client:
        assert client.request("POST", INFER, GOOD).status == 200
    until(
        lambda: not in_flight(server), "nothing is under way"
    )  # what was cancelled while it executed leaves when its execution ends


@pytest.mark.slow
def test_many_streams_at_once(lean_server: ServerProcess) -> None:
    with Http2(lean_server.http) as client:
        streams = [client.start("POST", INFER, GOOD) for _ in range(200)]
        for stream in streams:
            assert client.finish(stream).status == 200


def test_a_client_that_drops_open_streams(lean_server: ServerProcess) -> None:
    for _ in range(10):
        client = Http2(lean_server.http)
        for _ in range(20):
            client.start("POST", SLOW, GOOD)
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    serves(lean_server)


def test_streams_that_are_reset(lean_server: ServerProcess) -> None:
    with Http2(lean_server.http) as client:
        for _ in range(100):
            stream = client.start("POST", SLOW, GOOD)
            client.connection.reset_stream(stream)
            client.flush()
        assert client.request("POST", INFER, GOOD).status == 200
    serves(lean_server)


def test_answers_can_be_read_after_settings_that_say_the_same_twice(lean_server: ServerProcess) -> None:
    """The table of headers is given up, announced in an answer, and set up again by two SETTINGS that are alike."""
    with Http2(lean_server.http) as client:
        client.connection.decoder.max_allowed_table_size = 1 << 20
        for sizes in ((0,), (65537, 65537), ()):
            for size in sizes:
                client.sock.sendall(frame(4, 0, 0, struct.pack(">HI", 1, size)))
            assert client.request("POST", INFER, GOOD).status == 200


@pytest.mark.parametrize(("length", "status"), [((64 << 20) + 1, 413), (10**15, 400)])
def test_a_body_over_the_limit(lean_server: ServerProcess, length: int, status: int) -> None:
    with Http2(lean_server.http) as client:
        stream = client.connection.get_next_available_stream_id()
        fields = [(":method", "POST"), (":path", INFER), (":scheme", "http"), (":authority", "x")]
        client.connection.send_headers(stream, [*fields, ("content-length", str(length))])
        client.flush()
        while stream not in client.replies:
            client.pump()
        assert client.replies[stream].status == status


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("tls"))
    made.issue("server")
    return made


@pytest.fixture(scope="module")
def tls_server(http_repository: Path, certificates: Certificates) -> Iterator[ServerProcess]:
    with ServerProcess(http_repository, *certificates.flags("server")) as process:
        yield process


@pytest.mark.parametrize("end", ["body", "reset"])
def test_a_body_behind_its_answer(hypercorn_server: ServerProcess, end: str) -> None:
    with Http2(hypercorn_server.http) as client:
        stream = client.connection.get_next_available_stream_id()
        fields = [(":method", "POST"), (":path", "/v2/nothing"), (":scheme", "http")]
        client.connection.send_headers(
            stream, [*fields, (":authority", "localhost"), ("content-length", "2")]
        )
        client.flush()
        while stream not in client.replies or not client.replies[stream].body:
            client.pump()
        assert client.replies[stream].status == 404
        if end == "reset":
            client.connection.reset_stream(stream)
        else:
            client.connection.send_data(stream, b"{", end_stream=False)
            client.connection.send_data(stream, b"}", end_stream=True)
        client.flush()
        assert client.request("GET", "/v2/health/live").status == 200
        if end == "body":
            client.finish(stream)


def test_a_body_behind_its_answer_over_http1(hypercorn_server: ServerProcess) -> None:
    """The connection serves what comes after it."""
    with Http1(hypercorn_server.http) as client:
        client.send(b"POST /v2/nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n")
        assert client.read("POST").status == 404
        client.send(b"{}")
        assert client.request("GET", "/v2/health/live").status == 200


@pytest.mark.parametrize("protocol", ["http/1.1", "h2"])
def test_tls(tls_server: ServerProcess, certificates: Certificates, protocol: str) -> None:
    context = certificates.client(alpn=protocol)
    client: Http1 | Http2 = (Http1 if protocol == "http/1.1" else Http2)(tls_server.http, context)
    with client:
        for _ in range(2):
            reply = client.request("POST", INFER, GOOD)
            assert reply.status == 200 and json.loads(reply.body)["model_name"] == "simple"


def test_plain_bytes_on_the_tls_port(tls_server: ServerProcess, certificates: Certificates) -> None:
    with Http1(tls_server.http) as client:
        client.send(b"GET / HTTP/1.1\r\n\r\n")
        client.sock.settimeout(60)
        try:
            while client.sock.recv(4096):
                pass
        except ConnectionResetError:
            pass
    with Http1(tls_server.http, certificates.client(alpn="")) as client:
        assert client.request("GET", "/v2/health/live").status == 200


def closes(client: Http1) -> bytes:
    """What the server sends until it ends the connection."""
    got = b""
    try:
        while part := client.sock.recv(65536):
            got += part
    except ConnectionResetError:
        pass
    return got


def frames(data: bytes) -> list[tuple[int, bytes]]:
    """The kinds and payloads of frames."""
    found = []
    while data:
        end = 9 + int.from_bytes(data[:3], "big")
        found.append((data[3], data[9:end]))
        data = data[end:]
    return found


def test_wrong_frames_end_the_connection(lean_server: ServerProcess) -> None:
    """With GOAWAY and its code."""
    for garbage, code in ((b"\xff" * 100, 1), (b"\0" * 100, 1), (b"\0\0\1\0\0\0\0\0\0x", 1)):
        with Http1(lean_server.http) as client:
            client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + garbage)
            got = closes(client)
            *_, (kind, payload) = frames(got)
            assert kind == 7 and payload[4:8] == struct.pack(">I", code)  # GOAWAY is the last frame
    serves(lean_server)


@pytest.mark.slow
def test_a_preface_without_a_request_is_timed_out(impatient_server: ServerProcess) -> None:
    with Http1(impatient_server.http) as client:
        client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        closes(client)
    serves(impatient_server)


@pytest.mark.slow
def test_a_body_that_does_not_come_is_timed_out(impatient_server: ServerProcess) -> None:
    with Http2(impatient_server.http) as client:
        stream = client.connection.get_next_available_stream_id()
        fields = [(":method", "POST"), (":path", INFER), (":scheme", "http"), (":authority", "x")]
        client.connection.send_headers(stream, [*fields, ("content-length", "1000")])
        client.connection.send_data(stream, b"{")
        client.flush()
        while stream not in client.replies:
            client.pump()
        assert client.replies[stream].status == 408
    serves(impatient_server)
