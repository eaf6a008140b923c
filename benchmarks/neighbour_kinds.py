"""The neighbours of the benchmark: the models that they ask, and for each a function that works once."""

from __future__ import annotations

import gzip
import http.client
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ENSEMBLES = 500
NUMBERS_PER_MIB = 54_000  # of random.random(), with their commas
IO = """input {{ name: "INPUT0" data_type: TYPE_{type} dims: [ -1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_{type} dims: [ -1 ] }}
"""
ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", t)]) for t in tensors]
"""
SUM = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0",
                pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy()[:1])])
            for r in requests
        ]
"""
MANY = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for _ in range(200):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.zeros(16384, np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ENSEMBLE = """platform: "ensemble"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling { step [ { model_name: "probe" model_version: -1
  input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "OUTPUT0" } } ] }
"""
BUSY = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        end = time.thread_time() + 0.015
        while time.thread_time() < end:
            pass
        tensors = [pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", t)]) for t in tensors]
"""


def repository(folder: Path) -> Path:
    """Models that both servers serve: `probe` echoes, `first_*` answer one element, `echo` all, `busy` works 15 ms, `many`
    answers often; and ensembles that nobody asks, so that statistics, metrics and the index have something to tell."""
    for name, kind, code, count in (
        ("probe", "FP32", ECHO, 1),
        ("first", "FP32", SUM, 1),
        ("first_strings", "STRING", SUM, 1),
        ("echo", "FP32", ECHO, 1),
        ("busy", "FP32", BUSY, 2),
        ("coming_and_going", "FP32", ECHO, 1),
        ("many", "FP32", MANY, 1),
    ):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(code)
        group = f"instance_group [ {{ kind: KIND_CPU count: {count} }} ]\n"
        if name == "many":
            group += "model_transaction_policy { decoupled: true }\n"
        (folder / name / "config.pbtxt").write_text('backend: "python"\n' + IO.format(type=kind) + group)
    for i in range(ENSEMBLES):
        (folder / f"ensemble_{i}" / "1").mkdir(parents=True)
        (folder / f"ensemble_{i}" / "config.pbtxt").write_text(ENSEMBLE)
    return folder


def builtin(folder: Path) -> None:
    """What only our server has."""
    (folder / "builtin" / "1").mkdir(parents=True)
    (folder / "builtin" / "config.pbtxt").write_text('backend: "identity"\n' + IO.format(type="FP32"))


# ------------------------------------------------------------ the neighbours, each a function that works once


def tensor_json(mib: int, binary_answer: bool = True) -> bytes:
    """A request of about so many MiB of JSON numbers."""
    dice = random.Random(1)
    data = [dice.random() for _ in range(NUMBERS_PER_MIB * mib)]
    return _document("FP32", data, binary_answer)


def _document(datatype: str, data: list[Any], binary_answer: bool = True) -> bytes:
    tensor = {"name": "INPUT0", "shape": [len(data)], "datatype": datatype, "data": data}
    parameters = {"binary_data_output": binary_answer}
    return json.dumps({"inputs": [tensor], "parameters": parameters}, separators=(",", ":")).encode()


class Http:
    """One connection that sends the same request again and again."""

    def __init__(self, port: int, method: str, path: str, body: bytes = b"", **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._request = (method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})

    def __call__(self) -> None:
        self._connection.request(*self._request)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {body[:300]!r}")


def binary_request(values: int) -> tuple[bytes, int]:
    """A binary request of so many FP32 zeros, and the length of its JSON."""
    tensor = {
        "name": "INPUT0",
        "shape": [values],
        "datatype": "FP32",
        "parameters": {"binary_data_size": 4 * values},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + bytes(4 * values), len(head)


def _infer(port: int, model: str, body: bytes, **headers: str) -> Http:
    return Http(port, "POST", f"/v2/models/{model}/infer", body, **headers)


class Ports(NamedTuple):
    """Where a server listens on 127.0.0.1."""

    http: int
    grpc: int
    metrics: int


AFTER: list[Callable[[], None]] = []  # what a neighbour undoes at its end


def binary(ports: Ports, model: str, values: int) -> Http:
    """A client that sends so many FP32 zeros."""
    body, head = binary_request(values)
    return _infer(ports.http, model, body, Inference_Header_Content_Length=str(head))


def _grpc(ports: Ports) -> Callable[[], None]:
    import numpy as np
    import tritonclient.grpc as grpcclient

    client = grpcclient.InferenceServerClient(f"127.0.0.1:{ports.grpc}")
    tensor = grpcclient.InferInput("INPUT0", [4 << 20], "FP32")
    tensor.set_data_from_numpy(np.zeros(4 << 20, np.float32))
    return lambda: client.infer("first", [tensor])


def _slow_reader(ports: Ports) -> Callable[[], None]:
    """Reads 200 answers of 64 KiB, one every 5 ms."""
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(f"127.0.0.1:{ports.grpc}"))
    request = service_pb2.ModelInferRequest(model_name="many", raw_input_contents=[bytes(4)])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1])

    def once() -> None:
        for answer in stub.ModelStreamInfer(iter([request])):
            if answer.error_message:
                raise RuntimeError(answer.error_message)
            time.sleep(0.005)

    return once


def _reload(ports: Ports) -> Callable[[], None]:
    unload = Http(ports.http, "POST", "/v2/repository/models/coming_and_going/unload", b"{}")
    load = Http(ports.http, "POST", "/v2/repository/models/coming_and_going/load", b"{}")

    def once() -> None:
        load()
        unload()

    return once


def _traced(ports: Ports) -> Callable[[], None]:
    """Requests of 16 KiB, each with its tensors in the trace file."""
    path = "/v2/models/first/trace/setting"
    on = {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "1", "trace_count": "-1"}
    Http(ports.http, "POST", path, json.dumps(on).encode())()
    AFTER.append(Http(ports.http, "POST", path, b'{"trace_level": ["OFF"]}'))
    return binary(ports, "first", 4096)


def _many(count: int, make: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """`count` clients at once; one call is one request of each."""
    clients = [make() for _ in range(count)]

    def once() -> None:
        threads = [threading.Thread(target=client) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return once


NEIGHBOURS: dict[str, Callable[[Ports], Callable[[], None]]] = {
    "busy Python, 4 clients": lambda p: _many(4, lambda: binary(p, "busy", 1)),
    "JSON 1 MiB in": lambda p: _infer(p.http, "first", tensor_json(1)),
    "JSON 16 MiB in": lambda p: _infer(p.http, "first", tensor_json(16)),
    "JSON 1 MiB in and out": lambda p: _infer(p.http, "echo", tensor_json(1, False)),
    "JSON 16 MiB in and out": lambda p: _infer(p.http, "echo", tensor_json(16, False)),
    "binary 16 MiB": lambda p: binary(p, "first", 4 << 20),
    "gRPC 16 MiB": _grpc,
    "gzip of JSON 4 MiB": lambda p: _infer(
        p.http, "first", gzip.compress(tensor_json(4), 1), Content_Encoding="gzip"
    ),
    "a million strings": lambda p: _infer(
        p.http, "first_strings", _document("BYTES", [str(i) for i in range(1_000_000)])
    ),
    "decoupled answers, slow reader": _slow_reader,
    "statistics without pause": lambda p: Http(p.http, "GET", "/v2/models/stats"),
    "metrics without pause": lambda p: Http(p.metrics, "GET", "/metrics"),
    "index without pause": lambda p: Http(p.http, "POST", "/v2/repository/index", b"{}"),
    "load and unload": _reload,
    "tracing with tensors": _traced,
}
