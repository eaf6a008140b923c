"""Large HTTP bodies and gRPC messages are received into the memory of the model's process; docs/isolation.md counts the copies."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2

from tests.backends.python.models import config, python_model
from tests.support.http import Http1
from tests.support.infer_messages import binary_head
from tests.support.raw_http2 import RawClient
from tests.support.raw_http2 import message as framed
from tests.support.server import ServerProcess, without_front_ends
from tests.support.statistics import stats
from tests.support.streams import Answers
from tests.support.waiting import until

# front ends receive into the memory that they share with the engine
pytestmark = without_front_ends

SUM = """
import ctypes
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            arrays = [t.as_numpy() for t in request.inputs()]
            found = [float(a.sum()) if a.dtype != object else len(a) for a in arrays]
            flags = [float(a.flags.aligned and a.flags.writeable) for a in arrays]
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(found + flags, np.float32))]))
        return answers
"""
ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
            for request in requests
        ]
"""
MADE = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            array = request.inputs()[0].as_numpy()
            made = pb_utils.empty(array.shape, array.dtype)
            np.add(array, 1, out=made)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", made)]))
            del array, made
        return answers
"""
OWN = """
import os, signal

class TritonPythonModel:
    def execute(self, requests):
        if requests[0].request_id() == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy() * 2)])
            for request in requests
        ]
"""
MIB = 1 << 20
LARGE = np.arange(MIB // 4, dtype=np.float32) % 1000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    python_model(repository, "sum", SUM, config(inputs="A:TYPE_FP32:-1 B:TYPE_FP64:-1"))
    python_model(repository, "strings", SUM, config(inputs="A:TYPE_FP32:-1 B:TYPE_STRING:-1"))
    python_model(repository, "echo", ECHO)
    python_model(repository, "made", MADE)
    python_model(repository, "own", OWN)
    two = " instance_group { count: 2 kind: KIND_CPU }"
    python_model(repository, "two", ECHO, config() + two)
    batching = " dynamic_batching { max_queue_delay_microseconds: 100000 }"
    python_model(repository, "batched", ECHO, config(max_batch_size=8, extra=batching))
    with ServerProcess(repository) as process:
        yield process


def infer_grpc(server: ServerProcess, model: str, **arrays: np.ndarray) -> np.ndarray:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        tensors = []
        for name, array in arrays.items():
            kind = {"f": "FP32", "d": "FP64", "O": "BYTES"}[array.dtype.char]
            tensors.append(grpcclient.InferInput(name, list(array.shape), kind))
            tensors[-1].set_data_from_numpy(array)
        found: np.ndarray = client.infer(model, tensors, client_timeout=60).as_numpy("OUT")
        return found


def infer_stream(server: ServerProcess, model: str, **arrays: np.ndarray) -> np.ndarray:
    with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client) as answers:
        tensors = []
        for name, array in arrays.items():
            tensors.append(grpcclient.InferInput(name, list(array.shape), "FP32"))
            tensors[-1].set_data_from_numpy(array)
        client.async_stream_infer(model, tensors)
        found: np.ndarray = answers.result().as_numpy("OUT")
    return found


def infer(server: ServerProcess, model: str, id: str = "", **arrays: np.ndarray) -> np.ndarray:
    with httpclient.InferenceServerClient(server.http, network_timeout=60, connection_timeout=60) as client:
        tensors = []
        for name, array in arrays.items():
            kind = {"f": "FP32", "d": "FP64", "O": "BYTES"}[array.dtype.char]
            tensors.append(httpclient.InferInput(name, list(array.shape), kind))
            tensors[-1].set_data_from_numpy(array)
        found: np.ndarray = client.infer(model, tensors, request_id=id).as_numpy("OUT")
        return found


def counted(server: ServerProcess, model: str) -> tuple[int, int]:
    """Bytes of tensors that were copied, and that were not, so far."""
    stat = stats(server, model)
    return (
        sum(row["copied_bytes"] for row in stat["processes"]),
        sum(row["in_place_bytes"] for row in stat["processes"]),
    )


def crossed(
    server: ServerProcess, model: str, ask: Callable[..., np.ndarray] = infer, **arrays: np.ndarray
) -> tuple[int, int, np.ndarray]:
    before = counted(server, model)
    found = ask(server, model, **arrays)
    after = counted(server, model)
    return after[0] - before[0], after[1] - before[1], found


@pytest.mark.parametrize("ask", [infer, infer_grpc, infer_stream])
def test_nothing_is_copied_between_the_transport_and_the_model(server: ServerProcess, ask: Any) -> None:
    copied, in_place, found = crossed(server, "echo", ask, IN=LARGE)
    assert (found == LARGE).all()
    assert (copied, in_place) == (0, 2 * MIB)  # there, and back as an output
    copied, in_place, found = crossed(server, "made", ask, IN=LARGE)
    assert (found == LARGE + 1).all()
    assert (copied, in_place) == (0, 2 * MIB)


def test_other_tensors_are_copied_as_often_as_the_documentation_says(server: ServerProcess) -> None:
    copied, in_place, found = crossed(server, "own", IN=LARGE)  # an output that the model computed: once
    assert (found == LARGE * 2).all()
    assert (copied, in_place) == (MIB, MIB)
    small = np.ones(8, np.float32)  # in once; out once by each side
    copied, in_place, _ = crossed(server, "own", IN=small)
    assert (copied, in_place) == (3 * 32, 0)


@pytest.mark.parametrize("ask", [infer, infer_grpc])
def test_one_of_several_instances_receives_a_body_and_executes_it(server: ServerProcess, ask: Any) -> None:
    for _ in range(4):
        copied, in_place, found = crossed(server, "two", ask, IN=LARGE)
        assert (found == LARGE).all()
        assert (copied, in_place) == (0, 2 * MIB)


def test_several_bodies_at_once_are_received_by_several_instances(server: ServerProcess) -> None:
    """Two bodies are begun at once, so that each instance has one; neither is copied when they are complete."""
    head, body = request(MIB // 4, "two")
    before = counted(server, "two")
    with Http1(server.http) as one, Http1(server.http) as other:
        for client in (one, other):
            client.send(head + body[: 1 << 17])
        stats(server, "two")  # it is answered when both heads are read
        for client in (one, other):
            client.send(body[1 << 17 :])
        for client in (one, other):
            assert client.head().status == 200
    copied, in_place = (after - was for after, was in zip(counted(server, "two"), before, strict=True))
    assert copied <= 4096 and in_place >= 2 * MIB


def message(model: str, *arrays: np.ndarray, kind: str = "FP32", name: str = "IN") -> Any:
    made = service_pb2.ModelInferRequest(model_name=model)
    for i, array in enumerate(arrays):
        made.inputs.add(
            name=name if i == 0 else "B", datatype=kind if i == 0 else "FP64", shape=list(array.shape)
        )
    made.raw_input_contents.extend(array.tobytes() for array in arrays)
    return made


def ask_raw(server: ServerProcess, data: bytes) -> Any:
    """The answer to the bytes of a ModelInferRequest."""
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=lambda data: data,
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )
        return call(data, timeout=60)


def test_several_tensors_of_a_message_lie_aligned(server: ServerProcess) -> None:
    a, b = np.ones(100_001, np.float32), np.ones(50_000)
    before = counted(server, "sum")
    answer = ask_raw(server, message("sum", a, b, name="A").SerializeToString())
    copied, in_place = (after - was for after, was in zip(counted(server, "sum"), before, strict=True))
    found = np.frombuffer(answer.raw_output_contents[0], np.float32)
    assert found.tolist() == [a.sum(), b.sum(), 1, 1]
    assert in_place == a.nbytes + b.nbytes and copied < 100


def test_messages_in_another_order_are_decoded_as_ever(server: ServerProcess) -> None:
    whole = message("echo", LARGE)
    raw = service_pb2.ModelInferRequest(raw_input_contents=whole.raw_input_contents).SerializeToString()
    del whole.raw_input_contents[:]
    head = whole.SerializeToString()
    id = service_pb2.ModelInferRequest(id="later").SerializeToString()
    answer = ask_raw(server, head + raw + id)  # what follows the tensors has to be read, too
    assert answer.id == "later" and answer.raw_output_contents[0] == LARGE.tobytes()
    assert ask_raw(server, raw + head).raw_output_contents[0] == LARGE.tobytes()
    assert raw.startswith(b"\x3a\x80\x80\x40")
    longer = head + b"\x3a\x80\x80\xc0\x00" + raw[4:]  # its length written in one byte more
    assert ask_raw(server, longer).raw_output_contents[0] == LARGE.tobytes()


@pytest.mark.parametrize(
    ("tail", "text"),
    [
        (b"\x3a\x80\x80\x40" + bytes(100_000), "announces"),  # more than there is
        (b"\x3a\x90\xce\x02" + bytes(42_768) + b"\x3a", ""),  # nothing behind the tag
        (b"\x3a\x90\xce\x00" + bytes(10_000) + b"\x3a\xff\xff\xff\xff\xff\xff\x01" + bytes(40_000), ""),
        (b"\x3a\x90\xce\x00" + bytes(10_000) + b"\x38\x01" + bytes(40_000), ""),
    ],
)
def test_messages_that_end_wrongly_are_refused(server: ServerProcess, tail: bytes, text: str) -> None:
    whole = message("echo", np.ones(2500, np.float32))
    del whole.raw_input_contents[:]
    with pytest.raises(grpc.RpcError) as caught:
        ask_raw(server, whole.SerializeToString() + tail)
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
    assert text in caught.value.details()
    assert (infer_grpc(server, "echo", IN=LARGE) == LARGE).all()


def test_a_message_may_be_cut_anywhere(server: ServerProcess) -> None:
    """What has come before the tensor's place is known is moved there."""
    array = np.arange(12_000, dtype=np.float32)
    whole = framed(message("echo", array).SerializeToString())
    before = counted(server, "echo")
    head = len(whole) - array.nbytes
    cuts = [(1,), (3, 7), (5, 6, 9), (head - 4, head - 2), tuple(range(5, head + 3)), (head, len(whole) - 1)]
    cuts += [(cut,) for cut in range(5, head + 3)]
    for cut in cuts:
        with RawClient(server.grpc) as client:
            client.send(client.headers(1))
            for begin, end in itertools.pairwise((0, *cut, len(whole))):
                client.send(client.data(1, whole[begin:end], end=end == len(whole), size=end))
                client.sync()
            reply = client.finish(1)
        assert reply.status == 0
        answer = service_pb2.ModelInferResponse.FromString(reply.messages[0])
        assert answer.raw_output_contents[0] == array.tobytes()
    copied, in_place = (after - was for after, was in zip(counted(server, "echo"), before, strict=True))
    assert (copied, in_place) == (0, len(cuts) * 2 * array.nbytes)


def test_a_call_that_ends_in_the_middle_gives_its_memory_back(server: ServerProcess) -> None:
    """Far more than the area holds is begun and given up, one call after the other."""
    whole = framed(message("echo", np.ones(4 * MIB, np.float32)).SerializeToString())
    for i, part in enumerate([5, 10, 1000, MIB] * 6):
        with RawClient(server.grpc) as client:
            client.send(client.headers(1) + client.data(1, whole[:part], end=False))
            client.sync()
            if i % 2:
                client.reset(1)
                client.sync()
    until(lambda: crossed(server, "echo", infer_grpc, IN=LARGE)[:2] == (0, 2 * MIB), server.log)


@pytest.mark.parametrize("odd", [0, 1])
def test_tensors_that_are_not_aligned_are_copied(server: ServerProcess, odd: int) -> None:
    a, b = np.ones(100_000 + odd, np.float32), np.ones(50_000)
    copied, in_place, found = crossed(server, "sum", A=a, B=b)
    assert found.tolist() == [a.sum(), b.sum(), 1, 1]
    assert in_place == a.nbytes + (0 if odd else b.nbytes) and copied >= (b.nbytes if odd else 0)


def test_strings_are_never_read_where_the_process_can_write(server: ServerProcess) -> None:
    texts = np.array([b"x" * 1000] * 100, dtype=object)
    _, in_place, found = crossed(server, "strings", A=LARGE, B=texts)
    assert found.tolist()[:2] == [LARGE.sum(), 100] and in_place == 0
    with pytest.raises(httpclient.InferenceServerException, match=r"datatype|data-type"):
        infer(server, "echo", IN=texts)  # a model without strings is sent some
    with pytest.raises(grpcclient.InferenceServerException, match=r"datatype|data-type"):
        infer_grpc(server, "echo", IN=texts)
    _, in_place, found = crossed(server, "strings", infer_grpc, A=LARGE, B=texts)
    assert found.tolist()[:2] == [LARGE.sum(), 100] and in_place == 0
    assert (infer(server, "echo", IN=LARGE) == LARGE).all()


def test_a_batch_of_received_bodies(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http, concurrency=4, network_timeout=60) as client:
        sent = [np.full((1, 50_000), i, np.float32) for i in range(4)]
        waiting = []
        for array in sent:
            tensor = httpclient.InferInput("IN", list(array.shape), "FP32")
            tensor.set_data_from_numpy(array)
            waiting.append(client.async_infer("batched", [tensor]))
        for array, answer in zip(sent, waiting, strict=True):
            assert (answer.get_result().as_numpy("OUT") == array).all()


def request(count: int, model: str = "echo") -> tuple[bytes, bytes]:
    """Head and body of a request with `count` elements."""
    outputs = [{"name": "OUT", "parameters": {"binary_data": True}}]
    text = binary_head([count], "FP32", 4 * count, "IN", outputs=outputs)
    head = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\nContent-Length: {len(text) + 4 * count}\r\n\r\n"
    )
    return head.encode(), text + np.ones(count, np.float32).tobytes()


def test_a_client_that_leaves_in_the_middle_gives_its_memory_back(server: ServerProcess) -> None:
    """Bodies of far more than the area are begun and given up, one after the other."""
    head, body = request(4 * MIB)
    for part in [0, 10, 1000, MIB] * 6:
        with Http1(server.http) as client:
            client.send(head + body[:part])
    until(lambda: crossed(server, "echo", IN=LARGE)[:2] == (0, 2 * MIB), server.log)


@pytest.mark.slow
def test_more_bodies_than_there_is_memory_for_are_copied(server: ServerProcess) -> None:
    """The area holds eight of these; what comes beside them is received elsewhere, and answered."""
    host, port = server.http.split(":")
    head, body = request(4 * MIB, "made")
    clients = [socket.create_connection((host, int(port))) for _ in range(9)]
    try:
        for client in clients:
            client.sendall(head + body[: 1 << 17])

        def is_full() -> bool:
            copied, _, found = crossed(server, "made", IN=LARGE)
            assert (found == LARGE + 1).all()
            if copied < MIB:  # what this request took may have been missing to one of the others
                clients.append(socket.create_connection((host, int(port))))
                clients[-1].sendall(b"".join(request(MIB // 4, "made"))[: 1 << 17])
            return copied >= MIB

        until(is_full, server.log)
        clients[0].sendall(body[1 << 17 :])
        answer = clients[0].makefile("rb")
        assert b"200 OK" in answer.readline()
    finally:
        for client in clients:
            client.close()
    until(lambda: crossed(server, "made", IN=LARGE)[:2] == (0, 2 * MIB), server.log)


def test_what_lay_in_the_memory_of_a_process_that_ended_fails(server: ServerProcess) -> None:
    """It may have written there; what it had not taken of other requests is given to the next process."""
    for _ in range(3):
        infer(server, "own", IN=np.ones(8, np.float32))  # quick, so that several are sent ahead
    answers: dict[str, Any] = {}

    def ask(id: str, array: np.ndarray) -> None:
        try:
            answers[id] = infer(server, "own", id, IN=array)
        except httpclient.InferenceServerException as error:
            answers[id] = error.message()

    threads = []
    for id, array in (("stop", np.ones(8, np.float32)), ("large", LARGE), ("small", np.ones(9, np.float32))):
        threads.append(threading.Thread(target=ask, args=(id, array)))
        threads[-1].start()
        count = len(threads)
        until(lambda count=count: stats(server, "own")["live"]["accepted"] == count, server.log)
    os.kill(stats(server, "own")["processes"][0]["pid"], signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    assert "SIGKILL" in answers["stop"] and "SIGKILL" in answers["large"]
    assert answers["small"].tolist() == [2] * 9
