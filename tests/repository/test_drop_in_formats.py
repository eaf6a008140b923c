"""A repository of a Triton server with a folder for each format that is served here, in the words of the public examples:
it serves unchanged, `neptrio check` finds nothing in it, and nothing in it has been written to.

The configurations have what such repositories have beside the least: platforms, default file names, batching, instance
groups, optimization, warm-up, version policies, and parameters that mean something to that backend alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from neptrio import commands
from tests.backends.fil import ensembles
from tests.support import onnx_models
from tests.support.repository import write_model
from tests.support.server import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TORCH = find_spec("torch") is not None  # make test-backends

PYTHON_MODEL = """import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.model_config = model_config = json.loads(args["model_config"])
        output = pb_utils.get_output_config_by_name(model_config, "OUTPUT0")
        self.output_dtype = pb_utils.triton_string_to_numpy(output["data_type"])

    def execute(self, requests):
        responses = []
        for request in requests:
            rows = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            halved = pb_utils.Tensor("OUTPUT0", (rows / 2).astype(self.output_dtype))
            responses.append(pb_utils.InferenceResponse(output_tensors=[halved]))
        return responses

    def finalize(self):
        print("Cleaning up...")
"""
ONNX = """name: "scaled_onnx"
platform: "onnxruntime_onnx"
max_batch_size : 0
default_model_filename: "scaled.onnx"
version_policy: { all { } }
input [
  {
    name: "X"
    data_type: TYPE_FP32
    format: FORMAT_NONE
    dims: [ -1, 4 ]
  }
]
output [
  {
    name: "Y"
    data_type: TYPE_FP32
    dims: [ -1, 4 ]
    label_filename: "labels.txt"
  }
]
optimization { graph { level: 1 } }
parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
parameters: { key: "execution_mode" value: { string_value: "0" } }
"""
PYTHON = """name: "halved_python"
backend: "python"
max_batch_size: 64
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 8 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 8 ] } ]
instance_group [{ kind: KIND_CPU count: 1 }]
dynamic_batching { }
parameters: { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value: { string_value: "yes" } }
"""
TREES = """name: "%s"
backend: "fil"
max_batch_size: 32768
input [
  {
    name: "input__0"
    data_type: TYPE_FP32
    dims: [ 8 ]
  }
]
output [
  {
    name: "output__0"
    data_type: TYPE_FP32
    dims: [ %d ]
  }
]
instance_group [{ kind: KIND_AUTO }]
parameters [
  { key: "model_type" value: { string_value: "%s" } },
  { key: "predict_proba" value: { string_value: "%s" } },
  { key: "output_class" value: { string_value: "%s" } },
  { key: "threshold" value: { string_value: "0.5" } },
  { key: "storage_type" value: { string_value: "AUTO" } },
  { key: "use_experimental_optimizations" value: { string_value: "true" } }
]
dynamic_batching { max_queue_delay_microseconds: 100 }
"""
# as the backend's page on explanations has it, with the names of its later releases
EXPLAINED = """name: "explained_xgboost"
backend: "fil"
max_batch_size: 32768
input [ { name: "input__0" data_type: TYPE_FP32 dims: [ 8 ] } ]
output [
  {
    name: "output__0"
    data_type: TYPE_FP32
    dims: [ 1 ]
  },
  {
    name: "treeshap_output"
    data_type: TYPE_FP32
    dims: [ 9 ]
  }
]
instance_group [{ kind: KIND_AUTO }]
parameters [
  { key: "model_type" value: { string_value: "xgboost_json" } },
  { key: "is_classifier" value: { string_value: "true" } },
  { key: "layout" value: { string_value: "depth_first" } },
  { key: "chunk_size" value: { string_value: "4" } }
]
dynamic_batching {}
"""
OPENVINO = """name: "doubled_openvino"
backend: "openvino"
default_model_filename: "model.xml"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { kind: KIND_CPU count: 2 } ]
parameters: { key: "NUM_STREAMS" value: { string_value: "1" } }
parameters: { key: "PERFORMANCE_HINT" value: { string_value: "LATENCY" } }
model_warmup [ {
  name: "zeros"
  batch_size: 1
  inputs { key: "x" value: { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } }
} ]
"""
PYTORCH = """name: "linear_libtorch"
platform: "pytorch_libtorch"
max_batch_size: 8
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2 ] } ]
parameters: { key: "DISABLE_OPTIMIZED_EXECUTION" value: { string_value: "true" } }
parameters: { key: "INFERENCE_MODE" value: { string_value: "true" } }
"""
ENSEMBLE = """name: "halved_then_scored"
platform: "ensemble"
max_batch_size: 64
input [ { name: "ROWS" data_type: TYPE_FP32 dims: [ 8 ] } ]
output [
  { name: "CHANCE" data_type: TYPE_FP32 dims: [ 2 ] },
  { name: "CLASS" data_type: TYPE_FP32 dims: [ 1 ] }
]
ensemble_scheduling {
  step [
    {
      model_name: "halved_python"
      model_version: -1
      input_map { key: "INPUT0" value: "ROWS" }
      output_map { key: "OUTPUT0" value: "halved" }
    },
    {
      model_name: "chances_xgboost"
      model_version: -1
      input_map { key: "input__0" value: "halved" }
      output_map { key: "output__0" value: "CHANCE" }
    },
    {
      model_name: "classes_lightgbm"
      model_version: -1
      input_map { key: "input__0" value: "halved" }
      output_map { key: "output__0" value: "CLASS" }
    }
  ]
}
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    labels = "\n".join(("one", "two", "three", "four"))
    for version in (1, 3):
        files = {f"{version}/scaled.onnx": onnx_models.scale(), "labels.txt": labels}
        write_model(folder, "scaled_onnx", ONNX, files, (version,))
    write_model(folder, "halved_python", PYTHON, {"1/model.py": PYTHON_MODEL})
    trees = {
        "chances_xgboost": ("xgboost_json", 2, "true", "true", ensembles.xgboost("binary:logistic", ensembles.TWO, "json")),
        "classes_lightgbm": ("lightgbm", 1, "false", "true", ensembles.lightgbm("multiclass", ensembles.THREE, num_class=3)),
        "sums_treelite": ("treelite_checkpoint", 1, "false", "false", ensembles.sklearn("RandomForestRegressor", ensembles.WHOLE[:, 0])),
    }  # fmt: skip
    for name, (kind, width, chances, classes, make) in trees.items():
        make(write_model(folder, name, TREES % (name, width, kind, chances, classes)) / "1")
    trees["chances_xgboost"][4](write_model(folder, "explained_xgboost", EXPLAINED) / "1")
    _openvino(write_model(folder, "doubled_openvino", OPENVINO) / "1/model.xml")
    if TORCH:
        import torch

        torch.jit.script(torch.nn.Linear(4, 2)).save(
            write_model(folder, "linear_libtorch", PYTORCH) / "1/model.pt"
        )
    write_model(folder, "halved_then_scored", ENSEMBLE)
    return folder


def _openvino(path: Path) -> None:
    """y = 2 x, as IR."""
    import openvino
    from openvino import opset13 as operators

    x = operators.parameter([-1, 4], np.float32)
    x.output(0).tensor.set_names({"x"})
    y = operators.multiply(x, operators.constant(np.full(4, 2, np.float32)))
    y.output(0).tensor.set_names({"y"})
    openvino.save_model(openvino.Model([operators.result(y)], [x], "doubling"), path, compress_to_fp16=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def client(repository: Path) -> Iterator[httpclient.InferenceServerClient]:
    before = contents(repository)
    with ServerProcess(repository, env=dict(os.environ, PYTHONWARNINGS="")) as server:
        with httpclient.InferenceServerClient(server.http) as client:
            yield client
        with grpcclient.InferenceServerClient(server.grpc) as other:
            assert all(row.state == "READY" for row in other.get_model_repository_index().models)
    assert contents(repository) == before


def ask(
    client: httpclient.InferenceServerClient, model: str, name: str, rows: np.ndarray
) -> httpclient.InferResult:
    tensor = httpclient.InferInput(name, list(rows.shape), "FP32")
    tensor.set_data_from_numpy(rows)
    return client.infer(model, [tensor])


ROWS = ensembles.WHOLE[:5]


def test_every_folder_is_ready(client: httpclient.InferenceServerClient) -> None:
    index = {
        (row["name"], row.get("version")): row.get("state") for row in client.get_model_repository_index()
    }
    names = {
        "scaled_onnx",
        "halved_python",
        "chances_xgboost",
        "classes_lightgbm",
        "sums_treelite",
        "explained_xgboost",
        "doubled_openvino",
    }
    names |= {"halved_then_scored"} | ({"linear_libtorch"} if TORCH else set())
    assert {name for name, _ in index} == names and set(index.values()) == {"READY"}
    assert ("scaled_onnx", "1") in index and ("scaled_onnx", "3") in index


def test_each_answers_as_its_file_says(client: httpclient.InferenceServerClient, tmp_path: Path) -> None:
    import lightgbm
    import xgboost

    short = np.ascontiguousarray(ROWS[:, :4])
    np.testing.assert_array_equal(ask(client, "scaled_onnx", "X", short).as_numpy("Y"), short * 10)
    np.testing.assert_array_equal(ask(client, "doubled_openvino", "x", short).as_numpy("y"), short * 2)
    np.testing.assert_array_equal(ask(client, "halved_python", "INPUT0", ROWS).as_numpy("OUTPUT0"), ROWS / 2)
    made = ensembles.sklearn("RandomForestRegressor", ensembles.WHOLE[:, 0])(tmp_path)
    found = ask(client, "sums_treelite", "input__0", ROWS).as_numpy("output__0")
    np.testing.assert_allclose(found.ravel(), made.expected[:5], 1e-5, 1e-6)
    # and the ensemble as its steps, done by the libraries
    files = [ensembles.xgboost("binary:logistic", ensembles.TWO, "json")(tmp_path).path]
    files.append(ensembles.lightgbm("multiclass", ensembles.THREE, num_class=3)(tmp_path).path)
    booster = xgboost.Booster(model_file=files[0])
    explained = ask(client, "explained_xgboost", "input__0", ROWS)
    contributions = booster.predict(xgboost.DMatrix(ROWS), pred_contribs=True)
    np.testing.assert_allclose(explained.as_numpy("treeshap_output"), contributions, 1e-5, 1e-6)
    above = booster.predict(xgboost.DMatrix(ROWS)) > 0.5
    assert explained.as_numpy("output__0").ravel().tolist() == above.tolist()
    chances = booster.predict(xgboost.DMatrix(ROWS / 2))
    classes = lightgbm.Booster(model_file=files[1]).predict(ROWS / 2).argmax(1)
    answer = ask(client, "halved_then_scored", "ROWS", ROWS)
    np.testing.assert_allclose(answer.as_numpy("CHANCE"), np.stack((1 - chances, chances), 1), 1e-5, 1e-6)
    assert answer.as_numpy("CLASS").ravel().tolist() == classes.tolist()


@pytest.mark.skipif(not TORCH, reason="make test-backends")
def test_a_module_of_torchscript(client: httpclient.InferenceServerClient, repository: Path) -> None:
    import torch

    module = torch.jit.load(repository / "linear_libtorch/1/model.pt")
    short = np.ascontiguousarray(ROWS[:, :4])
    found = ask(client, "linear_libtorch", "INPUT__0", short).as_numpy("OUTPUT__0")
    with torch.no_grad():
        np.testing.assert_allclose(found, module(torch.from_numpy(short)).numpy(), 1e-5, 1e-6)


def test_the_check_finds_nothing(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run("check", [str(repository)]) == 0, capsys.readouterr()
    assert "0 errors, 0 warnings" in capsys.readouterr().out
