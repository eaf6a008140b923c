"""backend: "openvino": serves IR and ONNX files, and what else OpenVINO reads, under the parameters of Triton's backend of
that name.

Rules:
 1. A batch is one inference: the requests' rows are joined along the first dimension and the results divided again.
 2. The first dimension is made dynamic where the configuration batches, whatever the file has, unless
    SKIP_OV_DYNAMIC_BATCHSIZE says that the model cannot take that: then every batch has max_batch_size rows.
 3. A parameter has its effect, or the load fails. None loads code: CPU_EXTENSION_PATH is refused.
 4. Results lie in OpenVINO's memory until the next inference: what is answered is copied out of it.
 5. Tensors that the file gives no name are called INPUT__0 and OUTPUT__0, by their place: what is converted from PyTorch has
    results without names.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

# Importing OpenVINO would tell its makers so over the network, from a process of its own: it does not where this is missing.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
import openvino  # noqa: E402

import triton_python_backend_utils as pb_utils  # noqa: E402

NAMES = ("model.xml", "model.onnx")
ROWS = 4  # max_batch_size where neither says one, as for ONNX models
DATATYPES = {
    "boolean": "TYPE_BOOL", "u8": "TYPE_UINT8", "u16": "TYPE_UINT16", "u32": "TYPE_UINT32", "u64": "TYPE_UINT64",
    "i8": "TYPE_INT8", "i16": "TYPE_INT16", "i32": "TYPE_INT32", "i64": "TYPE_INT64", "f16": "TYPE_FP16",
    "f32": "TYPE_FP32", "f64": "TYPE_FP64",
}  # fmt: skip
HINTS = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")


class Parameters:
    """The parameters of a configuration. Raises ValueError for values that cannot be."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._given = {
            key: str(value.get("string_value", "")) for key, value in config.get("parameters", {}).items()
        }
        self.fixed_batch = self._flag("SKIP_OV_DYNAMIC_BATCHSIZE")
        self.padding = self._flag("ENABLE_BATCH_PADDING")
        self.reshape = self._flag("RESHAPE_IO_LAYERS")
        self.device = self._given.get("TARGET_DEVICE", "") or "CPU"
        if "CPU_EXTENSION_PATH" in self._given:
            raise ValueError(
                "parameter 'CPU_EXTENSION_PATH': libraries with layers of their own are not loaded"
            )
        # the model's THREADS, or cores divided by its instances: see the server's documentation of processes
        threads = self._number("INFERENCE_NUM_THREADS") or self._number("CPU_THREADS_NUM")
        threads = threads or int(os.environ.get("OMP_NUM_THREADS", "0") or 0)
        self.properties: dict[str, Any] = {}
        if threads and self.device == "CPU":
            self.properties["INFERENCE_NUM_THREADS"] = threads
        if compiling := self._number("COMPILATION_NUM_THREADS"):
            self.properties["COMPILATION_NUM_THREADS"] = compiling
        streams = self._given.get("NUM_STREAMS", "") or self._given.get("CPU_THROUGHPUT_STREAMS", "")
        if streams:
            if streams.upper() not in ("AUTO", "NUMA") and not streams.isdigit():
                raise ValueError(f"parameter 'NUM_STREAMS' must be AUTO, NUMA or a number, got '{streams}'")
            self.properties["NUM_STREAMS"] = int(streams) if streams.isdigit() else streams.upper()
        hint = self._choice("PERFORMANCE_HINT", HINTS)
        # an instance has one batch at a time
        self.properties["PERFORMANCE_HINT"] = hint or "LATENCY"
        short = self._flag("HINT_BF16") or self._flag("ENFORCE_BF16")
        if short or self.device == "CPU":  # which takes BF16 of its own accord where the processor has it
            self.properties["INFERENCE_PRECISION_HINT"] = openvino.Type.bf16 if short else openvino.Type.f32
        pinned = self._choice("CPU_BIND_THREAD", ("YES", "NUMA", "NO"))
        if pinned:
            self.properties["ENABLE_CPU_PINNING"] = pinned != "NO"

    def _choice(self, key: str, allowed: tuple[str, ...]) -> str:
        """A word, in any letters, as for a Triton server."""
        value = self._given.get(key, "")
        if value and value.upper() not in allowed:
            raise ValueError(f"parameter '{key}' must be one of {', '.join(allowed)}, got '{value}'")
        return value.upper()

    def _flag(self, key: str) -> bool:
        return self._choice(key, ("YES", "NO")) == "YES"

    def _number(self, key: str) -> int:
        value = self._given.get(key, "")
        if value and not value.isdigit():
            raise ValueError(f"parameter '{key}' must be a number, got '{value}'")
        return int(value or 0)


def read(folder: str, filename: str) -> Any:
    """The network in a version's folder. Raises ValueError."""
    there = [filename] if filename else [name for name in NAMES if os.path.isfile(os.path.join(folder, name))]
    path = os.path.join(folder, there[0]) if there else ""
    if not os.path.exists(path):  # it may be a folder: what TensorFlow calls a saved model
        raise ValueError(
            f"{folder} has no {filename or ' or '.join(NAMES)}; default_model_filename gives another name"
        )
    if path.endswith(".xml") and not os.path.isfile(f"{path[:-4]}.bin"):
        raise ValueError(f"{path} needs its weights beside it, {os.path.basename(path)[:-4]}.bin")
    try:
        network = openvino.Core().read_model(path)
    except RuntimeError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    for side, ports in (("INPUT", network.inputs), ("OUTPUT", network.outputs)):
        for name, port in zip(_names(ports, side), ports, strict=True):
            kind = port.get_element_type().get_type_name()
            if kind not in DATATYPES:
                text = "; strings are not served by this backend" if kind == "string" else ""
                raise ValueError(f"tensor '{name}' of {path} has the type {kind}{text}")
    return network


def _names(ports: list[Any], side: str) -> list[str]:
    """What each is called; by its place where the file has no name for it."""
    return [min(port.get_names(), default=f"{side}__{i}") for i, port in enumerate(ports)]


def _places(rows: list[dict[str, Any]], ports: list[Any], side: str) -> list[int]:
    """The place of each of the configuration's tensors among the file's. Raises ValueError."""
    known = {name: i for i, name in enumerate(_names(ports, side))}
    known |= {name: i for i, port in enumerate(ports) for name in port.get_names()}
    for row in rows:
        if row["name"] not in known:
            names = ", ".join(_names(ports, side))
            raise ValueError(f"the file has no {side.lower()} '{row['name']}', it has {names}")
    return [known[row["name"]] for row in rows]


def _dims(port: Any, name: str) -> list[int]:
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        raise ValueError(f"tensor '{name}' has no number of dimensions: write input and output yourself")
    return [-1 if size.is_dynamic else size.get_length() for size in shape]


class TritonPythonModel:
    """An instance of a model."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Fills in inputs, outputs and batching from the file."""
        stated = config.as_dict()
        network = read(config.version_directory, stated.get("default_model_filename", ""))
        sides = (
            ("input", config.add_input, network.inputs, _names(network.inputs, "INPUT")),
            ("output", config.add_output, network.outputs, _names(network.outputs, "OUTPUT")),
        )
        batched = stated.get("max_batch_size", 0) > 0
        if not batched and not stated.get("input") and not stated.get("output"):
            # only where nobody's dims say otherwise
            batched = all(
                _dims(port, name)[:1] == [-1]
                for _, _, ports, names in sides
                for name, port in zip(names, ports, strict=True)
            )
            if batched:
                config.set_max_batch_size(ROWS)
                if "sequence_batching" not in stated:
                    config.set_dynamic_batching()
        for key, add, ports, names in sides:
            for name, port in () if stated.get(key) else zip(names, ports, strict=True):
                kind = DATATYPES[port.get_element_type().get_type_name()]
                dims = _dims(port, name)[1 if batched else 0 :]
                # what has no dimension of its own is one value for clients
                more: dict[str, Any] = {} if dims else {"reshape": {"shape": []}}
                add({"name": name, "data_type": kind, "dims": dims or [1], **more})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Compiles the network for the configuration."""
        config = json.loads(args["model_config"])
        parameters = Parameters(config)
        folder = os.path.join(args["model_repository"], args["model_version"])
        network = read(folder, config.get("default_model_filename", ""))
        self._rows = config.get("max_batch_size", 0)
        self._fixed, self._padding = parameters.fixed_batch and self._rows > 0, parameters.padding
        self._inputs = [row["name"] for row in config["input"]]
        self._outputs = [row["name"] for row in config["output"]]
        taken = _places(config["input"], network.inputs, "INPUT")
        given = _places(config["output"], network.outputs, "OUTPUT")
        for kind, rows, ports, places in (
            ("input", config["input"], network.inputs, taken),
            ("output", config["output"], network.outputs, given),
        ):
            _compare(kind, rows, [ports[place] for place in places])
        for i, name in enumerate(_names(network.inputs, "INPUT")):
            if i not in taken:
                raise ValueError(f"the configuration has no input '{name}', which the network needs")
        shapes = {}
        for row, place in zip(config["input"], taken, strict=True):
            port = network.inputs[place]
            sizes = row["reshape"].get("shape", []) if row.get("reshape") is not None else row["dims"]
            dims = [int(size) for size in sizes] if parameters.reshape else None
            if self._rows:
                dims = _dims(port, row["name"])[1:] if dims is None else dims
                dims = [self._rows if self._fixed else -1, *dims]
            if dims is not None and dims != _dims(port, row["name"]):
                shapes[port] = openvino.PartialShape(dims)
        try:
            if shapes:
                network.reshape(shapes)
            compiled = openvino.Core().compile_model(network, parameters.device, parameters.properties)
        except RuntimeError as error:
            hint = ""
            if shapes and not self._fixed and self._rows:
                hint = " (for a network that takes one size of batch only: SKIP_OV_DYNAMIC_BATCHSIZE 'YES')"
            raise ValueError(f"the network cannot be compiled{hint}: {error}") from None
        self._request = compiled.create_infer_request()
        self._taken = [compiled.inputs[place] for place in taken]
        self._given = [compiled.outputs[place] for place in given]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers a batch."""
        if not self._rows:
            answers = [self._infer(_arrays(request, self._inputs)) for request in requests]
            return [_response(self._outputs, values) for values in answers]
        parts = [_arrays(request, self._inputs) for request in requests]
        counts = [len(arrays[0]) for arrays in parts]
        rows = sum(counts)
        joined = (
            parts[0] if len(parts) == 1 else [np.concatenate(column) for column in zip(*parts, strict=True)]
        )
        if self._fixed and rows < self._rows:
            if not self._padding:
                text = f"the network takes {self._rows} rows, the batch has {rows}: ENABLE_BATCH_PADDING 'YES' fills them up"
                error = pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG)
                return [pb_utils.InferenceResponse(error=error) for _ in requests]
            missing = self._rows - rows
            joined = [
                np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
                for array in joined
            ]
        found = self._infer(joined)
        for name, values in zip(self._outputs, found, strict=True):
            if values.ndim == 0 or len(values) != (self._rows if self._fixed else rows):
                raise ValueError(
                    f"output '{name}' has the shape {list(values.shape)} for a batch of {rows} rows: its first dimension "
                    "must be the batch"
                )
        responses, start = [], 0
        for count in counts:
            responses.append(_response(self._outputs, [values[start : start + count] for values in found]))
            start += count
        return responses

    def _infer(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        for port, array in zip(self._taken, arrays, strict=True):
            self._request.set_tensor(port, openvino.Tensor(np.ascontiguousarray(array), shared_memory=True))
        self._request.infer(share_outputs=True)
        return [self._request.get_tensor(port).data.copy() for port in self._given]


def _compare(kind: str, rows: list[dict[str, Any]], ports: list[Any]) -> None:
    """Raises ValueError when the configuration's tensors are not of the file's types."""
    for row, port in zip(rows, ports, strict=True):
        found = DATATYPES[port.get_element_type().get_type_name()]
        if found != row["data_type"]:
            raise ValueError(
                f"{kind} '{row['name']}' is {row['data_type']} in the configuration and {found} in the file"
            )


def _arrays(request: Any, names: list[str]) -> list[np.ndarray]:
    found = []
    for name in names:
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        if tensor is None:
            raise ValueError(f"input '{name}' is missing")
        found.append(tensor.as_numpy())
    return found


def _response(names: list[str], values: list[np.ndarray]) -> Any:
    tensors = [pb_utils.Tensor(name, value) for name, value in zip(names, values, strict=True)]
    return pb_utils.InferenceResponse(tensors)
