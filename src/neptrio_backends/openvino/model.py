"""backend: "openvino": serves IR and ONNX files under the parameters of Triton's backend of that name.

Rules:
 1. A batch is one inference: the requests' rows are joined along the first dimension and the results divided again.
 2. The first dimension is made dynamic where the configuration batches, whatever the file has, unless
    SKIP_OV_DYNAMIC_BATCHSIZE says that the model cannot take that: then every batch has max_batch_size rows.
 3. A parameter has its effect, or the load fails. None loads code: CPU_EXTENSION_PATH is refused.
 4. Results lie in OpenVINO's memory until the next inference: what is answered is copied out of it.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import openvino

import triton_python_backend_utils as pb_utils

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
        hint = self._given.get("PERFORMANCE_HINT", "")
        if hint and hint not in HINTS:
            raise ValueError(f"parameter 'PERFORMANCE_HINT' must be one of {', '.join(HINTS)}, got '{hint}'")
        # an instance has one batch at a time
        self.properties["PERFORMANCE_HINT"] = hint or "LATENCY"
        short = self._flag("HINT_BF16") or self._flag("ENFORCE_BF16")
        if short or self.device == "CPU":  # which takes BF16 of its own accord where the processor has it
            self.properties["INFERENCE_PRECISION_HINT"] = openvino.Type.bf16 if short else openvino.Type.f32
        pinned = self._choice("CPU_BIND_THREAD", ("YES", "NUMA", "NO"))
        if pinned:
            self.properties["ENABLE_CPU_PINNING"] = pinned != "NO"

    def _choice(self, key: str, allowed: tuple[str, ...]) -> str:
        value = self._given.get(key, "")
        if value and value not in allowed:
            raise ValueError(f"parameter '{key}' must be one of {', '.join(allowed)}, got '{value}'")
        return value

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
    if not os.path.isfile(path):
        raise ValueError(
            f"{folder} has no {path or ' or '.join(NAMES)}; default_model_filename gives another name"
        )
    if path.endswith(".xml") and not os.path.isfile(f"{path[:-4]}.bin"):
        raise ValueError(f"{path} needs its weights beside it, {os.path.basename(path)[:-4]}.bin")
    try:
        network = openvino.Core().read_model(path)
    except RuntimeError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    for port in (*network.inputs, *network.outputs):
        if _name(port) and port.get_element_type().get_type_name() not in DATATYPES:
            kind = port.get_element_type().get_type_name()
            text = "; strings are not served by this backend" if kind == "string" else ""
            raise ValueError(f"tensor '{_name(port)}' of {path} has the type {kind}{text}")
    return network


def _name(port: Any) -> str:
    names = sorted(port.get_names())
    return names[0] if names else ""


def _dims(port: Any) -> list[int]:
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        raise ValueError(
            f"tensor '{_name(port)}' has no number of dimensions: write input and output yourself"
        )
    return [-1 if size.is_dynamic else size.get_length() for size in shape]


class TritonPythonModel:
    """An instance of a model."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Fills in inputs, outputs and batching from the file."""
        stated = config.as_dict()
        network = read(config.version_directory, stated.get("default_model_filename", ""))
        ports = (*network.inputs, *network.outputs)
        batched = stated.get("max_batch_size", 0) > 0
        if not batched and not stated.get("input") and not stated.get("output"):
            # only where nobody's dims say otherwise
            batched = all(len(dims := _dims(port)) > 0 and dims[0] == -1 for port in ports)
            if batched:
                config.set_max_batch_size(ROWS)
                if "sequence_batching" not in stated:
                    config.set_dynamic_batching()
        for key, add, side in (
            ("input", config.add_input, network.inputs),
            ("output", config.add_output, network.outputs),
        ):
            for port in () if stated.get(key) else side:
                kind = DATATYPES[port.get_element_type().get_type_name()]
                add({"name": _name(port), "data_type": kind, "dims": _dims(port)[1 if batched else 0 :]})
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
        for kind, rows, ports in (
            ("input", config["input"], network.inputs),
            ("output", config["output"], network.outputs),
        ):
            _compare(kind, rows, ports)
        for port in network.inputs:
            if not port.get_names() & set(self._inputs):
                raise ValueError(f"the configuration has no input '{_name(port)}', which the network needs")
        shapes = {}
        for row in config["input"]:
            port = network.input(row["name"])
            dims = [int(size) for size in row["dims"]] if parameters.reshape else None
            if self._rows:
                dims = _dims(port)[1:] if dims is None else dims
                dims = [self._rows if self._fixed else -1, *dims]
            if dims is not None and dims != _dims(port):
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
        self._taken = [compiled.input(name) for name in self._inputs]
        self._given = [compiled.output(name) for name in self._outputs]

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
    """Raises ValueError when the configuration's tensors are not the file's."""
    known = {name: port for port in ports for name in port.get_names()}
    for row in rows:
        port = known.get(row["name"])
        if port is None:
            raise ValueError(f"the file has no {kind} '{row['name']}', it has {', '.join(map(_name, ports))}")
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
