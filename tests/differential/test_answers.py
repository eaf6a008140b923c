"""Answers compared with numpy: every datatype over every road, batched beside other requests, from the cache, behind front ends.

A request is made from a seed: a model, a shape (0 and 1 among the dimensions), values with the extremes of the datatype, and
a road (JSON, binary, half of each, both over HTTP/2, gRPC raw and typed, shared memory). Eight clients send at once, so that requests of
different shapes meet in the models' queues. What fails names the seed: `NEPTRIO_DIFFERENTIAL_SEED=... pytest ...` sends
that request first.

`make test` sends a few hundred, `make test-all` ten thousand; NEPTRIO_DIFFERENTIAL_REQUESTS sets another number.
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from onnx import helper
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor

from tests.backends.python.models import config as python_config
from tests.backends.python.models import python_model
from tests.support import onnx_models
from tests.support.http import Http1, Http2, Reply
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

GIVEN = os.environ.get("NEPTRIO_DIFFERENTIAL_REQUESTS", "")
COUNTS = [int(GIVEN)] if GIVEN else [800, pytest.param(10_000, marks=pytest.mark.slow)]
SEED = os.environ.get("NEPTRIO_DIFFERENTIAL_SEED", "")
CLIENTS = 8
REGION_BYTES = 1 << 16
DTYPES: dict[str, Any] = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
    "FP16": np.float16, "FP32": np.float32, "FP64": np.float64, "BYTES": np.object_,
    "BF16": np.uint16,  # as bits: numpy has no such type
}  # fmt: skip
CONTENTS = {
    "BOOL": "bool_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
TEXTS = [b"", b"a", b"\xc3\xa9", b'"\\\n\t', b"\x00", b"x" * 300, "漢字".encode(), b"</script>"]
BATCHED = "dynamic_batching { max_queue_delay_microseconds: 500 }"
CACHED = "response_cache { enable: true }"
PYTHON = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [request.inputs()[0].as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.concatenate([x, x], -1))]) for x in arrays]
"""


def doubled(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array, array], -1)


class Model(NamedTuple):
    """What a model is given and what numpy says that it answers."""

    name: str
    datatype: str
    answer: Callable[[np.ndarray], np.ndarray]


def doubling(datatype: str) -> bytes:
    """OUTPUT0 = INPUT0 beside itself."""
    return onnx_models.model(
        [helper.make_node("Concat", ["INPUT0", "INPUT0"], ["OUTPUT0"], axis=2)],
        [onnx_models.tensor("INPUT0", datatype, ("N", "H", "W"))],
        [onnx_models.tensor("OUTPUT0", datatype, ("N", "H", "V"))],
    )


def write_models(repository: Path) -> list[Model]:
    made = []
    for datatype in DTYPES:
        kind = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
        cached = [("cached", f"{BATCHED} {CACHED}")] if datatype in ("BYTES", "INT32", "FP32", "BOOL") else []
        for name, extra in [("identity", BATCHED), *cached]:
            write_model(
                repository, f"{name}_{datatype}", identity_config(kind, dims="-1, -1", pairs=1, extra=extra)
            )
            made.append(Model(f"{name}_{datatype}", datatype, lambda array: array))
        if datatype == "BF16":
            continue  # ONNX Runtime joins none on the CPU
        text = (
            f'backend: "onnxruntime" max_batch_size: 8 {BATCHED}\n'
            f'input {{ name: "INPUT0" data_type: {kind} dims: [ -1, -1 ] }}\n'
            f'output {{ name: "OUTPUT0" data_type: {kind} dims: [ -1, -1 ] }}\n'
        )
        write_model(repository, f"onnx_{datatype}", text)
        (repository / f"onnx_{datatype}" / "1" / "model.onnx").write_bytes(doubling(datatype))
        made.append(Model(f"onnx_{datatype}", datatype, doubled))
    for datatype in ("INT64", "BYTES"):
        kind = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
        config = python_config(
            f"INPUT0:{kind}:-1,-1", f"OUTPUT0:{kind}:-1,-1", max_batch_size=8, extra=BATCHED
        )
        python_model(repository, f"python_{datatype}", PYTHON, config)
        made.append(Model(f"python_{datatype}", datatype, doubled))
    return made


def values(dice: random.Random, datatype: str, shape: tuple[int, ...], finite: bool) -> np.ndarray:
    """Random elements and extremes; `finite`: without those that JSON has no text for."""
    count = int(np.prod(shape))
    dtype = DTYPES[datatype]
    found: list[Any]
    if datatype == "BYTES":
        found = [dice.choice(TEXTS) for _ in range(count)]
    elif datatype == "BOOL":
        found = [dice.random() < 0.5 for _ in range(count)]
    elif np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        edges = [limits.min, limits.max, 0, 1, limits.max - 1]
        found = [
            dice.choice(edges) if dice.random() < 0.3 else dice.randint(limits.min, limits.max)
            for _ in range(count)
        ]
    else:
        info = np.finfo(dtype)
        edges = [
            0.0,
            -0.0,
            1.0,
            float(info.max),
            float(info.min),
            float(info.tiny),
            float(info.smallest_subnormal),
        ]
        if not finite:
            edges += [float("nan"), float("inf"), float("-inf")]
        found = [dice.choice(edges) if dice.random() < 0.4 else dice.uniform(-1e4, 1e4) for _ in range(count)]
    made = np.empty(count, dtype)
    made[:] = found
    return made.reshape(shape)


def raw(array: np.ndarray) -> bytes:
    """An array's bytes on the wire."""
    if array.dtype != np.object_:
        return array.tobytes()
    packed = serialize_byte_tensor(array)
    return packed.item() if packed.size else b""


class Client:
    """One of those that send at once, with its connections and regions."""

    def __init__(self, server: ServerProcess, number: int) -> None:
        self.http = httpclient.InferenceServerClient(server.http)
        self.grpc = grpcclient.InferenceServerClient(server.grpc)
        self.plain = Http1(server.http)
        self.streams = Http2(server.http)
        self.regions = []
        for side in ("in", "out"):
            name = f"{side}{number}"
            handle = shm.create_shared_memory_region(name, f"/neptrio-{os.getpid()}-{name}", REGION_BYTES)
            self.http.register_system_shared_memory(name, f"/neptrio-{os.getpid()}-{name}", REGION_BYTES)
            self.regions.append((name, handle))

    def close(self) -> None:
        for name, handle in self.regions:
            self.http.unregister_system_shared_memory(name)
            shm.destroy_shared_memory_region(handle)
        self.plain.close()
        self.streams.close()
        self.grpc.close()
        self.http.close()

    # ------------------------------------------------------------ the roads

    def json(
        self, model: Model, array: np.ndarray, binary_out: bool = False, over: Http1 | Http2 | None = None
    ) -> np.ndarray:
        elements = (
            [e.decode() for e in array.ravel()] if model.datatype == "BYTES" else array.ravel().tolist()
        )
        given = {"name": "INPUT0", "datatype": model.datatype, "shape": list(array.shape), "data": elements}
        outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": binary_out}}]
        reply = (over or self.plain).request(
            "POST",
            f"/v2/models/{model.name}/infer",
            json.dumps({"inputs": [given], "outputs": outputs}).encode(),
        )
        if binary_out:
            return self.binary_answer(model, reply)
        assert reply.status == 200, reply.body[:500]
        (output,) = json.loads(reply.body)["outputs"]
        assert output["datatype"] == model.datatype
        found = output["data"]
        made = np.empty(len(found), DTYPES[model.datatype])
        made[:] = [text.encode() for text in found] if model.datatype == "BYTES" else found
        return made.reshape(output["shape"])

    def plain_binary(self, model: Model, array: np.ndarray, over: Http1 | Http2 | None = None) -> np.ndarray:
        data = raw(array)
        given = {"name": "INPUT0", "datatype": model.datatype, "shape": list(array.shape)}
        given["parameters"] = {"binary_data_size": len(data)}
        head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
        reply = (over or self.plain).request(
            "POST",
            f"/v2/models/{model.name}/infer",
            head + data,
            {"Inference-Header-Content-Length": str(len(head))},
        )
        return self.binary_answer(model, reply)

    def binary_answer(self, model: Model, reply: Reply) -> np.ndarray:
        assert reply.status == 200, reply.body[:500]
        end = int(reply.headers.get("inference-header-content-length", len(reply.body)))
        (output,) = json.loads(reply.body[:end])["outputs"]
        assert output["datatype"] == model.datatype
        return from_raw(model.datatype, output["shape"], reply.body[end:])

    def json_http2(self, model: Model, array: np.ndarray) -> np.ndarray:
        return self.json(model, array, over=self.streams)

    def binary_http2(self, model: Model, array: np.ndarray) -> np.ndarray:
        return self.plain_binary(model, array, over=self.streams)

    def json_in(self, model: Model, array: np.ndarray) -> np.ndarray:
        return self.json(model, array, binary_out=True)

    def binary(self, model: Model, array: np.ndarray, binary_out: bool = True) -> np.ndarray:
        given = httpclient.InferInput("INPUT0", list(array.shape), model.datatype)
        given.set_data_from_numpy(array, binary_data=True)
        wanted = httpclient.InferRequestedOutput("OUTPUT0", binary_data=binary_out)
        return self.http.infer(model.name, [given], outputs=[wanted]).as_numpy("OUTPUT0")

    def json_out(self, model: Model, array: np.ndarray) -> np.ndarray:
        return self.binary(model, array, binary_out=False)

    def over_grpc(self, model: Model, array: np.ndarray) -> np.ndarray:
        given = grpcclient.InferInput("INPUT0", list(array.shape), model.datatype)
        given.set_data_from_numpy(array)
        return self.grpc.infer(model.name, [given]).as_numpy("OUTPUT0")

    def typed(self, model: Model, array: np.ndarray) -> np.ndarray:
        made = service_pb2.ModelInferRequest(model_name=model.name)
        given = made.inputs.add(name="INPUT0", datatype=model.datatype, shape=array.shape)
        getattr(given.contents, CONTENTS[model.datatype]).extend(array.ravel().tolist())
        answer = self.grpc._client_stub.ModelInfer(made, timeout=60)
        (output,) = answer.outputs
        return from_raw(model.datatype, output.shape, answer.raw_output_contents[0])

    def shared(self, model: Model, array: np.ndarray) -> np.ndarray:
        (name_in, handle_in), (name_out, handle_out) = self.regions
        data = raw(array)
        if data:
            shm.set_shared_memory_region(handle_in, [np.frombuffer(data, np.uint8)])
        size_out = len(raw(model.answer(array)))
        given = httpclient.InferInput("INPUT0", list(array.shape), model.datatype)
        given.set_shared_memory(name_in, len(data))
        wanted = httpclient.InferRequestedOutput("OUTPUT0")
        wanted.set_shared_memory(name_out, size_out)
        answer = self.http.infer(model.name, [given], outputs=[wanted])
        shape = answer.get_output("OUTPUT0")["shape"]
        found = shm.get_contents_as_numpy(handle_out, np.uint8, [size_out]).tobytes() if size_out else b""
        return from_raw(model.datatype, shape, found)


def from_raw(datatype: str, shape: Any, data: bytes) -> np.ndarray:
    if datatype != "BYTES":
        return np.frombuffer(data, DTYPES[datatype]).reshape(shape)
    found, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    made = np.empty(len(found), np.object_)
    made[:] = found
    return made.reshape(tuple(shape))


ROADS = [
    *("json", "json_in", "json_out", "json_http2", "plain_binary", "binary", "binary_http2"),
    *("over_grpc", "typed", "shared"),
]


class Request(NamedTuple):
    model: Model
    array: np.ndarray
    road: str


def request(models: list[Model], seed: str) -> Request:
    """The request of a seed."""
    dice = random.Random(seed)
    model = dice.choice(models)
    roads = {
        "FP16": ["plain_binary", "binary", "binary_http2", "over_grpc", "shared"],
        "BF16": ["plain_binary", "binary_http2", "shared"],
    }.get(model.datatype, ROADS)
    road = dice.choice(roads)
    shape = (dice.randint(1, 3), dice.choice([0, 1, 1, 2, 3]), dice.choice([0, 1, 1, 2, 5]))
    return Request(model, values(dice, model.datatype, shape, "json" in road), road)


@pytest.fixture(scope="module", params=[0, 2], ids=["alone", "front-ends"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, list[Model]]]:
    repository = tmp_path_factory.mktemp("differential")
    models = write_models(repository)
    with ServerProcess(
        repository,
        f"--frontends={request.param}",
        "--allow-client-shm=true",
        "--cache-config=local,size=1048576",
    ) as server:
        yield server, models


@pytest.mark.parametrize("count", COUNTS)
def test_answers_are_numpys(served: tuple[ServerProcess, list[Model]], count: int) -> None:
    server, models = served
    seeds = [SEED] if SEED else []
    # one in four comes again, so that the cache answers it, or it follows one that is under way
    seeds += [f"{number - number % 4 if number % 4 == 3 else number}" for number in range(count // 2)]
    wrong: list[str] = []
    waiting = iter(seeds)
    lock = threading.Lock()

    def run(number: int) -> None:
        # tritonclient's HTTP client belongs to the thread that made it
        client = Client(server, number)
        try:
            while (seed := following()) is not None:
                send(client, seed)
        finally:
            client.close()

    def following() -> str | None:
        with lock:
            return next(waiting, None)

    def send(client: Client, seed: str) -> None:
        made = request(models, seed)
        expected = made.model.answer(made.array)
        try:
            found = getattr(client, made.road)(made.model, made.array)
        except Exception as error:
            wrong.append(
                f"seed {seed}: {made.model.name} over {made.road}: {made.array.shape}: {error!r}"[:600]
            )
            return
        if found is None:
            found = np.empty(0)
        if expected.size == 0:
            found = found.reshape(expected.shape) if found.size == 0 else found
        if tuple(found.shape) != expected.shape or raw(found.astype(expected.dtype)) != raw(expected):
            wrong.append(
                f"seed {seed}: {made.model.name} over {made.road}: {expected!r}, got {found!r}"[:600]
            )

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(run, range(CLIENTS)))
    assert not wrong, f"{len(wrong)} of {len(seeds)}:\n" + "\n".join(wrong[:10])
