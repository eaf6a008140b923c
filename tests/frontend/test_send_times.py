"""Traces of a server with front ends: answers count as sent when the engine has given them to the front end, and every trace ends."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.frontend.test_front_ends import infer_body, pids
from tests.support.gate import Gate
from tests.support.http import Http1, Http2
from tests.support.latch import Latch
from tests.support.metrics import scrape, value
from tests.support.repository import identity_config, write_model
from tests.support.run_first import with_site
from tests.support.server import ServerProcess
from tests.support.streams import Answers
from tests.support.traced import REPEAT, REPEAT_CONFIG, read
from tests.support.waiting import until

ANSWERED = ["INFER_RESPONSE_COMPLETE", "SEND_START", "SEND_END"]
# an answer whose text a worker prints
PRINTED = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.array = np.random.default_rng(1).random((1, 200_000))

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.array)]) for _ in requests]
"""
PRINTED_CONFIG = """
backend: "python" max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP64 dims: [ -1 ] } ]
parameters { key: "isolation" value { string_value: "none" } }
"""
# the server's workers say that they have begun something, and go on with it when a latch is opened
HELD = """
import pathlib
from neptrio.loop.workers import Workers

run = Workers.run

async def held(self, step, whose=None):
    def later():
        pathlib.Path({begun!r}).touch()
        pathlib.Path({latch!r}).read_bytes()
        return step()
    return await run(self, later, whose)

Workers.run = held
"""


class Traced:
    """A server that traces every request."""

    def __init__(self, server: ServerProcess, gate: Gate, file: Path) -> None:
        self.server = server
        self.gate = gate
        self.file = file
        self.numbers = iter(range(1 << 30))

    def name(self) -> str:
        """A request's id that no other request has."""
        return f"request-{next(self.numbers)}"

    def ended(self) -> dict[str, dict[str, Any]]:
        """The last traces, by the ids of their requests."""
        with urllib.request.urlopen(f"http://{self.server.http}/v2/trace/recent", timeout=60) as answer:
            return {trace.get("request_id", ""): trace for trace in json.loads(answer.read())}

    def late(self, request_id: str) -> dict[str, Any]:
        """The trace of a request whose client has no answer, when it has ended."""
        return until(lambda: self.ended().get(request_id), "the trace ends")

    def answers(self, model: str) -> float:
        """How often a model has answered, from the engine's own port."""
        return value(scrape(self.server), "nv_inference_request_success", model=model, version="1")


def points(trace: dict[str, Any]) -> list[str]:
    """The names of a trace's points without the protocol's; their times must be in order."""
    times = [point["ns"] for point in trace["timestamps"]]
    assert all(a <= b for a, b in pairwise(times))
    return [point["name"].replace("HTTP_", "").replace("GRPC_", "") for point in trace["timestamps"]]


def times(trace: dict[str, Any], name: str) -> list[int]:
    """When a trace has that point, in ns of the monotonic clock, which is the test's as well."""
    return [point["ns"] for point in trace["timestamps"] if point["name"].endswith(name)]


def numbers(module: Any) -> list[Any]:
    tensor = module.InferInput("INPUT0", [1, 2], "INT32")
    tensor.set_data_from_numpy(np.array([[1, 2]], np.int32))
    return [tensor]


def binary(server: ServerProcess, model: str, request_id: str) -> None:
    with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
        client.infer(model, numbers(httpclient), request_id=request_id)


def as_json(server: ServerProcess, model: str, request_id: str) -> None:
    with Http1(server.http) as client:
        reply = client.request("POST", f"/v2/models/{model}/infer", infer_body([1, 2], request_id))
        assert reply.status == 200


def http2(server: ServerProcess, model: str, request_id: str) -> None:
    with Http2(server.http) as client:
        reply = client.request("POST", f"/v2/models/{model}/infer", infer_body([1, 2], request_id))
        assert reply.status == 200


def unary(server: ServerProcess, model: str, request_id: str) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.infer(model, numbers(grpcclient), request_id=request_id)


def stream(server: ServerProcess, model: str, request_id: str) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client) as got:
        client.async_stream_infer(model, numbers(grpcclient), request_id=request_id)
        got.result()


WAYS = [binary, as_json, http2, unary, stream]


@contextmanager
def traced_server(folder: Path, front_ends: int, env: dict[str, str] | None = None) -> Iterator[Traced]:
    repository = folder / "models"
    write_model(repository, "echo", identity_config(dims="-1", pairs=1))
    write_model(repository, "floats", identity_config("TYPE_FP32", dims="-1", pairs=1))
    write_model(repository, "repeat", REPEAT_CONFIG, {"1/model.py": REPEAT})
    write_model(repository, "printed", PRINTED_CONFIG, {"1/model.py": PRINTED})
    gate = Gate(repository, folder / "gate", "gate", "")
    flags = [f"--trace-config={each}" for each in ("level=TIMESTAMPS", "rate=1")]
    flags += [f"--trace-config=triton,file={folder / 'traces'}", f"--frontends={front_ends}"]
    try:
        with ServerProcess(repository, *flags, env=env) as server:
            yield Traced(server, gate, folder / "traces")
    finally:
        gate.close()


@contextmanager
def held_workers(folder: Path) -> Iterator[tuple[Traced, Latch, Callable[[], bool]]]:
    """A server without front ends, what holds its workers, and whether one has begun something."""
    begun, latch = folder / "begun", folder / "latch"
    env = with_site(folder, HELD.format(begun=f"{begun}", latch=f"{latch}"))
    with Latch(latch) as held, traced_server(folder, 0, env) as made:
        yield made, held, begun.exists


@pytest.fixture(scope="module", params=[1, 2], ids=["1 front end", "2 front ends"])
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    with traced_server(tmp_path_factory.mktemp("server"), request.param) as made:
        yield made


@contextmanager
def stopped(server: ServerProcess) -> Iterator[list[int]]:
    """Front ends that do nothing while the block runs; their processes."""
    found = pids(server)
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield found
    finally:
        for pid in found:
            with suppress(ProcessLookupError):  # a test has killed it
                os.kill(pid, signal.SIGCONT)


def answered_by_the_engine(traced: Traced, model: str = "gate") -> None:
    """Lets the model answer, and waits until the engine has passed that on."""
    before = traced.answers(model)
    traced.gate.go()
    traced.gate.reported()
    until(lambda: traced.answers(model) == before + 1, "the engine has answered")


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_send_times_are_the_engines(traced: Traced, way: Callable[..., None]) -> None:
    """A front end that was stopped while the engine answered sends later, which no trace says."""
    name = traced.name()
    sent = time.monotonic_ns()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(way, traced.server, "gate", name)
        assert traced.gate.started() == [name]
        with stopped(traced.server):
            answered_by_the_engine(traced)
            begun = time.monotonic_ns()
        call.result(60)
    trace = traced.ended()[name]
    found = points(trace)
    assert found.index("REQUEST_START") < found.index("QUEUE_START") < found.index("COMPUTE_START")
    assert found[-4:] == ["REQUEST_END", *ANSWERED]
    (made,) = times(trace, "INFER_RESPONSE_COMPLETE")
    (start,), (end,) = times(trace, "SEND_START"), times(trace, "SEND_END")
    assert sent <= trace["timestamps"][0]["ns"]
    assert made <= start <= end <= begun


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_who_has_an_answer_finds_its_trace(traced: Traced, way: Callable[..., None]) -> None:
    for _ in range(20):
        name = traced.name()
        sent = time.monotonic_ns()
        way(traced.server, "echo", name)
        received = time.monotonic_ns()
        trace = traced.ended()[name]
        assert points(trace)[-4:] == ["REQUEST_END", *ANSWERED]
        (start,) = times(trace, "SEND_START")
        assert sent <= trace["timestamps"][0]["ns"] <= start <= received


def test_pipelined_requests(traced: Traced) -> None:
    names = [traced.name() for _ in range(20)]
    sent = time.monotonic_ns()
    with Http1(traced.server.http) as client:
        for name in names:
            client.start("POST", "/v2/models/echo/infer", infer_body([1], name))
        for name in names:
            reply = client.read()
            assert (reply.status, json.loads(reply.body)["id"]) == (200, name)
    received = time.monotonic_ns()
    found = traced.ended()
    for name in names:
        assert points(found[name])[-4:] == ["REQUEST_END", *ANSWERED]
        (start,) = times(found[name], "SEND_START")
        assert sent < start < received


def test_each_response_of_a_stream(traced: Traced) -> None:
    name = traced.name()
    tensor = grpcclient.InferInput("IN", [1], "INT32")
    tensor.set_data_from_numpy(np.array([5], np.int32))
    sent = time.monotonic_ns()
    with grpcclient.InferenceServerClient(traced.server.grpc) as client, Answers(client) as got:
        client.async_stream_infer("repeat", [tensor], request_id=name, enable_empty_final_response=True)
        for number in range(6):
            result = got.result()
            final = result.get_response().parameters["triton_final_response"].bool_param
            assert final is (number == 5)
        received = time.monotonic_ns()
    trace = traced.ended()[name]
    found = points(trace)
    assert [found.count(point) for point in ANSWERED] == [5, 5, 5]
    made, starts, ends = (times(trace, point) for point in ANSWERED)
    for one, start, end in zip(made, starts, ends, strict=True):
        assert sent < one <= start <= end
        assert start < received


@pytest.mark.slow
def test_an_answer_that_a_worker_classifies(traced: Traced) -> None:
    name = traced.name()
    given = grpcclient.InferInput("INPUT0", [1, 2_000_000], "FP32")
    given.set_data_from_numpy(np.arange(2_000_000, dtype=np.float32).reshape(1, -1))
    wanted = grpcclient.InferRequestedOutput("OUTPUT0", class_count=2)
    with grpcclient.InferenceServerClient(traced.server.grpc) as client:
        result = client.infer("floats", [given], outputs=[wanted], request_id=name)
    received = time.monotonic_ns()
    assert len(result.as_numpy("OUTPUT0").reshape(-1)) == 2
    trace = traced.ended()[name]
    assert points(trace)[-3:] == ANSWERED
    assert times(trace, "SEND_START")[0] < received


def test_a_client_that_left_while_its_request_executed(traced: Traced) -> None:
    name = traced.name()
    with Http1(traced.server.http) as client:
        client.start("POST", "/v2/models/gate/infer", infer_body([1], name))
        assert traced.gate.started() == [name]
    traced.gate.go("c")
    assert traced.gate.reported() == [name]
    assert points(traced.late(name))[-1] == "REQUEST_END"


@pytest.mark.parametrize("version", [1, 2])
def test_a_client_that_left_before_its_answer_was_sent(traced: Traced, version: int) -> None:
    """The engine had answered. Whether the front end sees the answer or the client's end first is not said."""
    name = traced.name()
    asked = "POST", "/v2/models/gate/infer", infer_body([1], name)
    with Http1(traced.server.http) if version == 1 else Http2(traced.server.http) as client:
        client.start(*asked)
        assert traced.gate.started() == [name]
        with stopped(traced.server):
            answered_by_the_engine(traced)
            client.close()
    assert "INFER_RESPONSE_COMPLETE" in points(traced.late(name))


@pytest.mark.parametrize("way", [as_json, unary], ids=lambda way: way.__name__)
def test_a_front_end_that_is_killed(traced: Traced, way: Callable[..., None]) -> None:
    """The engine had answered; no client has the answer, which the engine cannot know."""
    name = traced.name()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(way, traced.server, "gate", name)
        assert traced.gate.started() == [name]
        with stopped(traced.server) as found:
            answered_by_the_engine(traced)
            for pid in found:
                os.kill(pid, signal.SIGKILL)
        assert call.exception(60) is not None
    until(lambda: len(set(pids(traced.server)) - set(found)) == len(found), "others have started")
    assert points(traced.late(name))[-4:] == ["REQUEST_END", *ANSWERED]


def test_a_count(traced: Traced) -> None:
    """As many traces as were asked for, of five requests."""
    address = f"http://{traced.server.http}/v2/trace/setting"

    def change(settings: dict[str, str]) -> None:
        with urllib.request.urlopen(address, json.dumps(settings).encode(), timeout=60) as answer:
            assert answer.status == 200

    names = [traced.name() for _ in range(5)]
    change({"trace_count": "3"})
    for name in names:
        binary(traced.server, "echo", name)
    found = traced.ended()
    assert [name in found for name in names] == [True] * 3 + [False] * 2
    change({"trace_count": "-1"})
    written = [trace["request_id"] for trace in read(f"{traced.file}.0")]
    assert sorted(written[-3:]) == sorted(names[:3])


def test_the_last_traces_of_a_server_that_ends(tmp_path: Path) -> None:
    """Each once."""
    with traced_server(tmp_path, 2) as made:
        for number in range(8):
            unary(made.server, "echo", str(number))
        assert made.server.stop() == 0
        found = read(made.file)
    assert sorted(trace["request_id"] for trace in found) == [str(number) for number in range(8)]
    for trace in found:
        assert points(trace)[-3:] == ANSWERED


@pytest.mark.slow
def test_an_http2_client_that_leaves_while_its_answer_is_printed(tmp_path: Path) -> None:
    with held_workers(tmp_path) as (made, _, begun):
        client = Http2(made.server.http)
        client.start("POST", "/v2/models/printed/infer", infer_body([1], "left"))
        until(begun, "the answer is being printed")
        client.sock.close()
        assert points(made.late("left"))[-1] == "INFER_RESPONSE_COMPLETE"


@pytest.mark.slow
@pytest.mark.parametrize("headers", [{}, {"Accept-Encoding": "gzip"}], ids=["plain", "gzip"])
def test_an_answer_that_a_worker_prints_is_sent_when_it_is_printed(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    with held_workers(tmp_path) as (made, held, begun), Http1(made.server.http) as client:
        client.start("POST", "/v2/models/printed/infer", infer_body([1], "printed"), headers)
        until(begun, "the answer is being printed")
        binary(made.server, "echo", "meanwhile")
        meanwhile = time.monotonic_ns()
        held.open()
        assert client.read().status == 200
        trace = made.ended()["printed"]
        assert points(trace)[-3:] == ANSWERED
        assert times(trace, "SEND_END")[0] > meanwhile


@pytest.mark.slow
@pytest.mark.parametrize("headers", [{}, {"Accept-Encoding": "gzip"}], ids=["plain", "gzip"])
def test_a_client_that_leaves_while_its_answer_is_printed(tmp_path: Path, headers: dict[str, str]) -> None:
    with held_workers(tmp_path) as (made, _, begun):
        with Http1(made.server.http) as client:
            client.start("POST", "/v2/models/printed/infer", infer_body([1], "left"), headers)
            until(begun, "the answer is being printed")
        assert points(made.late("left"))[-1] == "INFER_RESPONSE_COMPLETE"
