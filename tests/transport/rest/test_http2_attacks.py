"""Peers that mean harm on the REST port's HTTP/2: GOAWAY, others are served, memory stays."""

from __future__ import annotations

import json
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import h2.connection
import h2.settings
import numpy as np
import pytest

from tests.support.certificates import Certificates
from tests.support.http import Http1, Http2
from tests.support.http2_attack import (
    CANCEL,
    CHANGED_SETTINGS,
    CONTINUATION,
    DATA,
    EMPTY_SETTINGS,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    GARBAGE,
    HEADERS,
    NAMED,
    PING,
    PINGS,
    PRIORITY,
    PROTOCOL_ERROR,
    RST_STREAM,
    SETTINGS,
    TABLE_ENTRY,
    WINDOW_UPDATES,
    pour,
    priorities,
    rapid_reset,
    refused_garbage,
    refused_window,
    sent_away,
    window,
)
from tests.support.infer_messages import binary_head
from tests.support.memory import resident
from tests.support.raw_http2 import PREFACE, RawClient, frame
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until
from tests.transport.conftest import SESSIONS
from tests.transport.http1.test_http1 import GOOD
from tests.transport.rest.conftest import in_flight, write_models

INFER = "/v2/models/simple/infer"
PLAIN: dict[str, str | None] = {"te": None, "content-type": None, "user-agent": None}


BOTH = [pytest.param(name, marks=pytest.mark.slow) if name != SESSIONS[-1] else name for name in SESSIONS]


@pytest.fixture(scope="module", params=BOTH)
def process(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("attacked")
    write_models(repository)
    with ServerProcess(
        repository, "--log-verbose=1", env={**os.environ, "NEPTRIO_HTTP2_SESSION": request.param}
    ) as server:
        yield server
        until(lambda: not in_flight(server), "nothing is under way")


@pytest.fixture(scope="module", params=BOTH)
def impatient(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[ServerProcess]:
    """A server of its own: on a busy machine its time limit would end attacks before they are seen."""
    repository = tmp_path_factory.mktemp("attacked")
    write_impatient_models(repository)
    env = {**os.environ, "NEPTRIO_HTTP2_SESSION": request.param}
    with ServerProcess(repository, "--http-request-timeout-secs=2", env=env) as server:
        yield server
        until(lambda: not in_flight(server), "nothing is under way")


@pytest.fixture
def attacker(process: ServerProcess) -> Iterator[RawClient]:
    """A connection to misuse; two neighbours are served before, meanwhile and after."""
    with Http2(process.http) as neighbour, Http1(process.http) as lean, RawClient(process.http) as client:
        assert neighbour.request("POST", INFER, GOOD).status == 200
        assert lean.request("POST", INFER, GOOD).status == 200
        before = resident(process.process.pid)
        yield client
        assert neighbour.request("POST", INFER, GOOD).status == 200
        assert lean.request("POST", INFER, GOOD).status == 200
        assert not neighbour.terminated
        # a body of the largest size may have been taken: what it needed goes when its stream has ended
        until(lambda: resident(process.process.pid) - before < 64 << 20, "memory comes back")
    until(
        lambda: not in_flight(process), "nothing is under way"
    )  # what was cancelled while it executed leaves when its execution ends


def head(client: RawClient, stream: int, path: str = INFER) -> bytes:
    """The header block of a POST."""
    return client.headers(stream, path, override=PLAIN)[9:]


def test_rapid_reset(attacker: RawClient) -> None:
    attacker.encoder.header_table_size = 0
    pour(attacker, rapid_reset(head(attacker, 1)))
    sent_away(attacker, ENHANCE_YOUR_CALM)


def test_rapid_reset_of_whole_requests(attacker: RawClient) -> None:
    attacker.encoder.header_table_size = 0
    pour(attacker, rapid_reset(head(attacker, 1, "/v2/models/slow/infer"), GOOD))
    sent_away(attacker, ENHANCE_YOUR_CALM)


def test_slow_rapid_reset(attacker: RawClient) -> None:
    """Opened and reset in chunks of their own, so that every request reaches the app."""
    attacker.encoder.header_table_size = 0
    block = head(attacker, 1, "/v2/models/slow/infer")
    for i in range(1, 20001, 2):
        try:
            attacker.send(frame(HEADERS, END_HEADERS, i, block) + frame(DATA, END_STREAM, i, GOOD))
            attacker.send(frame(RST_STREAM, 0, i, CANCEL))
        except (BrokenPipeError, ConnectionResetError):
            break
    sent_away(attacker, ENHANCE_YOUR_CALM)


@pytest.mark.parametrize(
    "flood",
    [
        PINGS,
        CHANGED_SETTINGS,
        EMPTY_SETTINGS,
        WINDOW_UPDATES,
        frame(PRIORITY, 0, 1, b"\0\0\0\0\1"),
        frame(0xEE, 0, 0, b"?"),
    ],
)
def test_floods_of_frames_that_cost_nothing(attacker: RawClient, flood: bytes) -> None:
    pour(attacker, flood * 100_000)
    sent_away(attacker, ENHANCE_YOUR_CALM)


def test_a_flood_of_acknowledgements_of_nothing(attacker: RawClient, process: ServerProcess) -> None:
    pour(attacker, frame(SETTINGS, 1, 0) * 100_000)
    h2 = "HTTP/2 session: h2" in process.log()  # which calls none of them an error
    sent_away(attacker, ENHANCE_YOUR_CALM if h2 else PROTOCOL_ERROR)


def test_empty_data_flood(attacker: RawClient) -> None:
    pour(attacker, frame(HEADERS, END_HEADERS, 1, head(attacker, 1)) + frame(DATA, 0, 1) * 100_000)
    sent_away(attacker, ENHANCE_YOUR_CALM)


def test_priority_tree_flood(attacker: RawClient) -> None:
    pour(attacker, priorities())
    sent_away(attacker, ENHANCE_YOUR_CALM)


@pytest.mark.slow
def test_streams_without_end_whose_refusals_nobody_reads(process: ServerProcess) -> None:
    """SETTINGS that are not acknowledged do not hold yet: streams beyond the limit are refused one by one."""
    before = resident(process.process.pid)
    with Http2(process.http) as neighbour, RawClient(process.http, preface=False) as client:
        client.encoder.header_table_size = 0
        block = head(client, 1)
        client.send(PREFACE + frame(SETTINGS, 0, 0))
        client.sock.settimeout(1)  # the server reads no more
        with pytest.raises(OSError):
            for first in range(1, 16_000_000, 20_000):
                client.send(
                    b"".join(frame(HEADERS, END_HEADERS, i, block) for i in range(first, first + 20_000, 2))
                )
        assert resident(process.process.pid) - before < 128 << 20
        assert neighbour.request("POST", INFER, GOOD).status == 200


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, 1000, 60_000])
def test_continuation_flood(attacker: RawClient, size: int) -> None:
    part = frame(CONTINUATION, 0, 1, b"y" * size)
    count = 2000 if size > 1000 else 100_000
    pour(attacker, frame(HEADERS, 0, 1, head(attacker, 1)) + part * count)
    sent_away(attacker, ENHANCE_YOUR_CALM, PROTOCOL_ERROR)


def test_hpack_bomb(attacker: RawClient) -> None:
    """One entry of 4,000 bytes in the table, then references of one byte each: 64 MB a frame."""
    pour(attacker, frame(HEADERS, END_HEADERS, 1, head(attacker, 1) + TABLE_ENTRY + NAMED * 12000))
    sent_away(attacker, ENHANCE_YOUR_CALM)


def test_overflowing_the_connection_window(attacker: RawClient) -> None:
    pour(attacker, window(0, 2**31 - 1))
    sent_away(attacker, FLOW_CONTROL_ERROR)


def test_overflowing_a_stream_window(attacker: RawClient) -> None:
    attacker.send(frame(HEADERS, END_HEADERS, 1, head(attacker, 1)))
    attacker.send(window(1, 2**31 - 1))
    refused_window(attacker)


@pytest.mark.slow
def test_sending_more_than_the_window(attacker: RawClient) -> None:
    """Credit comes back only as the app takes the body; a peer that ignores it is sent away."""
    pour(
        attacker,
        frame(HEADERS, END_HEADERS, 1, head(attacker, 1)) + frame(DATA, 0, 1, b" " * 60_000) * 1200,
    )
    attacker.until(lambda: attacker.goaway or attacker.replies[1].done or attacker.replies[1].headers, "end")
    if attacker.goaway is None:  # every frame was taken in time: then the size limit has ended it
        assert attacker.replies[1].headers[0][":status"] in ("413", "408")
    else:
        assert attacker.goaway.error_code == FLOW_CONTROL_ERROR


def test_zero_window_update(attacker: RawClient) -> None:
    attacker.send(window(0, 0))
    sent_away(attacker, PROTOCOL_ERROR)


@pytest.mark.parametrize("garbage", [*GARBAGE, b"\xff" * 100, b"\1\0\1\0\0\0\0\0\1" + bytes(65537)])
def test_frames_that_make_no_sense(attacker: RawClient, garbage: bytes) -> None:
    pour(attacker, garbage)
    refused_garbage(attacker)


@pytest.mark.slow
def test_random_frames(attacker: RawClient, process: ServerProcess) -> None:
    """Bytes of a fixed random sequence behind whole requests: whatever happens ends there."""
    import random

    draw = random.Random(7)
    for _ in range(60):
        with RawClient(process.http) as client:
            kinds = [frame(HEADERS, END_HEADERS, 1, head(client, 1)), frame(DATA, END_STREAM, 1, GOOD)]
            for _ in range(draw.randrange(1, 12)):
                payload = draw.randbytes(draw.choice([0, 1, 4, 5, 8, 9, 40]))
                kinds.append(frame(draw.randrange(0, 11), draw.randrange(256), draw.randrange(4), payload))
            draw.shuffle(kinds)
            pour(client, b"".join(kinds))
            client.sock.shutdown(socket.SHUT_WR)
            client.until_closed()
    with Http2(process.http) as neighbour:
        assert neighbour.request("POST", INFER, GOOD).status == 200


@pytest.mark.slow
@pytest.mark.parametrize("partial", [b"\0\0\x20\0\0\0\0\0\1xx", b"\0\0", b"\0\0\1\1\0\0\0\0\1\x82"])
def test_a_frame_that_does_not_come_is_timed_out(impatient: ServerProcess, partial: bytes) -> None:
    """Also behind a first request: 2 seconds are the server's request timeout."""
    with Http2(impatient.http) as neighbour, RawClient(impatient.http) as client:
        assert neighbour.request("POST", INFER, GOOD).status == 200
        client.send(frame(HEADERS, END_HEADERS, 1, head(client, 1)) + frame(DATA, END_STREAM, 1, GOOD))
        client.finish(1)
        client.send(partial)
        client.until_closed()
        assert client.goaway is not None
        assert neighbour.request("POST", INFER, GOOD).status == 200


def test_a_client_that_goes_in_the_middle(process: ServerProcess) -> None:
    host, _, port = process.http.rpartition(":")
    for first in (PREFACE, PREFACE + b"\0\0", PREFACE + frame(SETTINGS, 0, 0) + b"\0\0\xff\1"):
        with socket.create_connection((host, int(port)), 60) as sock:
            sock.sendall(first)
    with Http2(process.http) as client:
        assert client.request("POST", INFER, GOOD).status == 200


# ---------------------------------------------------------------- honest clients at the limits


@pytest.mark.slow
def test_thousands_of_requests_on_one_connection(process: ServerProcess) -> None:
    with Http2(process.http) as client:
        for _ in range(15):
            streams = [client.start("GET", "/v2/health/live") for _ in range(100)]
            assert {client.finish(stream).status for stream in streams} == {200}


@pytest.mark.slow
def test_as_many_cancels_as_streams_are_no_attack(process: ServerProcess) -> None:
    with Http2(process.http) as client:
        client.pump()
        limit = client.connection.remote_settings.max_concurrent_streams
        assert limit >= 100
        streams = [client.start("POST", "/v2/models/slow/infer", GOOD) for _ in range(limit)]
        for stream in streams:
            if stream not in client.ended:  # a machine that stands still may see answers before it cancels
                client.connection.reset_stream(stream)
        client.flush()
        assert client.request("POST", INFER, GOOD).status == 200
        assert not client.terminated
    until(lambda: not in_flight(process), "nothing is under way")


def test_answers_that_overtake_their_requests(process: ServerProcess) -> None:
    """An upload to a model that is not there is refused while it comes, again and again."""
    body = bytes(3 << 20)
    with Http2(process.http) as client:
        for _ in range(10):
            reply = client.request("POST", "/v2/models/nope/infer", body)
            assert reply.status == 404
        assert client.request("POST", INFER, GOOD).status == 200


def test_an_upload_that_is_not_read_over_http1(process: ServerProcess) -> None:
    with Http1(process.http) as client:
        assert client.request("GET", "/v2/health/live", b"x" * (1 << 20)).status == 200
        assert client.request("GET", "/v2/health/live", b"x" * (3 << 20)).status == 413


# ---------------------------------------------------------------- clients that do not read


def large(name: str = "many") -> tuple[bytes, dict[str, str]]:
    """A binary request whose answer is 16 MiB."""
    head = binary_head([1, 4 << 20], "FP32", 16 << 20, parameters={"binary_data_output": True})
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return head + np.ones(4 << 20, np.float32).tobytes(), headers


UNREAD = "its client does not read"

GROWS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        large = pb_utils.Tensor("OUTPUT0", np.ones((1, 4 << 20), np.float32))
        return [pb_utils.InferenceResponse([large]) for _ in requests]
"""


def write_impatient_models(repository: Path) -> None:
    """Those of all suites, and one whose answer to a small request is 16 MiB: it arrives in time."""
    write_models(repository)
    config = identity_config("TYPE_FP32", dims="-1", pairs=1).replace('"identity"', '"python"')
    write_model(repository, "grows", config, {"1/model.py": GROWS})


# of the model `grows`
SMALL = json.dumps(
    {
        "inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}],
        "parameters": {"binary_data_output": True},
    }
).encode()


def given_up(process: ServerProcess, times: int, sock: socket.socket) -> None:
    """Waits until the server has ended that many connections for not reading; the last is over."""
    process.until_logged(UNREAD, times + 1)
    got = 0
    try:
        while part := sock.recv(1 << 20):
            got += len(part)
    except OSError:
        pass
    assert got < 16 << 20  # the answer broke off


@pytest.mark.slow
def test_a_client_that_does_not_read_http2(impatient: ServerProcess) -> None:
    before = impatient.log().count(UNREAD)
    with Http2(impatient.http) as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # windows so large that nothing but the socket holds the answer up
        client.connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**30})
        client.connection.increment_flow_control_window(2**30)
        client.start("POST", "/v2/models/grows/infer", SMALL)
        client.sock.sendall(frame(PING, 0, 0, b"12345678") * 200)  # whose answers find no room
        given_up(impatient, before, client.sock)
    with Http2(impatient.http) as client:
        assert client.request("POST", INFER, GOOD).status == 200


@pytest.mark.slow
def test_a_client_that_gives_no_window(process: ServerProcess) -> None:
    """Answers wait in the connection, new requests are refused when there are too many bytes."""
    body, headers = large()
    before = resident(process.process.pid)
    with Http2(process.http) as client:
        client.connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        refused = False
        for _ in range(12):
            stream = client.start("POST", "/v2/models/many/infer", body, headers)
            while stream not in client.replies and stream not in client.resets:
                client.pump()
            refused = refused or client.resets.get(stream) == 7
        assert refused
        assert resident(process.process.pid) - before < 128 << 20  # 32 MiB of answers, the last one, its body
    until(lambda: not in_flight(process), "nothing is under way")
    with Http2(process.http) as client:
        assert client.request("POST", INFER, GOOD).status == 200


@pytest.fixture(scope="module")
def tls(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[ServerProcess, ssl.SSLContext]]:
    certificates = Certificates(tmp_path_factory.mktemp("tls"))
    certificates.issue("server")
    repository = tmp_path_factory.mktemp("attacked")
    write_impatient_models(repository)
    flags = ("--http-request-timeout-secs=2", *certificates.flags("server"))
    with ServerProcess(repository, *flags) as server:
        yield server, certificates.client(alpn="")


def test_a_client_that_does_not_read_http1(tls: tuple[ServerProcess, ssl.SSLContext]) -> None:
    process, context = tls
    before = process.log().count(UNREAD)
    with Http1(process.http, context) as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.start("POST", "/v2/models/grows/infer", SMALL)
        given_up(process, before, client.sock)
    with Http1(process.http, context) as client:
        assert client.request("POST", INFER, GOOD).status == 200


@pytest.mark.slow
@pytest.mark.parametrize("begin", [b"G", b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nx-slow: "])
@pytest.mark.parametrize("first", [True, False])
def test_a_slow_head_over_tls(tls: tuple[ServerProcess, ssl.SSLContext], first: bool, begin: bytes) -> None:
    process, context = tls
    with Http1(process.http, context) as client:
        if not first:
            assert client.request("POST", INFER, GOOD).status == 200
        client.send(begin)
        reply = client.read()
        assert reply.status == 408
        assert json.loads(reply.body) == {"error": "the request did not arrive in time"}
        assert client.closed()
    with Http1(process.http, context) as client:
        assert client.request("POST", INFER, GOOD).status == 200


def test_a_pipelined_head_that_stays_unfinished(impatient: ServerProcess) -> None:
    with Http1(impatient.http) as client:
        client.send(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\nGET /v2")
        assert client.read().status == 200
        assert client.read().status == 408


def test_an_idle_connection_is_not_timed_out(impatient: ServerProcess) -> None:
    """A second connection's timeout (2 s) passes meanwhile."""
    with Http1(impatient.http) as idle, Http1(impatient.http) as slow:
        assert idle.request("POST", INFER, GOOD).status == 200
        slow.send(b"G")
        assert slow.read().status == 408
        assert idle.request("POST", INFER, GOOD).status == 200


def test_a_malformed_request_is_told_in_json(impatient: ServerProcess) -> None:
    for bad, status in (
        (b"GET /\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * (65 << 10) + b"\r\n\r\n", 431),
    ):
        with Http1(impatient.http) as client:
            client.send(bad)
            reply = client.read()
            assert reply.status == status and "error" in json.loads(reply.body)
            assert client.closed()


@pytest.mark.slow
def test_the_server_ends_in_spite_of_a_client_that_does_not_read(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    repository = tmp_path_factory.mktemp("ending")
    write_models(repository)
    body, headers = large()
    flags = ("--http-request-timeout-secs=600", "--exit-timeout-secs=600")
    with ServerProcess(repository, *flags) as process:
        with Http2(process.http) as client:
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**30})
            client.connection.increment_flow_control_window(2**30)
            stream = client.start("POST", "/v2/models/many/infer", body, headers)
            while stream not in client.replies:
                client.pump()
            assert process.stop() == 0  # long before its time is over, with the answer on its way
