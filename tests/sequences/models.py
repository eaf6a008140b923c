"""Sequence models for tests (backend `sequence`: running sums that show their controls) and a client."""

from __future__ import annotations

import json
import queue
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

FORMS = {
    "int32": "int32_false_true: [ 0, 1 ]",
    "fp32": "fp32_false_true: [ 0, 1 ]",
    "bool": "bool_false_true: [ false, true ]",
}
FORM_TYPES = {"int32": "TYPE_INT32", "fp32": "TYPE_FP32", "bool": "TYPE_BOOL"}

# value 1 waits for the latch `open` in the model's folder
LATCHED = """
import pathlib
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        self.gate = pathlib.Path(args["model_repository"], "open")

    def execute(self, requests):
        out = []
        for request in requests:
            value = pb.get_input_tensor_by_name(request, "INPUT")
            if value.as_numpy().flat[0] == 1:
                self.gate.read_bytes()
            out.append(pb.InferenceResponse([pb.Tensor("OUTPUT", value.as_numpy())]))
        return out
"""
LATCHED_CONFIG = """
backend: "python" max_batch_size: 1
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
sequence_batching { max_sequence_idle_microseconds: 3600000000 direct { } }
"""


def controls(corrid: str = "TYPE_UINT64", form: str = "int32") -> str:
    """control_input for START, END, READY and CORRID."""
    flags = ",".join(
        f'{{ name: "{name}" control [ {{ kind: CONTROL_SEQUENCE_{name} {FORMS[form]} }} ] }}'
        for name in ("START", "END", "READY")
    )
    return (
        f"control_input [ {flags}, "
        f'{{ name: "CORRID" control [ {{ kind: CONTROL_SEQUENCE_CORRID data_type: {corrid} }} ] }} ]'
    )


def sequence_config(
    strategy: str,
    max_batch_size: int,
    *,
    idle_us: int = 60_000_000,
    corrid: str = "TYPE_UINT64",
    form: str = "int32",
    states: str = "",
    extra: str = "",
    batching: str = "",
) -> str:
    """A running-sum model whose outputs show the controls."""
    shown = ",".join(
        f'{{ name: "{name}" data_type: {dtype} dims: [ 1 ] }}'
        for name, dtype in (
            ("OUTPUT", "TYPE_INT32"),
            ("START", FORM_TYPES[form]),
            ("END", FORM_TYPES[form]),
            ("READY", FORM_TYPES[form]),
            ("CORRID", corrid),
            ("BATCH_SIZE", "TYPE_INT32"),
            ("POSITION", "TYPE_INT32"),
        )
    )
    return (
        f'backend: "sequence" max_batch_size: {max_batch_size} '
        'input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ -1 ] } ] '
        f"output [ {shown} ] "
        f"sequence_batching {{ max_sequence_idle_microseconds: {idle_us} {strategy} "
        f"{controls(corrid, form)} {states} {batching} }} {extra}"
    )


def tensors(module: Any, value: Any, batched: bool = True, name: str = "INPUT") -> list[Any]:
    """The input of a request."""
    array = np.atleast_1d(np.asarray(value, dtype=np.int32))
    if batched:
        array = array.reshape(1, -1)
    tensor = module.InferInput(name, list(array.shape), "INT32")
    tensor.set_data_from_numpy(array)
    return [tensor]


def flags(text: str) -> dict[str, bool]:
    """ "s", "e", "se" or "" as sequence flags."""
    return {"sequence_start": "s" in text, "sequence_end": "e" in text}


class Caller:
    """Unary requests over one protocol."""

    def __init__(self, server: Any, protocol: str) -> None:
        self.module: Any = httpclient if protocol == "http" else grpcclient
        self.client: Any = self.module.InferenceServerClient(
            server.http if protocol == "http" else server.grpc
        )

    def __call__(
        self, model: str, sequence: Any, text: str, value: Any, batched: bool = True, **more: Any
    ) -> dict[str, Any]:
        """Output name -> its first element (all of them when there are more)."""
        result = self.client.infer(
            model, tensors(self.module, value, batched), sequence_id=sequence, **flags(text), **more
        )
        return outputs(result)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


def outputs(result: Any) -> dict[str, Any]:
    """Output name -> its first element (all of them when there are more)."""
    response = result.get_response()
    names = response["outputs"] if isinstance(response, dict) else response.outputs
    found: dict[str, Any] = {}
    for row in names:
        name = row["name"] if isinstance(row, dict) else row.name
        array = result.as_numpy(name).reshape(-1)
        found[name] = array[0] if array.size == 1 else array.tolist()
    return found


class Stream:
    """A ModelStreamInfer call of the real client."""

    def __init__(self, server: Any, headers: dict[str, str] | None = None) -> None:
        self.client = grpcclient.InferenceServerClient(server.grpc)
        self.results: queue.Queue[Any] = queue.Queue()
        self.client.start_stream(lambda result, error: self.results.put((result, error)), headers=headers)

    def send(
        self,
        model: str,
        sequence: Any,
        text: str,
        value: Any,
        batched: bool = True,
        name: str = "INPUT",
        **more: Any,
    ) -> None:
        self.client.async_stream_infer(
            model, tensors(grpcclient, value, batched, name), sequence_id=sequence, **flags(text), **more
        )

    def receive(self) -> dict[str, Any]:
        """The next response's outputs; raises its error."""
        result, error = self.results.get(timeout=60)
        if error is not None:
            raise error
        return {**outputs(result), "id": result.get_response().id}

    def close(self, cancel: bool = False) -> None:
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rest(server: Any, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """(status, JSON body) of a plain REST call."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{server.http}{path}", data=data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            raw = reply.read()
            return reply.status, json.loads(raw) if raw else None
    except urllib.error.HTTPError as error:
        with error:
            raw = error.read()
            return error.code, json.loads(raw) if raw else None


def listing(server: Any, model: str) -> dict[str, Any]:
    """What the model says of its sequences."""
    status, answer = rest(server, "GET", f"/v2/models/{model}/sequences")
    assert status == 200
    return dict(answer)
