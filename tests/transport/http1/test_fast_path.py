"""The fast path takes exactly what the parser would have taken, with the same outcome."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from neptrio.transport.header_policy import HeaderPolicy
from neptrio.transport.http1.connection import Http1Connection
from neptrio.transport.http1.states import State
from neptrio.transport.rest.port import Port
from neptrio.transport.wire import Wire
from tests.support.embedded import EmbeddedServer
from tests.support.repository import identity_config, write_model
from tests.support.waiting import until_trio
from tests.transport.http1.test_http1 import GOOD

PATH = b"/v2/models/identity/infer"
TENSOR = np.arange(16, dtype=np.int32).tobytes()
BINARY_HEAD = (
    b'{"inputs":[{"name":"INPUT0","shape":[1,16],"datatype":"INT32","parameters":{"binary_data_size":64}},'
    b'{"name":"INPUT1","shape":[1,16],"datatype":"INT32","parameters":{"binary_data_size":64}}],'
    b'"parameters":{"binary_data_output":true}}'
)
BINARY = BINARY_HEAD + TENSOR * 2


class Tasks:
    """A nursery that starts nothing and remembers what it was asked for."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def start_soon(self, *_: Any, name: Any) -> None:
        self.started.append(name.__name__)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "identity", identity_config())
    with EmbeddedServer(Path(repository)) as running:
        yield running


def connected(
    sock: socket.socket, server: EmbeddedServer, tasks: Tasks, policy: HeaderPolicy | None = None
) -> Http1Connection:
    services = server.server.services
    wire = Wire(sock, tasks, services.loop)  # type: ignore[arg-type]  # nobody runs its tasks
    return Http1Connection(wire, Port(services, None, policy))  # type: ignore[arg-type]  # nor calls the app


async def outcome(
    server: EmbeddedServer, parts: list[bytes], fast_path: bool, policy: HeaderPolicy | None = None
) -> tuple[Any, ...]:
    """Of bytes that come in parts: what comes back, which tasks were started, whether it closes; and what the fast path has taken."""
    ours, theirs = socket.socketpair()
    tasks = Tasks()
    for end in (ours, theirs):
        end.setblocking(False)
    try:
        connection = connected(ours, server, tasks, policy)
        connection.fast_path = connection.fast_path and fast_path
        for part in parts:
            while connection.later is not None:  # as the connection's task, which waits for room
                await until_trio(connection.has_room, "there is room")
                later, connection.later = connection.later, None
                connection.pass_on(later)
            if not connection.closing:
                connection.pass_on(part)
            server.server.loop.loop_pass.end()
        await until_trio(
            lambda: (
                not server.inflight() and (tasks.started or all(e.complete for e in connection.exchanges))
            ),
            "every exchange is complete, or waits for a task that nobody runs",
        )
        server.server.loop.loop_pass.end()
        try:
            answer = theirs.recv(1 << 20)
        except BlockingIOError:
            answer = b""
        return answer, tasks.started, connection.closing, connection.passed
    finally:
        ours.close()
        theirs.close()


def both(
    server: EmbeddedServer, *parts: bytes, policy: HeaderPolicy | None = None
) -> tuple[tuple[Any, ...], int]:
    """The outcome, the same with and without the fast path, and how many requests the fast path took."""

    async def run() -> tuple[Any, Any]:
        return (
            await outcome(server, list(parts), True, policy),
            await outcome(server, list(parts), False, policy),
        )

    with_fast_path, without = server.run(run)
    assert with_fast_path[:3] == without[:3], parts
    assert without[3] == 0
    return with_fast_path[:3], with_fast_path[3]


def request(
    *headers: bytes,
    body: bytes = GOOD,
    path: bytes = PATH,
    length: bytes | None = None,
    host: bytes = b"Host: x",
) -> bytes:
    announced = b"%d" % len(body) if length is None else length
    lines = [b"POST %b HTTP/1.1" % path, host, b"Content-Length: %b" % announced, *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


PLAIN = [
    request(),
    request(host=b"hOST: [::1]:8000"),
    request(b"User-Agent: x/1 (y; z)", b"content-type: application/json"),
    request(b"Connection: keep-alive", b"CONNECTION: Keep-Alive"),
    request(b"Inference-Header-Content-Length: %d" % len(BINARY_HEAD), body=BINARY),
    request(path=b"/v2/models/identity/versions/1/infer"),
    request(path=b"/v2/models/nobody/infer"),
    request(path=b"/v2/models/identity/versions/7/infer"),
    request(body=b"{"),
    request(body=b""),
    request(b"Inference-Header-Content-Length: 9999", body=BINARY),
    request(b"Inference-Header-Content-Length: 0", body=BINARY),
    request(b"X-Empty:", b"X-Spaces:    a b   "),
    request(b"Accept-Encoding: identity"),
    request(b"accept-encoding:Identity "),
]
LEFT = [
    request(host=b"X: y"),
    request(host=b"Host: a b"),
    request(b"Host: x"),
    request(b"Connection: close"),
    request(b"Connection: keep-alive, close"),
    request(b"Accept-Encoding: gzip"),
    request(b"Accept-Encoding: identity;q=0.5, gzip"),
    request(b"Accept-Encoding: identity", b"Accept-Encoding: gzip"),
    request(b"Accept-Encoding:"),
    request(b"Content-Encoding: gzip"),
    request(b"Expect: 100-continue"),
    request(b"Content-Length: 0"),
    request(b"Transfer-Encoding: chunked"),
    request(b"X: a", b" folded"),
    request(b"Bad Name: a"),
    request(b": a"),
    request(b"X: \x80"),
    request(b"X: a\tb"),
    request(length=b"+5"),
    request(length=b""),
    request(length=b"5 5"),
    request(length=b"99999999999999999999"),
    request(b"Inference-Header-Content-Length: -1"),
    request(b"Inference-Header-Content-Length: 1 1"),
    request(path=b"/v2/models/identity/infer?x=1"),
    request(path=b"/v2/models/iden%74ity/infer"),
    request(path=b"/v2/models/identity/infer/"),
    request(path=b"/v2/models/identity/generate"),
    request(path=b"//v2/models/identity/infer"),
    request().replace(b"HTTP/1.1", b"HTTP/1.0"),
    request().replace(b"POST", b"PUT"),
    request().replace(b"POST", b"post"),
    request().replace(b"\r\n", b"\n"),
    b"\r\n" + request(),
    request()[:-1],
    request()[:40],
]


@pytest.mark.parametrize("data", PLAIN)
def test_plain_requests_are_taken_past_the_parser(server: EmbeddedServer, data: bytes) -> None:
    answer, passed = both(server, data)
    assert passed == 1
    assert answer[0].startswith(b"HTTP/1.1 ")


@pytest.mark.parametrize("data", LEFT)
def test_others_are_left_to_the_parser(server: EmbeddedServer, data: bytes) -> None:
    assert both(server, data)[1] == 0


def test_pipelined_requests_are_answered_in_order_whichever_way_they_went(server: EmbeddedServer) -> None:
    def named(name: bytes, *headers: bytes) -> bytes:
        return request(*headers, body=b'{"id":"%b",' % name + GOOD[1:])

    data = named(b"one") + named(b"two", b"Accept-Encoding: br") + named(b"three") + named(b"four")
    (answer, _, closing), passed = both(server, data)
    places = [answer.index(b'"id":"%b"' % name) for name in (b"one", b"two", b"three", b"four")]
    assert places == sorted(places)
    assert not closing
    assert passed == 1  # what follows a request of the parser in the same bytes is the parser's


def cut(data: bytes, *places: int) -> list[bytes]:
    """The parts of `data` between these places."""
    edges = [0, *sorted(places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


HEAD = len(request(body=b"", length=b"%d" % len(GOOD)))


@pytest.mark.parametrize("data", PLAIN)
def test_a_head_waits_for_its_body(server: EmbeddedServer, data: bytes) -> None:
    head = data.index(b"\r\n\r\n") + 4
    assert both(server, *cut(data, head))[1] == 1


@pytest.mark.parametrize("data", LEFT)
def test_no_other_head_does(server: EmbeddedServer, data: bytes) -> None:
    head = data.index(b"\r\n\r\n") + 4 if b"\r\n\r\n" in data else 10
    assert both(server, *cut(data, head))[1] == 0


@pytest.mark.parametrize(
    ("parts", "passed"),
    [
        (cut(request(), HEAD, HEAD + 5), 1),
        (cut(request(), HEAD + 5, HEAD + 6), 1),
        (cut(request(), HEAD, HEAD + 5, HEAD + 6), 0),  # it comes in more parts than are waited for
        (cut(request(), HEAD - 1), 0),
        (cut(request() * 2, HEAD), 2),
        (cut(request() * 2, len(request()) + HEAD), 2),
        (cut(request() * 3, HEAD, len(request()) + HEAD, 2 * len(request()) + HEAD), 3),
        (cut(request() + request(b"Accept-Encoding: gzip"), HEAD), 1),
        (cut(request(body=GOOD + b" " * 20_000), HEAD + 20), 0),  # what is waited for is small
        (cut(request(), HEAD)[:1], 0),
    ],
)
def test_requests_in_parts(server: EmbeddedServer, parts: list[bytes], passed: int) -> None:
    assert both(server, *parts)[1] == passed


def test_a_request_in_parts_is_one_that_is_being_received(server: EmbeddedServer) -> None:
    """For times and limits it is what it would be in the parser."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            connection = connected(ours, server, Tasks())
            connection.body_received = 1 << 30  # of the request before
            before = connection.held_bytes
            connection.pass_on(request()[:-2])
            assert connection.partial == request()[:-2]
            assert State.IDLE < connection.state < State.LAST, "it is being received"
            assert connection.held_bytes == before + HEAD + len(GOOD) - 2
            began = connection.head.receive_start
            connection.end_grace()
            connection.check(began + 10**9, 10**9, 0)
            assert not connection.closing, "it is waited for"
            connection.pass_on(request()[-2:-1])
            assert connection.head.receive_start == began, "it began with its first part"
            connection.check(began + 10**9 + 1, 10**9, 0)
            assert connection.closing
            assert theirs.recv(1 << 16).startswith(b"HTTP/1.1 408 ")

    server.run(run)


def test_a_request_has_its_time_from_when_those_before_it_were_answered(server: EmbeddedServer) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            connection = connected(ours, server, Tasks())
            connection.pass_on(request() + request(b"Expect: 100-continue")[: -len(GOOD)])
            began = connection.head.receive_start
            await until_trio(lambda: not connection.exchanges, "the first is answered")
            answered = connection.since_ns
            assert answered > began
            connection.check(answered + 10**9, 10**9, 0)
            assert not connection.closing, "it is waited for"
            connection.check(answered + 10**9 + 1, 10**9, 0)
            assert connection.closing

    server.run(run)


NAMES = [b"Content-Length", b"content-length", b"Connection", b"Expect", b"Upgrade", b"X", b"x-y_z", b"Te"]
NAMES += [b"Transfer-Encoding", b"Inference-Header-Content-Length", b"Accept-Encoding", b"Host", b"", b"A B"]
VALUES = [b"0", b"5", b"%d" % len(GOOD), b"keep-alive", b"Keep-Alive", b"close", b"chunked", b"h2c", b"gzip"]
VALUES += [
    b"identity",
    b"",
    b" ",
    b"\t",
    b"a b",
    b"\xff",
    b"100-continue",
    b"websocket",
    b"%d" % len(BINARY_HEAD),
]
SEPARATORS = [b": ", b":", b" : ", b":\t", b"", b":  "]
ENDS = [b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\n "]
PATHS = [PATH, b"/v2/models/identity/versions/1/infer", b"/v2/models/none/infer", b"/v2/models//infer", b"*"]
PATHS += [b"/v2/models/a%20b/infer", b"/v2/models/identity/infer?q", b"http://h/v2/models/identity/infer"]


@st.composite
def requests(draw: Any) -> bytes:
    body = draw(st.sampled_from([GOOD, BINARY, b"", b"{}"]))
    lines = [
        b"%b %b %b"
        % (
            draw(st.sampled_from([b"POST", b"POST", b"POST", b"GET", b"HEAD", b"POST "])),
            draw(st.sampled_from(PATHS)),
            draw(
                st.sampled_from(
                    [b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.1 "]
                )
            ),
        )
    ]
    headers = [b"Content-Length: %d" % len(body)] if draw(st.integers(0, 4)) else []
    for _ in range(draw(st.integers(0, 3))):
        headers.append(
            draw(st.sampled_from(NAMES)) + draw(st.sampled_from(SEPARATORS)) + draw(st.sampled_from(VALUES))
        )
    headers.append(draw(st.sampled_from([b"Host: x", b"Host: x", b"Host: x", b"X: y", b"Host: /"])))
    data = b"".join(line + draw(st.sampled_from(ENDS)) for line in lines + draw(st.permutations(headers)))
    return data + b"\r\n" + body


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(requests(), min_size=1, max_size=2),
    st.integers(0, 1 << 16),
    st.binary(max_size=1),
    st.lists(st.integers(0, 1 << 16), max_size=4),
)
@example([PLAIN[0]], 0, b"", [])
def test_no_request_fares_differently_in_the_lane(
    server: EmbeddedServer, made: list[bytes], at: int, flip: bytes, places: list[int]
) -> None:
    data = b"".join(made)
    if flip and data:
        at %= len(data)
        data = data[:at] + flip + data[at + 1 :]
    both(server, *(part for part in cut(data, *(place % len(data) for place in places)) if part))
