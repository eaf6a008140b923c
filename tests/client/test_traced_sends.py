"""SEND_END of a trace is when the kernel has taken the whole answer, however slowly its client reads."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from hyperframe.frame import WindowUpdateFrame
from tritonclient.grpc import service_pb2

from tests.backends.python.models import config, isolated
from tests.support.http import Http1
from tests.support.raw_http2 import STREAM_INFER, RawClient, message
from tests.support.server import ServerProcess, without_front_ends
from tests.support.waiting import until

SIZE = 32 << 20  # more than the buffers between server and client hold
MODEL = f"""
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        made = pb_utils.Tensor("OUT", np.ones({SIZE // 4}, np.float32))
        return [pb_utils.InferenceResponse([made]) for _ in requests]
"""
# a front end has the answer when the engine's trace of it ends; tests/frontend/test_send_times.py
pytestmark = without_front_ends


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    isolated(repository, "large", MODEL, config(), way="none")
    two_at_once = "dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 60000000 }"
    of_a_batch = MODEL.replace("np.float32)", "np.float32)[None]")
    isolated(repository, "pair", of_a_batch, config(max_batch_size=2, extra=two_at_once), way="none")
    with ServerProcess(repository, "--trace-config=level=TIMESTAMPS", "--trace-config=rate=1") as process:
        yield process


def recent(server: ServerProcess, request_id: str) -> list[dict[str, Any]]:
    """The traces of a request that have ended."""
    with urllib.request.urlopen(f"http://{server.http}/v2/trace/recent", timeout=60) as answer:
        return [trace for trace in json.loads(answer.read()) if trace.get("request_id") == request_id]


def sent(server: ServerProcess, request_id: str) -> tuple[int, int]:
    """When the answer to a request began and ended to be sent, on the monotonic clock."""
    until(lambda: recent(server, request_id), "the trace")
    [trace] = recent(server, request_id)
    times = {row["name"]: row["ns"] for row in trace["timestamps"]}
    front = "HTTP" if "HTTP_SEND_END" in times else "GRPC"
    return times[f"{front}_SEND_START"], times[f"{front}_SEND_END"]


def test_a_slow_reader_over_http(server: ServerProcess) -> None:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}
    body = {"id": "http", "inputs": [tensor], "parameters": {"binary_data_output": True}}
    raw = json.dumps(body).encode()
    with Http1(server.http) as client:
        client.start("POST", "/v2/models/large/infer", raw)
        got = len(client.sock.recv(1))
        begun = time.monotonic_ns()
        assert recent(server, "http") == [], "most of the answer waits for its client"
        resumed = time.monotonic_ns()
        while got < SIZE:
            got += len(client.sock.recv(1 << 20))
    start, end = sent(server, "http")
    assert start < begun and resumed < end


def test_a_slow_reader_over_grpc(server: ServerProcess) -> None:
    request = service_pb2.ModelInferRequest(model_name="large", id="grpc")
    request.inputs.add(name="IN", datatype="FP32", shape=[1]).contents.fp32_contents.append(1)
    client = RawClient(server.grpc, credit=False)
    try:
        client.send(client.headers(1) + client.data(1, message(request.SerializeToString()), end=True))
        client.until(lambda: client.replies[1].data, "the answer's beginning")
        begun = time.monotonic_ns()
        assert recent(server, "grpc") == [], "the client's windows are full"
        resumed = time.monotonic_ns()
        for stream in (0, 1):
            client.send(WindowUpdateFrame(stream, window_increment=2 * SIZE).serialize())
        client.until(lambda: client.replies[1].ended, "the whole answer")
        assert client.replies[1].status == 0
    finally:
        client.close()
    start, end = sent(server, "grpc")
    assert start < begun and resumed < end


def stream_request(request_id: str, model: str = "large") -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    shape = [1, 1] if model == "pair" else [1]
    request.inputs.add(name="IN", datatype="FP32", shape=shape).contents.fp32_contents.append(1)
    return message(request.SerializeToString())


@pytest.mark.parametrize("model", ["large", "pair"])
def test_a_slow_reader_of_a_stream(server: ServerProcess, model: str) -> None:
    """Each answer has its own end: the first one's does not wait until the second, which is behind it, is read. Also where both
    are made together."""
    client = RawClient(server.grpc, credit=False)
    one, two = f"{model} one", f"{model} two"
    try:
        requests = stream_request(one, model) + stream_request(two, model)
        client.send(client.headers(1, STREAM_INFER) + client.data(1, requests, end=True))
        client.until(lambda: client.replies[1].data, "the first answer's beginning")
        begun = time.monotonic_ns()
        assert recent(server, one) == [], "the client's windows are full"
        resumed = time.monotonic_ns()
        for stream in (0, 1):
            client.send(WindowUpdateFrame(stream, window_increment=SIZE).serialize())
        client.until(lambda: client.replies[1].messages, "the first answer")
        start, end = sent(server, one)
        assert start < begun and resumed < end
        assert recent(server, two) == [], "most of the second waits for its client"
        resumed = time.monotonic_ns()
        for stream in (0, 1):
            client.send(WindowUpdateFrame(stream, window_increment=2 * SIZE).serialize())
        client.until(lambda: client.replies[1].ended, "both answers")
        assert client.replies[1].status == 0
    finally:
        client.close()
    assert resumed < sent(server, two)[1]


@pytest.mark.slow
def test_answers_that_workers_compress(tmp_path: Path) -> None:
    """An answer of a stream that waits for a worker, or behind one that does, was not sent before."""
    isolated(tmp_path, "large", MODEL, config(), way="none")
    compressing = "--grpc-infer-response-compression-level=high"
    with ServerProcess(
        tmp_path, "--trace-config=level=TIMESTAMPS", "--trace-config=rate=1", compressing
    ) as server:
        client = RawClient(server.grpc)
        try:
            names = ["one", "two", "three"]
            requests = b"".join(map(stream_request, names))
            client.send(
                client.headers(1, STREAM_INFER, [("grpc-accept-encoding", "gzip")])
                + client.data(1, requests, end=True)
            )
            client.until(lambda: client.replies[1].messages, "the first answer")
            came = time.monotonic_ns()
            client.until(lambda: client.replies[1].ended, "all answers")
            assert client.replies[1].status == 0 and len(client.replies[1].data) < SIZE // 8
        finally:
            client.close()
        ends = [sent(server, name)[1] for name in names]
        assert ends == sorted(ends)
        assert came < ends[2], "workers were not through with it when the first one came"
        client = RawClient(server.grpc)
        client.send(
            client.headers(1, STREAM_INFER, [("grpc-accept-encoding", "gzip")])
            + client.data(1, stream_request("left") + stream_request("left too"))
        )
        client.until(lambda: client.replies[1].headers, "the stream's beginning")
        client.close()
        until(lambda: recent(server, "left") and recent(server, "left too"), "the traces")


def test_a_client_that_leaves_a_stream_ends_its_traces(server: ServerProcess) -> None:
    client = RawClient(server.grpc, credit=False)
    client.send(
        client.headers(1, STREAM_INFER)
        + client.data(1, stream_request("left one") + stream_request("left two"))
    )
    client.until(lambda: client.replies[1].data, "the first answer's beginning")
    client.close()
    until(lambda: recent(server, "left one") and recent(server, "left two"), "the traces")


def test_a_client_that_leaves_ends_its_trace(server: ServerProcess) -> None:
    request = service_pb2.ModelInferRequest(model_name="large", id="gone")
    request.inputs.add(name="IN", datatype="FP32", shape=[1]).contents.fp32_contents.append(1)
    client = RawClient(server.grpc, credit=False)
    client.send(client.headers(1) + client.data(1, message(request.SerializeToString()), end=True))
    client.until(lambda: client.replies[1].data, "the answer's beginning")
    client.close()
    until(lambda: recent(server, "gone"), "the trace")


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page's commands are curl's")
def test_the_first_commands_of_the_page(tmp_path: Path) -> None:
    """docs/trace.md begins with commands that work on a server without any flags about tracing."""
    page = Path(__file__).resolve().parents[2] / "docs" / "trace.md"
    switch, look, _ = re.findall(r"^curl (.*)$", page.read_text(), re.M)[:3]
    isolated(tmp_path, "resnet", MODEL, config(), way="none")
    with ServerProcess(tmp_path) as server:
        for command in (switch, look):
            assert "localhost:8000" in command
        run = functools.partial(subprocess.run, shell=True, capture_output=True, text=True, check=True)
        settings = json.loads(run(f"curl -s {switch.replace('localhost:8000', server.http)}").stdout)
        assert settings["trace_level"] == ["TIMESTAMPS"] and settings["trace_file"] == ""
        with httpclient.InferenceServerClient(server.http) as client:
            tensor = httpclient.InferInput("IN", [1], "FP32")
            tensor.set_data_from_numpy(np.ones(1, np.float32))
            client.infer("resnet", [tensor])
        shown = f"curl -s {look.replace('localhost:8000', server.http)}"
        until(lambda: json.loads(run(shown).stdout), "a trace")
        [trace] = json.loads(run(shown).stdout)
        assert trace["model_name"] == "resnet"
        with grpcclient.InferenceServerClient(server.grpc) as client:
            told = client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})
            assert list(told.settings["trace_level"].value) == ["TIMESTAMPS"]
