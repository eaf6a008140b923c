"""How a refused infer request is written down: what is sent, and the status and text it is answered with."""

from __future__ import annotations

import json
from typing import Any

UNKNOWN = "[request id: <id_unknown>] "
ROW = list(range(16))


def tensor(
    name: str = "INPUT0", shape: Any = (1, 16), datatype: Any = "INT32", **more: Any
) -> dict[str, Any]:
    given = {"name": name, "shape": list(shape), "datatype": datatype, "data": ROW}
    given.update(more)
    return {key: value for key, value in given.items() if value is not ...}


def both(**changes: Any) -> bytes:
    """Two good inputs; `changes` go into the document."""
    document = {"inputs": [tensor(), tensor("INPUT1")]}
    document.update(changes)
    return json.dumps(document).encode()


def first(**changes: Any) -> bytes:
    """INPUT0 with changes, INPUT1 good."""
    return json.dumps({"inputs": [tensor(**changes), tensor("INPUT1")]}).encode()


def only(datatype: str, data: Any, shape: Any = None) -> bytes:
    shape = [1, len(data)] if shape is None else shape
    return json.dumps(
        {"inputs": [{"name": "INPUT0", "shape": shape, "datatype": datatype, "data": data}]}
    ).encode()


PARSE = "failed to parse the request JSON buffer: "
KIND = "attempt to access JSON non-{0} as {0}"
ONE_SOURCE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. "
)
NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to "
    "each input shape. If you want to specify the full shape including the batch dim in your input dims config, "
    "try setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
RESERVED = "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
INVALID_TYPE = "parameter 'a' has invalid type. It should be either 'int', 'bool', or 'string'."

Case = tuple[str, str, bytes, dict[str, str], int, str]  # name, path, body, headers, status, error


class Cases(list[Case]):
    """Refusals under one heading."""

    def __call__(
        self, name: str, model: str, body: bytes, error: str, status: int = 400, **headers: str
    ) -> None:
        """Adds one: `body` sent to `model` with `headers` (underscores are hyphens)."""
        given = {key.replace("_", "-"): value for key, value in headers.items()}
        self.append((name, f"/v2/models/{model}/infer", body, given, status, error))
