"""Bodies whose length a client says in an odd way: the same with and without TLS."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.certificates import Certificates
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

HEAD = b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"2\r\n{}\r\n0\r\n\r\n"


@pytest.fixture(scope="module", params=["lean", "tls"])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    folder = tmp_path_factory.mktemp("server")
    write_model(folder / "models", "simple", identity_config())
    certificates = Certificates(folder)
    certificate, key = certificates.issue("server")
    flags = {
        "lean": (),
        "tls": (f"--http-tls-cert={certificate}", f"--http-tls-key={key}"),
    }[request.param]
    with ServerProcess(folder / "models", *flags) as server:
        yield lambda: Http1(server.http, certificates.client() if request.param == "tls" else None)


@pytest.mark.parametrize(
    "coding",
    [
        b"identity",
        b"unknown",
        b"gzip, chunked",
        b"chunked, gzip",
        b"chunked\r\nTransfer-Encoding: chunked",
        b"identity\r\nContent-Length: 2",
    ],
)
def test_another_coding_than_chunked_is_refused_and_the_connection_ends(client, coding: bytes) -> None:  # type: ignore[no-untyped-def]
    with client() as sender:
        sender.send(HEAD + b"Transfer-Encoding: " + coding + b"\r\n\r\n" + CHUNKED)
        reply = sender.read("POST")
        assert (reply.status, reply.headers["connection"]) == (400, "close")
        assert "Transfer-Encoding" in json.loads(reply.body)["error"]
        assert sender.closed()


def test_a_length_beside_chunks_is_the_last_request(client) -> None:  # type: ignore[no-untyped-def]
    both = HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED
    with client() as sender:
        sender.send(both + both)
        reply = sender.read("POST")
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert sender.closed()


def test_chunks_alone_are_one_request_of_several(client) -> None:  # type: ignore[no-untyped-def]
    with client() as sender:
        for _ in range(2):
            sender.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED)
            assert sender.read("POST").status == 200


@pytest.mark.parametrize(
    "beside", ["a trailer without end", "trailers without end", "an extension without end"]
)
def test_what_stands_beside_the_parts_of_a_body_is_limited(client, beside: str) -> None:  # type: ignore[no-untyped-def]
    text = {
        "a trailer without end": b"0\r\nX-T: " + b"x" * (128 << 10),
        "trailers without end": b"0\r\n" + b"A: b\r\n" * (32 << 10),
        "an extension without end": b"1;" + b"x" * (128 << 10),
    }
    with client() as sender:
        sender.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n" + text[beside])
        reply = sender.read("POST")
        assert (reply.status, reply.headers["connection"]) == (431, "close")
        assert json.loads(reply.body)["error"] == "request headers exceed the limit of 65536 bytes"
        assert sender.closed()


def test_trailers_may_be_as_long_as_a_head(client) -> None:  # type: ignore[no-untyped-def]
    trailers = b"X-T: " + b"x" * 30_000 + b"\r\n"
    body = b"2\r\n{}\r\n0\r\n" + 2 * trailers + b"\r\n"
    with client() as sender:
        for _ in range(3):
            sender.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body)
            assert sender.read("POST").status == 200


def test_many_small_parts_are_one_body(client) -> None:  # type: ignore[no-untyped-def]
    """Their sizes are longer than a head may be."""
    spaces = b"1\r\n \r\n" * 40_000
    with client() as sender:
        sender.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + spaces + CHUNKED)
        assert sender.read("POST").status == 200
