"""A front end may write anything on its socket: it is killed, and the engine goes on."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from neptrio.backends.python.children import Forked
from neptrio.execution.admission import Admission
from neptrio.frontend.forward import LENGTH
from neptrio.frontend.frames import HEAD, Kind
from neptrio.frontend.front_end_session import FrontEndSession
from neptrio.observe.trace_sampler import Sampler
from neptrio.service.connections import Connections
from neptrio.service.request_limits import RequestLimits
from tests.support.fronts import Directory


def frame(kind: int, payload: bytes, number: int = 1) -> bytes:
    return HEAD.pack(number, len(payload), kind) + payload


def http(**members: Any) -> bytes:
    """An HTTP request; `members` are JSON texts."""
    told = {
        "method": '"GET"',
        "path": '"/"',
        "raw_path": '"/"',
        "query": '""',
        "version": '"1.1"',
        "headers": "[]",
        "raw_headers": "null",
        "client": '""',
        "certificate": "null",
        "received": "[1, 1]",
        **members,
    }
    text = "{" + ",".join(f'"{name}": {value}' for name, value in told.items()) + "}"
    return LENGTH.pack(len(text)) + text.encode()


CALL = '{"path":"/a","metadata":[],"client":"","peer":"","certificate":null,"deadline":%s}'
WRITTEN = {
    "no length": frame(Kind.HTTP, b""),
    "half a length": frame(Kind.HTTP, b"\1\0"),
    "not JSON": frame(Kind.HTTP, LENGTH.pack(3) + b"abc"),
    "not an object": frame(Kind.HTTP, LENGTH.pack(2) + b"[]"),
    "no times": frame(Kind.HTTP, http(received="null")),
    "one time": frame(Kind.HTTP, http(received="[1]")),
    "a time that is a float": frame(Kind.HTTP, http(received="[1.5, 1]")),
    "a time that is infinite": frame(Kind.HTTP, http(received="[Infinity, 1e999]")),
    "a time that is a text": frame(Kind.HTTP, http(received='["1", 1]')),
    "a time that no number has": frame(Kind.HTTP, http(received=f"[{'9' * 5000}, 1]")),
    "a path that is a number": frame(Kind.HTTP, http(raw_path="1")),
    "headers that are no pairs": frame(Kind.HTTP, http(headers="[[1]]")),
    "a number twice": frame(Kind.HTTP, http()) * 2,
    "a deadline that no float is": frame(Kind.CALL, (CALL % ("9" * 400)).encode()),
    "a row with an infinite number": frame(Kind.ROW, b'{"lag": [Infinity]}'),
    "a row that is a list": frame(Kind.ROW, b"[]"),
    "an address that is no text": frame(Kind.ENTER, b"\xff"),
    "the end of no connection": frame(Kind.LEAVE, b"1.2.3.4"),
    "a frame that is too long": HEAD.pack(1, 2**32 - 1, Kind.HTTP),
}


class Template:
    """Starts a process that does nothing, and writes to the engine in its place."""

    def __init__(self, written: bytes) -> None:
        self.process = subprocess.Popen(["sleep", "600"])
        self.sock: socket.socket
        self._written = written

    async def fork(self, number: int, descriptors: list[int]) -> Forked:
        self.sock = socket.socket(fileno=os.dup(descriptors[0]))
        self.sock.setblocking(True)
        self.sock.sendall(self._written)
        return Forked(self.process.pid)


async def nothing(*_: Any) -> None:
    pass


def session_of(written: bytes) -> tuple[FrontEndSession, Template]:
    template = Template(written)
    ignore = lambda *_: None  # noqa: E731
    services: Any = SimpleNamespace(
        admission=Admission(Directory(), Sampler()),
        connections=Connections(),
        request_limits=RequestLimits(0, 0),
        loop=SimpleNamespace(
            loop_pass=SimpleNamespace(end=ignore),
            poller=SimpleNamespace(listen=ignore, unlisten=ignore),
        ),
        audit=None,
        access=None,
    )
    fronts: Any = SimpleNamespace(
        services=services,
        template=template,
        passed=list,
        tell=ignore,
        changed=ignore,
        busy_poll=SimpleNamespace(add=ignore, remove=ignore),
        counts=SimpleNamespace(absent=ignore),
        verbs=SimpleNamespace(services=services, app=nothing, http_policy=None),
    )
    return FrontEndSession(fronts, 0), template


@pytest.mark.parametrize("what", WRITTEN)
def test_what_cannot_be(what: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "neptrio.frontend"):

        async def run() -> None:
            session, template = session_of(WRITTEN[what])
            with trio.fail_after(60):
                await session.run()
            assert session.ended
            template.sock.close()
            assert template.process.wait(60) is not None

        trio.run(run)
    assert "is killed" in caplog.text
