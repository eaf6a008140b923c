"""Which front end accepts the next connection."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from neptrio.frontend.connection_balance import ABSENT, ConnectionBalance, ConnectionCounts
from tests.frontend.test_front_ends import pids
from tests.frontend.test_rows import told
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

TRIES = 7
ALIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def counts() -> ConnectionCounts:
    counts, descriptor = ConnectionCounts.create(3)
    os.close(descriptor)
    return counts


def test_who_has_clearly_more_than_another_stands_back(counts: ConnectionCounts) -> None:
    first, second = ConnectionBalance(counts, 0), ConnectionBalance(counts, 2)
    first.has(0)
    assert first.accepts_next()  # the others do not accept
    first.has(1000)
    assert first.accepts_next()
    second.has(0)
    assert second.accepts_next()
    assert not first.accepts_next()
    first.has(2)
    assert not first.accepts_next()
    first.has(1)
    assert first.accepts_next()  # a few at a time, so that nobody waits for each single one
    second.has(1)
    first.has(2)
    assert first.accepts_next() and second.accepts_next()


def test_more_may_be_ahead_where_there_are_many(counts: ConnectionCounts) -> None:
    first, second = ConnectionBalance(counts, 0), ConnectionBalance(counts, 1)
    second.has(400)
    first.has(499)
    assert first.accepts_next()
    first.has(500)
    assert not first.accepts_next()
    counts.absent(1)
    assert first.accepts_next()


def test_nobody_accepts_at_first(counts: ConnectionCounts) -> None:
    assert counts.fewest() == ABSENT


def connect(server: ServerProcess, number: int) -> list[socket.socket]:
    host, _, port = server.http.rpartition(":")
    return [socket.create_connection((host, int(port)), timeout=30) for _ in range(number)]


def answer(clients: list[socket.socket]) -> None:
    for client in clients:
        client.sendall(ALIVE)
    for client in clients:
        assert client.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200"


def connections(server: ServerProcess) -> list[int]:
    """How many each front end has, as it said last: that of who asks may be among them."""
    return [row["connections"] for row in told(server).values()]


def shares(server: ServerProcess, number: int) -> list[int]:
    """Who has how many of so many connections that are made at once."""
    clients = connect(server, number)
    answer(clients)
    until(lambda: sum(connections(server)) >= number, "they have told of it")
    found = connections(server)
    for client in clients:
        client.close()
    until(lambda: sum(connections(server)) <= 1, "they have ended")
    return found


@pytest.mark.slow
def test_connections_made_at_once_are_shared_out(tmp_path: Path) -> None:
    """Who has no core for a few milliseconds is not waited for, and has fewer then: not most times."""
    write_model(tmp_path, "echo", identity_config(dims="-1", pairs=1))
    with ServerProcess(tmp_path, "--frontends=3") as server:
        found = [shares(server, 30) for _ in range(TRIES)]
        assert sum(min(each) >= 6 for each in found) > TRIES // 2, found


@pytest.mark.slow
def test_one_that_is_stopped_holds_nobody_up(tmp_path: Path) -> None:
    write_model(tmp_path, "echo", identity_config(dims="-1", pairs=1))
    with ServerProcess(tmp_path, "--frontends=2") as server:
        stopped, _ = pids(server)
        os.kill(stopped, signal.SIGSTOP)
        try:
            clients = connect(server, 20)  # all beyond its turn are the other's
            answer(clients)
            for client in clients:
                client.close()
        finally:
            os.kill(stopped, signal.SIGCONT)


@pytest.mark.slow
def test_one_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    write_model(tmp_path, "echo", identity_config(dims="-1", pairs=1))
    with ServerProcess(tmp_path, "--frontends=2") as server:
        victim, other = pids(server)
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(set(pids(server)) - {victim}) == 2, "another has started")
        new = (set(pids(server)) - {victim, other}).pop()
        until(lambda: told(server)[new]["loop_lag"]["count"], "it accepts")
        until(lambda: min(shares(server, 20)) >= 5, "it has its share")
