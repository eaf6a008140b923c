"""Tests of the test suite's own helpers: a check that can never fail would check nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import trio
import tritonclient.http as httpclient

from tests.support.latch import Latch
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess, tracebacks
from tests.support.waiting import until, until_trio

LOG = """I1121 00:31:38.123456 4711 repository.py:12] before
E1121 00:31:39.123456 4711 app.py:79] GET /x failed
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    1 / 0
ZeroDivisionError: division by zero
2026-11-21T00:31:38Z I 4711 repository.py:12] between
Exception ignored in: <function f at 0x1>
Traceback (most recent call last):
ValueError: of two

lines
W1121 00:31:38.123456 4711 repository.py:12] after
"""


def test_tracebacks_are_found_with_what_belongs_to_them() -> None:
    lines = LOG.splitlines(keepends=True)
    assert tracebacks(LOG) == ["".join(lines[1:6]), "".join(lines[6:12])]
    assert tracebacks(LOG.replace("Traceback", "trace")) == []


def test_waiting_ends_with_a_value_or_says_what_did_not_come_true() -> None:
    values = iter([0, 0, 7])
    assert until(lambda: next(values)) == 7
    with pytest.raises(AssertionError, match=r"did not come true in 0.02 s: the text"):
        until(lambda: False, lambda: "the text", 0.02)
    values = iter([0, 0, 7])
    assert trio.run(until_trio, lambda: next(values)) == 7
    with pytest.raises(AssertionError, match=r"did not come true in 0.02 s: never"):
        trio.run(until_trio, lambda: False, "never", 0.02)


def test_a_latch_holds_until_it_is_opened_and_never_again(tmp_path: Path) -> None:
    passed = threading.Semaphore(0)

    def read() -> None:
        (tmp_path / "latch").read_bytes()
        passed.release()

    with Latch(tmp_path / "latch") as latch:
        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert not passed.acquire(timeout=0.05)
        latch.open()
        latch.open()
        for thread in threads:
            assert passed.acquire(timeout=60)
            thread.join(300)
        read()


FAILS = """
import subprocess
import sys
import threading
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        thread = threading.Thread(target=lambda: {}["not there"])
        thread.start()
        thread.join()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
CONFIG = """backend: "python" max_batch_size: 0
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
parameters { key: "isolation" value: { string_value: "none" } }
"""


def provoke(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        tensor = httpclient.InferInput("IN", [1], "INT32")
        tensor.set_data_from_numpy(np.ones(1, np.int32))
        client.infer("fails", [tensor])
    server.until_logged("KeyError: 'not there'")


@pytest.mark.slow
def test_a_traceback_in_the_log_fails_the_test_unless_it_is_provoked(tmp_path: Path) -> None:
    write_model(tmp_path, "fails", CONFIG, {"1/model.py": FAILS})
    with (
        pytest.raises(AssertionError, match=r"what no test provoked(.|\n)*KeyError: 'not there'"),
        ServerProcess(tmp_path) as server,
    ):
        provoke(server)
    assert server.process.returncode == 0
    with ServerProcess(tmp_path, failures="KeyError: 'not there'") as server:
        provoke(server)
    with (
        pytest.raises(AssertionError, match=r"'absent' is not 1 times in the log"),
        ServerProcess(tmp_path) as server,
    ):
        server.until_logged("absent", seconds=0.02)


@pytest.mark.slow
def test_the_log_has_what_the_server_wrote_before_its_answer(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config())
    with (
        ServerProcess(tmp_path, "--model-control-mode=explicit") as server,
        httpclient.InferenceServerClient(server.http) as client,
        server._news,  # the thread that reads comes too late
    ):
        client.load_model("m")
        assert "successfully loaded 'm'" in server.log()


UNCAUGHT = """
import subprocess
import sys
import threading

class Failing:
    def __del__(self):
        raise ValueError("in __del__")

def test_a_destructor():
    Failing()

def test_a_thread():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()

def test_an_open_file():
    open(__file__)

def test_a_coroutine_that_never_ran():
    async def coroutine(): ...
    coroutine()
"""


@pytest.mark.slow
def test_what_nobody_catches_fails_a_test(tmp_path: Path) -> None:
    """With the suite's settings warnings are errors, and so are exceptions that are otherwise only reported."""
    (tmp_path / "test_uncaught.py").write_text(UNCAUGHT)
    settings = Path(__file__).resolve().parents[2] / "pyproject.toml"
    command = [sys.executable, "-m", "pytest", "-c", str(settings), f"--rootdir={tmp_path}", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "4 failed" in done.stdout, done.stdout
