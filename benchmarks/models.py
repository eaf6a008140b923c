"""The model repositories the benchmark serves: the same tensors for every server."""

from __future__ import annotations

from pathlib import Path

ADD_SUB = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", a + b), pb_utils.Tensor("OUTPUT1", a - b)])
            )
        return responses
"""

IDENTITY = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy())]
            )
            for r in requests
        ]
"""

ACCUMULATE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy().reshape(-1)[0]
            end = pb_utils.get_input_tensor_by_name(request, "END").as_numpy().reshape(-1)[0]
            key = int(pb_utils.get_input_tensor_by_name(request, "CORRID").as_numpy().reshape(-1)[0])
            total = value if start else self.sums.get(key, 0) + value
            if end:
                self.sums.pop(key, None)
            else:
                self.sums[key] = total
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value)]))
        return responses
"""

CALL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            asked = pb_utils.InferenceRequest(
                model_name="simple", inputs=request.inputs(), requested_output_names=["OUTPUT0", "OUTPUT1"]
            )
            answer = asked.exec()
            responses.append(pb_utils.InferenceResponse(answer.output_tensors()))
        return responses
"""

PURE = """
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            end = time.thread_time() + 0.005
            while time.thread_time() < end:
                pass
            a = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", a + b), pb_utils.Tensor("OUTPUT1", a - b)])
            )
        return responses
"""

SIMPLE_IO = """
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 16 ] } ]
"""
LARGE_IO = """
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
"""
SEQUENCE_IO = """
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
sequence_batching {
  oldest { max_candidate_sequences: 64 }
  max_sequence_idle_microseconds: 60000000
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
  ]
}
"""
ONE_INSTANCE = "instance_group [ { kind: KIND_CPU count: 1 } ]\n"
BATCHED = "dynamic_batching { max_queue_delay_microseconds: 0 }\n"


def written(repository: Path, name: str, config: str, model: str = "", filename: str = "model.py") -> None:
    """Writes a model: its configuration without the name, and its file if there is one."""
    folder = repository / name / "1"
    folder.mkdir(parents=True, exist_ok=True)
    (repository / name / "config.pbtxt").write_text(f'name: "{name}"\n' + config)
    if model:
        (folder / filename).write_text(model)


def python_repository(repository: Path) -> None:
    """TritonPythonModel versions: tritonserver's Python backend and our own serve the same files."""
    python = 'backend: "python"\n' + ONE_INSTANCE
    written(repository, "simple", python + "max_batch_size: 8\n" + SIMPLE_IO, ADD_SUB)
    written(repository, "simple_batched", python + "max_batch_size: 64\n" + SIMPLE_IO + BATCHED, ADD_SUB)
    written(repository, "bls", python + "max_batch_size: 8\n" + SIMPLE_IO, CALL)
    written(repository, "large", python + LARGE_IO, IDENTITY)
    written(repository, "sequence", python + "max_batch_size: 1\n" + SEQUENCE_IO, ACCUMULATE)


def pure_python(repository: Path, name: str) -> None:
    """A model with 5 ms of Python code per request, which holds the GIL."""
    written(repository, name, 'backend: "python"\n' + ONE_INSTANCE + "max_batch_size: 8\n" + SIMPLE_IO, PURE)


KERNEL = (
    Path(__file__).resolve().parent.parent / "examples" / "model_repository" / "simple"
)  # add/sub as a CUDA source file


def native_repository(repository: Path) -> None:
    """Our built-in and kernel models under the same names."""
    import shutil

    for name, extra in (("simple", ""), ("simple_batched", BATCHED)):
        shutil.rmtree(repository / name, ignore_errors=True)
        shutil.copytree(KERNEL, repository / name)
        config = (KERNEL / "config.pbtxt").read_text()
        lines = [line for line in config.splitlines() if not line.startswith(("name:", "max_batch_size:"))]
        batch = 64 if extra else 8
        (repository / name / "config.pbtxt").write_text(
            f'name: "{name}"\nmax_batch_size: {batch}\n' + "\n".join(lines) + "\n" + extra
        )
    written(repository, "large", 'backend: "identity"\n' + LARGE_IO)
    written(repository, "sequence", 'backend: "sequence"\nmax_batch_size: 1\n' + SEQUENCE_IO)


def with_instances(repository: Path, name: str, count: int) -> None:
    """A copy of a model that has `count` instances, as NAME_COUNT."""
    import shutil

    made = f"{name}_{count}"
    shutil.copytree(repository / name, repository / made)
    config = (repository / name / "config.pbtxt").read_text()
    lines = [line for line in config.splitlines() if not line.startswith(("name:", "instance_group"))]
    group = f"instance_group [ {{ kind: KIND_CPU count: {count} }} ]\n"
    (repository / made / "config.pbtxt").write_text(f'name: "{made}"\n' + "\n".join(lines) + "\n" + group)


def onnx_repository(repository: Path) -> Path:
    """Add/sub as an ONNX model of one session thread. Returns the model's file."""
    import onnx
    from onnx import TensorProto, helper

    shape = ["batch", 16]
    a, b, total, difference = (
        helper.make_tensor_value_info(name, TensorProto.INT32, shape)
        for name in ("INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1")
    )
    nodes = [
        helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
        helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
    ]
    graph = helper.make_graph(nodes, "simple", [a, b], [total, difference])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    config = 'backend: "onnxruntime"\nmax_batch_size: 8\n' + SIMPLE_IO + ONE_INSTANCE
    config += 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }\n'
    written(repository, "simple", config)
    path = repository / "simple" / "1" / "model.onnx"
    onnx.save(model, str(path))
    return path
