"""Peers that mean harm: each is sent away with GOAWAY, others are served, memory stays."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.http2_attack import (
    CANCEL,
    CHANGED_SETTINGS,
    CONTINUATION,
    DATA,
    EMPTY_SETTINGS,
    END_HEADERS,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    GARBAGE,
    HEADERS,
    NAMED,
    PINGS,
    PROTOCOL_ERROR,
    RST_STREAM,
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
from tests.support.infer_messages import identity
from tests.support.memory import resident
from tests.support.raw_http2 import INFER, PREFACE, RawClient, frame, message
from tests.support.sanitizer import SANITIZED
from tests.support.server import ServerProcess
from tests.transport.conftest import SESSIONS


@pytest.fixture(scope="module", params=SESSIONS)
def process(grpc_repository: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    env = {**os.environ, "NEPTRIO_HTTP2_SESSION": request.param}
    with ServerProcess(grpc_repository, "--log-verbose=1", env=env) as server:
        server.until_logged(f"HTTP/2 session: {request.param}")
        yield server


@pytest.fixture
def attacker(process: ServerProcess) -> Iterator[RawClient]:
    """A connection to misuse; a neighbour is served before, meanwhile and after."""
    with RawClient(process.grpc) as neighbour, RawClient(process.grpc) as client:
        assert neighbour.call(1, identity()).status == 0
        before = resident(process.process.pid)
        yield client
        assert neighbour.call(3, identity()).status == 0
        assert neighbour.goaway is None
        assert SANITIZED or resident(process.process.pid) - before < 64 << 20
    with RawClient(process.grpc) as newcomer:
        assert newcomer.call(1, identity()).status == 0


@pytest.mark.slow
def test_rapid_reset(attacker: RawClient) -> None:
    attacker.encoder.header_table_size = 0
    pour(attacker, rapid_reset(attacker.headers(1)[9:]))
    sent_away(attacker, ENHANCE_YOUR_CALM)


@pytest.mark.slow
def test_rapid_reset_of_whole_requests(attacker: RawClient) -> None:
    attacker.encoder.header_table_size = 0
    pour(attacker, rapid_reset(attacker.headers(1)[9:], message(identity(model="slow"))))
    sent_away(attacker, ENHANCE_YOUR_CALM)


def test_ping_flood(attacker: RawClient) -> None:
    attacker.send(attacker.headers(1))  # with a call open, so that it is no matter of ping strikes
    pour(attacker, PINGS * 100_000)
    sent_away(attacker, ENHANCE_YOUR_CALM)


def test_settings_flood(attacker: RawClient) -> None:
    pour(attacker, CHANGED_SETTINGS * 50_000)
    sent_away(attacker, ENHANCE_YOUR_CALM)


@pytest.mark.slow
def test_empty_settings_flood(attacker: RawClient) -> None:
    pour(attacker, EMPTY_SETTINGS * 50_000)
    sent_away(attacker, ENHANCE_YOUR_CALM)


def test_window_update_flood(attacker: RawClient) -> None:
    pour(attacker, WINDOW_UPDATES * 100_000)
    sent_away(attacker, ENHANCE_YOUR_CALM)


def test_priority_flood(attacker: RawClient) -> None:
    pour(attacker, priorities())
    sent_away(attacker, ENHANCE_YOUR_CALM)


def test_empty_data_flood(attacker: RawClient) -> None:
    pour(attacker, attacker.headers(1) + frame(DATA, 0, 1) * 100_000)
    sent_away(attacker, ENHANCE_YOUR_CALM)


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_continuation_flood(attacker: RawClient, size: int) -> None:
    block = attacker.headers(1)[9:]
    part = frame(
        CONTINUATION, 0, 1, (b"\0\1x" + bytes([size & 0x7F]) + b"y" * (size & 0x7F)) if size else b""
    )
    pour(attacker, frame(HEADERS, 0, 1, block) + part * (400_000 if not size else 100_000))
    sent_away(attacker, ENHANCE_YOUR_CALM, PROTOCOL_ERROR)


def test_hpack_bomb(attacker: RawClient) -> None:
    """One entry of 4,000 bytes in the table, then references of one byte each: 64 MB a frame."""
    head = attacker.headers(1)[9:]
    pour(attacker, frame(HEADERS, END_HEADERS, 1, head + TABLE_ENTRY + NAMED * 16000))
    sent_away(attacker, ENHANCE_YOUR_CALM)


def test_overflowing_the_connection_window(attacker: RawClient) -> None:
    pour(attacker, window(0, 2**31 - 1))
    sent_away(attacker, FLOW_CONTROL_ERROR)


def test_overflowing_a_stream_window(attacker: RawClient) -> None:
    attacker.send(attacker.headers(1) + window(1, 2**31 - 1))
    refused_window(attacker)


def test_sending_more_than_the_window(attacker: RawClient) -> None:
    """A message of 100 MiB on a stream nobody may have read: the server's windows say no."""
    attacker.send(attacker.headers(1) + attacker.data(1, b"\0\x06\x40\0\0", end=False))
    attacker.sync()
    big = frame(DATA, 0, 1, bytes(1 << 20))
    pour(attacker, big * 3)
    attacker.sync()
    assert attacker.goaway is None  # within the window


def test_zero_window_update(attacker: RawClient) -> None:
    attacker.send(window(0, 0))
    sent_away(attacker, PROTOCOL_ERROR)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_frames_that_make_no_sense(attacker: RawClient, garbage: bytes) -> None:
    pour(attacker, garbage)
    refused_garbage(attacker)


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n",
        bytes(range(190, 254)),
    ],
)
def test_a_client_that_does_not_speak_http2(process: ServerProcess, first: bytes) -> None:
    host, _, port = process.grpc.rpartition(":")
    with socket.create_connection((host, int(port)), 60) as sock:
        sock.sendall(first)
        sock.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n") and b"REST is on another port" in answer
    length = int(answer.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
    assert len(answer.partition(b"\r\n\r\n")[2]) == length


@pytest.mark.parametrize("first", [b"", b"PRI", PREFACE, PREFACE + b"\0\0"])
def test_a_client_that_goes_early(process: ServerProcess, first: bytes) -> None:
    host, _, port = process.grpc.rpartition(":")
    with socket.create_connection((host, int(port)), 60) as sock:
        sock.sendall(first)
    with RawClient(process.grpc) as client:
        assert client.call(1, identity()).status == 0


@pytest.mark.slow
def test_two_thousand_cancels_are_no_attack(process: ServerProcess) -> None:
    """The largest burst a well-behaved client can make: every stream it may have open."""
    with RawClient(process.grpc) as client:
        body = message(identity(model="slow"))
        ids = range(1, 4001, 2)
        client.send(b"".join(client.headers(i, INFER) + client.data(i, body) for i in ids))
        client.send(b"".join(frame(RST_STREAM, 0, i, CANCEL) for i in ids))
        assert client.call(4001, identity()).status == 0
        assert client.goaway is None
