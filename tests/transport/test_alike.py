"""Refusals that come by the thousand are encoded once; the transports keep what they encoded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from neptrio.errors import Code, TritonError, Unavailable
from neptrio.transport.grpc.status import error_trailers
from neptrio.transport.http1.connection import Http1Connection

ALIKE = object()


def refusal(alike: object, text: str = "the queue is full") -> TritonError:
    made = Unavailable(text)
    made.alike = alike
    return made


def http(error: TritonError, keep_alive: bool, headers: list[tuple[bytes, bytes]]) -> list[bytes]:
    exchange = SimpleNamespace(keep_alive=keep_alive, output=[], access=None)
    Http1Connection.reply_error(None, exchange, error, headers)
    return exchange.output


def test_grpc_encodes_errors_that_are_alike_once() -> None:
    first = error_trailers(refusal(ALIKE))
    assert dict(first) == {b"grpc-status": b"14", b"grpc-message": b"the queue is full"}
    assert error_trailers(refusal(ALIKE)) is first
    assert error_trailers(refusal(None)) == first and error_trailers(refusal(None)) is not first
    assert error_trailers(refusal(object(), "another")) != first


@pytest.mark.parametrize("keep_alive", [False, True])
def test_http_encodes_errors_that_are_alike_once(keep_alive: bool) -> None:
    first = http(refusal(ALIKE), keep_alive, [])
    head, _, body = b"".join(first).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ") and body == b'{"error":"the queue is full"}'
    assert (b"connection: close" in head.lower()) is not keep_alive
    again = http(refusal(ALIKE), keep_alive, [])
    assert [id(part) for part in again] == [id(part) for part in first]
    again.clear()  # what a connection does with its answer is not the next one's
    assert http(refusal(ALIKE), keep_alive, []) == first == http(refusal(None), keep_alive, [])


def test_an_answer_with_headers_of_its_own_is_not_kept() -> None:
    """A traced request's refusal carries its trace: nobody else may be sent that."""
    traced = b"".join(http(refusal(ALIKE), True, [(b"traceparent", b"00-1-2-01")]))
    assert b"00-1-2-01" in traced
    assert b"00-1-2-01" not in b"".join(http(refusal(ALIKE), True, []))


def test_alike_does_not_leak_between_errors() -> None:
    refusal(ALIKE)
    assert TritonError("x").alike is None and TritonError("x", Code.INTERNAL).alike is None
