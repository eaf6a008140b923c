"""Limits and tokens with front ends: they hold for all front ends together, and a front end that ends gives back."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.frontend.test_front_ends import COUNT, clients_of_both, infer_body, pids
from tests.support.gate import Gate
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.run_first import with_site
from tests.support.server import ServerProcess
from tests.support.waiting import until
from tests.transport.test_tokens import row

GATED = "/v2/models/gate/infer"
ECHO = "/v2/models/echo/infer"
FLAGS = (f"--frontends={COUNT}",)
# of rates: however slow the machine is, the next request may not come before the test has ended
LONG_SECONDS = "from neptrio.service import request_limits\nrequest_limits.NS *= 10**6\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_model(tmp_path / "models", "echo", identity_config(dims="-1", pairs=1))
    return tmp_path / "models"


def ask(client: Http1, token: str, path: str = ECHO) -> tuple[int, bytes]:
    """A request with a token; "" for none."""
    send(client, token, path)
    reply = client.read()
    return reply.status, reply.body


def send(client: Http1, token: str, path: str = ECHO, id: str = "") -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    client.start("POST", path, infer_body([1], id), headers)


def with_file(tmp_path: Path, text: str) -> str:
    (tmp_path / "auth.toml").write_text(text)
    return f"--auth-config={tmp_path}/auth.toml"


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["token", "address"])
def test_requests_at_once_are_counted_over_all(tmp_path: Path, repository: Path, limit: str) -> None:
    gate = Gate(repository, tmp_path / "gate")
    flag = "--max-concurrent-requests-per-address=1"
    if limit == "token":
        flag = with_file(tmp_path, row("narrow", "infer") + "concurrent_requests = 1\n")
    token = "narrow" if limit == "token" else ""
    with ServerProcess(repository, flag, *FLAGS) as server:
        found = clients_of_both(server)
        (victim, holds), (_, other) = found.items()
        send(holds, token, GATED, "held")
        assert gate.started() == ["held"]
        status, body = ask(other, token)
        assert (status, b"has 1 requests under way" in body) == (429, True)
        os.kill(victim, signal.SIGKILL)  # which cancels what it has asked for, and that is counted no more
        gate.go("c")
        assert gate.reported() == ["held"]
        until(lambda: ask(other, token)[0] == 200, "there is room for another request")
        for client in found.values():
            client.close()
    gate.close()


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["token", "address"])
def test_requests_per_second_are_counted_over_all(tmp_path: Path, repository: Path, limit: str) -> None:
    flag, text = "--max-requests-per-second-per-address=3", b"3 requests per second"
    if limit == "token":
        flag = with_file(tmp_path, row("slow", "infer", "read") + "requests_per_second = 3\n")
    token = "slow" if limit == "token" else ""
    with ServerProcess(repository, flag, *FLAGS, env=with_site(tmp_path, LONG_SECONDS)) as server:
        found = list(clients_of_both(server).values())
        # probes are not counted, so the bucket is full; each front end alone would let three pass
        replies = [ask(found[number % 2], token) for number in range(6)]
        assert [status for status, _ in replies] == [200, 200, 200, 429, 429, 429]
        assert all(text in body for _, body in replies[3:])
        for client in found:
            client.close()


def turned_away(server: ServerProcess) -> bool:
    """Whether a new connection is told to try again later."""
    with Http1(server.http) as client:
        return client.request("GET", "/v2").status == 503


@pytest.mark.slow
def test_connections_are_counted_over_all(repository: Path) -> None:
    with ServerProcess(repository, "--max-connections-per-address=2", *FLAGS) as server:
        found = clients_of_both(server)
        (victim, first), (_, second) = found.items()
        assert turned_away(server)
        assert turned_away(server)
        os.kill(victim, signal.SIGKILL)
        assert first.file.readline() == b""
        until(lambda: len(set(pids(server)) - {victim}) == COUNT, "another has started")
        until(lambda: not turned_away(server), "its connections count no more")
        first.close()
        assert second.request("GET", "/v2").status == 200
        second.close()


@pytest.mark.slow
def test_the_newest_of_many_that_are_turned_away_is_answered(repository: Path) -> None:
    """They take places in the order in which they came, also when the engine is asked about many at once."""
    with ServerProcess(repository, "--max-connections=1", "--frontends=1") as server:
        with Http1(server.http) as holder, ExitStack() as stack:
            assert holder.request("GET", "/v2").status == 200
            (pid,) = pids(server)
            host, _, port = server.http.rpartition(":")
            for _ in range(5):
                os.kill(pid, signal.SIGSTOP)
                for _ in range(40):
                    stack.enter_context(socket.create_connection((host, int(port)), 60))
                with Http1(server.http) as probe:
                    probe.start("GET", "/v2/health/live")
                    os.kill(pid, signal.SIGCONT)
                    assert probe.read().status == 200


@pytest.mark.slow
def test_a_new_file_holds_everywhere_when_the_log_says_so(tmp_path: Path, repository: Path) -> None:
    flag = with_file(tmp_path, row("old", "infer"))
    with ServerProcess(repository, flag, *FLAGS) as server:
        found = list(clients_of_both(server).values())
        assert [ask(client, "old")[0] for client in found] == [200, 200]
        assert [ask(client, "new")[0] for client in found] == [401, 401]
        (tmp_path / "next").write_text(row("new", "infer") + row("third", "read"))
        os.replace(tmp_path / "next", tmp_path / "auth.toml")
        server.until_logged("there are 2 tokens now")
        assert [ask(client, "old")[0] for client in found] == [401, 401]
        assert [ask(client, "new")[0] for client in found] == [200, 200]
        assert [ask(client, "third")[0] for client in found] == [403, 403]
        for client in found:
            client.close()


@pytest.mark.slow
def test_a_client_that_resets_is_counted_no_more(repository: Path) -> None:
    with ServerProcess(repository, "--max-connections-per-address=1", *FLAGS) as server:
        host, _, port = server.http.rpartition(":")
        for _ in range(4):  # each leaves before it can have been let in, or right after
            sock = socket.create_connection((host, int(port)), 60)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            sock.close()
        until(lambda: not turned_away(server), "the place is free")
