"""Large bodies are received by front ends into memory that the engine maps: what a model is given lies there.

A model in the engine's process says where its inputs lie: how far from the beginning of what one front end and the
engine share, -1 for anywhere else.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2

from neptrio.frontend.channel import Layout
from neptrio.frontend.front import AREA
from tests.backends.python.models import config, isolated
from tests.frontend.test_front_ends import front_of, pids
from tests.support.gate import Gate
from tests.support.http import Http1
from tests.support.infer_messages import binary_head
from tests.support.raw_http2 import RawClient
from tests.support.raw_http2 import message as framed
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.statistics import stats
from tests.support.streams import Answers
from tests.support.waiting import until

WHERE = """
import numpy as np


def place(array):
    address = array.__array_interface__["data"][0]
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "memfd:neptrio-front" in line:
                span, _, offset = line.split()[:3]
                first, end = (int(number, 16) for number in span.split("-"))
                if first <= address < end:
                    return address - first + int(offset, 16)
    return -1


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            arrays = [tensor.as_numpy() for tensor in request.inputs()]
            places = np.array([place(array) for array in arrays], np.int64)
            sums = np.array([array.sum() if array.dtype != object else len(array) for array in arrays], np.float64)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("PLACE", places), pb_utils.Tensor("SUM", sums)]))
        return answers
"""
PLUS = """
class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy() + 1)])
            for request in requests
        ]
"""
TWICE = """
platform: "ensemble"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling { step [
  { model_name: "plus" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "MID" } },
  { model_name: "plus" model_version: -1 input_map { key: "IN" value: "MID" } output_map { key: "OUT" value: "OUT" } }
] }
"""
DECOUPLED = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            array = request.inputs()[0].as_numpy()
            for half in (array[: len(array) // 2], array[len(array) // 2 :]):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", half)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
OUTPUTS = "PLACE:TYPE_INT64:-1 SUM:TYPE_FP64:-1"
IN_PLACE = 'parameters { key: "READ_ONLY_INPUTS" value: { string_value: "true" } }'
MIB = 1 << 20
LARGE = np.arange(MIB // 4, dtype=np.float32) % 1000
BODIES = Layout(AREA).bodies


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    isolated(folder, "where", WHERE, config("A:TYPE_FP32:-1 B:TYPE_FP64:-1", OUTPUTS, extra=IN_PLACE), "none")
    isolated(
        folder, "strings", WHERE, config("A:TYPE_FP32:-1 B:TYPE_STRING:-1", OUTPUTS, extra=IN_PLACE), "none"
    )
    isolated(folder, "plus", PLUS, config(), "none")
    many = config(extra="model_transaction_policy { decoupled: true }")
    isolated(folder, "many", DECOUPLED, many, "none")
    isolated(folder, "process", PLUS, config(), "process")
    write_model(folder, "twice", TWICE)
    write_model(folder, "echo", identity_config("TYPE_FP32", "-1", 0, 1))
    cached = identity_config("TYPE_FP32", "-1", 0, 1, "response_cache { enable: true }")
    write_model(folder, "cached", cached)
    return folder


@pytest.fixture(scope="module", params=[1, 2])
def server(repository: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    flags = (
        f"--frontends={request.param}",
        "--cache-config=local,size=67108864",
        "--model-control-mode=explicit",
    )
    with ServerProcess(repository, *flags, "--load-model=*") as process:
        yield process


def infer(server: ServerProcess, protocol: str, model: str, **arrays: np.ndarray) -> Any:
    module: Any = httpclient if protocol == "http" else grpcclient
    tensors = []
    for name, array in arrays.items():
        kind = {"f": "FP32", "d": "FP64", "O": "BYTES"}[array.dtype.char]
        tensors.append(module.InferInput(name, list(array.shape), kind))
        tensors[-1].set_data_from_numpy(array)
    with module.InferenceServerClient(getattr(server, protocol)) as client:
        return client.infer(model, tensors)


def shared_bytes(server: ServerProcess) -> int:
    """What the front ends say of how much of the shared memory is in use."""
    with urllib.request.urlopen(f"http://{server.http}/v2/models/stats?live=true") as answer:
        return sum(row["shared_bytes"] for row in json.loads(answer.read())["front_ends"])


def body(model: str, array: np.ndarray, name: str = "IN", id: str = "") -> tuple[bytes, bytes]:
    """Head and body of a request with one tensor."""
    kind = {"f": "FP32", "i": "INT32"}[array.dtype.char]
    binary = {"binary_data_output": True}
    text = binary_head(list(array.shape), kind, array.nbytes, name, id=id, parameters=binary)
    head = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\nContent-Length: {len(text) + array.nbytes}\r\n\r\n"
    )
    return head.encode(), text + array.tobytes()


def message(model: str, *arrays: np.ndarray) -> bytes:
    made = service_pb2.ModelInferRequest(model_name=model)
    for name, array in zip("AB" if len(arrays) > 1 else ["IN"], arrays, strict=True):
        made.inputs.add(name=name, datatype={"f": "FP32", "d": "FP64"}[array.dtype.char], shape=array.shape)
    made.raw_input_contents.extend(array.tobytes() for array in arrays)
    return made.SerializeToString()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_model_reads_what_the_kernel_wrote(server: ServerProcess, protocol: str) -> None:
    a, b = LARGE, np.arange(100_000, dtype=np.float64)
    for _ in range(3):
        found = infer(server, protocol, "where", A=a, B=b)
        assert found.as_numpy("SUM").tolist() == [a.astype(np.float64).sum(), b.sum()]
        places = found.as_numpy("PLACE")
        assert (places >= BODIES).all(), "in the memory for bodies"
        assert (places < BODIES + (4 << 20)).all(), "the same pages are used again"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_what_is_small_or_lies_badly_is_copied(server: ServerProcess, protocol: str) -> None:
    a, b = LARGE[:1001], np.arange(100, dtype=np.float64)
    found = infer(server, protocol, "where", A=a, B=b)
    assert found.as_numpy("SUM").tolist() == [a.sum(), b.sum()]
    assert (found.as_numpy("PLACE") == -1).all(), "in memory of the engine's own"
    a, b = LARGE[:100_001], np.arange(100_000, dtype=np.float64)
    found = infer(server, protocol, "where", A=a, B=b)
    assert found.as_numpy("SUM").tolist() == [a.astype(np.float64).sum(), b.sum()]
    first, second = found.as_numpy("PLACE")
    assert first >= BODIES
    # a body has its tensors one behind the other, messages have a buffer for each
    assert 0 < second < BODIES if protocol == "http" else second >= BODIES


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_strings_are_not_received_there(server: ServerProcess, protocol: str) -> None:
    text = np.array([b"x" * 1000] * 100, dtype=object)
    found = infer(server, protocol, "strings", A=LARGE, B=text)
    assert found.as_numpy("SUM").tolist() == [LARGE.astype(np.float64).sum(), 100]
    first, second = found.as_numpy("PLACE")
    assert 0 < first < BODIES and second == -1
    with pytest.raises(Exception, match=r"datatype|data-type"):
        infer(server, protocol, "plus", IN=text)  # a model without strings is sent some


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(("model", "more"), [("plus", 1), ("twice", 2), ("process", 1)])
def test_whoever_executes_it(server: ServerProcess, protocol: str, model: str, more: int) -> None:
    for number in range(3):
        array = LARGE + number
        found = infer(server, protocol, model, IN=array).as_numpy("OUT")
        np.testing.assert_array_equal(found, array + more)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_cached_answer_does_not_change_with_the_memory(server: ServerProcess, protocol: str) -> None:
    """The identity model's output lies where its input was received; the next body is received there, too."""
    arrays = [LARGE[: MIB // 8] + 1000 * (protocol == "grpc") + number for number in range(4)]
    for _ in range(2):
        for array in arrays:
            found = infer(server, protocol, "cached", INPUT0=array).as_numpy("OUTPUT0")
            np.testing.assert_array_equal(found, array)
    assert stats(server, "cached")["inference_stats"]["cache_hit"]["count"] >= 4


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_many_at_once_get_their_own_back(server: ServerProcess, protocol: str) -> None:
    """Answers of the identity model are sent from where the requests were received."""

    def ask(number: int) -> bool:
        arrays = [LARGE + 1000 * number + 10_000 * turn for turn in range(10)]
        return all(
            np.array_equal(infer(server, protocol, "echo", INPUT0=array).as_numpy("OUTPUT0"), array)
            for array in arrays
        )

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(ask, range(6)))
    until(lambda: shared_bytes(server) == 0, server.log)


def executed(server: ServerProcess, model: str) -> int:
    return int(stats(server, model)["inference_count"])


@pytest.mark.slow
def test_an_answer_stays_until_its_client_has_read_it(server: ServerProcess) -> None:
    array = np.arange(4 * MIB, dtype=np.float32)
    before = executed(server, "echo")
    with Http1(server.http) as client:
        client.sock.sendall(b"".join(body("echo", array, "INPUT0")))
        until(lambda: executed(server, "echo") > before, server.log)
        for number in range(3):
            found = infer(server, "http", "echo", INPUT0=array + number).as_numpy("OUTPUT0")
            np.testing.assert_array_equal(found, array + number)
        until(lambda: shared_bytes(server) >= array.nbytes, server.log)
        reply = client.read()
    assert reply.status == 200
    np.testing.assert_array_equal(np.frombuffer(reply.body[-array.nbytes :], np.float32), array)
    until(lambda: shared_bytes(server) == 0, server.log)


def test_messages_of_a_stream(server: ServerProcess) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client) as answers:
        tensor = grpcclient.InferInput("IN", list(LARGE.shape), "FP32")
        tensor.set_data_from_numpy(LARGE)
        for _ in range(3):
            client.async_stream_infer("many", [tensor])
        got = answers.results(6)
    for first, second in zip(got[::2], got[1::2], strict=True):
        found = np.concatenate([first.as_numpy("OUT"), second.as_numpy("OUT")])
        np.testing.assert_array_equal(found, LARGE)


def test_a_request_that_is_refused_gives_its_memory_back(server: ServerProcess) -> None:
    for protocol in ("http", "grpc"):
        with pytest.raises(Exception, match="expected"):
            infer(server, protocol, "plus", IN=LARGE.reshape(2, -1))
        with pytest.raises(Exception, match="'B'"):
            infer(server, protocol, "where", A=LARGE)
    with Http1(server.http) as client:
        head, rest = body("plus", LARGE)
        client.sock.sendall(head + rest.replace(b"FP32", b"FP99"))
        assert client.read().status == 400
    until(lambda: shared_bytes(server) < MIB // 2, server.log)


def test_bodies_that_are_not_complete_lie_there_until_their_client_leaves(server: ServerProcess) -> None:
    head, rest = body("plus", np.ones(MIB, np.float32))
    whole = framed(message("plus", np.ones(MIB, np.float32)))
    with Http1(server.http) as client, RawClient(server.grpc) as other:
        client.sock.sendall(head + rest[:MIB])
        other.send(other.headers(1) + other.data(1, whole[:MIB], end=False))
        other.sync()
        until(lambda: shared_bytes(server) >= 8 * MIB, server.log)
        infer(server, "http", "plus", IN=LARGE)
        infer(server, "grpc", "plus", IN=LARGE)
        other.reset(1)
        other.sync()
        until(lambda: shared_bytes(server) < 8 * MIB, server.log)
    until(lambda: shared_bytes(server) < 4 * MIB, server.log)


def test_a_model_that_goes_while_its_body_comes(server: ServerProcess) -> None:
    """The engine reads what the front end does not: the body goes there as it came."""
    head, rest = body("plus", LARGE)
    with httpclient.InferenceServerClient(server.http) as control, Http1(server.http) as client:
        client.sock.sendall(head + rest[: MIB // 2])
        until(lambda: shared_bytes(server) >= MIB, server.log)
        control.unload_model("plus")
        client.sock.sendall(rest[MIB // 2 :])
        reply = client.read()
        assert reply.status in (400, 404) and b"'plus'" in reply.body
        client.sock.sendall(head + rest[: MIB // 2])
        control.load_model("plus")
        client.sock.sendall(rest[MIB // 2 :])
        assert client.read().status == 200, "without memory when it began, so it was received elsewhere"
        client.sock.sendall(head + rest)
        assert client.read().status == 200


def test_http_requests_to_a_decoupled_model_are_refused_as_ever(server: ServerProcess) -> None:
    head, rest = body("many", LARGE)
    with Http1(server.http) as client:
        client.sock.sendall(head + rest)
        reply = client.read()
    assert reply.status == 501 and b"decoupled" in reply.body


def test_messages_in_another_order_are_decoded_as_ever(server: ServerProcess) -> None:
    whole = service_pb2.ModelInferRequest.FromString(message("plus", LARGE))
    raw = service_pb2.ModelInferRequest(raw_input_contents=whole.raw_input_contents).SerializeToString()
    del whole.raw_input_contents[:]
    head = whole.SerializeToString()
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=lambda data: data,
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )
        for data in (raw + head, head + raw + service_pb2.ModelInferRequest(id="later").SerializeToString()):
            assert call(data, timeout=60).raw_output_contents[0] == (LARGE + 1).tobytes()


@pytest.mark.slow
def test_a_front_end_that_ends_with_half_a_body(tmp_path: Path) -> None:
    """One request is executed and reads what was received, of another half has come."""
    gate = Gate(tmp_path / "models", tmp_path / "gate")
    isolated(tmp_path / "models", "plus", PLUS, config(), "none")
    array = np.arange(MIB // 4, dtype=np.int32).reshape(1, -1)
    head, rest = body("plus", LARGE)
    with ServerProcess(tmp_path / "models", "--frontends=1") as server:
        (victim,) = pids(server)
        with Http1(server.http) as lost, Http1(server.http) as other:
            lost.sock.sendall(b"".join(body("gate", array, "INPUT0", "lost")))
            assert gate.started() == ["lost"]
            other.sock.sendall(head + rest[: MIB // 2])
            assert front_of(server, other.sock.getsockname()) == victim
            until(lambda: shared_bytes(server) >= 2 * MIB, server.log)
            os.kill(victim, signal.SIGKILL)
            gate.go("c")  # goes on when the request is cancelled, and looks at what it was given
            assert gate.reported() == ["lost"]
            assert lost.file.readline() == other.file.readline() == b""
        until(lambda: pids(server) and pids(server) != [victim], "another has started")
        for protocol in ("http", "grpc"):
            found = infer(server, protocol, "plus", IN=LARGE).as_numpy("OUT")
            np.testing.assert_array_equal(found, LARGE + 1)
        until(lambda: shared_bytes(server) == 0, server.log)
    gate.close()
