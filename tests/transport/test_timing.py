"""Times in answers: opted in by header, metadata, parameter and configuration; over every way an answer can take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.support.http import Http1, Http2, Reply
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.streams import Answers

EXECUTED = {
    "neptrio_queue_ns",
    "neptrio_input_ns",
    "neptrio_compute_ns",
    "neptrio_output_ns",
    "neptrio_batch_size",
}
DELAY_NS = 5_000_000
DELAY = 'parameters { key: "execute_delay_ms" value { string_value: "5" } }'
STEP = """step [ {{ model_name: "{0}" model_version: -1 input_map {{ key: "INPUT0" value: "{1}" }}
  output_map {{ key: "OUTPUT0" value: "{2}" }} }} ]"""
PARAMETERS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        given = [np.array([request.parameters().encode()], dtype=object) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("O", one)]) for one in given]
"""
TWO = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for i in range(2):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("O", np.full(1, i, np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
FAIL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("not today")) for _ in requests]
"""
NUMBER = 'input [ { name: "N" data_type: TYPE_INT32 dims: [ 1 ] } ]'


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("timing")
    write_model(folder, "plain", identity_config(dims="-1", pairs=1, extra=DELAY))
    write_model(folder, "big", identity_config("TYPE_FP32", dims="-1", pairs=1, max_batch_size=0))
    always = 'parameters { key: "neptrio_timing" value { string_value: "true" } }'
    write_model(folder, "always", identity_config(dims="-1", pairs=1, extra=always))
    batched = "dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 30000000 }"
    write_model(folder, "batched", identity_config(dims="1", pairs=1, max_batch_size=4, extra=batched))
    cached = "response_cache { enable: true }"
    write_model(folder, "cached", identity_config(dims="-1", pairs=1, extra=cached))
    io = 'max_batch_size: 8 input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ] '
    io += 'output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]'
    steps = STEP.format("plain", "INPUT0", "middle") + STEP.format("plain", "middle", "OUTPUT0")
    write_model(folder, "twice", f'platform: "ensemble" {io} ensemble_scheduling {{ {steps} }}')
    outer = STEP.format("twice", "INPUT0", "OUTPUT0")
    write_model(folder, "nested", f'platform: "ensemble" {io} ensemble_scheduling {{ {outer} }}')
    text = 'output [ { name: "O" data_type: TYPE_STRING dims: [ 1 ] } ]'
    write_model(folder, "parameters", f'backend: "python" {NUMBER} {text}', {"1/model.py": PARAMETERS})
    number = 'output [ { name: "O" data_type: TYPE_INT32 dims: [ 1 ] } ]'
    decoupled = "model_transaction_policy { decoupled: true }"
    write_model(folder, "two", f'backend: "python" {NUMBER} {number} {decoupled}', {"1/model.py": TWO})
    write_model(folder, "fail", f'backend: "python" {NUMBER} {number}', {"1/model.py": FAIL})
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    with ServerProcess(repository, "--cache-config=local,size=65536", failures="not today") as process:
        yield process


@pytest.fixture(scope="module")
def hypercorn(repository: Path) -> Iterator[ServerProcess]:
    flags = ("--cache-config=local,size=65536", "--http-lean=false")
    with ServerProcess(repository, *flags, failures="not today") as process:
        yield process


@pytest.fixture(params=["http/1.1", "http/2", "hypercorn"])
def http(request: pytest.FixtureRequest) -> Iterator[Http1 | Http2]:
    """A client of each way to be served."""
    process = request.getfixturevalue("hypercorn" if request.param == "hypercorn" else "server")
    with (Http2 if request.param == "http/2" else Http1)(process.http) as client:
        yield client


@pytest.fixture
def grpc(server: ServerProcess) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        yield client


def body(
    name: str = "INPUT0", parameters: dict[str, Any] | None = None, shape: tuple[int, ...] = (1, 2)
) -> bytes:
    data = [7] * int(np.prod(shape))
    made: dict[str, Any] = {
        "inputs": [{"name": name, "datatype": "INT32", "shape": list(shape), "data": data}]
    }
    if parameters is not None:
        made["parameters"] = parameters
    return json.dumps(made).encode()


def document(reply: Reply) -> Any:
    return json.loads(reply.body)


def server_timing(reply: Reply) -> dict[str, str]:
    """The metrics of a Server-Timing header, {} without one."""
    text = reply.headers.get("server-timing", "")
    return dict(part.split(";")[::1] for part in text.split(", ")) if text else {}


ASK = {"Neptrio-Timing": "true"}


def test_nothing_is_told_that_was_not_asked_for(http: Http1 | Http2) -> None:
    for headers, parameters in (
        ({}, None),
        ({"Neptrio-Timing": "false"}, None),
        ({}, {"neptrio_timing": False}),
    ):
        reply = http.request("POST", "/v2/models/plain/infer", body(parameters=parameters), headers)
        assert reply.status == 200
        assert "parameters" not in document(reply) and "server-timing" not in reply.headers


@pytest.mark.parametrize("way", ["header", "parameter", "1"])
def test_a_single_request(http: Http1 | Http2, way: str) -> None:
    headers = {"header": ASK, "1": {"neptrio-timing": "1"}}.get(way, {})
    parameters = {"neptrio_timing": True} if way == "parameter" else None
    reply = http.request("POST", "/v2/models/plain/infer", body(parameters=parameters), headers)
    told = document(reply)["parameters"]
    assert set(told) == EXECUTED
    assert told["neptrio_batch_size"] == 1
    assert told["neptrio_compute_ns"] >= DELAY_NS
    timing = server_timing(reply)
    assert list(timing) == ["queue", "input", "compute", "output", "batch"]
    assert timing["compute"] == f"dur={told['neptrio_compute_ns'] / 1e6:.6f}"
    assert timing["batch"] == 'desc="1"'
    assert document(reply)["outputs"][0]["data"] == [7, 7]


def test_a_binary_answer_has_them_too(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        given = httpclient.InferInput("INPUT0", [1, 2], "INT32")
        given.set_data_from_numpy(np.array([[1, 2]], np.int32))
        answer = client.infer("plain", [given], headers=dict(ASK))
        assert set(answer.get_response()["parameters"]) == EXECUTED
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), [[1, 2]])


def test_a_large_answer_that_a_worker_prints(http: Http1 | Http2) -> None:
    data = [0.25] * 20000
    made = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [20000], "data": data}]}
    reply = http.request("POST", "/v2/models/big/infer", json.dumps(made).encode(), ASK)
    assert set(document(reply)["parameters"]) == EXECUTED
    assert "compute" in server_timing(reply)
    assert document(reply)["outputs"][0]["data"] == data


def test_the_configuration_asks_and_a_request_may_decline(http: Http1 | Http2) -> None:
    assert set(document(http.request("POST", "/v2/models/always/infer", body()))["parameters"]) == EXECUTED
    reply = http.request("POST", "/v2/models/always/infer", body(), {"Neptrio-Timing": "false"})
    assert "parameters" not in document(reply)
    reply = http.request("POST", "/v2/models/always/infer", body(parameters={"neptrio_timing": False}))
    assert "parameters" not in document(reply)


def test_a_batch_is_told_its_size(server: ServerProcess) -> None:
    def one(ask: bool) -> Reply:
        with Http1(server.http) as client:
            return client.request("POST", "/v2/models/batched/infer", body(shape=(1, 1)), ASK if ask else {})

    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(one, [True, True, True, False]))
    told = [document(reply).get("parameters") for reply in replies]
    assert [t and t["neptrio_batch_size"] for t in told] == [4, 4, 4, None]


def test_an_ensemble_adds_up_its_steps(http: Http1 | Http2) -> None:
    for model in ("twice", "nested"):
        told = document(http.request("POST", f"/v2/models/{model}/infer", body(), ASK))["parameters"]
        assert set(told) == EXECUTED - {"neptrio_batch_size"}  # its steps have batches, each of its own
        assert told["neptrio_compute_ns"] >= 2 * DELAY_NS


def test_a_cached_answer(http: Http1 | Http2, server: ServerProcess) -> None:
    width = 3 if isinstance(http, Http1) else 4
    answers = [
        http.request("POST", "/v2/models/cached/infer", body(shape=(1, width)), headers)
        for headers in (ASK, ASK, {})
    ]
    assert set(document(answers[0])["parameters"]) == EXECUTED
    assert set(document(answers[1])["parameters"]) == {"neptrio_queue_ns", "neptrio_cache_lookup_ns"}
    assert list(server_timing(answers[1])) == ["queue", "cache"]
    assert "parameters" not in document(answers[2])


def test_generate(http: Http1 | Http2) -> None:
    made = {"INPUT0": [1, 2], "neptrio_timing": True}
    reply = http.request("POST", "/v2/models/plain/generate", json.dumps(made).encode())
    assert set(document(reply)) > EXECUTED and "compute" in server_timing(reply)
    reply = http.request("POST", "/v2/models/plain/generate", b'{"INPUT0": [1, 2]}', ASK)
    assert set(document(reply)) > EXECUTED
    assert not EXECUTED & set(
        document(http.request("POST", "/v2/models/plain/generate", b'{"INPUT0": [1, 2]}'))
    )


def test_streams_over_http(http: Http1 | Http2) -> None:
    reply = http.request("POST", "/v2/models/two/infer_stream", body("N", shape=(1,)), ASK)
    events = [json.loads(part.removeprefix(b"data: ")) for part in reply.body.strip().split(b"\n\n")]
    assert len(events) == 3
    assert [event["outputs"][0]["data"] for event in events[:2]] == [[0], [1]]
    assert all(set(event["parameters"]) == {*EXECUTED, "triton_final_response"} for event in events[:2])
    reply = http.request("POST", "/v2/models/two/generate_stream", b'{"N": 1}', ASK)
    events = [json.loads(part.removeprefix(b"data: ")) for part in reply.body.strip().split(b"\n\n")]
    assert len(events) == 2 and all(set(event) > EXECUTED for event in events)


def test_a_failed_execution_is_told_in_the_header(http: Http1 | Http2) -> None:
    reply = http.request("POST", "/v2/models/fail/infer", body("N", shape=(1,)), ASK)
    assert reply.status >= 400 and list(document(reply)) == ["error"]
    assert "queue" in server_timing(reply)
    assert "server-timing" not in http.request("POST", "/v2/models/fail/infer", body("N", shape=(1,))).headers


def test_models_do_not_see_the_wish(http: Http1 | Http2) -> None:
    reply = http.request(
        "POST", "/v2/models/parameters/infer", body("N", {"neptrio_timing": True, "own": 3}, (1,))
    )
    assert json.loads(document(reply)["outputs"][0]["data"][0]) == {"own": 3}
    assert set(document(reply)["parameters"]) == EXECUTED


def test_bad_wishes_are_refused(http: Http1 | Http2, grpc: grpcclient.InferenceServerClient) -> None:
    reply = http.request("POST", "/v2/models/plain/infer", body(), {"Neptrio-Timing": "yes"})
    assert reply.status == 400
    assert document(reply)["error"] == "the header 'neptrio-timing' must be 'true' or 'false', got 'yes'"
    reply = http.request("POST", "/v2/models/plain/infer", body(parameters={"neptrio_timing": "true"}))
    assert reply.status == 400
    assert document(reply)["error"] == "parameter 'neptrio_timing' must be a boolean, got 'true'"
    with pytest.raises(grpcclient.InferenceServerException, match="must be 'true' or 'false', got 'yes'"):
        grpc.infer("plain", [grpc_input()], headers={"neptrio-timing": "yes"})


def grpc_input(name: str = "INPUT0", shape: tuple[int, ...] = (1, 2)) -> grpcclient.InferInput:
    given = grpcclient.InferInput(name, list(shape), "INT32")
    given.set_data_from_numpy(np.ones(shape, np.int32))
    return given


def told(answer: grpcclient.InferResult) -> set[str]:
    return set(answer.get_response().parameters)


def test_unary_calls(grpc: grpcclient.InferenceServerClient) -> None:
    assert told(grpc.infer("plain", [grpc_input()])) == set()
    assert told(grpc.infer("plain", [grpc_input()], headers={"neptrio-timing": "true"})) == EXECUTED
    assert told(grpc.infer("plain", [grpc_input()], parameters={"neptrio_timing": True})) == EXECUTED
    compressed = grpc.infer(
        "plain", [grpc_input()], headers={"neptrio-timing": "true"}, compression_algorithm="gzip"
    )
    assert told(compressed) == EXECUTED
    assert compressed.get_response().parameters["neptrio_compute_ns"].int64_param >= DELAY_NS
    assert told(grpc.infer("always", [grpc_input()])) == EXECUTED
    assert told(grpc.infer("always", [grpc_input()], headers={"neptrio-timing": "false"})) == set()


def test_grpc_streams(grpc: grpcclient.InferenceServerClient) -> None:
    with Answers(grpc) as answers:
        grpc.async_stream_infer("plain", [grpc_input()], parameters={"neptrio_timing": True})
        assert told(answers.result()) == {*EXECUTED, "triton_final_response"}
        grpc.async_stream_infer("plain", [grpc_input()])
        assert told(answers.result()) == {"triton_final_response"}
    with Answers(grpc, headers={"neptrio-timing": "true"}) as answers:
        grpc.async_stream_infer("two", [grpc_input("N", (1,))], enable_empty_final_response=True)
        made = answers.results(3)
    assert all(told(one) >= EXECUTED for one in made)
    computed = [one.get_response().parameters["neptrio_compute_ns"].int64_param for one in made]
    assert computed == sorted(computed)  # so far


def test_a_wrong_configuration_is_named(tmp_path: Path) -> None:
    extra = 'parameters { key: "neptrio_timing" value { string_value: "on" } }'
    write_model(tmp_path, "m", identity_config(extra=extra))
    with ServerProcess(tmp_path, "--exit-on-error=false", "--strict-readiness=false") as process:
        with httpclient.InferenceServerClient(process.http) as client:
            (row,) = client.get_model_repository_index()
        assert "parameter 'neptrio_timing' must be 'true' or 'false', got 'on'" in row["reason"]
