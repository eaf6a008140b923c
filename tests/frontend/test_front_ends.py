"""A server with front ends, through real sockets: everything works through each, and the end of one is its own."""

from __future__ import annotations

import json
import os
import queue
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.support.gate import Gate
from tests.support.http import Http1
from tests.support.metrics import scrape, value
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.statistics import stats
from tests.support.waiting import until

COUNT = 2


def children(server: ServerProcess) -> list[tuple[int, str]]:
    """The engine's child processes and their names."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = stat.read_text().partition(" (")
        except OSError:
            continue  # it has ended
        name, _, rest = rest.rpartition(") ")
        if int(rest.split()[1]) == server.process.pid:
            found.append((int(pid), name))
    return found


def pids(server: ServerProcess) -> list[int]:
    """The front ends' processes: the engine's children of that name, but for their template."""
    return [
        pid for pid, name in children(server) if name.startswith("neptrio:front") and name != "neptrio:fronts"
    ]


def front_of(server: ServerProcess, local: tuple[str, int]) -> int:
    """The front end that serves the connection of a client's socket."""
    ends = [f":{int(server.http.rpartition(':')[2]):04X}", f":{local[1]:04X}"]

    def accepted() -> set[str]:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        # as a set: a row may be told twice where the table changes while it is read
        return {row[9] for row in rows if [row[1][-5:], row[2][-5:]] == ends and row[9] != "0"}

    (inode,) = until(accepted, "a front end has accepted it")
    for pid in pids(server):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if os.readlink(each) == f"socket:[{inode}]":
                    return pid
            except FileNotFoundError:
                continue
    raise AssertionError("no front end has the connection")


def clients_of_both(server: ServerProcess) -> dict[int, Http1]:
    """A connection to each of two front ends, by its process."""
    first = Http1(server.http)
    assert first.request("GET", "/v2/health/live").status == 200
    one = front_of(server, first.sock.getsockname())
    os.kill(one, signal.SIGSTOP)  # so that the other takes the next connection
    try:
        second = Http1(server.http)
        assert second.request("GET", "/v2/health/live").status == 200
        other = front_of(server, second.sock.getsockname())
    finally:
        os.kill(one, signal.SIGCONT)
    assert one != other
    return {one: first, other: second}


def infer_body(values: list[int], id: str = "") -> bytes:
    return json.dumps(
        {
            "id": id,
            "inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1, len(values)], "data": values}],
        }
    ).encode()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    write_model(folder, "echo", identity_config(dims="-1", pairs=1))
    write_model(folder, "text", identity_config("TYPE_STRING", dims="-1", pairs=1))
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    with ServerProcess(repository, f"--frontends={COUNT}", "--model-control-mode=none") as process:
        yield process


@pytest.mark.parametrize("size", [4, 100_000, 4_000_000])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tensors_of_any_size(server: ServerProcess, protocol: str, size: int) -> None:
    module: Any = httpclient if protocol == "http" else grpcclient
    array = np.arange(size, dtype=np.int32).reshape(1, size)
    given = module.InferInput("INPUT0", [1, size], "INT32")
    given.set_data_from_numpy(array)
    with module.InferenceServerClient(getattr(server, protocol)) as client:
        for _ in range(3):
            result = client.infer("echo", [given], request_id="one")
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_strings(server: ServerProcess, protocol: str) -> None:
    module: Any = httpclient if protocol == "http" else grpcclient
    array = np.array([[b"", b"a" * 70_000, "é".encode()]], object)
    given = module.InferInput("INPUT0", [1, 3], "BYTES")
    given.set_data_from_numpy(array)
    with module.InferenceServerClient(getattr(server, protocol)) as client:
        assert client.infer("text", [given]).as_numpy("OUTPUT0").tolist() == array.tolist()


def test_every_front_end_serves_every_verb_with_the_same_counts(server: ServerProcess) -> None:
    found = clients_of_both(server)
    before = stats(server, "echo")["inference_count"]
    for client in found.values():
        reply = client.request("POST", "/v2/models/echo/infer", infer_body([1, 2]))
        assert (reply.status, json.loads(reply.body)["outputs"][0]["data"]) == (200, [1, 2])
        assert client.request("GET", "/v2/models/echo").status == 200
        assert client.request("POST", "/v2/models/echo/generate", b'{"INPUT0": [[5]]}').status == 200
        assert client.request("GET", "/nothing").status == 404
    assert stats(server, "echo")["inference_count"] == before + 2 * COUNT
    for client in found.values():
        client.close()


def test_a_large_answer_of_a_control_verb(server: ServerProcess) -> None:
    """It comes in many pieces."""
    with grpcclient.InferenceServerClient(server.grpc) as client:
        assert client.get_model_config("echo").config.name == "echo"
        with pytest.raises(Exception, match="not found"):
            client.get_model_config("nope")


DECOUPLED = """
class TritonPythonModel:
    def execute(self, requests):
        raise AssertionError("nothing comes here")
"""


@pytest.mark.slow
@pytest.mark.parametrize("front_ends", [0, COUNT])
def test_which_model_is_asked_comes_before_what_the_body_is(tmp_path: Path, front_ends: int) -> None:
    write_model(tmp_path, "echo", identity_config(dims="-1", pairs=1))
    write_model(
        tmp_path,
        "many",
        'backend: "python" model_transaction_policy { decoupled: true } '
        'input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ] '
        'output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]',
        {"1/model.py": DECOUPLED},
    )
    with ServerProcess(tmp_path, f"--frontends={front_ends}") as server, Http1(server.http) as client:
        for body in (b"{", b"[" * 300_000):
            for path, code, text in (
                ("/v2/models/nope/infer", 404, b"unknown model: 'nope' is not found"),
                ("/v2/models/echo/versions/7/infer", 404, b"'echo' version 7 is not"),
                ("/v2/models/many/infer", 501, b"decoupled transaction policy"),
                ("/v2/models/echo/infer", 400, b"error"),
            ):
                reply = client.request("POST", path, body)
                assert (reply.status, text in reply.body) == (code, True), (path, reply)
        assert client.request("POST", "/v2/models/echo/infer", infer_body([1])).status == 200


@pytest.mark.slow
def test_the_end_of_one_is_its_own(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "models", tmp_path / "gate")
    with ServerProcess(tmp_path / "models", f"--frontends={COUNT}") as server:
        found = clients_of_both(server)
        (victim, lost), (_, stays) = found.items()
        lost.start("POST", "/v2/models/gate/infer", infer_body([1], "lost"))
        assert gate.started() == ["lost"]
        stays.start("POST", "/v2/models/gate/infer", infer_body([2], "stays"))
        os.kill(victim, signal.SIGKILL)
        assert lost.file.readline() == b"", "its connections have ended"
        gate.go("c")  # goes on when the request is cancelled
        assert gate.reported() == ["lost"]
        assert gate.started() == ["stays"]
        gate.go()
        reply = stays.read()
        assert (reply.status, json.loads(reply.body)["outputs"][0]["data"]) == (200, [2])
        until(lambda: len(set(pids(server)) - {victim}) == COUNT, "another has started")
        again = clients_of_both(server)
        for number, client in enumerate(again.values()):
            client.start("POST", "/v2/models/gate/infer", infer_body([3], f"new{number}"))
            assert gate.started() == [f"new{number}"]
            gate.go()
            assert client.read().status == 200
        for client in [*found.values(), *again.values()]:
            client.close()
        server.until_logged("front end")
    gate.close()


@pytest.mark.slow
def test_a_shutdown_answers_what_is_under_way(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "models", tmp_path / "gate")
    server = ServerProcess(tmp_path / "models", f"--frontends={COUNT}")
    processes = pids(server)
    assert len(processes) == COUNT
    with Http1(server.http) as client, grpcclient.InferenceServerClient(server.grpc) as grpc:
        answers: queue.Queue[Any] = queue.Queue()
        client.start("POST", "/v2/models/gate/infer", infer_body([1], "http"))
        assert gate.started() == ["http"]
        given = grpcclient.InferInput("INPUT0", [1, 1], "INT32")
        given.set_data_from_numpy(np.array([[7]], np.int32))
        grpc.async_infer(
            "gate", [given], lambda result, error: answers.put((result, error)), request_id="grpc"
        )
        until(
            lambda: value(scrape(server), "neptrio_requests", model="gate", version="1", state="queued"),
            "it is queued",
        )
        server.process.send_signal(signal.SIGTERM)
        gate.go("k")
        assert gate.started() == ["grpc"]
        gate.go("k")
        assert client.read().status == 200
        result, error = answers.get(timeout=60)
        assert error is None
        assert result.as_numpy("OUTPUT0").tolist() == [[7]]
    assert server.ended() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    gate.close()


@pytest.mark.slow
def test_front_ends_end_with_the_engine(repository: Path) -> None:
    server = ServerProcess(repository, f"--frontends={COUNT}")
    processes = pids(server)
    server.process.kill()
    server._end(60)
    until(lambda: not any(alive(pid) for pid in processes), "they have ended")


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_the_start_up_text_names_what_they_speak(repository: Path) -> None:
    with ServerProcess(repository, "--frontends=1", "--allow-grpc=false") as server:
        (pid,) = pids(server)
        server.until_logged(f"front ends speak HTTP (0: process {pid})\n")
