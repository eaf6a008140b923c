"""The lean HTTP/1.1 connection, byte by byte: framing, limits, timeouts, ends of connections."""

from __future__ import annotations

import gzip
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.support.gate import Gate
from tests.support.http import Http1
from tests.support.infer_messages import IDENTITY_JSON, binary_head
from tests.support.latch import Latch
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.statistics import stats
from tests.support.waiting import until
from tests.transport.rest.conftest import accepted, delay, in_flight

ROW = list(range(16))
GOOD = IDENTITY_JSON
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


def post(model: str, body: bytes = GOOD, *headers: bytes) -> bytes:
    lines = [
        b"POST /v2/models/%s/infer HTTP/1.1" % model.encode(),
        b"Host: x",
        b"Content-Length: %d" % len(body),
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@pytest.fixture
def client(lean_server: ServerProcess) -> Iterator[Http1]:
    with Http1(lean_server.http) as connection:
        yield connection


def cancelled(server: ServerProcess, model: str) -> int:
    return int(stats(server, model)["inference_stats"]["fail"]["count"])


def test_blanks_behind_a_value_are_none_of_it(client: Http1) -> None:
    """RFC 9110, 5.5, for what the fast path takes and for what only the parser takes (a chunked body, gzip)."""
    packed = gzip.compress(GOOD)
    rest = b"Host: x \t\r\nContent-Encoding: gzip \t \r\n"
    requests = {
        "plain": b"Host: x \t \r\nContent-Length: %d \r\n\r\n%b" % (len(GOOD), GOOD),
        "gzip": rest + b"Content-Length: %d\t\r\n\r\n%b" % (len(packed), packed),
        "chunked": rest + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(packed), packed),
    }
    for name, text in requests.items():
        client.send(b"POST /v2/models/simple/infer HTTP/1.1\r\n" + text)
        reply = client.read()
        assert reply.status == 200, (name, reply.body)


def test_only_the_headers_of_a_triton_server(client: Http1) -> None:
    reply = client.request("GET", "/v2")
    assert set(reply.headers) == {"content-type", "content-length"}
    assert (reply.version, reply.reason) == ("HTTP/1.1", "OK")


def test_keep_alive(client: Http1) -> None:
    for _ in range(3):
        client.send(LIVE)
        assert client.read().status == 200


def test_pipelined_requests_are_answered_in_order(client: Http1) -> None:
    named = [GOOD[:-1] + b',"id":"%d"}' % i for i in range(20)]
    mixed = b"".join(
        post("slow" if i == 0 else "simple", body) + (LIVE if i % 5 == 0 else b"")
        for i, body in enumerate(named)
    )
    client.send(mixed)
    for i in range(20):
        assert json.loads(client.read().body)["id"] == str(i)
        if i % 5 == 0:
            reply = client.read()
            assert (reply.status, reply.body) == (200, b"")


def test_a_thousand_pipelined_requests(client: Http1) -> None:
    sender = threading.Thread(target=client.send, args=(post("simple") * 1000,))
    sender.start()
    for _ in range(1000):
        assert client.read().status == 200
    sender.join()


LATCHED = """
import pathlib

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        pathlib.Path({!r}).read_bytes()
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
            for request in requests
        ]
"""


@pytest.mark.slow
@pytest.mark.parametrize("header", ["", "Accept-Encoding: identity"])  # past the parser, and through it
def test_pipelined_requests_are_begun_as_far_as_there_is_room(tmp_path: Path, header: str) -> None:
    """300 in one piece: 64 are under way, those behind them wait in the connection."""
    text = (
        'backend: "python" input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } '
        'output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }'
    )
    with Latch(tmp_path / "latch") as latch:
        write_model(
            tmp_path / "models", "held", text, {"1/model.py": LATCHED.format(str(tmp_path / "latch"))}
        )
        with ServerProcess(tmp_path / "models") as server, Http1(server.http) as client:
            body = '{"id":"%d","inputs":[{"name":"IN","datatype":"INT32","shape":[1],"data":[1]}]}'
            bodies = [(body % number).encode() for number in range(300)]
            client.send(
                b"".join(post("held", body, *([header.encode()] if header else [])) for body in bodies)
            )
            until(lambda: accepted(server, "held") >= 64, "64 are under way")
            assert accepted(server, "held") < 64 + 8  # the last KiB of what was read is not looked at
            latch.open()
            assert [json.loads(client.read().body)["id"] for _ in bodies] == [str(n) for n in range(300)]
            assert client.request("GET", "/v2/health/live").status == 200


def test_connection_close_is_echoed(client: Http1) -> None:
    client.send(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" + LIVE)
    reply = client.read()
    assert reply.status == 200 and reply.headers["connection"] == "close"
    assert client.closed()


def test_http_1_0_is_answered_in_kind_and_closed(client: Http1) -> None:
    client.send(b"GET /v2/health/live HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    reply = client.read()
    assert (reply.version, reply.status) == ("HTTP/1.0", 200)
    assert client.closed()


def test_a_stream_for_http_1_0_ends_with_the_connection(client: Http1) -> None:
    body = b'{"INPUT0":"a"}'
    client.send(
        b"POST /v2/models/text/generate_stream HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    reply = client.read()
    assert "transfer-encoding" not in reply.headers
    assert reply.body == b'data: {"OUTPUT0":"a","model_name":"text","model_version":"1"}\n\n'


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_chunked_bodies(client: Http1, size: int) -> None:
    chunks = [GOOD[i : i + size] for i in range(0, len(GOOD), size)]
    body = b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in chunks) + b"0\r\nTrailer: x\r\n\r\n"
    client.send(
        b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        + body
        + LIVE
    )
    assert client.read().status == 200
    assert client.read().status == 200


def test_a_request_byte_by_byte(client: Http1) -> None:
    client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in post("simple", GOOD[:40]):
        client.send(bytes([byte]))
    assert client.read().status == 400


def test_expect_continue(client: Http1) -> None:
    head, _, body = post("simple", GOOD, b"Expect: 100-continue").partition(b"\r\n\r\n")
    client.send(head + b"\r\n\r\n")
    line = client.file.readline()
    assert line == b"HTTP/1.1 100 Continue\r\n" and client.file.readline() == b"\r\n"
    client.send(body)
    assert client.read().status == 200
    # a body that is there already needs no invitation
    client.send(post("simple", GOOD, b"Expect: 100-continue"))
    assert client.read().interim == []


@pytest.mark.slow
@pytest.mark.parametrize("size", [1 << 20, 16 << 20])
def test_large_bodies_both_ways(client: Http1, size: int) -> None:
    payload = np.random.default_rng(1).integers(0, 256, size, np.uint8).tobytes()
    head = binary_head([1, size], "UINT8", size, parameters={"binary_data_output": True})
    headers = {"Inference-Header-Content-Length": str(len(head))}
    for _ in range(2):
        reply = client.request("POST", "/v2/models/uint8/infer", head + payload, headers)
        assert reply.status == 200 and reply.body.endswith(payload)
    client.send(LIVE)
    assert client.read().status == 200


@pytest.mark.parametrize("length_first", [True, False])
@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("", bytes)]
)
def test_chunks_written_by_hand(
    client: Http1, encoding: str, pack: Callable[[bytes], bytes], length_first: bool
) -> None:
    """Libraries add the length of what they are given; the chunks hold, and nothing behind them is looked at."""
    packed = pack(GOOD)
    body = b"%X\r\n%s\r\n%X\r\n%s\r\n0\r\n\r\n" % (7, packed[:7], len(packed) - 7, packed[7:])
    both = [b"Content-Length: %d\r\n" % len(body), b"Transfer-Encoding: chunked\r\n"]
    headers = b"".join(both if length_first else both[::-1])
    if encoding:
        headers += f"Content-Encoding: {encoding}\r\n".encode()
    client.send(b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n" + body + LIVE)
    reply = client.read()
    assert (reply.status, reply.headers["connection"]) == (200, "close"), reply.body
    assert json.loads(reply.body)["model_name"] == "simple"
    assert client.closed()


def test_heads_that_follow_each_other_without_pause(client: Http1) -> None:
    """Each is as long as it is, wherever what was received together ends."""
    many = 20
    request = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nA: " + b"x" * 60_000 + b"\r\n\r\n"
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(client.send, request * many)
        assert [client.read().status for _ in range(many)] == [200] * many
        sent.result()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GARBAGE\r\n\r\n", 405),
        (b"FOO / HTTP/1.1\r\n\r\n", 405),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 405),
        (b"GET nothing\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
        (
            b"POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked, gzip\r\n\r\n",
            400,
        ),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 9223372036854775808\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999999\r\n\r\n", 413),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: \r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 67108865\r\nExpect: 100-continue\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 2000 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 400_000, 431),
    ],
)
def test_malformed_requests_are_refused_and_the_connection_closes(
    client: Http1, request_bytes: bytes, status: int
) -> None:
    """And without a traceback in the log, for which the server is searched when it stops."""
    client.send(request_bytes)
    reply = client.read()
    assert reply.status == status and reply.headers["connection"] == "close"
    assert reply.headers["content-type"] == "application/json" and "error" in json.loads(reply.body)
    assert client.closed()


def test_a_chunked_body_over_the_limit_is_refused_on_the_way(client: Http1) -> None:
    client.send(b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"

    def push() -> None:
        try:
            for _ in range(70):
                client.send(chunk)
        except OSError:
            pass  # the server stopped reading, as it should

    sender = threading.Thread(target=push)
    sender.start()
    reply = client.read()
    assert reply.status == 413
    client.sock.shutdown(socket.SHUT_RDWR)
    sender.join()


@pytest.mark.parametrize("upgrade", [b"websocket", b"foo"])
def test_other_upgrades_are_ignored(client: Http1, upgrade: bytes) -> None:
    client.send(
        b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n" % upgrade
        + LIVE
    )
    assert client.read().status == 200
    assert client.read().status == 200


def test_connect_is_refused(client: Http1) -> None:
    client.send(b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\nwhatever")
    assert client.read().status == 404


@pytest.mark.slow
@pytest.mark.parametrize(
    "partial",
    [
        b"",
        b"G",
        b"PRI * HT",
        b"GET /v2/health/live HTTP/1.1\r\nHost:",
        post("simple")[:-1],
        post("simple", GOOD + b" " * 99_999)[:-1],
    ],
    ids=["nothing", "one-byte", "preface", "head", "body", "large-body"],
)
def test_half_sent_requests_time_out(impatient_server: ServerProcess, partial: bytes) -> None:
    with Http1(impatient_server.http) as client:
        client.send(partial)
        if partial not in (b"", b"PRI * HT"):
            reply = client.read()
            error = {"error": "the request did not arrive in time"}
            assert (reply.status, json.loads(reply.body)) == (408, error)
        assert client.closed()


@pytest.mark.parametrize(
    "partial", [b"G", b"POST /v2/models/simple/infer HTTP/1.1\r\nContent-Len", post("simple")[:-1]]
)
def test_the_end_of_input_within_a_request(client: Http1, partial: bytes) -> None:
    client.send(partial)
    client.sock.shutdown(socket.SHUT_WR)
    assert client.closed()


def test_a_closed_sending_side_still_gets_its_answers(client: Http1) -> None:
    client.send(post("simple") + LIVE)
    client.sock.shutdown(socket.SHUT_WR)
    assert client.read().status == 200
    assert client.read().status == 200
    assert client.closed()


@pytest.mark.slow
def test_a_disconnect_cancels_what_is_queued(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "models", tmp_path / "gate", extra="")
    body = b'{"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "INT32", "data": [1]}]}'
    with ServerProcess(tmp_path / "models") as server:
        with Http1(server.http) as client:
            client.send(post("gate", body) * 6)
            until(lambda: accepted(server, "gate") == 6, "all are accepted")
            gate.started()
            linger = struct.pack("ii", 1, 0)
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        until(lambda: cancelled(server, "gate") == 5, "those that wait are cancelled")
        gate.go("c")  # the one that executes is told
        until(lambda: cancelled(server, "gate") == 6, "and ends as cancelled")
        assert in_flight(server) == 0
    gate.close()


def test_a_reader_that_stops_slows_only_itself(lean_server: ServerProcess) -> None:
    size = 1 << 20
    head = binary_head([1, size], "UINT8", size, parameters={"binary_data_output": True})
    request = post("uint8", head + b"\7" * size, b"Inference-Header-Content-Length: %d" % len(head))
    with Http1(lean_server.http) as client:
        client.sock.settimeout(0.5)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 400:  # the server stops reading long before 400 MiB
                client.send(request)
                sent += 1
        with Http1(lean_server.http) as other:
            assert other.request("POST", "/v2/models/simple/infer", GOOD).status == 200
    assert sent < 200


def test_random_bytes_kill_nothing(lean_server: ServerProcess) -> None:
    rng = np.random.default_rng(7)
    template = post("simple") + LIVE
    for _ in range(150):
        data = bytearray(template)
        for _ in range(int(rng.integers(1, 6))):
            data[int(rng.integers(0, len(data)))] = int(rng.integers(0, 256))
        with Http1(lean_server.http) as client:
            client.send(bytes(data[: int(rng.integers(1, len(data)))]))
    with Http1(lean_server.http) as client:
        assert client.request("POST", "/v2/models/simple/infer", GOOD).status == 200
    until(lambda: in_flight(lean_server) == 0, "every request is answered")
    assert "Traceback" not in lean_server.log()


@pytest.mark.slow
def test_a_shutdown_answers_what_is_under_way(tmp_path: Path) -> None:
    write_model(tmp_path, "slow", identity_config(extra=delay(400)))
    with ExitStack() as stack:
        process = stack.enter_context(ServerProcess(tmp_path))
        idle, *busy = (stack.enter_context(Http1(process.http)) for _ in range(4))
        assert idle.request("GET", "/v2/health/live").status == 200
        for connection in busy:
            connection.send(post("slow"))
        # one waits behind the one that runs and the one that is prepared
        until(lambda: accepted(process, "slow") == len(busy), "all are accepted")
        process.process.send_signal(signal.SIGTERM)
        for connection in busy:
            assert connection.read().status == 200
            assert connection.closed()
        assert idle.closed()
        assert process.ended() == 0


@pytest.mark.slow
def test_keep_alive_timeout(tmp_path: Path) -> None:
    """A connection outlives a request only for so long: with a hair's breadth none is used twice."""
    write_model(tmp_path, "simple", identity_config())
    with ServerProcess(tmp_path, "--http-keep-alive-timeout-secs=0.4") as process:
        for _ in range(2):
            with Http1(process.http) as client:
                assert client.request("POST", "/v2/models/simple/infer", GOOD).status == 200
                assert client.closed()
    with ServerProcess(tmp_path, "--http-keep-alive-timeout-secs=3600") as process:
        with Http1(process.http) as client:
            for _ in range(2):
                assert client.request("POST", "/v2/models/simple/infer", GOOD).status == 200


@pytest.mark.slow
def test_tls_flags_belong_together() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "neptrio", "--model-repository=.", "--http-tls-cert=x.pem"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0 and "belong together" in done.stderr
