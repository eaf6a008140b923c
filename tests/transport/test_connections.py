"""Too many connections: probes and scrapes are answered, others are told to come again, and it passes."""

from __future__ import annotations

import json
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from neptrio.service.connections import Connections, client_of, kept_back
from neptrio.settings import Settings
from tests.support.gate import Gate
from tests.support.http import Http1
from tests.support.infer_messages import identity
from tests.support.latch import Latch
from tests.support.memory import resident
from tests.support.metrics import scrape, value
from tests.support.raw_http2 import LIVE, RawClient, message
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess, without_front_ends
from tests.support.waiting import until
from tests.transport.http1.test_http1 import GOOD, post
from tests.transport.rest.test_http2_attacks import PLAIN

INFER = "/v2/models/simple/infer"
PROBE = b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n"
GATED = b'{"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "INT32", "data": [1]}]}'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_model(tmp_path / "models", "simple", identity_config())
    return tmp_path / "models"


def idle(stack: ExitStack, address: str, count: int) -> list[socket.socket]:
    """Connections that say nothing."""
    host, _, port = address.rpartition(":")
    return [
        stack.enter_context(socket.create_connection((host, int(port)), timeout=60)) for _ in range(count)
    ]


def probes_are_answered(server: ServerProcess) -> None:
    """REST, gRPC by hand and by the real client, and the metrics page."""
    for path in ("live", "ready"):
        with Http1(server.http) as client:
            assert client.request("GET", f"/v2/health/{path}").status == 200
    with RawClient(server.grpc) as raw:
        assert raw.call(1, b"", LIVE).status == 0
    with RawClient(server.grpc) as raw:
        assert raw.call(1, b"", "/grpc.health.v1.Health/Check").status == 0
    with httpclient.InferenceServerClient(server.http) as http:
        assert http.is_server_ready()
    with grpcclient.InferenceServerClient(server.grpc) as grpc:
        assert grpc.is_server_ready()
    assert "nv_inference_count" in scrape(server)


# ---------------------------------------------------------------- descriptors


@pytest.mark.slow
def test_hundreds_of_idle_connections(repository: Path) -> None:
    """With 128 descriptors; the machine's gauges go on, and in the end there is room again."""
    with ServerProcess(repository, "--metrics-interval-ms=20", limits="ulimit -n 128") as server:
        with ExitStack() as stack:
            for address in (server.http, server.grpc, server.metrics):
                idle(stack, address, 200)
            for _ in range(3):
                probes_are_answered(server)
            server.until_logged("no descriptors left for connections: turned away a connection")
            assert "sampling the machine failed" not in server.log()
            # idle connections end within seconds while others are turned away
            until(lambda: infer(server) == 200, "there is room for a request")
        assert server.log().count("turned away a connection") < 100  # which would be one for each


@pytest.mark.slow
@without_front_ends
@pytest.mark.parametrize("path", ["/v2", INFER])
def test_an_idle_connection_keeps_no_head(repository: Path, path: str) -> None:
    """Each of 400 had 60 KB, and may stay idle for as long as it likes."""
    with ServerProcess(repository) as server, ExitStack() as stack:
        clients = [stack.enter_context(Http1(server.http)) for _ in range(400)]

        def ask(size: int) -> int:
            for client in clients:
                body = GOOD if path == INFER else b""
                reply = client.request("POST" if body else "GET", path, body, {"x-much": "y" * size})
                assert reply.status == 200
            return resident(server.process.pid)

        before = ask(1)
        assert ask(60_000) - before < 8 << 20


def infer(server: ServerProcess) -> int:
    with Http1(server.http) as client:
        return client.request("POST", INFER, GOOD).status


@pytest.mark.slow
def test_the_soft_limit_is_raised(repository: Path) -> None:
    with ServerProcess(repository, limits="ulimit -S -n 64") as server:
        limits = Path(f"/proc/{server.process.pid}/limits").read_text()
        (line,) = (line for line in limits.splitlines() if line.startswith("Max open files"))
        soft, hard = line.split()[3:5]
        assert soft == str(min(int(hard), 1 << 20))
        with ExitStack() as stack:
            idle(stack, server.http, 100)
            assert infer(server) == 200


WAITS = """
import pathlib


class TritonPythonModel:
    def initialize(self, args):
        pathlib.Path({entered!r}).touch()
        pathlib.Path({latch!r}).read_bytes()

    def execute(self, requests):
        return []
"""


@pytest.mark.slow
def test_a_flood_while_the_server_starts(tmp_path: Path) -> None:
    """Hundreds of connections to every port before the fronts are up."""
    entered = tmp_path / "entered"
    with ExitStack() as stack:
        latch = stack.enter_context(Latch(tmp_path / "latch"))
        code = WAITS.format(entered=str(entered), latch=str(latch.path))
        write_model(tmp_path / "models", "waits", 'backend: "python"', {"1/model.py": code})
        ports = []
        for _ in range(3):  # taken, so that nobody else gets them
            holder = stack.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
            ports.append(holder.getsockname()[1])
        flags = [
            f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)
        ]

        def flood() -> None:
            until(entered.exists, "the model loads, and the ports listen")
            for port in ports:
                idle(stack, f"127.0.0.1:{port}", 300)
            latch.open()

        flooding = threading.Thread(target=flood)
        flooding.start()
        with ServerProcess(tmp_path / "models", *flags, limits="ulimit -n 128") as server:
            flooding.join(60)
            probes_are_answered(server)


@pytest.mark.slow
@without_front_ends  # connections take descriptors of front ends: see the next test
def test_no_descriptor_is_left_for_a_while(repository: Path) -> None:
    """Somebody else in the process took them all: connections are closed, samples fail, then all is well."""
    with ServerProcess(repository, "--metrics-interval-ms=20") as server, ExitStack() as stack:
        pid = server.process.pid
        with RawClient(server.grpc) as raw:  # its call needs modules: they are imported when it is answered
            assert raw.call(1, b"", LIVE).status == 0
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (without_gaps(server, pid, stack), before[1]))
        server.until_logged("sampling the machine failed, its gauges stay as they are", 3)
        for address in (server.http, server.grpc, server.metrics):
            with Http1(address) as client:
                assert client.closed()
        server.until_logged("connections are closed as they come")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        until(lambda: infer_or_refused(server) == 200, "connections are taken again")
        probes_are_answered(server)
        # not its utilization, which stays at 1 while all processors are busy
        first = value(scrape(server), "nv_cpu_memory_used_bytes")
        taken = b"x" * (64 << 20)
        until(
            lambda: taken and value(scrape(server), "nv_cpu_memory_used_bytes") != first,
            "samples are taken again",
        )


@pytest.mark.slow
def test_no_descriptor_is_left_in_a_front_end(repository: Path) -> None:
    with ServerProcess(repository, "--frontends=1") as server, ExitStack() as stack:
        pid = int(value(scrape(server), "neptrio_front_end_process_id", front_end="0"))
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (without_gaps(server, pid, stack), before[1]))
        for address in (server.http, server.grpc):
            with Http1(address) as client:
                assert client.closed()
        server.until_logged("connections are closed as they come")
        scrape(server)  # the engine has descriptors
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        until(lambda: infer_or_refused(server) == 200, "connections are taken again")
        probes_are_answered(server)


def without_gaps(server: ServerProcess, pid: int, stack: ExitStack) -> int:
    """How many descriptors the process that serves has, once they are the lowest numbers: connections fill what is free between.

    A limit below a descriptor that is in use would forbid its number for ever once it is closed.
    """
    probe = stack.enter_context(Http1(server.http))
    while True:
        # many samples long, and not while the process stands still: what is open all the time, without the sampler's files
        used, answers, end = descriptors(pid), 0, time.monotonic() + 0.5
        while time.monotonic() < end or answers < 50:
            assert probe.request("GET", "/v2/health/live").status == 200
            answers += 1
            used &= descriptors(pid)
        if used == set(range(len(used))):
            return len(used)
        client = stack.enter_context(Http1(server.http))
        assert client.request("GET", "/v2/health/live").status == 200


def descriptors(pid: int) -> set[int]:
    return {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}


def infer_or_refused(server: ServerProcess) -> int:
    try:
        return infer(server)
    except ConnectionError:
        return 0


# ---------------------------------------------------------------- limits


class Full:
    """A server with room for two connections, which two requests hold that do not end."""

    def __init__(self, tmp_path: Path, stack: ExitStack, *flags: str) -> None:
        self.gate = Gate(tmp_path / "models", tmp_path / "gate", extra="", size=1)
        stack.callback(self.gate.close)
        write_model(tmp_path / "models", "simple", identity_config())
        self.server = stack.enter_context(ServerProcess(tmp_path / "models", *flags))
        self.holders = [stack.enter_context(Http1(self.server.http)) for _ in range(2)]
        for holder in self.holders:
            holder.send(post("gate", GATED))
        self.gate.started()

    def go(self) -> None:
        """The requests end."""
        self.gate.go("kk")
        for holder in self.holders:
            assert holder.read().status == 200


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Full]:
    with ExitStack() as stack:
        yield Full(tmp_path, stack, "--max-connections=2")


@pytest.mark.slow
def test_a_connection_too_many_is_told_why_and_when(full: Full) -> None:
    server = full.server
    why = "the server has its most connections, 2 (--max-connections); try again in 5 seconds"
    for request in (
        post("simple"),
        b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n",
    ):
        with Http1(server.http) as client:
            client.send(request)
            reply = client.read()
            assert (reply.status, reply.headers["retry-after"]) == (503, "5")
            assert reply.headers["connection"] == "close" and json.loads(reply.body) == {"error": why}
            assert client.file.read(1) == b""
    with RawClient(server.http) as raw:
        raw.send(raw.headers(1, INFER, override=PLAIN) + raw.data(1, GOOD))
        answer = raw.finish(1)
        assert answer.headers[0][":status"] == "503" and answer.headers[0]["retry-after"] == "5"
        assert json.loads(bytes(answer.data)) == {"error": why}
    with RawClient(server.grpc) as raw:
        raw.start(1, identity("x", "simple"))
        answer = raw.finish(1)
        assert (answer.status, answer.text) == (14, why)
        assert answer.headers[-1]["grpc-retry-pushback-ms"] == "5000"
        raw.until_closed()
        assert raw.goaway is not None and raw.goaway.error_code == 0
    probes_are_answered(server)
    full.go()


def test_a_connection_too_many_may_ask_whether_the_server_is_well(full: Full) -> None:
    with Http1(full.server.http) as client:
        client.send(PROBE)
        reply = client.read()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
    with RawClient(full.server.http) as raw:
        raw.send(raw.headers(1, "/v2/health/live", end=True, override={**PLAIN, ":method": "GET"}))
        assert raw.finish(1).headers[0][":status"] == "200"
    full.go()


def test_there_is_room_when_a_connection_ends(full: Full) -> None:
    with Http1(full.server.http) as client:
        assert client.request("POST", INFER, GOOD).status == 503
    full.go()
    full.holders[0].close()
    until(lambda: infer(full.server) == 200, "a place is free")


@pytest.mark.slow
def test_an_idle_connection_makes_room_while_others_wait(full: Full) -> None:
    """Within seconds, though its time would be ten minutes; one that works stays."""
    full.gate.go("k")
    ready, _, _ = select.select([holder.sock for holder in full.holders], [], [], 60)
    (idle_one,) = (holder for holder in full.holders if holder.sock in ready)
    assert idle_one.read().status == 200
    (busy_one,) = (holder for holder in full.holders if holder is not idle_one)
    until(lambda: infer(full.server) == 200, "a place is free")
    assert idle_one.file.read(1) == b""
    full.gate.go("k")
    assert busy_one.read().status == 200


@pytest.mark.slow
@pytest.mark.parametrize("front", ["http", "grpc"])
def test_silent_connections_cannot_hold_the_last_places(full: Full, front: str) -> None:
    """Forty of them: each takes the place of the one before, and goes after seconds by itself."""
    with ExitStack() as stack:
        silent = idle(stack, getattr(full.server, front), 40)
        probes_are_answered(full.server)
        for sock in silent:
            while sock.recv(4096):  # SETTINGS
                pass
    full.go()


def test_one_address_leaves_room_for_others(repository: Path) -> None:
    with ServerProcess(repository, "--max-connections-per-address=2") as server, ExitStack() as stack:
        clients = [stack.enter_context(Http1(server.http)) for _ in range(2)]
        for client in clients:
            assert client.request("POST", INFER, GOOD).status == 200
        with Http1(server.http) as third:
            reply = third.request("POST", INFER, GOOD)
            assert reply.status == 503 and "this address has its most connections, 2" in reply.body.decode()
        host, port = server.http.split(":")
        with socket.create_connection((host, int(port)), 60, source_address=("127.0.0.2", 0)) as other:
            other.sendall(post("simple"))
            assert other.recv(15) == b"HTTP/1.1 200 OK"
        clients[0].close()
        until(lambda: infer(server) == 200, "the address has room again")


@pytest.mark.slow
def test_an_idle_grpc_connection_ends(repository: Path) -> None:
    assert Settings().http_keep_alive_timeout_secs == 600
    assert Settings().grpc_max_connection_idle_ms == 600_000
    with ServerProcess(repository, "--grpc-max-connection-idle=300") as server, ExitStack() as stack:

        def watches() -> RawClient | None:
            """A client of Watch; None where a pause has made its connection idle before that."""
            made = stack.enter_context(RawClient(server.grpc))
            try:
                made.send(made.headers(1, "/grpc.health.v1.Health/Watch") + made.data(1, message(b"")))
            except ConnectionError:
                return None
            made.until(lambda: made.replies[1].messages or made.closed, "Watch answers")
            return made if made.replies[1].messages else None

        watching = until(watches, "a connection has a call")
        assert watching is not None
        with RawClient(server.grpc) as silent:
            silent.until_closed()
            assert silent.goaway is not None and silent.goaway.error_code == 0
            assert watching.call(3, identity("x", "simple")).status == 0


# ---------------------------------------------------------------- the counts


def test_addresses_are_those_of_clients() -> None:
    assert client_of("10.1.2.3") == "10.1.2.3"
    assert client_of("::ffff:10.1.2.3") == "10.1.2.3"
    assert client_of("2001:db8:1:2:3:4:5:6") == client_of("2001:db8:1:2::1") == "2001:db8:1:2::/64"
    assert client_of("fe80::1%eth0") == "fe80::/64"
    assert client_of("2001:db8:1:3::1") != client_of("2001:db8:1:2::1")


def test_what_is_let_in_is_counted_until_it_leaves() -> None:
    connections = Connections(most=3, of_one_client=2, descriptors=1024)
    assert connections.enter(10, "a") == connections.enter(11, "a") == connections.enter(12, "b") == ""
    assert "most connections, 3" in connections.enter(13, "c")
    assert connections.statistics().open == 3 and connections.statistics().clients == 2
    connections.leave("b")
    assert "this address" in connections.enter(12, "a")
    assert connections.enter(12, "c") == ""
    for address in ("a", "a", "c"):
        connections.leave(address)
    assert (connections.statistics().open, connections.statistics().clients) == (0, 0)
    assert connections.statistics().turned_away == 2


def test_descriptors_above_the_line_are_kept_back() -> None:
    for descriptors in (64, 128, 1024, 4096, 1 << 20):
        connections = Connections(descriptors=descriptors)
        line = descriptors - kept_back(descriptors)
        assert connections.enter(line - 1, "a") == "" and not connections.pressed
        assert "descriptors" in connections.enter(line, "a") and connections.pressed
    assert kept_back(128) == 64 and kept_back(1 << 20) == 512
