"""Shapes whose elements no integer can count: refused on every way in, before anything believes them.

Each is made so that the product of its dimensions and of the element size, taken modulo 2**64, is exactly the
number of bytes that come with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from tests.backends.kernel.family import kernel_config, parameter, tensors
from tests.backends.python.models import config, python_model
from tests.support.http import Http1
from tests.support.raw_http2 import RawClient
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

SIZE = {"FP32": 4, "FP64": 8, "INT8": 1}
TOO_MANY = "element count of input '{}' exceeds maximum size of 72057594037927936"

MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([
            pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy())]) for r in requests]
"""


def wrapping(datatype: str, rows: int) -> tuple[list[int], int]:
    """A shape of `rows` rows that takes more than 2**64 bytes, and what is left of those modulo 2**64."""
    whole = 2**64 // SIZE[datatype]
    columns = -(-whole // rows)
    return [rows, columns], (rows * columns - whole) * SIZE[datatype]


# (model, datatype, shape, bytes)
CASES = [
    ("rows_fp32", "FP32", [64, 2**56], 0),
    *(("rows_fp64", "FP64", *wrapping("FP64", rows)) for rows in (33, 47, 63)),
    ("python", "FP64", *wrapping("FP64", 33)),
    ("kernel", "FP32", [64, 2**56], 0),
    ("free", "FP32", [2**31, 2**31, 4], 0),
    ("free", "FP32", [2**62, 2**62, 2**62], 0),
    ("free", "FP32", [0, 2**62, 2**62], 0),
    ("free", "FP32", [2**40, 0, 2**40], 0),
    ("bytes", "INT8", [64, 2**58], 0),
    ("bytes", "INT8", [3, 2**61], 0),
]
INPUT = {"kernel": "X"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "rows_fp32", identity_config("TYPE_FP32", "-1", 64, 1))
    write_model(repository, "rows_fp64", identity_config("TYPE_FP64", "-1", 64, 1))
    write_model(repository, "bytes", identity_config("TYPE_INT8", "-1", 64, 1))
    write_model(repository, "free", identity_config("TYPE_FP32", "-1, -1, -1", 0, 1))
    write_model(repository, "text", identity_config("TYPE_STRING", "-1, -1", 0, 1))
    python_model(repository, "python", MODEL, config("INPUT0:TYPE_FP64:-1", "OUTPUT0:TYPE_FP64:-1", 64))
    kernel = kernel_config(
        64,
        tensors("input", ("X", "FP32", "-1")),
        tensors("output", ("Y", "FP32", "-1")),
        parameter("kernels", "run<<<1, 1>>>(X, Y)"),
        parameter("shapes", "Y = [batch, X.shape[1]]"),
        " instance_group { kind: KIND_CPU }",
    )
    source = 'extern "C" __global__ void run(const float* x, float* y) {}\n'
    write_model(repository, "kernel", kernel, {"1/model.cu": source})
    with ServerProcess(repository, "--allow-client-shm=true") as process:
        yield process


def check_http(server: ServerProcess, model: str, body: bytes, header_length: int, text: str) -> None:
    with Http1(server.http) as client:
        reply = client.request(
            "POST",
            f"/v2/models/{model}/infer",
            body,
            {"Inference-Header-Content-Length": str(header_length)},
        )
        assert reply.status == 400, reply
        assert text in json.loads(reply.body)["error"]


@pytest.mark.parametrize(("model", "datatype", "shape", "size"), CASES)
def test_http_binary(server: ServerProcess, model: str, datatype: str, shape: list[int], size: int) -> None:
    name = INPUT.get(model, "INPUT0")
    tensor = {
        "name": name,
        "shape": shape,
        "datatype": datatype,
        "parameters": {"binary_data_size": size},
    }
    head = json.dumps({"inputs": [tensor]}).encode()
    check_http(server, model, head + bytes(size), len(head), TOO_MANY.format(name))


@pytest.mark.parametrize(("model", "datatype", "shape", "size"), CASES)
def test_http_json(server: ServerProcess, model: str, datatype: str, shape: list[int], size: int) -> None:
    name = INPUT.get(model, "INPUT0")
    data = [0] * (size // SIZE[datatype])
    body = json.dumps(
        {"inputs": [{"name": name, "shape": shape, "datatype": datatype, "data": data}]}
    ).encode()
    text = TOO_MANY.format(name) if 0 in shape else "Shape does not match true shape of 'data' field"
    check_http(server, model, body, len(body), text)


def check_grpc(server: ServerProcess, request: Any, text: str) -> None:
    with RawClient(server.grpc) as client:
        reply = client.call(1, request.SerializeToString())
        assert reply.status == 3, reply.text
        assert text in reply.text


@pytest.mark.parametrize(("model", "datatype", "shape", "size"), CASES)
@pytest.mark.parametrize("form", ["raw", "typed"])
def test_grpc(
    server: ServerProcess, model: str, datatype: str, shape: list[int], size: int, form: str
) -> None:
    name = INPUT.get(model, "INPUT0")
    request = service_pb2.ModelInferRequest(model_name=model)
    tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
    if form == "raw":
        request.raw_input_contents.append(bytes(size))
    else:
        field = {"FP32": "fp32_contents", "FP64": "fp64_contents", "INT8": "int_contents"}[datatype]
        tensor.contents.SetInParent()
        getattr(tensor.contents, field).extend([0] * (size // SIZE[datatype]))
    check_grpc(server, request, TOO_MANY.format(name))


@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_shared_memory(server: ServerProcess, module: Any) -> None:
    shape, size = wrapping("FP64", 33)
    region = shm.create_shared_memory_region("wide", "/neptrio_impossible", size)
    try:
        with module.InferenceServerClient(server.http if module is httpclient else server.grpc) as client:
            client.register_system_shared_memory("wide", "/neptrio_impossible", size)
            tensor = module.InferInput("INPUT0", shape, "FP64")
            tensor.set_shared_memory("wide", size)
            with pytest.raises(InferenceServerException, match="element count of input 'INPUT0' exceeds"):
                client.infer("rows_fp64", [tensor])
            client.unregister_system_shared_memory("wide")
    finally:
        shm.destroy_shared_memory_region(region)


def test_strings(server: ServerProcess) -> None:
    request = service_pb2.ModelInferRequest(model_name="text")
    request.inputs.add(name="INPUT0", datatype="BYTES", shape=[2**32, 2**32])
    request.raw_input_contents.append(b"")
    check_grpc(server, request, TOO_MANY.format("INPUT0"))


def test_empty_tensors_of_possible_shapes_are_served(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        for shape in ([0, 5, 7], [2**20, 0, 2**20], [0, 0, 0]):
            tensor = httpclient.InferInput("INPUT0", shape, "FP32")
            tensor.set_data_from_numpy(np.empty(shape, np.float32))
            result = client.infer("free", [tensor])
            assert result.get_output("OUTPUT0")["shape"] == shape


def test_a_configuration_with_impossible_dims_is_refused(tmp_path: Any) -> None:
    write_model(tmp_path, "good", identity_config())
    write_model(tmp_path, "wide", identity_config("TYPE_FP32", f"{2**40}, -1, {2**40}", 8, 1))
    with ServerProcess(tmp_path, "--exit-on-error=false") as server:
        server.until_logged("more than 72057594037927936 elements")
