"""The system refuses threads: what was asked for fails, everything else goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import tritonclient.http as httpclient

import neptrio
import triton_python_backend_utils as utils
from neptrio.errors import Code, Unavailable
from neptrio.loop import threads
from tests.backends.python.models import isolated, python_model
from tests.backends.python.test_isolated_process import ONE, call, children
from tests.support.http import Http1, Reply
from tests.support.infer_messages import binary_head, request, stream_response
from tests.support.metrics import scrape, value
from tests.support.no_threads import NoThreads, workers
from tests.support.raw_http2 import LIVE, STREAM_INFER, RawClient, message
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

ASKED = """
class TritonPythonModel:
    def is_ready(self):
        return True

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
UNAVAILABLE = 14
OUTPUTS = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
MISSING = "the system gives the server no further thread now"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread can be started in this process, but for the third that is tried."""
    real, tries = threading.Thread.start, iter(range(100))

    def start(thread: threading.Thread) -> None:
        if next(tries) != 2:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(threads, "FIRST_PAUSE", 0.001)


def test_a_refused_thread_is_an_error_that_says_so(refused: None) -> None:
    with pytest.raises(Unavailable, match=MISSING) as info:
        threads.start(print)
    assert info.value.code == Code.UNAVAILABLE
    with pytest.raises(threads.NoThread):
        threads.start_later(60, print)


def test_what_must_not_fail_is_tried_until_it_works(refused: None) -> None:
    called = threading.Event()
    threads.start_surely(called.set).join()
    assert called.is_set()


def test_an_error_of_the_function_stays_its_own() -> None:
    def fail() -> None:
        raise RuntimeError("can't start new thread")  # but it was one that ran

    async def run() -> None:
        with pytest.raises(RuntimeError, match="new thread"):
            await threads.run(fail)
        assert await threads.run_surely(int, "3") == 3

    trio.run(run)


def test_every_thread_of_the_server_and_of_models_processes_starts_in_one_place() -> None:
    """Elsewhere nobody expects that the system refuses one."""
    found = []
    package, of_models = Path(neptrio.__file__).parent, Path(utils.__file__).parent
    for file in (*package.rglob("*.py"), *of_models.rglob("*.py")):
        if file not in (Path(threads.__file__), of_models / "_process" / "threads.py"):
            for number, line in enumerate(file.read_text().splitlines(), 1):
                if re.search(r"trio\.to_thread|threading\.(Thread|Timer)\(|start_new_thread", line):
                    found.append(f"{file}:{number}: {line.strip()}")
    assert not found, "use neptrio.loop.threads, or _process/threads.py:\n" + "\n".join(found)


def post(server: ServerProcess, path: str, body: Any) -> tuple[int, str]:
    request = urllib.request.Request(f"http://{server.http}{path}", json.dumps(body).encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.slow
def test_a_server_that_gets_no_threads_goes_on(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "asked", ASKED)
    isolated(tmp_path / "models", "apart", ASKED)
    write_model(tmp_path / "models", "m", identity_config())
    without = NoThreads(tmp_path)
    flags = (
        *("--model-control-mode=explicit", "--load-model=asked", "--load-model=apart"),
        *("--metrics-interval-ms=50", f"--trace-config=triton,file={tmp_path}/trace.json"),
    )
    with (
        ServerProcess(tmp_path / "models", *flags, env=without.env) as server,
        httpclient.InferenceServerClient(server.http, network_timeout=60) as client,
    ):
        assert client.is_model_ready("asked") and client.is_model_ready("apart")
        with without:
            server.until_logged(f"its gauges stay as they are: {MISSING}")
            assert not client.is_model_ready("asked")
            assert not client.is_model_ready("apart")
            for path in ("/v2/repository/models/m/load", "/v2/repository/index"):
                status, text = post(server, path, {})
                assert status == 503 and MISSING in text, (path, text)
            settings = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
            status, text = post(server, "/v2/trace/setting", settings)
            assert status == 503 and MISSING in text
            assert call(server, "apart", ONE + 1)[0] == 1
        client.load_model("m")
        until(lambda: client.is_model_ready("asked") and client.is_model_ready("apart"), server.log)
        assert value(scrape(server), "nv_cpu_utilization") >= 0


@pytest.mark.slow
def test_large_answers_that_clients_want_compressed_while_there_are_no_threads(tmp_path: Path) -> None:
    """Each is answered with the error, in its place; the server, and the connections, go on."""
    write_model(tmp_path / "models", "big", identity_config("TYPE_UINT8", "-1", 0, 1))
    without = NoThreads(tmp_path)
    large, small = np.zeros(400_000, np.uint8), np.zeros(10, np.uint8)
    accepts = [("grpc-accept-encoding", "gzip")]
    with (
        ServerProcess(
            tmp_path / "models", "--grpc-infer-response-compression-level=low", env=without.env
        ) as server,
        Http1(server.http) as rest,
        RawClient(server.grpc) as client,
    ):

        def asked(tensor: Any) -> Reply:
            head = binary_head([tensor.size], "UINT8", tensor.nbytes, outputs=OUTPUTS)
            headers = {"Inference-Header-Content-Length": f"{len(head)}", "Accept-Encoding": "gzip"}
            return rest.request("POST", "/v2/models/big/infer", head + tensor.tobytes(), headers)

        assert client.call(1, b"", LIVE).status == 0  # the control calls' modules are imported by a thread
        with without:
            until(lambda: workers(server.process.pid) == 0)
            reply = asked(large)
            assert reply.status == 503 and MISSING in reply.body.decode()
            assert asked(small).status == 200
            client.start(3, request("big", large), extra=accepts)
            assert client.finish(3).status == UNAVAILABLE and MISSING in client.replies[3].text
            bodies = [
                request("big", tensor, request_id=name) for name, tensor in (("1", large), ("2", small))
            ]
            payload = b"".join(map(message, bodies))
            client.send(client.headers(5, STREAM_INFER, accepts) + client.data(5, payload))
            assert client.finish(5).status == 0
            answers = [stream_response(body) for body in client.replies[5].messages]
            assert [answer.infer_response.id for answer in answers] == ["1", "2"]
            assert MISSING in answers[0].error_message
            client.send(
                client.headers(7, STREAM_INFER, [*accepts, ("triton_grpc_error", "true")])
                + client.data(7, payload)
            )
            assert client.finish(7).status == UNAVAILABLE
        assert asked(large).status == 200


@pytest.mark.slow
def test_a_process_that_ends_while_there_are_no_threads_is_started_when_there_are(tmp_path: Path) -> None:
    isolated(tmp_path / "models", "apart", ASKED)
    without = NoThreads(tmp_path)
    with (
        ServerProcess(tmp_path / "models", env=without.env) as server,
        httpclient.InferenceServerClient(server.http, network_timeout=60) as client,
    ):
        (pid,) = children(server.process.pid)
        with without:
            os.kill(pid, signal.SIGKILL)
            until(lambda: not client.is_server_ready(), "it is noticed")
        server.until_logged("apart_0 runs again")
        until(lambda: client.is_model_ready("apart"), server.log)
