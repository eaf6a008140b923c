"""execute(): tensors in and out, checks of what a model returns, errors. Real server, real clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.python.models import config, python_model
from tests.support.datatypes import TYPES
from tests.support.server import ServerProcess

SUM = """
import numpy as np

class TritonPythonModel:
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        answers = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "B").as_numpy()
            answers.append(pb_utils.InferenceResponse(
                [pb_utils.Tensor("SUM", a + b), pb_utils.Tensor("DIFFERENCE", a - b)],
                parameters={"instance": self.args["model_instance_name"]},
            ))
        return answers
"""

IDENTITY = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""

IN_PLACE = """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            array = request.inputs()[0].as_numpy()
            array *= 2
            again = request.inputs()[0].as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", again)]))
        return answers
"""

REUSE = """
import numpy as np

class TritonPythonModel:
    def initialize(self, args):
        self.buffer = np.zeros(100000, np.float32)

    def execute(self, requests):
        answers = []
        for request in requests:
            self.buffer[:] = request.inputs()[0].as_numpy()[0]
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.buffer)]))
        return answers
"""

BAD = """
import json

class TritonPythonModel:
    def execute(self, requests):
        what = json.loads(requests[0].parameters())["what"]
        if what == "none":
            return None
        if what == "few":
            return []
        if what == "entry":
            return [None]
        if what == "type":
            return ["text"]
        if what == "raise":
            raise RuntimeError("no luck today")
        if what == "exit":
            raise SystemExit(3)
        if what == "dtype":
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", __import__("numpy").zeros(1, "complex64"))])]
        if what == "outputs":
            return [pb_utils.InferenceResponse(["text"])]
        code = getattr(pb_utils.TritonError, what)
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("told you", code))]
"""

LAYOUT = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            array = request.inputs()[0].as_numpy().reshape(-1, 2)
            answers.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("T", array.T),
                pb_utils.Tensor("BIG", array.astype(">f4")),
                pb_utils.Tensor("EMPTY", np.zeros((0, 3), np.float32)),
                pb_utils.Tensor("SCALAR", np.array(7, np.float32)),
            ]))
        return answers
"""

DLPACK = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        array = np.from_dlpack(requests[0].inputs()[0])
        capsule = pb_utils.Tensor("x", array + 1).to_dlpack()
        return [pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", capsule)])]
"""

DLPACK_BF16 = """
class TritonPythonModel:
    def execute(self, requests):
        capsule = requests[0].inputs()[0].to_dlpack()
        return [pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", capsule)])]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    ints = "TYPE_INT32:16"
    python_model(repository, "sum", SUM, config(f"A:{ints} B:{ints}", f"SUM:{ints} DIFFERENCE:{ints}", 8))
    python_model(repository, "in_place", IN_PLACE)
    python_model(repository, "reuse", REUSE)
    python_model(repository, "bad", BAD)
    python_model(repository, "dlpack", DLPACK)
    bf16 = config("IN:TYPE_BF16:-1", "OUT:TYPE_BF16:-1")
    python_model(repository, "dlpack_bf16", DLPACK_BF16, bf16)
    kinds = "T:TYPE_FP32:-1,-1 BIG:TYPE_FP32:-1,-1 EMPTY:TYPE_FP32:-1,-1 SCALAR:TYPE_FP32:-1"
    python_model(repository, "layout", LAYOUT, config(outputs=kinds))
    for kind in (*TYPES, "BF16"):
        text = config(f"IN:TYPE_{kind}:-1", f"OUT:TYPE_{kind}:-1")
        python_model(repository, f"identity_{kind.lower()}", IDENTITY, text)
    with ServerProcess(repository) as process:
        yield process


def call(
    module: Any, server: ServerProcess, model: str, array: np.ndarray, kind: str = "FP32", **more: Any
) -> Any:
    address = server.http if module is httpclient else server.grpc
    with module.InferenceServerClient(address) as client:
        tensor = module.InferInput("IN", list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        return client.infer(model, [tensor], **more)


both = pytest.mark.parametrize("module", [httpclient, grpcclient], ids=["http", "grpc"])


@both
def test_sum_and_difference(server: ServerProcess, module: Any) -> None:
    address = server.http if module is httpclient else server.grpc
    a = np.arange(32, dtype=np.int32).reshape(2, 16)
    with module.InferenceServerClient(address) as client:
        inputs = [module.InferInput(n, [2, 16], "INT32") for n in "AB"]
        inputs[0].set_data_from_numpy(a)
        inputs[1].set_data_from_numpy(a * 3)
        result = client.infer("sum", inputs, request_id="x")
        np.testing.assert_array_equal(result.as_numpy("SUM"), a * 4)
        np.testing.assert_array_equal(result.as_numpy("DIFFERENCE"), a * -2)
        only = client.infer("sum", inputs, outputs=[module.InferRequestedOutput("DIFFERENCE")])
        assert only.as_numpy("SUM") is None
        np.testing.assert_array_equal(only.as_numpy("DIFFERENCE"), a * -2)
        response = result.get_response()
        if module is httpclient:
            assert response["parameters"] == {"instance": "sum_0"}
        else:
            assert response.parameters["instance"].string_param == "sum_0"


@both
@pytest.mark.parametrize(
    "kind",
    [
        "BOOL",
        "UINT8",
        "UINT16",
        "UINT32",
        "UINT64",
        "INT8",
        "INT16",
        "INT32",
        "INT64",
        "FP16",
        "FP32",
        "FP64",
    ],
)
def test_identity_of_every_datatype(server: ServerProcess, module: Any, kind: str) -> None:
    from tritonclient.utils import triton_to_np_dtype

    array = np.array([0, 1, 1, 0, 5], dtype=triton_to_np_dtype(kind))
    result = call(module, server, f"identity_{kind.lower()}", array, kind)
    assert result.as_numpy("OUT").dtype == array.dtype
    np.testing.assert_array_equal(result.as_numpy("OUT"), array)


@both
def test_strings_and_bfloat16(server: ServerProcess, module: Any) -> None:
    words = np.array([b"one", "zw\u00f6lf".encode(), b"", b"\x00\xff"], dtype=np.object_)
    result = call(module, server, "identity_string", words, "BYTES")
    assert result.as_numpy("OUT").tolist() == words.tolist()
    half = np.array([0.5, -2.0, 96.0], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(call(module, server, "identity_bf16", half, "BF16").as_numpy("OUT"), half)


@both
@pytest.mark.parametrize("count", [3, 300000])
def test_a_model_may_write_to_its_inputs(server: ServerProcess, module: Any, count: int) -> None:
    array = np.arange(count, dtype=np.float32)
    np.testing.assert_array_equal(call(module, server, "in_place", array).as_numpy("OUT"), array * 2)


@pytest.mark.slow
def test_a_model_may_reuse_its_output_buffer(server: ServerProcess) -> None:
    """Many requests in flight at once, each answered with what the buffer held for it."""
    with grpcclient.InferenceServerClient(server.grpc) as client:
        import queue

        results: queue.Queue[Any] = queue.Queue()
        for i in range(40):
            tensor = grpcclient.InferInput("IN", [1], "FP32")
            tensor.set_data_from_numpy(np.array([i], np.float32))
            client.async_infer(
                "reuse", [tensor], lambda result, error: results.put((result, error)), request_id=str(i)
            )
        for _ in range(40):
            result, error = results.get(timeout=60)
            assert error is None
            values = set(result.as_numpy("OUT").tolist())
            assert values == {float(result.get_response().id)}


@both
def test_layouts(server: ServerProcess, module: Any) -> None:
    array = np.arange(6, dtype=np.float32)
    result = call(module, server, "layout", array)
    np.testing.assert_array_equal(result.as_numpy("T"), array.reshape(3, 2).T)
    np.testing.assert_array_equal(result.as_numpy("BIG"), array.reshape(3, 2))
    assert result.as_numpy("EMPTY").shape == (0, 3)
    assert result.as_numpy("SCALAR").reshape(-1).tolist() == [7.0]


@both
def test_dlpack(server: ServerProcess, module: Any) -> None:
    array = np.arange(6, dtype=np.float32)
    np.testing.assert_array_equal(call(module, server, "dlpack", array).as_numpy("OUT"), array + 1)
    result = call(module, server, "dlpack_bf16", array.astype(ml_dtypes.bfloat16), "BF16")
    np.testing.assert_array_equal(result.as_numpy("OUT"), array)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("none", "must return a list of 1 InferenceResponse objects, one per request, got NoneType"),
        ("few", r"InferenceRequest\(s\) size is:1, and InferenceResponse\(s\) size is:0"),
        ("entry", r"execute\(\) returned None for a request"),
        ("type", "must return InferenceResponse objects, got str"),
        ("dtype", "complex64"),
        (
            "outputs",
            "output_tensors of InferenceResponse must be a list of Tensor objects with nothing else in it, got str",
        ),
        (
            "raise",
            r"Failed to process the request\(s\) for model 'bad_0', message: RuntimeError: no luck today"
            r"\n\nAt:\n  .*/bad/1/model.py\(17\): execute\n",
        ),
        ("exit", "SystemExit: 3"),
    ],
)
def test_a_model_that_misbehaves(server: ServerProcess, what: str, message: str) -> None:
    array = np.zeros(1, np.float32)
    with pytest.raises(InferenceServerException, match=message) as info:
        call(httpclient, server, "bad", array, parameters={"what": what})
    assert info.value.status() == "500"
    with pytest.raises(InferenceServerException, match=message) as info:
        call(grpcclient, server, "bad", array, parameters={"what": what})
    assert info.value.status() == "StatusCode.INTERNAL"
    assert call(httpclient, server, "in_place", array).as_numpy("OUT").tolist() == [0.0]


@pytest.mark.parametrize(
    ("code", "http", "grpc"),
    [
        ("UNKNOWN", "400", "UNKNOWN"),
        ("INTERNAL", "500", "INTERNAL"),
        ("NOT_FOUND", "404", "NOT_FOUND"),
        ("INVALID_ARG", "400", "INVALID_ARGUMENT"),
        ("UNAVAILABLE", "503", "UNAVAILABLE"),
        ("UNSUPPORTED", "501", "UNIMPLEMENTED"),
        ("ALREADY_EXISTS", "400", "ALREADY_EXISTS"),
        ("CANCELLED", "400", "CANCELLED"),
    ],
)
def test_error_codes_of_responses(server: ServerProcess, code: str, http: str, grpc: str) -> None:
    array = np.zeros(1, np.float32)
    for module, status in ((httpclient, http), (grpcclient, f"StatusCode.{grpc}")):
        with pytest.raises(InferenceServerException, match="told you") as info:
            call(module, server, "bad", array, parameters={"what": code})
        assert info.value.status() == status
