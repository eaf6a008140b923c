"""Large messages whose decoding takes long, and large outputs to classify, are for the workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.embedded import EmbeddedServer
from tests.support.gated_workers import WorkersGate, gate_workers
from tests.support.repository import write_model
from tests.support.streams import Answers

N = 200_000
CONFIG = """backend: "identity"
input { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] }
"""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> WorkersGate:
    return gate_workers(monkeypatch)


def embedded(folder: Path, **settings: Any) -> EmbeddedServer:
    write_model(folder, "m", CONFIG)
    write_model(folder, "strings", CONFIG.replace("INT32", "STRING"))
    return EmbeddedServer(folder, **settings)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with embedded(tmp_path) as made:
        yield made


@pytest.fixture
def stub(server: EmbeddedServer) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def typed(count: int, first: int = 0, **contents: Any) -> Any:
    """A request with typed contents, by default `first` and then as many large numbers as are left."""
    made = service_pb2.ModelInferRequest(model_name="m", id=str(first))
    tensor = made.inputs.add(name="INPUT0", shape=[count], datatype="INT32")
    for field, values in (contents or {"int_contents": [first] + [1234567] * (count - 1)}).items():
        getattr(tensor.contents, field).extend(values)
    return made


def raw(model: str, datatype: str, count: int, content: bytes) -> Any:
    made = service_pb2.ModelInferRequest(model_name=model)
    made.inputs.add(name="INPUT0", shape=[count], datatype=datatype)
    made.raw_input_contents.append(content)
    return made


def accepted(server: EmbeddedServer) -> int:
    (model,) = [model for model in server.server.repository.ready_models() if model.name == "m"]
    return int(server.ask(model.counters.accounts)["accepted"])


def kept(server: EmbeddedServer) -> int:
    """Bytes of the server's budget that decoded messages hold."""
    return server.server.services.held._kept


def test_typed_contents(server: EmbeddedServer, stub: Any, gate: WorkersGate) -> None:
    server.ask(gate.open.set)
    answer = stub.ModelInfer(typed(N, 7))
    assert np.frombuffer(answer.raw_output_contents[0], np.int32).tolist() == [7] + [1234567] * (N - 1)
    assert gate.done == 1
    stub.ModelInfer(typed(10))
    stub.ModelInfer(raw("m", "INT32", N, bytes(4 * N)))
    assert gate.asked == 1, "few elements, and raw contents, are the loop's"
    server.until(lambda: kept(server) == 0, "the bytes are given back")


def test_strings(server: EmbeddedServer, stub: Any, gate: WorkersGate) -> None:
    server.ask(gate.open.set)
    texts = [b"%d" % i for i in range(100_000)]
    content = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    message = typed(len(texts), bytes_contents=texts)
    message.model_name, message.inputs[0].datatype = "strings", "BYTES"
    assert stub.ModelInfer(message).raw_output_contents == [content]
    assert stub.ModelInfer(raw("strings", "BYTES", len(texts), content)).raw_output_contents == [content]
    assert gate.done == 2
    with pytest.raises(grpc.RpcError, match="got 100000"):
        stub.ModelInfer(raw("strings", "BYTES", len(texts) + 1, content))
    with pytest.raises(
        grpc.RpcError, match=r"incomplete string data .* of length 5 but only 4 bytes available"
    ):
        stub.ModelInfer(raw("strings", "BYTES", len(texts), content[:-1]))


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (typed(N, int_contents=[1] * (N - 1) + [-1], uint_contents=[2]), "unexpected explicit tensor data"),
        (typed(N + 1), "got 800000"),
    ],
)
def test_what_is_wrong_is_told(
    server: EmbeddedServer, stub: Any, gate: WorkersGate, broken: Any, why: str
) -> None:
    server.ask(gate.open.set)
    if why == "got 800000":
        broken.inputs[0].contents.int_contents.pop()
    with pytest.raises(grpc.RpcError, match=why):
        stub.ModelInfer(broken)
    assert gate.asked == 1
    server.until(lambda: kept(server) == 0, "the bytes are given back")


def test_a_stream_keeps_its_order(server: EmbeddedServer, stub: Any, gate: WorkersGate) -> None:
    answers = stub.ModelStreamInfer(iter([typed(N, 1), typed(1, 2), typed(N, 3), typed(1, 4)]))
    server.until(lambda: gate.asked == 1, "the first is with the workers")
    assert accepted(server) == 0, "none overtakes it"
    server.ask(gate.open.set)
    assert [answer.infer_response.id for answer in answers] == ["1", "2", "3", "4"]
    assert gate.done == 2


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_ends_the_work(
    server: EmbeddedServer, stub: Any, gate: WorkersGate, streamed: bool
) -> None:
    call = stub.ModelStreamInfer(iter([typed(N)])) if streamed else stub.ModelInfer.future(typed(N))
    server.until(lambda: gate.asked == 1, "it is with the workers")
    call.cancel()
    server.until(lambda: gate.left == 1, "the work is given up")
    assert accepted(server) == 0
    server.until(lambda: kept(server) == 0, "the bytes are given back")


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
def test_the_deadline_holds_while_it_is_decoded(
    server: EmbeddedServer, stub: Any, gate: WorkersGate, streamed: bool
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        if streamed:
            list(stub.ModelStreamInfer(iter([typed(N)]), timeout=2))
        else:
            stub.ModelInfer(typed(N), timeout=2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    server.until(lambda: gate.left == gate.asked, "nothing is decoded for nobody")
    assert accepted(server) == 0


@pytest.mark.slow
def test_the_exit_timeout_holds(tmp_path: Path, gate: WorkersGate) -> None:
    with embedded(tmp_path, exit_timeout_secs=1.0) as server, grpc.insecure_channel(server.grpc) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer.future(typed(N))
        server.until(lambda: gate.asked == 1, "it is with the workers")
        server.stop()
        assert server.server.timed_out and gate.left == 1
        with pytest.raises(grpc.RpcError):
            call.result()


def test_what_is_decoded_needs_room(tmp_path: Path) -> None:
    """Integers of one byte each on the wire, eight in memory."""
    with (
        embedded(tmp_path, max_held_bytes=1 << 20) as server,
        grpc.insecure_channel(server.grpc) as channel,
    ):
        message = typed(N, int64_contents=[1] * N)
        message.inputs[0].datatype = "INT64"
        with pytest.raises(grpc.RpcError) as caught:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert f"{8 * N} bytes can never be held" in caught.value.details()
        server.until(lambda: kept(server) == 0, "the bytes are given back")


def classified(count: int, classes: int, number: int = 0) -> Any:
    content = np.random.default_rng(number).permutation(count).astype(np.int32)
    made = raw("m", "INT32", count, content.tobytes())
    made.id = str(number)
    made.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = classes
    return made


def best(count: int, classes: int, number: int = 0) -> list[str]:
    content = np.random.default_rng(number).permutation(count).astype(np.int32)
    return [f"{content[i]}:{i}" for i in np.argsort(content)[::-1][:classes]]


def texts(response: Any) -> list[str]:
    found, content = [], response.raw_output_contents[0]
    while content:
        length = int.from_bytes(content[:4], "little")
        found.append(content[4 : 4 + length].decode())
        content = content[4 + length :]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"grpc_infer_response_compression_level": "low"}])
def test_a_worker_classifies(tmp_path: Path, gate: WorkersGate, settings: dict[str, Any]) -> None:
    with embedded(tmp_path, **settings) as server, grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        server.ask(gate.open.set)
        assert texts(stub.ModelInfer(classified(N, 3))) == best(N, 3)
        assert gate.done == 1
        assert texts(stub.ModelInfer(classified(100, 3))) == best(100, 3)
        assert gate.asked == 1, "the small one is the loop's"
        wrong = classified(N, 3)
        wrong.model_name, wrong.inputs[0].datatype = "strings", "BYTES"
        wrong.raw_input_contents[0] = b"\0\0\0\0" * N
        wrong.outputs[0].name = "OUTPUT0"
        with pytest.raises(grpc.RpcError, match="unsupported type 'BYTES'"):
            stub.ModelInfer(wrong)


@pytest.mark.parametrize(("rows", "columns"), [(1025, 3), (900, 300), (20_000, 7)])
def test_a_worker_classifies_many_rows(tmp_path: Path, gate: WorkersGate, rows: int, columns: int) -> None:
    """However few bytes they have: for each of them something is printed. A row has the classes that it has alone."""
    write_model(tmp_path, "rows", CONFIG.replace("INT32", "INT8") + "max_batch_size: 100000")
    values = np.random.default_rng(1).integers(-3, 3, (rows, columns), np.int8)
    message = raw("rows", "INT8", rows, values.tobytes())
    message.inputs[0].shape.append(columns)
    message.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = 2
    with embedded(tmp_path) as server, grpc.insecure_channel(server.grpc) as channel:
        server.ask(gate.open.set)
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message)
    assert gate.done == 1 and list(answer.outputs[0].shape) == [rows, 2]
    order = np.argsort(-values.astype(np.int64), axis=1, kind="stable")[
        :, :2
    ]  # of equals the one with the lowest number
    assert texts(answer) == [f"{row[i]}:{i}" for row, best in zip(values, order, strict=True) for i in best]


def test_classified_answers_keep_their_order(server: EmbeddedServer, gate: WorkersGate) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client) as answers:
        for number in range(4):
            count = N if number % 2 == 0 else 10
            tensor = grpcclient.InferInput("INPUT0", [count], "INT32")
            tensor.set_data_from_numpy(np.random.default_rng(number).permutation(count).astype(np.int32))
            wanted = grpcclient.InferRequestedOutput("OUTPUT0", class_count=2)
            client.async_stream_infer("m", [tensor], outputs=[wanted], request_id=str(number))
        server.until(lambda: gate.asked == 1, "the first answer is with the workers")
        server.ask(gate.open.set)
        for number in range(4):
            answer = answers.result().get_response()
            assert answer.id == str(number)
            assert texts(answer) == best(N if number % 2 == 0 else 10, 2, number)
    assert gate.done == 2


def test_nobody_classifies_for_a_client_that_left(
    server: EmbeddedServer, stub: Any, gate: WorkersGate
) -> None:
    call = stub.ModelStreamInfer(iter([classified(N, 3)]))
    server.until(lambda: gate.asked == 1, "the answer is with the workers")
    call.cancel()
    server.until(lambda: gate.left == 1, "the work is given up")
