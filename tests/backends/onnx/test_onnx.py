"""The onnxruntime backend in a real server, with the real clients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from onnx import helper
from tritonclient.utils import InferenceServerException

from tests.support import onnx_models
from tests.support.repository import write_model
from tests.support.server import ServerProcess

RNG = np.random.default_rng(7)
VALUES: dict[str, np.ndarray] = {
    "BOOL": np.array([[True, False, True, True]]),
    "UINT8": np.array([[0, 1, 254, 255]], np.uint8),
    "UINT16": np.array([[0, 1, 65534, 65535]], np.uint16),
    "UINT32": np.array([[0, 1, 2**32 - 2, 2**32 - 1]], np.uint32),
    "UINT64": np.array([[0, 1, 2**64 - 2, 2**64 - 1]], np.uint64),
    "INT8": np.array([[-128, -1, 0, 127]], np.int8),
    "INT16": np.array([[-32768, -1, 0, 32767]], np.int16),
    "INT32": np.array([[-(2**31), -1, 0, 2**31 - 1]], np.int32),
    "INT64": np.array([[-(2**63), -1, 0, 2**63 - 1]], np.int64),
    "FP16": np.array([[0.5, -2, np.inf, 65504]], np.float16),
    "FP32": np.array([[0.1, -2, np.inf, 3e38]], np.float32),
    "FP64": np.array([[0.1, -2, np.inf, 1e300]], np.float64),
    "BYTES": np.array([[b"", b"plain", "täxt ✓".encode(), b"zero\x00inside\x00"]], object),
}


def many_shapes() -> bytes:
    """SHAPE = the shape of X as INT64: shows what the backend was given."""
    return onnx_models.model(
        [helper.make_node("Shape", ["X"], ["S"]), helper.make_node("Identity", ["X"], ["Y"])],
        [onnx_models.tensor("X", "FP32", [None, None, None])],
        [onnx_models.tensor("S", "INT64", [3]), onnx_models.tensor("Y", "FP32", [None, None, None])],
    )


BATCH_DETECTOR = onnx_models.model(
    # COUNT = how many rows were executed together, for every row
    [
        helper.make_node("Shape", ["X"], ["shape"], start=0, end=1),
        helper.make_node("Concat", ["shape", "one"], ["shape2"], axis=0),
        helper.make_node("Expand", ["shape", "shape2"], ["COUNT"]),
        helper.make_node("Identity", ["X"], ["Y"]),
    ],
    [onnx_models.tensor("X", "FP32", ["N", 4])],
    [onnx_models.tensor("COUNT", "INT64", ["N", 1]), onnx_models.tensor("Y", "FP32", ["N", 4])],
    [helper.make_tensor("one", onnx_models.TYPES["INT64"], [1], [1])],
)


ACCUMULATE = onnx_models.model(
    # Y = X + STATE, which is the next STATE
    [helper.make_node("Add", ["X", "STATE"], ["Y"]), helper.make_node("Identity", ["Y"], ["NEXT"])],
    [onnx_models.tensor("X", "INT32", ["N", 1]), onnx_models.tensor("STATE", "INT32", ["N", 1])],
    [onnx_models.tensor("Y", "INT32", ["N", 1]), onnx_models.tensor("NEXT", "INT32", ["N", 1])],
)


@pytest.fixture(scope="module", params=["session_api=c", "session_api=python", "isolation=process"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("onnx")

    def add(name: str, content: bytes, config: str | None = None, file: str = "1/model.onnx") -> None:
        folder = write_model(repository, name, config or "", {file: content})
        if config is None:
            (folder / "config.pbtxt").unlink()

    for datatype in (*VALUES, "BF16"):
        add(f"identity_{datatype.lower()}", onnx_models.identity(datatype))
    add("add_sub", onnx_models.add_sub())
    add("fixed", onnx_models.add_sub((16,)))
    add("scalar", onnx_models.identity("FP32", ()))
    add("scale", onnx_models.scale(), 'backend: "onnxruntime" '
        'input [ { name: "X" data_type: TYPE_FP32 dims: [-1, 4] },'
        ' { name: "FACTOR" data_type: TYPE_FP32 dims: [1] optional: true } ] '
        'output { name: "Y" data_type: TYPE_FP32 dims: [-1, 4] }')  # fmt: skip
    add("tuned", onnx_models.add_sub(), 'platform: "onnxruntime_onnx" max_batch_size: 3 '
        'instance_group { count: 3 kind: KIND_CPU } optimization { graph { level: 1 } } '
        'parameters { key: "intra_op_thread_count" value { string_value: "1" } } '
        'parameters { key: "inter_op_thread_count" value { string_value: "2" } } '
        'parameters { key: "execution_mode" value { string_value: "1" } } '
        'parameters { key: "enable_mem_arena" value { string_value: "0" } } '
        'parameters { key: "session.intra_op.allow_spinning" value { string_value: "1" } } '
        'default_model_filename: "other.onnx"', "1/other.onnx")  # fmt: skip
    add("reshaped", many_shapes(), 'backend: "onnxruntime" max_batch_size: 0 '
        'input { name: "X" data_type: TYPE_FP32 dims: [-1, 6] reshape { shape: [-1, 2, 3] } } '
        'output [ { name: "S" data_type: TYPE_INT64 dims: [3] },'
        ' { name: "Y" data_type: TYPE_FP32 dims: [-1, 6] reshape { shape: [-1, 2, 3] } } ]')  # fmt: skip
    add("reshaped_batch", many_shapes(), 'backend: "onnxruntime" max_batch_size: 4 '
        'input { name: "X" data_type: TYPE_FP32 dims: [6] reshape { shape: [2, 3] } } '
        'output { name: "Y" data_type: TYPE_FP32 dims: [6] reshape { shape: [2, 3] } }')  # fmt: skip
    add("counter", BATCH_DETECTOR)
    add("accumulate", ACCUMULATE, 'backend: "onnxruntime" max_batch_size: 4 '
        'input { name: "X" data_type: TYPE_INT32 dims: [1] } output { name: "Y" data_type: TYPE_INT32 dims: [1] } '
        'sequence_batching { max_sequence_idle_microseconds: 60000000 state { input_name: "STATE" output_name: "NEXT" data_type: TYPE_INT32 dims: [1] } }')  # fmt: skip
    with ServerProcess(repository, f"--backend-config=onnxruntime,{request.param}") as process:
        yield process


def infer(address: str, name: str, module: Any, wanted: list[str] | None = None, **arrays: np.ndarray) -> Any:
    with module.InferenceServerClient(address) as client:
        made = []
        for key, array in arrays.items():
            datatype = "BYTES" if array.dtype == object else client_type(array)
            tensor = module.InferInput(key, list(array.shape), datatype)
            tensor.set_data_from_numpy(array)
            made.append(tensor)
        outputs = [module.InferRequestedOutput(w) for w in wanted] if wanted else None
        return client.infer(name, made, outputs=outputs)


def client_type(array: np.ndarray) -> str:
    from tritonclient.utils import np_to_triton_dtype

    return str(np_to_triton_dtype(array.dtype))


@pytest.mark.parametrize("datatype", VALUES)
@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_every_datatype(server: ServerProcess, datatype: str, module: Any) -> None:
    address = server.http if module is httpclient else server.grpc
    value = np.concatenate([VALUES[datatype], VALUES[datatype][:, ::-1]])
    result = infer(address, f"identity_{datatype.lower()}", module, X=value)
    got = result.as_numpy("Y")
    assert got.shape == (2, 4)
    np.testing.assert_array_equal(got, value)


def test_bf16(server: ServerProcess) -> None:
    value = np.array([[0.5, -2, 1e30, 3]], ml_dtypes.bfloat16)
    with httpclient.InferenceServerClient(server.http) as client:
        tensor = httpclient.InferInput("X", [1, 4], "BF16")
        tensor.set_data_from_numpy(value)
        result = client.infer("identity_bf16", [tensor]).as_numpy("Y")
        np.testing.assert_array_equal(result.astype(np.float32), value.astype(np.float32))


def test_auto_completed_configuration(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        config = client.get_model_config("add_sub")
        metadata = client.get_model_metadata("add_sub")
    assert list(config) == [
        "name", "platform", "backend", "runtime", "version_policy", "max_batch_size", "input", "output", "batch_input",
        "batch_output", "optimization", "dynamic_batching", "instance_group", "default_model_filename",
        "cc_model_filenames", "metric_tags", "parameters", "model_warmup",
    ]  # fmt: skip
    assert config["platform"] == "onnxruntime_onnx" and config["backend"] == "onnxruntime"
    assert config["max_batch_size"] == 4
    assert config["dynamic_batching"]["preferred_batch_size"] == [4]
    assert config["input"][0] == {
        "name": "A",
        "data_type": "TYPE_INT32",
        "format": "FORMAT_NONE",
        "dims": [16],
        "is_shape_tensor": False,
        "allow_ragged_batch": False,
        "optional": False,
        "is_non_linear_format_io": False,
    }
    assert [(o["name"], o["dims"]) for o in config["output"]] == [("SUM", [16]), ("DIFF", [16])]
    group = config["instance_group"]
    assert [(g["name"], g["kind"], g["count"]) for g in group] == [("add_sub", "KIND_CPU", 2)]
    assert list(group[0]) == [
        "name", "kind", "count", "gpus", "secondary_devices", "profile", "passive", "host_policy",
    ]  # fmt: skip
    assert config["default_model_filename"] == "model.onnx"
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert config["optimization"] == {
        "priority": "PRIORITY_DEFAULT",
        "input_pinned_memory": {"enable": True},
        "output_pinned_memory": {"enable": True},
        "gather_kernel_buffer_threshold": 0,
        "eager_batching": False,
    }
    assert metadata["platform"] == "onnxruntime_onnx"
    assert metadata["inputs"][0] == {"name": "A", "datatype": "INT32", "shape": [-1, 16]}


def test_model_without_batch_dimension(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        config = client.get_model_config("fixed")
    assert config["max_batch_size"] == 0 and "dynamic_batching" not in config
    a, b = np.arange(16, dtype=np.int32), np.ones(16, np.int32)
    result = infer(server.http, "fixed", httpclient, A=a, B=b)
    np.testing.assert_array_equal(result.as_numpy("SUM"), a + b)
    np.testing.assert_array_equal(result.as_numpy("DIFF"), a - b)


def test_a_scalar_is_one_element_to_clients(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        config = client.get_model_config("scalar")
        assert config["input"][0]["dims"] == [1] and config["input"][0]["reshape"] == {"shape": []}
    result = infer(server.http, "scalar", httpclient, X=np.array([2.5], np.float32))
    np.testing.assert_array_equal(result.as_numpy("Y"), np.array([2.5], np.float32))


def test_optional_input(server: ServerProcess) -> None:
    x = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(infer(server.http, "scale", httpclient, X=x).as_numpy("Y"), x * 10)
    result = infer(server.grpc, "scale", grpcclient, X=x, FACTOR=np.array([3], np.float32))
    np.testing.assert_array_equal(result.as_numpy("Y"), x * 3)


def test_parameters_and_file_name(server: ServerProcess) -> None:
    a = RNG.integers(-100, 100, (3, 16), dtype=np.int32)
    result = infer(server.http, "tuned", httpclient, ["DIFF"], A=a, B=a)
    np.testing.assert_array_equal(result.as_numpy("DIFF"), np.zeros((3, 16), np.int32))
    assert result.as_numpy("SUM") is None
    with httpclient.InferenceServerClient(server.http) as client:
        assert client.get_model_config("tuned")["instance_group"][0]["count"] == 3
        with pytest.raises(InferenceServerException, match="batch-size must be <= 3"):
            infer(
                server.http, "tuned", httpclient, A=np.zeros((4, 16), np.int32), B=np.zeros((4, 16), np.int32)
            )


@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_reshape(server: ServerProcess, module: Any) -> None:
    address = server.http if module is httpclient else server.grpc
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    result = infer(address, "reshaped", module, X=x)
    np.testing.assert_array_equal(result.as_numpy("S"), [4, 2, 3])
    np.testing.assert_array_equal(result.as_numpy("Y"), x)
    np.testing.assert_array_equal(infer(address, "reshaped_batch", module, X=x).as_numpy("Y"), x)


def test_metadata_shows_the_dims_before_reshaping(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        metadata = client.get_model_metadata("reshaped")
    assert metadata["inputs"][0]["shape"] == [-1, 6]
    assert metadata["outputs"][1]["shape"] == [-1, 6]


def test_zero_sized_tensors(server: ServerProcess) -> None:
    x = np.empty((0, 6), np.float32)
    result = infer(server.http, "reshaped", httpclient, X=x)
    np.testing.assert_array_equal(result.as_numpy("S"), [0, 2, 3])
    assert result.as_numpy("Y").shape == (0, 6)


def test_strings_must_be_utf8(server: ServerProcess) -> None:
    with pytest.raises(InferenceServerException, match="input 'X' must hold UTF-8 strings"):
        infer(server.http, "identity_bytes", httpclient, X=np.array([[b"\xff\xfe", b"", b"", b""]], object))


def test_many_clients_get_their_own_rows(server: ServerProcess) -> None:
    """Whatever is executed together, everyone gets the rows they sent."""
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with grpcclient.InferenceServerClient(server.grpc) as client:
            for _ in range(20):
                x = rng.random((rng.integers(1, 4), 4), dtype=np.float32)
                tensor = grpcclient.InferInput("X", list(x.shape), "FP32")
                tensor.set_data_from_numpy(x)
                result = client.infer("counter", [tensor])
                counts = result.as_numpy("COUNT")
                if (
                    not np.array_equal(result.as_numpy("Y"), x)
                    or counts.shape != (len(x), 1)
                    or counts.max() > 4
                ):
                    wrong.append(f"{x} -> {result.as_numpy('Y')}, {counts}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert wrong == []


@pytest.mark.parametrize("wanted", [None, ["Y"]])
def test_the_state_of_sequences(server: ServerProcess, wanted: list[str] | None) -> None:
    """It is computed whether or not the client lists outputs, and kept by sequence."""
    outputs = [grpcclient.InferRequestedOutput(name) for name in wanted] if wanted else None
    got: dict[int, list[int]] = {1: [], 2: []}
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for k in range(3):
            for sequence in got:
                tensor = grpcclient.InferInput("X", [1, 1], "INT32")
                tensor.set_data_from_numpy(np.array([[10 * sequence + k]], np.int32))
                result = client.infer(
                    "accumulate",
                    [tensor],
                    outputs=outputs,
                    sequence_id=sequence,
                    sequence_start=k == 0,
                    sequence_end=k == 2,
                )
                got[sequence].append(int(result.as_numpy("Y")[0, 0]))
                assert result.as_numpy("NEXT") is None
    assert got == {1: [10, 21, 33], 2: [20, 41, 63]}


BAD = {
    "missing_file": ("", b"", "1/readme.txt", ["unable to find", "model.onnx"]),
    "not_onnx": ("", b"this is no model", "1/model.onnx", ["not an ONNX model, or a damaged one", "model.onnx"]),
    "unknown_input": (
        'input { name: "Z" data_type: TYPE_FP32 dims: [4] } output { name: "Y" data_type: TYPE_FP32 dims: [4] }',
        onnx_models.identity(), "1/model.onnx", ["missing are 'X'"],
    ),
    "extra_input": (
        'input [ { name: "X" data_type: TYPE_FP32 dims: [4] }, { name: "Z" data_type: TYPE_FP32 dims: [4] } ] '
        'output { name: "Y" data_type: TYPE_FP32 dims: [4] }',
        onnx_models.identity(), "1/model.onnx", ["unexpected inference input 'Z'", "allowed inputs are: 'X'"],
    ),
    "unknown_output": (
        'input { name: "X" data_type: TYPE_FP32 dims: [4] } output { name: "W" data_type: TYPE_FP32 dims: [4] }',
        onnx_models.identity(), "1/model.onnx", ["unexpected inference output 'W'", "allowed outputs are: 'Y'"],
    ),
    "wrong_type": (
        'input { name: "X" data_type: TYPE_INT32 dims: [4] } output { name: "Y" data_type: TYPE_FP32 dims: [4] }',
        onnx_models.identity(), "1/model.onnx",
        ["unexpected datatype TYPE_INT32 for input 'X', expecting TYPE_FP32"],
    ),
    "wrong_shape": (
        'input { name: "X" data_type: TYPE_FP32 dims: [5] } output { name: "Y" data_type: TYPE_FP32 dims: [4] }',
        onnx_models.identity(), "1/model.onnx",
        ["input 'X' has the shape [-1, 4] in the model, but the configuration says [-1, 5]"],
    ),
    "wrong_rank": (
        'input { name: "X" data_type: TYPE_FP32 dims: [4, 1] } output { name: "Y" data_type: TYPE_FP32 dims: [4] }',
        onnx_models.identity(), "1/model.onnx", ["[-1, 4]", "[-1, 4, 1]"],
    ),
    "cannot_batch": ("", onnx_models.identity("FP32", (4,)), "1/model.onnx",
        ["does not support batching", "max_batch_size (8)", "'X' [4]"]),
    "bad_threads": (
        'parameters { key: "intra_op_thread_count" value { string_value: "many" } }',
        onnx_models.identity(), "1/model.onnx", ["'intra_op_thread_count'", "integer from 0", "'many'"],
    ),
    "bad_level": ("optimization { graph { level: 7 } }", onnx_models.identity(), "1/model.onnx",
        ["optimization.graph.level", "got 7"]),
    "no_accelerator": (
        'optimization { execution_accelerators { cpu_execution_accelerator [ { name: "warp" } ] } }',
        onnx_models.identity(), "1/model.onnx", ["'warp'", "is not available", "CPUExecutionProvider"],
    ),
    "not_optional": (
        'input { name: "X" data_type: TYPE_FP32 dims: [4] optional: true } '
        'output { name: "Y" data_type: TYPE_FP32 dims: [4] }',
        onnx_models.identity(), "1/model.onnx", ["input 'X' is optional", "requires it"],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("api", ["", "python"])
def test_load_errors(tmp_path: Path, api: str) -> None:
    for name, (extra, content, file, _) in BAD.items():
        write_model(tmp_path, name, f'backend: "onnxruntime" max_batch_size: 8 {extra}', {file: content})
    flags = ("--exit-on-error=false", "--backend-config=onnxruntime,default-max-batch-size=16")
    flags += (f"--backend-config=onnxruntime,session_api={api}",)
    write_model(tmp_path, "good", "", {"1/model.onnx": onnx_models.identity()})
    with ServerProcess(tmp_path, *flags) as server, httpclient.InferenceServerClient(server.http) as client:
        reasons = {row["name"]: row.get("reason", "") for row in client.get_model_repository_index()}
        for name, (_, _, _, texts) in BAD.items():
            for text in texts:
                assert text in reasons[name], f"{name}: {reasons[name]}"
        assert client.is_model_ready("good") and not client.is_server_ready()
        assert client.get_model_config("good")["max_batch_size"] == 16


@pytest.mark.slow
def test_auto_completion_can_be_off(tmp_path: Path) -> None:
    write_model(tmp_path, "bare", 'backend: "onnxruntime"', {"1/model.onnx": onnx_models.identity()})
    with (
        ServerProcess(tmp_path, "--exit-on-error=false", "--disable-auto-complete-config") as server,
        httpclient.InferenceServerClient(server.http) as client,
    ):
        (row,) = client.get_model_repository_index()
        assert row["state"] == "UNAVAILABLE" and "missing are 'X'" in row["reason"]
