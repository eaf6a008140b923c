"""backend: "pytorch": serves modules of PyTorch under the names and parameters of Triton's backend of that name.

Rules:
 1. A batch is one call: the requests' rows are joined along the first dimension and the results divided again.
 2. A parameter has its effect, or is a switch of PyTorch that this release does not have and is told as such in the log, or
    the load fails.
 3. A result is copied once on its way out of the process, and where it must be copied anyway (it lies on a GPU, or not in the
    order that is sent), that copy goes where it is sent from.
 4. Weights are loaded once for all instances on the CPU: in the process that theirs are forked from (preload).
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import torch

import torch_probe
import torch_source
import triton_python_backend_utils as pb_utils
from torch_files import Loaded, find, load, signature

ROWS = 64  # max_batch_size where neither the configuration nor the file has one
SWITCHES = {
    "ENABLE_NVFUSER": "_jit_set_nvfuser_enabled",
    "ENABLE_JIT_EXECUTOR": "_jit_set_profiling_executor",
    "ENABLE_JIT_PROFILING": "_jit_set_profiling_mode",
    "ENABLE_TENSOR_FUSER": "_jit_set_texpr_fuser_enabled",
}
_shared: dict[str, Loaded] = {}  # what preload() has loaded: path -> module


def preload(args: dict[str, str]) -> None:
    """Loads the file before instances are forked, so that they share its pages."""
    config = json.loads(args["model_config"])
    if any(group.get("kind") in ("KIND_GPU", "KIND_MODEL") for group in config.get("instance_group", [])):
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what is forked from this process must not have had a pool of threads in it
    _shared[_folder(args)] = _load(args, config, "cpu")
    torch.set_num_threads(threads)


def _folder(args: dict[str, str]) -> str:
    return os.path.join(args["model_repository"], args["model_version"])


def _path(args: dict[str, str], config: dict[str, Any]) -> str:
    """The file of a version: the source of a class, or what holds a module. Raises ValueError."""
    folder, filename = _folder(args), config.get("default_model_filename", "")
    source = torch_source.find(folder, filename) if config.get("runtime") == "model.py" else ""
    return source or find(folder, filename, config.get("platform", ""))


def _load(args: dict[str, str], config: dict[str, Any], device: str | None) -> Loaded:
    """What a version's folder holds, on a device; None: where the file has it. Raises ValueError."""
    path = _path(args, config)
    if path.endswith(".py"):
        text = config.get("parameters", {}).get(torch_source.COMPILE, {}).get("string_value", "")
        return torch_source.load(path, device or "cpu", torch_source.compiling(text))
    return load(path, device)


def _row(name: str, data_type: str, dims: list[int]) -> dict[str, Any]:
    """An input or output of a configuration. What has no dimension of its own is one value for clients."""
    more: dict[str, Any] = {} if dims else {"reshape": {"shape": []}}
    return {"name": name, "data_type": data_type, "dims": dims or [1], **more}


def _tensors(config: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the module takes and gives: beside the configuration's inputs and outputs, what the server keeps of sequences."""
    sequences = config.get("sequence_batching", {})
    controls = [{"name": row["name"], "data_type": ""} for row in sequences.get("control_input", [])]
    states = sequences.get("state", [])
    listed = {row["name"] for row in config["output"]}  # a state may be answered, too
    return (
        [*config["input"], *controls, *({**row, "name": row["input_name"]} for row in states)],
        [
            *config["output"],
            *({**row, "name": row["output_name"]} for row in states if row["output_name"] not in listed),
        ],
    )


def _probed(args: dict[str, str], config: dict[str, Any]) -> list[torch_probe.Row]:
    """What the module gives for the configuration's inputs, by running it. Raises ValueError."""
    torch.set_num_threads(1)  # other processes are forked from this one
    loaded = _load(args, config, "cpu")
    if not config.get("input") or config.get("output"):
        raise ValueError(
            f"{_path(args, config)} does not say which tensors it takes"
            + (f" ({loaded.takes})" if loaded.takes else "")
            + ": write input into the configuration (`neptrio import` takes --input NAME:FP32:-1,4 for each), or export the "
            "module with torch.export"
        )
    rows = [(row["name"], row["data_type"], [int(size) for size in row["dims"]]) for row in config["input"]]
    try:
        return torch_probe.outputs(loaded, rows, config.get("max_batch_size", 0) > 0)
    except Exception as error:  # of whatever the module does
        raise ValueError(
            f"{_path(args, config)}: what the module gives could not be found out with zeros of the configuration's inputs: "
            f"{type(error).__name__}: {error}"
        ) from error


class TritonPythonModel:
    """An instance of a model."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Fills in inputs, outputs and batching where the file tells them, as torch.export's does; and outputs of others."""
        stated = config.as_dict()
        if stated.get("input") and stated.get("output"):
            return config
        folder, filename = os.path.split(config.version_directory)
        args = {"model_repository": folder, "model_version": filename}
        path = _path(args, stated)
        found = None if path.endswith(".py") else signature(path)
        if found is None:
            for found_row in _probed(args, stated):
                config.add_output(_row(*found_row))
            return config
        if found.rows:
            if not stated.get("max_batch_size"):
                config.set_max_batch_size(min(found.rows, ROWS))
            if "sequence_batching" not in stated:
                config.set_dynamic_batching()
        for add, rows, there in (
            (config.add_input, found.inputs, stated.get("input")),
            (config.add_output, found.outputs, stated.get("output")),
        ):
            for row in () if there else rows:
                add(_row(*row))
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the file and finds out which tensor is which argument."""
        config = json.loads(args["model_config"])
        self._parameters = {
            key: str(value.get("string_value", "")) for key, value in config.get("parameters", {}).items()
        }
        self._set_up()
        gpu = args["model_instance_kind"] == "GPU"
        own = args["model_instance_kind"] == "MODEL"  # the file says where it lies
        self._device = f"cuda:{args['model_instance_device_id']}" if gpu else "cpu"
        loaded = None if gpu or own else _shared.get(_folder(args))
        loaded = loaded or _load(args, config, None if own else self._device)
        self._module = loaded.call
        if own and loaded.device is not None:
            self._device = str(loaded.device)
        if gpu:
            device_id = int(args["model_instance_device_id"])
            pb_utils.holds_memory([("GPU", device_id, torch.cuda.memory_reserved(device_id))])
        self._batched = config.get("max_batch_size", 0) > 0
        inputs, outputs = _tensors(config)
        self._inputs = [row["name"] for row in inputs]
        self._strings = {row["name"] for row in (*inputs, *outputs) if row["data_type"] == "TYPE_STRING"}
        self._arrange = loaded.arrange(self._inputs)
        self._outputs = [row["name"] for row in outputs]
        self._pick = loaded.pick(self._outputs)
        self._dtypes = {row["name"]: pb_utils.triton_string_to_numpy(row["data_type"]) for row in outputs}
        if self._strings and self._batched:
            for row in (*inputs, *outputs):
                if row["name"] in self._strings and [int(size) for size in row["dims"]] != [1]:
                    raise ValueError(f"'{row['name']}' is a list of strings: its dims must be [ 1 ]")

    def _flag(self, key: str, default: bool) -> bool:
        value = self._parameters.get(key, "")
        if value.lower() not in ("", "true", "false"):
            raise ValueError(f"parameter '{key}' must be 'true' or 'false', got '{value}'")
        return default if not value else value.lower() == "true"

    def _number(self, *keys: str) -> int:
        """The first of these parameters that is given, 0 where none is."""
        key = next((key for key in keys if self._parameters.get(key)), keys[0])
        value = self._parameters.get(key, "")
        if value and (not value.isdigit() or int(value) < 1):
            raise ValueError(f"parameter '{key}' must be a number above 0, got '{value}'")
        return int(value or 0)

    def _set_up(self) -> None:
        """Parameters of the process, which is the instance's own."""
        self._inference = self._flag("INFERENCE_MODE", True)
        torch.backends.cudnn.enabled = not self._flag("DISABLE_CUDNN", False)
        if self._flag("DISABLE_OPTIMIZED_EXECUTION", False):
            torch._C._set_graph_executor_optimize(False)
        self._flag("ENABLE_WEIGHT_SHARING", True)  # instances on the CPU share them, whatever it says
        clean = self._flag("CACHE_CLEANING_ENABLED", False)  # so it is called for packages of AOTInductor
        self._clean = self._flag("ENABLE_CACHE_CLEANING", clean)
        if self._parameters.get("MODEL_INIT_LIBRARY"):
            raise ValueError("parameter 'MODEL_INIT_LIBRARY': libraries of a model's own are not loaded")
        for key, name in SWITCHES.items():
            if key in self._parameters:
                wanted = self._flag(key, True)
                switch = getattr(torch._C, name, None)
                if switch is None:
                    pb_utils.Logger.log_warn(
                        f"parameter '{key}' has no effect with PyTorch {torch.__version__}"
                    )
                else:
                    switch(wanted)
        threads = self._number("INTRA_OP_THREAD_COUNT", "NUM_THREADS")
        if threads:
            torch.set_num_threads(threads)
        between = self._number("INTER_OP_THREAD_COUNT", "NUM_INTEROP_THREADS")
        if between:
            torch.set_num_interop_threads(between)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers a batch."""
        if not self._batched:
            return [self._answer(request) for request in requests]
        joined: list[list[np.ndarray]] = []
        for name in self._inputs:
            joined.append([_array(request, name) for request in requests])
        rows = [len(array) for array in joined[0]]
        arrays = [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in joined]
        found = self._call(arrays)
        responses, start = [], 0
        for count in rows:
            tensors = []
            for name, value in zip(self._outputs, found, strict=True):
                shape = _shape(value)
                if not shape or shape[0] != sum(rows):
                    raise ValueError(
                        f"output '{name}' has the shape {shape} for a batch of {sum(rows)} rows: its first "
                        "dimension must be the batch"
                    )
                part = value if len(rows) == 1 else value[start : start + count]
                tensors.append(pb_utils.Tensor(name, self._taken(name, part)))
            responses.append(pb_utils.InferenceResponse(tensors))
            start += count
        return responses

    def _answer(self, request: Any) -> Any:
        found = self._call([_array(request, name) for name in self._inputs])
        tensors = [
            pb_utils.Tensor(name, self._taken(name, value))
            for name, value in zip(self._outputs, found, strict=True)
        ]
        return pb_utils.InferenceResponse(tensors)

    def _call(self, arrays: list[np.ndarray]) -> list[Any]:
        """The module's results, in the order of the configuration's outputs: tensors, and lists of texts."""
        values = [self._given(name, array) for name, array in zip(self._inputs, arrays, strict=True)]
        args, kwargs = self._arrange(values)
        with torch.inference_mode(self._inference), torch.set_grad_enabled(False):
            result = self._module(*args, **kwargs)
        if self._clean and self._device != "cpu":
            torch.cuda.empty_cache()
        chosen = self._pick(result)
        for name, value in zip(self._outputs, chosen, strict=True):
            if name not in self._strings and not isinstance(value, torch.Tensor):
                raise ValueError(f"output '{name}' is no tensor: {type(value).__name__}")
        return chosen

    def _given(self, name: str, array: np.ndarray) -> Any:
        if name in self._strings:
            return [value.decode() for value in array.ravel().tolist()]
        # numpy's own types take the short way; BF16 is none of them
        tensor = (
            torch.from_numpy(array)
            if array.dtype.kind != "V"
            else torch.from_dlpack(pb_utils.Tensor(name, array))
        )
        return tensor if self._device == "cpu" else tensor.to(self._device, non_blocking=True)

    def _taken(self, name: str, value: Any) -> np.ndarray:
        if name in self._strings:
            texts = np.array([text.encode() for text in value], object)
            return texts.reshape(-1, 1) if self._batched else texts
        wanted = self._dtypes[name]
        value = value.detach()
        if value.dtype == torch.bfloat16:
            found: np.ndarray = pb_utils.Tensor.from_dlpack(name, value.cpu().contiguous()).as_numpy()
        elif value.device.type == "cpu" and value.is_contiguous():
            found = value.numpy()
        else:
            found = pb_utils.empty(value.shape, torch.empty(0, dtype=value.dtype).numpy().dtype)
            torch.from_numpy(found).copy_(value)
        if found.dtype != wanted:
            raise ValueError(f"output '{name}' is {found.dtype}, the configuration says {np.dtype(wanted)}")
        return found


def _shape(value: Any) -> list[int]:
    """The shape of a result; a list of texts has one dimension."""
    return list(value.shape) if isinstance(value, torch.Tensor) else [len(value)]


def _array(request: Any, name: str) -> np.ndarray:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        raise ValueError(f"input '{name}' is missing")
    found: np.ndarray = tensor.as_numpy()
    return found
