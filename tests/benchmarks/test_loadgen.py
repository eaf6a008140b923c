"""The load generator against a server that stalls on purpose, and against a real one."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run
from tests.support.server import ServerProcess

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n"


class Stalling:
    """Answers one connection's requests; the one numbered `at` waits for `seconds`, or for ever."""

    def __init__(self, at: int, seconds: float | None, answer: bytes = ANSWER) -> None:
        self._at, self._seconds, self._answer = at, seconds, answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        data, count = b"", 0
        with connection:
            while got := connection.recv(65536):
                data += got
                while (end := data.find(b"\r\n\r\n")) >= 0 and len(data) >= end + 6:
                    data, count = data[end + 6 :], count + 1
                    if count == self._at:
                        self._closed.wait(self._seconds)
                    connection.sendall(self._answer)

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        self._thread.join()


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    run.build_loadgen()


@pytest.fixture
def body(tmp_path: Path) -> Iterator[list[str]]:
    (tmp_path / "body").write_bytes(b"{}")
    (tmp_path / "expect").write_bytes(b"ok")
    yield ["--mode", "http", "--path", "/", "--body", f"{tmp_path}/body", "--expect", f"{tmp_path}/expect"]


SECONDS = (
    "0.2",
    "2",
    "20",
)  # of short runs: the longer ones where the machine had no time for what is looked for


def generate(server: Stalling, options: list[str]) -> tuple[int, dict[str, Any]]:
    try:
        command = [str(run.LOADGEN), *options, "--port", str(server.port), "--warmup", "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    finally:
        server.close()
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_open_loop_charges_a_stall_to_all_that_was_due(body: list[str]) -> None:
    # 100 of the 400 requests are due while the server stalls for half a second
    code, result = generate(Stalling(100, 0.5), [*body, "--rate", "200", "--duration", "2"])
    assert code == 0
    assert result["requests"] == 400
    assert result["p90_us"] > 250_000  # the 40 slowest waited for more than half of the stall


@pytest.mark.slow
def test_closed_loop_sees_a_stall_once(body: list[str]) -> None:
    for seconds in SECONDS[1:]:
        code, result = generate(Stalling(10, 0.5), [*body, "--duration", seconds])
        if result["requests"] > 10:
            break
    assert code == 0
    assert result["requests"] > 10
    assert result["max_us"] > 400_000


@pytest.mark.slow
def test_what_is_due_before_the_end_is_sent_after_it(body: list[str]) -> None:
    # the stall outlasts the measurement: every request is still sent, answered and counted
    code, result = generate(Stalling(50, 1.5), [*body, "--rate", "100", "--duration", "1"])
    assert code == 0
    assert result["requests"] == 100
    assert result["p99_us"] > 1_000_000


def test_a_chunked_answer_is_joined(body: list[str]) -> None:
    for seconds in SECONDS:
        code, result = generate(Stalling(0, 0, CHUNKED), [*body, "--duration", seconds])
        if result["requests"] or result["mismatches"]:
            break
    assert code == 0
    assert result["requests"] > 0


def test_a_wrong_answer_is_an_error(body: list[str]) -> None:
    answer = ANSWER.replace(b"ok", b"no")
    for seconds in SECONDS:
        code, result = generate(Stalling(0, 0, answer), [*body, "--duration", seconds])
        if result["mismatches"]:
            break
    assert code == 1
    assert result["mismatches"] > 0


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def counted(options: list[str]) -> subprocess.CompletedProcess[str]:
    """A short run of the generator; a longer one where the machine had no time for a single answer."""
    for seconds in SECONDS:
        command = [str(run.LOADGEN), *options, "--duration", seconds]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if not done.stdout:
            break
        result = result_of(done)
        if result["requests"] or result["failures"] or result["mismatches"]:
            break
    return done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "model", "elements"),
    [
        ("json", "simple", 16),
        ("binary", "simple", 16),
        ("unary", "simple", 16),
        ("stream", "simple", 16),
        ("binary", "large", 300_000),
        ("unary", "large", 300_000),
    ],
)
def test_every_form_is_answered_by_a_real_server(
    form: str, model: str, elements: int, tmp_path: Path
) -> None:
    from benchmarks import models

    models.python_repository(tmp_path / "models")
    with ServerProcess(tmp_path / "models") as server:
        address = server.http if form in ("json", "binary") else server.grpc
        work = run.workload(run.Case("", form, model, 1, elements=elements))
        options = [*run.write_bodies(work, form, tmp_path / form), "--port", address.rpartition(":")[2]]
        options += ["--warmup", "0.1", "--idle", "20", "--connections", "2"]
        done = counted(options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("idle 20\n")
    assert result_of(done)["requests"] > 0


@pytest.mark.slow
def test_sequences_end_with_the_run(tmp_path: Path) -> None:
    """What a run left open would keep its slot, and the next run would wait for it."""
    from benchmarks import models

    models.native_repository(tmp_path / "models")
    with ServerProcess(tmp_path / "models") as server:
        work = run.workload(run.Case("", "sequence", "sequence", 1))
        options = [*run.write_bodies(work, "sequence", tmp_path), "--port", server.grpc.rpartition(":")[2]]
        options += ["--warmup", "0", "--streams", "40", "--sequence-length", "10"]
        for first in ("1", "1000000"):  # 40 + 40 sequences are more than the model's 64 candidates
            done = counted([*options, "--first-sequence", first])
            assert done.returncode == 0, done.stdout + done.stderr
            assert result_of(done)["requests"] > 0
