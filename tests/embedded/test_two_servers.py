"""Several servers in one process, each on a thread of its own: none of them sees anything of another."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as grpc_client
from opentelemetry import trace

import neptrio
from tests.backends.python.models import config, python_model
from tests.support.collector import Collector
from tests.support.http import Http1

Whole = npt.NDArray[np.int32]
ROUNDS = 400
IN_PROCESS = 'parameters { key: "isolation" value: { string_value: "none" } }'


@pytest.fixture
def servers() -> Iterator[list[neptrio.RunningServer]]:
    """Two servers, in an interpreter that changes threads as often as it can."""
    before = sys.getswitchinterval()
    with ExitStack() as stack:
        made = []
        for _ in range(2):
            server = neptrio.Server(http_port=0, grpc_port=0)

            @server.function
            def same(x: Whole) -> Whole:
                return x

            made.append(stack.enter_context(server.running()))
        sys.setswitchinterval(1e-6)
        try:
            yield made
        finally:
            sys.setswitchinterval(before)


def rest(server: neptrio.RunningServer, value: int) -> list[Any]:
    """What comes back for `value`, over and over, by the way of requests that are not plain."""
    x = {"name": "x", "datatype": "INT32", "shape": [64], "data": [value] * 64}
    body = json.dumps({"inputs": [x]}).encode()
    name = {"X-Name": "ä".encode().decode("latin-1")}
    with Http1(server.addresses["http"]) as client:
        replies = [client.request("POST", "/v2/models/same/infer", body, name) for _ in range(ROUNDS)]
    return [json.loads(reply.body)["outputs"][0]["data"] for reply in replies]


def grpc(server: neptrio.RunningServer, value: int) -> list[Any]:
    x = grpc_client.InferInput("x", [64], "INT32")
    x.set_data_from_numpy(np.full(64, value, np.int32))
    with grpc_client.InferenceServerClient(server.addresses["grpc"]) as client:
        return [client.infer("same", [x]).as_numpy("OUTPUT").tolist() for _ in range(ROUNDS // 2)]


@pytest.mark.parametrize("way", [rest, grpc])
def test_each_answers_its_own_clients(servers: list[neptrio.RunningServer], way: Any) -> None:
    answers: dict[int, list[Any]] = {}

    def ask(server: neptrio.RunningServer, value: int) -> None:
        answers[value] = way(server, value)

    threads = [threading.Thread(target=ask, args=(server, 11 * (i + 1))) for i, server in enumerate(servers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [11, 22]
    for value, got in answers.items():
        assert all(data == [value] * 64 for data in got)


ASKING = """
import contextvars
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "TOLD").as_numpy()[0]) for request in requests]

    def answer(self, told):
        found = []

        def ask():
            try:
                asked = pb_utils.InferenceRequest(
                    model_name="who",
                    requested_output_names=["OUTPUT"],
                    inputs=[pb_utils.Tensor("x", np.zeros(1, np.int32))],
                )
                found.append(str(asked.exec().output_tensors()[0].as_numpy()[0]))
            except pb_utils.TritonModelException as error:
                found.append(str(error))

        run = contextvars.copy_context().run if told else lambda function: function()
        thread = threading.Thread(target=run, args=(ask,))
        thread.start()
        thread.join()
        return pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", np.array(found, object))])
"""


def numbered(number: int) -> Any:
    """A function that says which server it belongs to."""

    def who(x: Whole) -> Whole:
        return np.full(1, number, np.int32)

    return who


@pytest.mark.slow
def test_a_models_thread_reaches_its_own_server_or_none(tmp_path: Path) -> None:
    text = config("TOLD:TYPE_BOOL:1", "ANSWER:TYPE_STRING:1", 0, IN_PROCESS)
    python_model(tmp_path, "asking", ASKING, text)
    with ExitStack() as stack:
        made = []
        for number in range(2):
            server = neptrio.Server(tmp_path)
            server.function(numbered(number))
            made.append(stack.enter_context(server.running()))
        for number, running in enumerate(made):
            assert running.model("asking").infer({"TOLD": [True]})["ANSWER"][0] == str(number).encode()
            answer = running.model("asking").infer({"TOLD": [False]})["ANSWER"][0]
            assert (
                b"several run in this process; start the thread with contextvars.copy_context().run" in answer
            )


def traced(collector: Collector, region: str) -> neptrio.Server:
    """A server whose function makes a span of its own."""
    flags = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=1", f"opentelemetry,url={collector.url}")
    server = neptrio.Server(trace_config=(*flags, f"opentelemetry,resource=region={region}"))

    @server.function
    def same(x: Whole) -> Whole:
        with trace.get_tracer("model").start_as_current_span("outer"):
            trace.get_tracer("model").start_span("inner").end()
        return x

    return server


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [True, False])
def test_spans_of_models_go_to_their_own_servers_collector(at_once: bool) -> None:
    def ask(server: neptrio.RunningServer) -> None:
        server.model("same").infer({"x": np.zeros(4, np.int32)})

    with Collector() as first, Collector() as second:
        with traced(first, "here").running() as one:
            if at_once:
                with traced(second, "there").running() as other:
                    ask(one)
                    ask(other)
            ask(one)
        if not at_once:
            with traced(second, "there").running() as other:
                ask(other)
        for collector, region, times in ((first, "here", 1 + at_once), (second, "there", 1)):
            names = ["InferRequest", "compute", "inner", "outer", "same"]
            assert sorted(span.name for span in collector.spans) == sorted(names * times)
            assert {resource["region"] for resource in collector.resources} == {region}
