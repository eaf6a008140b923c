"""ModelInferRequest messages for raw clients, made with tritonclient's own generated code, and its own inputs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2

TRITON = {"int32": "INT32", "uint8": "UINT8", "float32": "FP32", "int64": "INT64"}


def request(
    model: str, *tensors: np.ndarray, request_id: str = "", names: list[str] | None = None, **parameters: Any
) -> bytes:
    """A serialized request with raw contents; inputs are INPUT0, INPUT1, ..."""
    made = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for i, tensor in enumerate(tensors):
        name = names[i] if names else f"INPUT{i}"
        made.inputs.add(name=name, datatype=TRITON[tensor.dtype.name], shape=tensor.shape)
        made.raw_input_contents.append(tensor.tobytes())
    for key, value in parameters.items():
        if isinstance(value, bool):
            made.parameters[key].bool_param = value
        elif isinstance(value, int):
            made.parameters[key].int64_param = value
        else:
            made.parameters[key].string_param = value
    return bytes(made.SerializeToString())


def identity(request_id: str = "", model: str = "identity", **parameters: Any) -> bytes:
    """A request for the test suite's two-tensor identity model."""
    row = np.arange(16, dtype=np.int32).reshape(1, 16)
    return request(model, row, row + 1, request_id=request_id, **parameters)


# the same for REST
IDENTITY_JSON = json.dumps(
    {
        "inputs": [
            {"name": f"INPUT{i}", "shape": [1, 16], "datatype": "INT32", "data": list(range(16))}
            for i in range(2)
        ]
    }
).encode()


def identity_inputs(module: Any = grpcclient) -> list[Any]:
    """The inputs of the same for a real client: `tritonclient.grpc`, `tritonclient.http` or their aio forms."""
    made = []
    for i in range(2):
        tensor = module.InferInput(f"INPUT{i}", [1, 16], "INT32")
        tensor.set_data_from_numpy(np.arange(16, dtype=np.int32).reshape(1, 16) + i)
        made.append(tensor)
    return made


def binary_head(shape: list[int], datatype: str, nbytes: int, name: str = "INPUT0", **document: Any) -> bytes:
    """The JSON of a REST request whose only tensor follows it in `nbytes` bytes; `document` are more members of it."""
    tensor = {"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": nbytes}}
    return json.dumps({"inputs": [tensor], **document}).encode()


def response(body: bytes) -> Any:
    """A parsed ModelInferResponse."""
    return service_pb2.ModelInferResponse.FromString(body)


def stream_response(body: bytes) -> Any:
    """A parsed ModelStreamInferResponse."""
    return service_pb2.ModelStreamInferResponse.FromString(body)
