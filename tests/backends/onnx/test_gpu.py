"""ONNX models on ONNX Runtime's own CUDA provider. Skipped, saying why, where there is no GPU or no such provider; with
NEPTRIO_REQUIRE_GPU=1 they fail without a GPU. What the server asks ONNX Runtime for is tested in test_device_instance.py."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper

from neptrio.backends.kernel import device
from neptrio.backends.onnx import library
from neptrio.errors import InvalidArgument
from tests.backends.kernel.family import kernel_config, parameter, tensors
from tests.support import onnx_models
from tests.support.gpu_models import ADD, add, add_config, get, post, reason, unload
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

CUDA = "CUDAExecutionProvider"
REQUIRED = os.environ.get("NEPTRIO_REQUIRE_GPU") == "1"


def missing() -> str:
    """Why these tests cannot run here, "" when they can, or are to fail."""
    if device.count() == 0:
        return "" if REQUIRED else f"no GPU: {device.why_none() or 'none'}"
    try:
        found = library.module().get_available_providers()
    except InvalidArgument as error:
        return str(error)
    return "" if CUDA in found else f"ONNX Runtime has {', '.join(found)} alone"


WHY = missing()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(WHY), reason=WHY),
]

GPU = " instance_group { kind: KIND_GPU gpus: [ 0 ] } "
ALL_ON_CUDA = parameter("session.disable_cpu_ep_fallback", "1")  # or the load fails
EXPLICIT = ("--model-control-mode=explicit", "--exit-on-error=false")
ONE = numpy_helper.from_array(np.array(1, np.int32), "ONE")
RNG = np.random.default_rng(17)
WEIGHTS = RNG.standard_normal((64, 48)).astype(np.float32)
FILTERS = RNG.standard_normal((4, 3, 3, 3)).astype(np.float32)

PLUS_ONE = onnx_models.model(
    [helper.make_node("Add", ["X", "ONE"], ["Y"])],
    [onnx_models.tensor("X", "INT32", ("N", None))],
    [onnx_models.tensor("Y", "INT32", ("N", None))],
    [ONE],
)
DENSE = onnx_models.model(
    [
        helper.make_node("MatMul", ["X", "W"], ["t"]),
        helper.make_node("Relu", ["t"], ["Y"]),
        helper.make_node("Softmax", ["t"], ["Z"], axis=-1),
    ],
    [onnx_models.tensor("X", "FP32", ("N", 64))],
    [onnx_models.tensor("Y", "FP32", ("N", 48)), onnx_models.tensor("Z", "FP32", ("N", 48))],
    [numpy_helper.from_array(WEIGHTS, "W")],
)
CONVOLUTION = onnx_models.model(
    [helper.make_node("Conv", ["X", "W"], ["Y"])],
    [onnx_models.tensor("X", "FP32", ("N", 3, 10, 10))],
    [onnx_models.tensor("Y", "FP32", ("N", 4, 8, 8))],
    [numpy_helper.from_array(FILTERS, "W")],
)
# Det is an operator that CUDA's provider lacks: what is before and behind it runs there
DETERMINANT = onnx_models.model(
    [
        helper.make_node("Add", ["X", "X"], ["twice"]),
        helper.make_node("Det", ["twice"], ["t"]),
        helper.make_node("Neg", ["t"], ["Y"]),
    ],
    [onnx_models.tensor("X", "FP32", ("N", 3, 3))],
    [onnx_models.tensor("Y", "FP32", ("N",))],
)
SUM = onnx_models.model(
    [
        helper.make_node("Add", ["X", "BEFORE"], ["AFTER"]),
        helper.make_node("Identity", ["AFTER"], ["Y"]),
    ],
    [onnx_models.tensor(name, "INT32", ("N", 4)) for name in ("X", "BEFORE")],
    [onnx_models.tensor(name, "INT32", ("N", 4)) for name in ("Y", "AFTER")],
)
# Y = the sum of X[0] ones
ONES = onnx_models.model(
    [
        helper.make_node(
            "ConstantOfShape", ["X"], ["t"], value=helper.make_tensor("v", TensorProto.FLOAT, [1], [1.0])
        ),
        helper.make_node("Exp", ["t"], ["u"]),
        helper.make_node("ReduceMax", ["u"], ["Y"], keepdims=1),
    ],
    [onnx_models.tensor("X", "INT64", (1,))],
    [onnx_models.tensor("Y", "FP32", (1,))],
)


def many_products() -> bytes:
    """Y = X, after X products of large matrices."""
    size = 8192
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["on"]),
            helper.make_node("MatMul", ["before", "before"], ["after"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("before", TensorProto.FLOAT, [size, size]),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("after", TensorProto.FLOAT, [size, size]),
        ],
    )
    zero = helper.make_tensor("v", TensorProto.FLOAT, [1], [0.0])
    nodes = [
        helper.make_node("ConstantOfShape", ["SIZES"], ["start"], value=zero),
        helper.make_node("Squeeze", ["X"], ["count"]),
        helper.make_node("Loop", ["count", "", "start"], ["end"], body=body),
        helper.make_node("ReduceMax", ["end"], ["largest"], axes=[0, 1], keepdims=0),
        helper.make_node("Cast", ["largest"], ["as_int"], to=TensorProto.INT64),
        helper.make_node("Add", ["as_int", "X"], ["Y"]),
    ]
    sizes = numpy_helper.from_array(np.array([size, size], np.int64), "SIZES")
    return onnx_models.model(
        nodes, [onnx_models.tensor("X", "INT64", (1,))], [onnx_models.tensor("Y", "INT64", (1,))], [sizes]
    )


def onnx_config(extra: str = "", max_batch_size: int = 8) -> str:
    return f'backend: "onnxruntime" max_batch_size: {max_batch_size} {GPU} {extra}'


@pytest.fixture(autouse=True)
def a_gpu() -> None:
    """Fails a test that was not skipped though there is no GPU."""
    assert device.count(), f"NEPTRIO_REQUIRE_GPU=1, and there is no GPU: {device.why_none()}"


def infer(server: ServerProcess, model: str, **arrays: np.ndarray) -> dict[str, np.ndarray]:
    """A request with binary tensors over HTTP; returns the outputs."""
    import tritonclient.http as httpclient
    from tritonclient.utils import np_to_triton_dtype

    with httpclient.InferenceServerClient(server.http, network_timeout=120) as client:
        given = [
            httpclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
            for name, array in arrays.items()
        ]
        for tensor, array in zip(given, arrays.values(), strict=True):
            tensor.set_data_from_numpy(array)
        result = client.infer(model, given)
        return {entry["name"]: result.as_numpy(entry["name"]) for entry in result.get_response()["outputs"]}


def dense(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    product = x.astype(np.float64) @ WEIGHTS.astype(np.float64)
    e = np.exp(product - product.max(-1, keepdims=True))
    return np.maximum(product, 0), e / e.sum(-1, keepdims=True)


def convolution(x: np.ndarray) -> np.ndarray:
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), axis=(2, 3))
    return np.einsum("ncyxij,kcij->nkyx", windows, FILTERS.astype(np.float64))


def without_tf32() -> str:
    """Products in single precision throughout, so that they can be compared."""
    own = '{ name: "cuda" parameters { key: "use_tf32" value: "0" } }'
    return f"optimization {{ execution_accelerators {{ gpu_execution_accelerator [ {own} ] }} }}"


def test_models_run_on_cuda_alone(tmp_path: Path) -> None:
    """cuBLAS, cuDNN and kernels of ONNX Runtime, against numpy, with no operator left to the CPU."""
    for name, content in (("dense", DENSE), ("convolution", CONVOLUTION), ("plus", PLUS_ONE)):
        write_model(tmp_path, name, onnx_config(ALL_ON_CUDA + without_tf32()), {"1/model.onnx": content})
    with ServerProcess(tmp_path) as server:
        server.until_logged("1 x GPU 0")
        for n in (1, 3, 8):
            x = RNG.standard_normal((n, 64)).astype(np.float32)
            got = infer(server, "dense", X=x)
            for name, expected in zip("YZ", dense(x), strict=True):
                np.testing.assert_allclose(got[name], expected, rtol=1e-4, atol=1e-4)
            x = RNG.standard_normal((n, 3, 10, 10)).astype(np.float32)
            np.testing.assert_allclose(
                infer(server, "convolution", X=x)["Y"], convolution(x), rtol=1e-4, atol=1e-4
            )
            assert add(server, "plus", n, -n) == (200, [n + 1, 1 - n])


def test_requests_over_grpc(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    import tritonclient.grpc as grpcclient

    write_model(tmp_path, "dense", onnx_config(ALL_ON_CUDA + without_tf32()), {"1/model.onnx": DENSE})
    with ServerProcess(tmp_path) as server, grpcclient.InferenceServerClient(server.grpc) as client:
        x = RNG.standard_normal((5, 64)).astype(np.float32)
        tensor = grpcclient.InferInput("X", [5, 64], "FP32")
        tensor.set_data_from_numpy(x)
        result = client.infer("dense", [tensor])
        for name, expected in zip("YZ", dense(x), strict=True):
            np.testing.assert_allclose(result.as_numpy(name), expected, rtol=1e-4, atol=1e-4)


def test_an_operator_that_cuda_lacks_runs_on_the_cpu(tmp_path: Path) -> None:
    write_model(tmp_path, "det", onnx_config(), {"1/model.onnx": DETERMINANT})
    write_model(tmp_path, "strict", onnx_config(ALL_ON_CUDA), {"1/model.onnx": DETERMINANT})
    with ServerProcess(tmp_path, "--exit-on-error=false") as server:
        x = RNG.standard_normal((4, 3, 3)).astype(np.float32)
        np.testing.assert_allclose(
            infer(server, "det", X=x)["Y"].ravel(), -np.linalg.det(2 * x), rtol=1e-3, atol=1e-4
        )
        state, why = reason(server, "strict")
        print("an operator that CUDA lacks:", why)
        assert state == "UNAVAILABLE" and "fallback to CPU EP has been explicitly disabled" in why


def test_datatypes(tmp_path: Path) -> None:
    """There and back; those that the CUDA provider has no kernel for go through the CPU's."""
    kinds = {
        "FP16": np.float16, "FP32": np.float32, "FP64": np.float64, "INT8": np.int8, "UINT8": np.uint8,
        "INT16": np.int16, "INT64": np.int64, "BOOL": np.bool_, "BYTES": np.object_,
    }  # fmt: skip
    for name in kinds:
        write_model(tmp_path, name, onnx_config(), {"1/model.onnx": onnx_models.identity(name)})
    with ServerProcess(tmp_path) as server:
        for name, dtype in kinds.items():
            x = RNG.integers(0, 2, (3, 4)).astype(dtype)
            if name == "BYTES":
                x = np.array([f"text {i}" for i in range(12)], np.object_).reshape(3, 4)
            got = infer(server, name, X=x)["Y"]
            assert [v.decode() if isinstance(v, bytes) else v for v in got.ravel()] == x.ravel().tolist()


STEPS = (
    ("three", (("a", "X", "t"), ("plus", "t", "u"), ("a", "u", "Y"))),
    ("last", (("a", "X", "t"), ("plus", "t", "Y"))),
    ("first", (("plus", "X", "t"), ("a", "t", "Y"))),
)


def ensemble(*steps: tuple[str, str, str]) -> str:
    body = "".join(
        f' step {{ model_name: "{model}" model_version: -1 input_map {{ key: "X" value: "{source}" }}'
        f' output_map {{ key: "Y" value: "{target}" }} }}'
        for model, source, target in steps
    )
    io = tensors("input", ("X", "INT32", "-1")) + tensors("output", ("Y", "INT32", "-1"))
    return f'platform: "ensemble" max_batch_size: 8 {io} ensemble_scheduling {{ {body} }}'


def test_steps_of_an_ensemble_in_batches(tmp_path: Path) -> None:
    """Kernel and ONNX models in turn, requests of clients among those of the steps before; each gets its own rows."""
    delay = "dynamic_batching { preferred_batch_size: 8 max_queue_delay_microseconds: 2000 }"
    write_model(tmp_path, "a", add_config(GPU), {"1/model.cu": ADD})
    write_model(tmp_path, "plus", onnx_config(ALL_ON_CUDA + delay), {"1/model.onnx": PLUS_ONE})
    for name, steps in STEPS:
        write_model(tmp_path, name, ensemble(*steps))
    plus = {"three": 3, "last": 2, "first": 2, "plus": 1}
    with ServerProcess(tmp_path) as server, ThreadPoolExecutor(32) as pool:
        asked = [(name, i) for i in range(100) for name in plus]
        answers = list(pool.map(lambda row: add(server, row[0], row[1], 7, -row[1]), asked))
        for (name, i), answer in zip(asked, answers, strict=True):
            assert answer == (200, [i + plus[name], 7 + plus[name], plus[name] - i])
        (stats,) = json.loads(get(server.http, "/v2/models/plus/stats"))["model_stats"]
        assert stats["inference_count"] == 400 and stats["execution_count"] < 400
        print("executions of 400 inferences:", stats["execution_count"])


def test_tensors_are_bound_on_the_device(tmp_path: Path) -> None:
    """An instance without a server: inputs are read, and outputs left, where the device has them."""
    from neptrio.backends.onnx.backend import OnnxBackend
    from neptrio.backends.onnx.device_instance import DeviceInstance
    from neptrio.execution.batch import Batch
    from neptrio.request import device_memory
    from neptrio.request.infer_request import InferRequest, ModelCore, RequestedOutput, tensor_at
    from neptrio.request.numpy_tensor import from_numpy, to_numpy
    from tests.support.onnx_instances import context

    made = context(tmp_path, PLUS_ONE, onnx_config())
    OnnxBackend.auto_complete(made)
    instance = OnnxBackend(made).create_instance("m_0_0", "GPU", 0)
    assert isinstance(instance, DeviceInstance)
    instance.initialize()
    gpu = device.Device.get(0)
    try:
        own = instance.session._session
        assert own.get_providers()[0] == CUDA and own.get_provider_options()[CUDA]["device_id"] == "0"
        for at, keep in (
            (0, True),
            (0, False),
            (4, True),
        ):  # at 4 it is copied to where a kernel may rely on it
            x = RNG.integers(-99, 99, (3, 1000)).astype(np.int32)
            block = gpu.pool.block(x.nbytes + 256)
            gpu.pool.store(block.address + at, from_numpy("X", x))
            request = InferRequest()
            request.inputs = [
                tensor_at("X", request_dtype(x), x.shape, block.address + at, x.nbytes, block, 2, 0)
            ]
            request.outputs = [RequestedOutput("Y")]
            request.outputs[0].keep_on_device = keep
            request.batch_size = 3
            batch = Batch(ModelCore("m", "1"), [request])
            instance.execute(batch)
            assert batch.error is None
            (output,) = batch.responses[0].outputs
            assert output.memory_kind == (2 if keep else 0)
            assert (to_numpy(device_memory.on_host(output) if keep else output) == x + 1).all()
            del output, batch, request
    finally:
        instance.finalize()
        gpu.release()


def request_dtype(array: np.ndarray) -> int:
    from neptrio.request.numpy_tensor import from_numpy

    return int(from_numpy("X", array).dtype)


def test_states_stay_on_the_device(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    import tritonclient.grpc as grpcclient

    def step(sequence: int, value: int, start: bool = False, end: bool = False) -> Any:
        tensor = grpcclient.InferInput("X", [1, 4], "INT32")
        tensor.set_data_from_numpy(np.full((1, 4), value, np.int32))
        result = client.infer("sum", [tensor], sequence_id=sequence, sequence_start=start, sequence_end=end)
        return result.as_numpy("Y")[0].tolist()

    io = tensors("input", ("X", "INT32", "4")) + tensors("output", ("Y", "INT32", "4"))
    state = 'state { input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_INT32 dims: [ 4 ] }'
    sequences = f"sequence_batching {{ oldest {{ }} max_sequence_idle_microseconds: 60000000 {state} }}"
    write_model(tmp_path, "sum", onnx_config(io + sequences), {"1/model.onnx": SUM})
    with ServerProcess(tmp_path) as server, grpcclient.InferenceServerClient(server.grpc) as client:
        assert step(1, 5, start=True) == [5] * 4 and step(2, 100, start=True) == [100] * 4
        total = 5
        for value in range(1, 20):
            total += value
            assert step(1, value) == [total] * 4
        assert step(2, 1, end=True) == [101] * 4 and step(1, 0, end=True) == [total] * 4


def test_regions_made_by_tritonclient(tmp_path: Path) -> None:
    import tritonclient.http as httpclient
    import tritonclient.utils.cuda_shared_memory as regions

    write_model(tmp_path, "plus", onnx_config(), {"1/model.onnx": PLUS_ONE})
    values = np.array([[1, 2, 3, 2**30]], np.int32)
    made = {name: regions.create_shared_memory_region(name, values.nbytes, 0) for name in ("x", "y")}
    try:
        regions.set_shared_memory_region(made["x"], [values])
        with ServerProcess(tmp_path, "--allow-client-shm=true") as server:
            with httpclient.InferenceServerClient(server.http) as client:
                for name, region in made.items():
                    client.register_cuda_shared_memory(name, regions.get_raw_handle(region), 0, values.nbytes)
                tensor = httpclient.InferInput("X", list(values.shape), "INT32")
                tensor.set_shared_memory("x", values.nbytes)
                output = httpclient.InferRequestedOutput("Y")
                output.set_shared_memory("y", values.nbytes)
                client.infer("plus", [tensor], outputs=[output])
                got = regions.get_contents_as_numpy(made["y"], np.int32, list(values.shape))
                assert got.tolist() == (values + 1).tolist()
                client.unregister_cuda_shared_memory()
    finally:
        for region in made.values():
            regions.destroy_shared_memory_region(region)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (
            parameter("cudnn_conv_algo_search", "7"),
            r"'cudnn_conv_algo_search' of model 'bad' must be 0 \(EXHAUSTIVE\)",
        ),
        (parameter("gpu_mem_limit", "much"), "'gpu_mem_limit' of model 'bad' must be an integer, got 'much'"),
        (
            'optimization { execution_accelerators { gpu_execution_accelerator [ { name: "cuda" '
            'parameters { key: "nonsense" value: "1" } } ] } }',
            'Unknown provider option: "nonsense"',
        ),
    ],
    ids=["value", "number", "name"],
)
def test_an_option_that_means_nothing_fails_the_load(tmp_path: Path, extra: str, said: str) -> None:
    write_model(tmp_path, "bad", onnx_config(extra), {"1/model.onnx": PLUS_ONE})
    write_model(tmp_path, "plus", onnx_config(), {"1/model.onnx": PLUS_ONE})
    with ServerProcess(tmp_path, *EXPLICIT, "--load-model=plus") as server:
        status, body = post(server, "/v2/repository/models/bad/load")
        print("load:", status, body)
        assert status >= 400 and re.search(said, body["error"])
        assert add(server, "plus", 1) == (200, [2])


def test_a_provider_whose_library_does_not_load_is_no_silent_cpu(tmp_path: Path) -> None:
    """ONNX Runtime itself would run the model on the CPU. It is as it is, but for that library."""
    package, capi = tmp_path / "site" / "onnxruntime", tmp_path / "site" / "onnxruntime" / "capi"
    capi.mkdir(parents=True)
    there = Path(library.module().__file__).parent
    for folder, source in ((package, there), (capi, there / "capi")):
        for entry in source.iterdir():
            if entry.name not in ("capi", "__pycache__"):
                (folder / entry.name).symlink_to(entry)
    spoilt = capi / "libonnxruntime_providers_cuda.so"
    spoilt.unlink()
    spoilt.write_bytes(b"")
    write_model(tmp_path / "models", "plus", onnx_config(), {"1/model.onnx": PLUS_ONE})
    env = os.environ | {"PYTHONPATH": f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}"}
    with ServerProcess(tmp_path / "models", "--exit-on-error=false", env=env) as server:
        state, why = reason(server, "plus")
        print("without its library:", why)
        assert state == "UNAVAILABLE" and f"asks for {CUDA}" in why and "file too short" in why


@pytest.fixture
def free() -> Iterator[Any]:
    """Free bytes of the device, as the driver tells it to this process."""
    from cuda.bindings import driver

    gpu = device.Device.get(0)

    def ask() -> int:
        with gpu.current():
            return int(device.call(driver.cuMemGetInfo(), "asking for its memory")[0])

    yield ask
    gpu.release()


def test_an_unload_gives_the_memory_back(tmp_path: Path, free: Any) -> None:
    large = 1 << 27  # floats
    write_model(tmp_path, "ones", onnx_config("", 0), {"1/model.onnx": ONES})
    write_model(tmp_path, "plus", onnx_config(), {"1/model.onnx": PLUS_ONE})
    with ServerProcess(tmp_path, *EXPLICIT, "--load-model=plus") as server:
        assert add(server, "plus", 1) == (200, [2])
        for _ in range(2):
            assert post(server, "/v2/repository/models/ones/load")[0] == 200
            before = free()
            got = infer(server, "ones", X=np.array([large], np.int64))["Y"]
            assert got.tolist() == pytest.approx([np.e])
            during = free()
            assert before - during >= 4 * large
            unload(server, "ones")
            until(lambda low=during: free() - low >= 4 * large, "the memory is free again")  # type: ignore[misc]
            print("free before, during, afterwards (MiB):", before >> 20, during >> 20, free() >> 20)
        assert add(server, "plus", 2) == (200, [3])


def test_a_request_larger_than_the_memory_fails_alone(tmp_path: Path) -> None:
    """The device's, and what the configuration leaves to the model."""
    write_model(tmp_path, "ones", onnx_config("", 0), {"1/model.onnx": ONES})
    limit = parameter("gpu_mem_limit", str(64 << 20))
    write_model(tmp_path, "limited", onnx_config(limit, 0), {"1/model.onnx": ONES})
    with ServerProcess(tmp_path) as server:
        tensor = {"name": "X", "datatype": "INT64", "shape": [1], "data": [1 << 40]}
        status, body = post(server, "/v2/models/ones/infer", {"inputs": [tensor]})
        print("more than the memory:", status, body)
        assert status == 500 and body["error"]
        tensor["data"] = [32 << 20]
        assert post(server, "/v2/models/ones/infer", {"inputs": [tensor]})[0] == 200
        status, body = post(server, "/v2/models/limited/infer", {"inputs": [tensor]})
        assert status == 500 and "memory" in body["error"]
        for model in ("ones", "limited"):
            got = infer(server, model, X=np.array([10], np.int64))["Y"]
            assert got.tolist() == pytest.approx([np.e])


BREAKING = """
extern "C" __global__ void run(const int* x, int* y)
{
    if (x[threadIdx.x] < 0) *(volatile int*)16 = 1;
    y[threadIdx.x] = x[threadIdx.x];
}
"""


def test_a_broken_context_takes_onnx_models_out_of_service_too(tmp_path: Path) -> None:
    config = kernel_config(
        0,
        tensors("input", ("X", "INT32", "32")),
        tensors("output", ("Y", "INT32", "32")),
        parameter("kernels", "run<<<1, 32>>>(X, Y)"),
    )
    write_model(tmp_path, "breaking", config + GPU, {"1/model.cu": BREAKING})
    write_model(tmp_path, "plus", onnx_config(), {"1/model.onnx": PLUS_ONE})
    apart = parameter("isolation", "process")
    write_model(tmp_path, "apart", onnx_config(apart), {"1/model.onnx": PLUS_ONE})
    with ServerProcess(tmp_path) as server:
        for model in ("plus", "apart"):
            assert add(server, model, 1) == (200, [2])
        tensor = {"name": "X", "datatype": "INT32", "shape": [32], "data": [-1] * 32}
        assert post(server, "/v2/models/breaking/infer", {"inputs": [tensor]})[0] == 500
        until(lambda: reason(server, "plus")[0] == "UNAVAILABLE", "the ONNX model left service")
        assert "CUDA_ERROR_ILLEGAL_ADDRESS in model 'breaking'" in reason(server, "plus")[1]
        assert add(server, "plus", 1)[0] == 503
        assert add(server, "apart", 2) == (200, [3]), "a process of its own has a context of its own"
        assert server.stop() == 0


def test_a_run_that_takes_too_long_ends_in_time(tmp_path: Path) -> None:
    """Its batch is answered, the GPU is given up, and the server ends though the run goes on."""
    limit = parameter("EXECUTE_TIMEOUT_SECONDS", "2")
    write_model(tmp_path, "products", onnx_config(limit, 0), {"1/model.onnx": many_products()})
    write_model(tmp_path, "plus", onnx_config(), {"1/model.onnx": PLUS_ONE})

    def products(count: int) -> tuple[int, Any]:
        tensor = {"name": "X", "datatype": "INT64", "shape": [1], "data": [count]}
        return post(server, "/v2/models/products/infer", {"inputs": [tensor]})

    with ServerProcess(tmp_path) as server:
        status, body = products(3)
        assert status == 200 and body["outputs"][0]["data"] == [3]
        assert add(server, "plus", 1) == (200, [2])
        why = "no end of a run within 2 s (EXECUTE_TIMEOUT_SECONDS)"
        assert products(1 << 40) == (504, {"error": f"model 'products': {why}"})
        assert f"GPU 0 cannot be used any more after {why} in model 'products'" in reason(server, "plus")[1]
        assert add(server, "plus", 1)[0] == 503
        assert server.stop() == 0
