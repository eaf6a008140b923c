"""Bursts of responses of a decoupled model's process: beside others, and when the process ends behind one."""

from __future__ import annotations

import os
import queue
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.backends.python.models import config, isolated
from tests.support.server import ServerProcess
from tests.support.waiting import until

BURST = """
import os, pathlib
import numpy as np

HERE = pathlib.Path(__file__).parent

class TritonPythonModel:
    def execute(self, requests):
        count, size, ends = requests[0].inputs()[0].as_numpy().astype(int)
        if ends:
            (HERE / "pid.new").write_text(str(os.getpid()))
            (HERE / "pid.new").rename(HERE / "pid")
            (HERE / "pipe").read_bytes()
        sender = requests[0].get_response_sender()
        for number in range(count):
            made = pb_utils.Tensor("OUT", np.full(size, number, np.float32))
            sender.send(pb_utils.InferenceResponse([made]))
        if ends:
            os._exit(3)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""


class Stream:
    """A stream, whose answers of `burst` are checked."""

    def __init__(self, server: ServerProcess) -> None:
        self._answers: queue.Queue[Any] = queue.Queue()
        self._client = grpcclient.InferenceServerClient(server.grpc)
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))

    def ask(self, count: int, size: int, ends: bool = False) -> None:
        values = grpcclient.InferInput("IN", [3], "FP32")
        values.set_data_from_numpy(np.array([count, size, ends], np.float32))
        self._client.async_stream_infer("burst", [values], enable_empty_final_response=True)

    def take(self, count: int, size: int) -> None:
        """Takes the next answers: `count` of `size` elements, in order and complete."""
        for number in range(count):
            result, error = self._answers.get(timeout=60)
            assert error is None, f"answer {number}: {error}"
            got = result.as_numpy("OUT")
            assert got.shape == (size,) and (got == number).all(), f"answer {number}"

    def last(self) -> Any:
        """The result and error of what comes behind them."""
        return self._answers.get(timeout=60)

    def close(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


@pytest.fixture
def server(tmp_path: Path) -> Any:
    isolated(tmp_path, "burst", BURST, config(extra="model_transaction_policy { decoupled: true }"))
    isolated(tmp_path, "echo", ECHO)
    os.mkfifo(tmp_path / "burst" / "1" / "pipe")
    with ServerProcess(tmp_path) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("bursts,count,size", [(10, 200, 1 << 14), (10, 20, 1 << 17), (20, 1000, 1)])
def test_a_burst_beside_other_processes_is_complete(
    server: ServerProcess, bursts: int, count: int, size: int
) -> None:
    over = threading.Event()
    failed: list[BaseException] = []

    def others() -> None:
        try:
            with httpclient.InferenceServerClient(server.http) as client:
                number = 0
                while not over.is_set():
                    values = httpclient.InferInput("IN", [1], "FP32")
                    values.set_data_from_numpy(np.array([number], np.float32))
                    assert client.infer("echo", [values]).as_numpy("OUT")[0] == number
                    number += 1
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=others)
    thread.start()
    stream = Stream(server)
    try:
        for _ in range(bursts):
            stream.ask(count, size)
            stream.take(count, size)
            result, error = stream.last()
            assert error is None and result.get_response().parameters["triton_final_response"].bool_param
    finally:
        over.set()
        thread.join(60)
        stream.close()
    assert not failed


@pytest.mark.parametrize("count,size", [(400, 1), (15, 1 << 14), (3, 1 << 16)])
def test_what_a_process_sent_before_its_end_arrives(
    server: ServerProcess, tmp_path: Path, count: int, size: int
) -> None:
    """The server learns of all of it, and of the end, at once."""
    place = tmp_path / "burst" / "1"
    stream = Stream(server)
    stream.ask(count, size, ends=True)
    until((place / "pid").exists)
    pid = int((place / "pid").read_text())
    server.process.send_signal(signal.SIGSTOP)
    try:
        (place / "pipe").write_bytes(b"go")
        until(lambda: ended(pid), "the process still runs")
    finally:
        server.process.send_signal(signal.SIGCONT)
    stream.take(count, size)
    _, error = stream.last()
    assert "its process exited with status 3" in error.message()
    stream.close()


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True
