"""The closed-loop clients against servers of all manners."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from neptrio.client.connection import ConnectionLost
from neptrio.sweep.load import REFUSALS, Load, Loaded, Script
from neptrio.sweep.measure import point_of

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@contextmanager
def answering(answer: Callable[[bytes], list[bytes]]) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives to each request the pieces that `answer` returns; an empty one closes the connection."""
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connection: socket.socket) -> None:
            with connection, connection.makefile("rb") as file:
                while head := file.readline():
                    length = 0
                    while (line := file.readline()) != b"\r\n":
                        name, _, value = line.partition(b":")
                        length = int(value) if name == b"Content-Length" else length
                    body = file.read(length)
                    seen.append(body)
                    for piece in answer(head):
                        if not piece:
                            return
                        connection.sendall(piece)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threads.append(threading.Thread(target=serve, args=(connection,)))
                threads[-1].start()

        threads: list[threading.Thread] = []
        acceptor = threading.Thread(target=accept)
        acceptor.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", seen
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            acceptor.join()
            for thread in threads:
                thread.join()


def run(address: str, clients: int = 1, seconds: float = 0, body: bytes = b"x") -> Loaded:
    load = Load(address)
    return load.run([Script((load.request("/infer", {}, body),))] * clients, seconds)


def test_every_client_is_answered_at_least_once() -> None:
    with answering(lambda _: [OK]) as (address, seen):
        found = run(address, clients=3)
    assert len(found.latencies) == len(found.ended) == len(seen) == 3
    assert found.failures == 0 and found.seconds == max(found.ended) > 0


def test_answers_may_come_in_pieces_and_chunks() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    for whole in (OK, chunked):
        with answering(lambda _, whole=whole: [whole[i : i + 1] for i in range(len(whole))]) as (address, _):  # type: ignore[misc]
            assert len(run(address).latencies) == 1


def test_large_requests_are_written_as_the_server_takes_them() -> None:
    with answering(lambda _: [OK]) as (address, seen):
        assert len(run(address, clients=2, body=bytes(8 << 20)).latencies) == 2
    assert [len(body) for body in seen] == [8 << 20] * 2


def test_a_server_that_only_refuses_is_not_asked_for_ever() -> None:
    refusal = b'HTTP/1.1 503 Service Unavailable\r\nContent-Length: 16\r\n\r\n{"error":"full"}'
    with answering(lambda _: [refusal]) as (address, _):
        found = run(address, clients=2, seconds=3600)
    assert REFUSALS <= found.failures <= REFUSALS + 1 and not found.latencies
    assert found.failure == 'HTTP status 503: {"error":"full"}'
    event = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n13\r\nevent: error\ndata: {}\r\n0\r\n\r\n"
    with answering(lambda _: [event]) as (address, _):
        assert run(address).failures == 1


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([b""], "closed the connection"),
        ([b"HTTP/1.1 200 OK\r\n\r\n"], "neither with a Content-Length nor in chunks"),
        ([OK.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")], "closes connections after an answer"),
    ],
)
def test_connections_that_end_are_told(pieces: list[bytes], said: str) -> None:
    with answering(lambda _: pieces) as (address, _), pytest.raises(ConnectionLost, match=said):
        run(address, seconds=3600)


def test_a_sequence_is_ended_when_the_time_is_over() -> None:
    with answering(lambda _: [OK]) as (address, seen):
        load = Load(address)
        steps = tuple(load.request("/infer", {}, name) for name in (b"start", b"middle", b"end"))
        assert len(load.run([Script(steps, steps[2])], 0).latencies) == 2
    assert seen == [b"start", b"end"]


def test_a_point_is_the_difference_of_two_statistics() -> None:
    def stats(requests: int, hits: int, sizes: dict[int, int]) -> dict[str, object]:
        spent = {"count": requests - hits, "ns": 1000 * (requests - hits)}
        part = lambda n: {"count": n, "ns": 5_000_000 * n}  # noqa: E731
        return {
            "inference_count": sum(s * n for s, n in sizes.items()),
            "execution_count": sum(sizes.values()),
            "inference_stats": {
                "success": {"count": requests, "ns": 0},
                "queue": {"count": requests, "ns": 7000 * requests},
                "cache_hit": {"count": hits, "ns": 0},
                **{f"compute_{name}": spent for name in ("input", "infer", "output")},
            },
            "batch_stats": [
                {"batch_size": s, **{f"compute_{name}": part(n) for name in ("input", "infer", "output")}}
                for s, n in sizes.items()
            ],
        }

    found = Loaded(seconds=2.0, latencies=[0.001] * 90, ended=[i / 45 for i in range(90)], client_cpu=0.5)
    point = point_of(1, 4, found, stats(10, 0, {1: 10}), stats(110, 4, {1: 20, 2: 43}), 0.25)
    assert (point.requests, point.others, point.cache_hits) == (90, 10, 4)
    assert point.sizes == {1: (10, pytest.approx(0.15)), 2: (43, pytest.approx(0.645))}
    assert (point.executions, point.inferences, point.queue_us, point.compute_us) == (53, 96, 7.0, 3.0)
    assert (point.requests_per_s, point.p50_ms, point.client_cpu, point.stable) == (45.0, 1.0, 0.25, True)
    assert not point.usable
    found.ended = [i / 100 for i in range(90)]
    assert not point_of(1, 4, found, stats(0, 0, {}), stats(90, 0, {1: 90}), None).stable
