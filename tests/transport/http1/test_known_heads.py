"""Heads that came before are not read again, and requests with them end as if they had been."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.embedded import EmbeddedServer
from tests.support.repository import identity_config, write_model
from tests.transport.http1.test_fast_path import BINARY, BINARY_HEAD, both, request
from tests.transport.http1.test_http1 import GOOD
from tests.transport.http1.test_known_tokens import FILE, policy

OTHER = b'{"id":"another",' + GOOD[1:]
BROKEN = b"[" + GOOD[1:]  # as long as GOOD
BINARY_LENGTH = b"Inference-Header-Content-Length: %d" % len(BINARY_HEAD)
LONG = b"X-Long: " + 2000 * b"a"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    repository = tmp_path_factory.mktemp("models")
    for name in ("identity", "identitx"):
        write_model(repository, name, identity_config())
    with EmbeddedServer(Path(repository)) as running:
        yield running


def statuses(answer: bytes) -> list[bytes]:
    return [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]


A = request()
B = request(BINARY_LENGTH, body=BINARY)
ELSEWHERE = request(path=b"/v2/models/identitx/infer")
NOWHERE = request(path=b"/v2/models/identitz/infer")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([A] * 5, [b"200"] * 5),
        ([B] * 5, [b"200"] * 5),
        ([A, A, A, request(body=BROKEN), A], [b"200", b"200", b"200", b"400", b"200"]),
        ([A, A, request(body=OTHER), A, A], [b"200"] * 5),
        ([A, A, ELSEWHERE, A, ELSEWHERE, ELSEWHERE, A], [b"200"] * 7),
        ([A, A, NOWHERE, A, NOWHERE, NOWHERE, NOWHERE, A], [b"200", b"200", b"404", b"200", *[b"404"] * 3, b"200"]),
        ([A, B] * 4, [b"200"] * 8),
        ([B, B, request(BINARY_LENGTH.replace(b": 2", b": 1"), body=BINARY), B], [b"200", b"200", b"400", b"200"]),
        ([request(LONG)] * 4, [b"200"] * 4),
        ([request(b"X: %d" % n) for n in (1, 1, 1, 2, 3, 3, 1, 1)], [b"200"] * 8),
    ],
)  # fmt: skip
def test_each_request_is_its_own(server: EmbeddedServer, data: list[bytes], expected: list[bytes]) -> None:
    (answer, _, closing), passed = both(server, b"".join(data))
    assert statuses(answer) == expected
    assert passed == len(data)
    assert not closing


def test_answers_are_to_their_own_bodies(server: EmbeddedServer) -> None:
    bodies = [b'{"id":"%d",' % number + GOOD[1:] for number in range(8)]
    (answer, _, _), passed = both(server, b"".join(request(body=body) for body in bodies))
    assert passed == 8
    assert [answer.index(b'"id":"%d"' % n) for n in range(8)] == sorted(
        answer.index(b'"id":"%d"' % n) for n in range(8)
    )


def test_a_head_that_differs_where_it_matters_is_read(server: EmbeddedServer) -> None:
    for changed in (
        request(host=b"Host: x y"),
        request(b"Connection: close"),
        request(b"Content-Length: %d" % len(GOOD)),
        request().replace(b"HTTP/1.1", b"HTTP/1.0"),
        request(length=b"%d" % (len(GOOD) + 1)),
    ):
        (answer, _, _), passed = both(server, 3 * A + changed)
        assert passed == 3, changed
        assert statuses(answer)[:3] == [b"200"] * 3


def test_a_head_that_is_known_and_a_body_that_is_not_whole(server: EmbeddedServer) -> None:
    for missing in (1, len(GOOD), len(GOOD) + 1, len(A) - 1):
        (answer, _, _), passed = both(server, 3 * A + A[: len(A) - missing])
        assert (statuses(answer), passed) == ([b"200"] * 3, 3)


def test_what_one_connection_takes_another_may_not(server: EmbeddedServer, tmp_path: Path) -> None:
    assert both(server, 4 * A)[1] == 4
    (answer, _, _), passed = both(server, A, policy=policy(tmp_path, FILE))
    assert (statuses(answer), passed) == ([b"401"], 0)


POOL = [A, B, ELSEWHERE, NOWHERE, request(body=BROKEN), request(body=OTHER), request(LONG)]
POOL += [request(host=b"Host: x y"), request(b"Connection: close"), request(host=b"Host: y")]
POOL += [request(b"Accept-Encoding: gzip"), request(body=b""), request(body=b"{}")]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(POOL), st.integers(1, 3)), max_size=6), st.integers(0, 3))
def test_any_order_ends_as_with_the_parser(
    server: EmbeddedServer, data: list[tuple[bytes, int]], cut: int
) -> None:
    sent = b"".join(each * times for each, times in data)
    both(server, sent[: len(sent) - cut])
