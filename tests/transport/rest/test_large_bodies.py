"""Large JSON bodies are decoded by workers: order, fairness, and clients that leave."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from tests.backends.python.models import config as python_config
from tests.backends.python.models import isolated
from tests.support.embedded import EmbeddedServer
from tests.support.gated_workers import WorkersGate, gate_workers
from tests.support.http import Http1
from tests.support.infer_messages import binary_head
from tests.support.repository import write_model
from tests.support.waiting import until

N = 200_000
CONFIG = """backend: "identity"
input { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] }
"""
TWO = """backend: "identity"
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "INPUT1" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ -1 ] } ]
"""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> WorkersGate:
    return gate_workers(monkeypatch)


@pytest.fixture(params=[True, False], ids=["lean", "hypercorn"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedServer]:
    write_model(tmp_path, "m", CONFIG)
    write_model(tmp_path, "two", TWO)
    write_model(tmp_path, "strings", CONFIG.replace("INT32", "STRING"))
    with EmbeddedServer(tmp_path, http_lean=request.param, allow_client_shm=True) as made:
        yield made


def body(count: int, first: int = 0) -> bytes:
    tensor = {
        "name": "INPUT0",
        "shape": [count],
        "datatype": "INT32",
        "data": [first] + [1234567] * (count - 1),
    }
    return json.dumps(
        {"inputs": [tensor], "id": str(first), "parameters": {"binary_data_output": True}}
    ).encode()


def post(content: bytes, path: str = "/v2/models/m/infer") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def test_a_large_body_is_answered(server: EmbeddedServer, gate: WorkersGate) -> None:
    server.ask(gate.open.set)
    with httpclient.InferenceServerClient(server.http) as client:
        tensor = httpclient.InferInput("INPUT0", [N], "INT32")
        data = np.arange(N, dtype=np.int32)
        tensor.set_data_from_numpy(data, binary_data=False)
        assert np.array_equal(client.infer("m", [tensor]).as_numpy("OUTPUT0"), data)
    assert gate.done == 1
    with Http1(server.http) as client:
        refused = client.request("POST", "/v2/models/m/infer", body(N)[:-9])
    assert refused.status == 400 and b"failed to parse the request JSON buffer" in refused.body
    assert gate.asked == 2


REPEAT = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            answer = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
            sender.send(answer)
            sender.send(answer, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("lean", [True, False], ids=["lean", "hypercorn"])
def test_a_model_that_becomes_decoupled_meanwhile_is_refused(
    tmp_path: Path, gate: WorkersGate, lean: bool
) -> None:
    """Its answers cannot be carried; the client is told so, as by a later request."""
    write_model(tmp_path, "m", CONFIG)
    settings: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("*",)}
    with (
        EmbeddedServer(tmp_path, http_lean=lean, **settings) as server,
        Http1(server.http) as client,
        Http1(server.http) as other,
    ):
        client.send(post(body(N)))
        until(lambda: gate.asked == 1, "a worker has the body")
        decoupled = python_config(
            "INPUT0:TYPE_INT32:-1", "OUT:TYPE_INT32:-1", extra="model_transaction_policy { decoupled: true }"
        )
        isolated(tmp_path, "m", REPEAT, decoupled, "none")
        assert other.request("POST", "/v2/repository/models/m/load").status == 200
        server.ask(gate.open.set)
        refused = client.read()
        assert refused.status == 501 and b"doesn't support models with decoupled transaction" in refused.body


def test_a_region_is_asked_on_the_loop(server: EmbeddedServer) -> None:
    """One input is large JSON, the other lies in shared memory."""
    data = np.arange(N, dtype=np.int32)
    handle = shm.create_shared_memory_region("large", "/neptrio_large_bodies", data.nbytes)
    try:
        shm.set_shared_memory_region(handle, [data])
        with httpclient.InferenceServerClient(server.http) as client:
            client.register_system_shared_memory("large", "/neptrio_large_bodies", data.nbytes)
            tensors = [httpclient.InferInput(f"INPUT{i}", [N], "INT32") for i in range(2)]
            tensors[0].set_data_from_numpy(data + 1, binary_data=False)
            tensors[1].set_shared_memory("large", data.nbytes)
            result = client.infer("two", tensors)
            assert np.array_equal(result.as_numpy("OUTPUT0"), data + 1)
            assert np.array_equal(result.as_numpy("OUTPUT1"), data)
            client.unregister_system_shared_memory()
    finally:
        shm.destroy_shared_memory_region(handle)


def test_a_worker_copies_a_large_output(server: EmbeddedServer, gate: WorkersGate) -> None:
    """Into a region, which is looked up on the loop; a small output is the loop's."""
    server.ask(gate.open.set)
    data = np.arange(2 * N, dtype=np.int32)
    handle = shm.create_shared_memory_region("out", "/neptrio_large_outputs", data.nbytes)
    try:
        with httpclient.InferenceServerClient(server.http) as client:
            client.register_system_shared_memory("out", "/neptrio_large_outputs", data.nbytes)
            for count, steps in ((2 * N, 1), (100, 1)):
                tensor = httpclient.InferInput("INPUT0", [count], "INT32")
                tensor.set_data_from_numpy(data[:count] + count)
                wanted = httpclient.InferRequestedOutput("OUTPUT0")
                wanted.set_shared_memory("out", 4 * count)
                client.infer("m", [tensor], outputs=[wanted])
                found = shm.get_contents_as_numpy(handle, np.int32, [count])
                assert np.array_equal(found, data[:count] + count)
                assert gate.done == steps
            wanted.set_shared_memory("unknown", 8 * N)
            tensor.set_shape([2 * N])
            tensor.set_data_from_numpy(data)
            with pytest.raises(
                InferenceServerException, match="Unable to find shared memory region: 'unknown'"
            ):
                client.infer("m", [tensor], outputs=[wanted])
            client.unregister_system_shared_memory()
    finally:
        shm.destroy_shared_memory_region(handle)


@pytest.mark.parametrize("server", [True], indirect=True)
def test_nothing_overtakes_a_large_body(server: EmbeddedServer, gate: WorkersGate) -> None:
    (model,) = [model for model in server.server.repository.ready_models() if model.name == "m"]
    with Http1(server.http) as client:
        client.send(post(body(N, 1)) + post(body(1, 2)) + post(body(N, 3)) + post(body(1, 4)))
        server.until(lambda: gate.asked == 1, "the first is with the workers")
        with Http1(server.http) as other:
            assert other.request("POST", "/v2/models/m/infer", body(1, 5)).status == 200
        assert server.ask(model.counters.accounts)["accepted"] == 1, "the other connection's only"
        server.ask(gate.open.set)
        for i in range(1, 5):
            reply = client.read()
            assert reply.status == 200
            head = reply.body[: int(reply.headers["inference-header-content-length"])]
            assert json.loads(head)["id"] == str(i)
    assert gate.done == 2


def test_a_client_that_leaves_ends_the_work(server: EmbeddedServer, gate: WorkersGate) -> None:
    with Http1(server.http) as client:
        client.send(post(body(N)))
        server.until(lambda: gate.asked == 1, "it is with the workers")
    server.until(lambda: gate.left == 1, "the work is given up")
    server.ask(gate.open.set)
    (model,) = [model for model in server.server.repository.ready_models() if model.name == "m"]
    assert server.ask(model.counters.accounts)["accepted"] == 0


@pytest.mark.slow
def test_the_exit_timeout_holds(tmp_path: Path, gate: WorkersGate) -> None:
    """A request that is never decoded holds up the end no longer than any other."""
    write_model(tmp_path, "m", CONFIG)
    with EmbeddedServer(tmp_path, exit_timeout_secs=1.0) as server, Http1(server.http) as client:
        client.send(post(body(N)))
        server.until(lambda: gate.asked == 1, "it is with the workers")
        server.stop()
        assert server.server.timed_out and gate.left == 1


def binary(count: int, number: int) -> tuple[bytes, int]:
    """A binary request whose answer is JSON, and its JSON's length: the fast path takes it."""
    head = binary_head([count], "INT32", 4 * count, id=str(number), outputs=[{"name": "OUTPUT0"}])
    return head + np.full(count, number, np.int32).tobytes(), len(head)


def post_binary(count: int, number: int, more: str = "") -> bytes:
    content, head = binary(count, number)
    more += f"Inference-Header-Content-Length: {head}\r\n"
    return post(content).replace(b"\r\n\r\n", f"\r\n{more}\r\n".encode(), 1)


@pytest.mark.parametrize("more", ["", "Accept-Encoding: gzip\r\n"], ids=["plain", "gzip"])
def test_a_large_answer_is_printed_by_a_worker(server: EmbeddedServer, gate: WorkersGate, more: str) -> None:
    server.ask(gate.open.set)
    with Http1(server.http) as client:
        for count in (20_000, 10):
            client.send(post_binary(count, 7, more))
            reply = client.read()
            text = gzip.decompress(reply.body) if more and "content-encoding" in reply.headers else reply.body
            assert reply.status == 200 and json.loads(text)["outputs"][0]["data"] == [7] * count
    assert gate.done == 1, "the small one is the loop's"


@pytest.mark.parametrize("server", [True], indirect=True)
@pytest.mark.parametrize("more", ["", "Accept-Encoding: identity\r\n"], ids=["fast path", "parser"])
def test_large_answers_keep_their_order(server: EmbeddedServer, gate: WorkersGate, more: str) -> None:
    with Http1(server.http) as client:
        for number in range(4):
            client.send(post_binary(20_000 if number % 2 == 0 else 1, number, more))
        server.until(lambda: gate.asked >= 1, "the first answer is with the workers")
        server.ask(gate.open.set)
        for number in range(4):
            reply = client.read()
            assert json.loads(reply.body)["id"] == str(number)


@pytest.mark.parametrize("more", ["", "Accept-Encoding: identity\r\n"], ids=["fast path", "parser"])
def test_nobody_prints_for_a_client_that_left(server: EmbeddedServer, gate: WorkersGate, more: str) -> None:
    with Http1(server.http) as client:
        client.send(post_binary(20_000, 1, more))
        server.until(lambda: gate.asked == 1, "the answer is with the workers")
    server.until(lambda: gate.left == 1, "the work is given up")


@pytest.mark.slow
def test_a_worker_walks_over_strings(server: EmbeddedServer, gate: WorkersGate) -> None:
    """Only of strings; other binary tensors need no work at all."""
    server.ask(gate.open.set)
    strings = np.array([b"%d" % i for i in range(100_000)], dtype=object)
    with httpclient.InferenceServerClient(server.http) as client:
        tensor = httpclient.InferInput("INPUT0", [N], "INT32")
        tensor.set_data_from_numpy(np.arange(N, dtype=np.int32))
        client.infer("m", [tensor])
        assert gate.asked == 0
        tensor = httpclient.InferInput("INPUT0", [len(strings)], "BYTES")
        tensor.set_data_from_numpy(strings)
        assert np.array_equal(client.infer("strings", [tensor]).as_numpy("OUTPUT0"), strings)
        assert gate.done == 1
        tensor.set_shape([len(strings) - 1])
        with pytest.raises(InferenceServerException, match="unexpected number of string elements 100000 "):
            client.infer("strings", [tensor])
        tensor.set_shape([len(strings) + 1])
        with pytest.raises(InferenceServerException, match=r"expected 100001 string elements .* got 100000"):
            client.infer("strings", [tensor])


@pytest.mark.parametrize("binary", [True, False])
def test_a_worker_classifies_a_large_output(server: EmbeddedServer, gate: WorkersGate, binary: bool) -> None:
    server.ask(gate.open.set)
    data = np.random.default_rng(1).permutation(N).astype(np.int32)
    with httpclient.InferenceServerClient(server.http) as client:
        for count, steps in ((N, 1), (100, 1)):
            tensor = httpclient.InferInput("INPUT0", [count], "INT32")
            tensor.set_data_from_numpy(data[:count])
            wanted = httpclient.InferRequestedOutput("OUTPUT0", binary_data=binary, class_count=3)
            found = client.infer("m", [tensor], outputs=[wanted]).as_numpy("OUTPUT0")
            best = np.argsort(data[:count])[::-1][:3]
            assert [text if isinstance(text, bytes) else text.encode() for text in found] == [
                b"%d:%d" % (data[i], i) for i in best
            ]
            assert gate.done == steps, "the small one is the loop's"
