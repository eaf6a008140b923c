"""Request bytes for the load generator: one tensor set in every wire form, with the answer to expect."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

GRPC_PATH = "/inference.GRPCInferenceService/"
SEQUENCE_MARK = 0x0102030405060708  # nine varint bytes, patched by the generator for each sequence


@dataclass(frozen=True)
class Workload:
    """A model and the tensors sent to it; `expected` are the bytes one output must have."""

    model: str
    inputs: tuple[tuple[str, np.ndarray], ...]
    expected: np.ndarray
    datatype: str = "INT32"
    parameters: dict[str, Any] = field(default_factory=dict)


def http_binary(work: Workload) -> tuple[bytes, int, bytes]:
    """(body, length of its JSON part, bytes that the answer must contain)."""
    head = json.dumps(
        {
            "parameters": {"binary_data_output": True, **work.parameters},
            "inputs": [
                {
                    "name": name,
                    "shape": list(a.shape),
                    "datatype": work.datatype,
                    "parameters": {"binary_data_size": a.nbytes},
                }
                for name, a in work.inputs
            ],
        }
    ).encode()
    return head + b"".join(a.tobytes() for _, a in work.inputs), len(head), work.expected.tobytes()


def http_json(work: Workload) -> tuple[bytes, None, bytes]:
    """(body, None, bytes that the answer must contain)."""
    body = json.dumps(
        {
            "inputs": [
                {
                    "name": name,
                    "shape": list(a.shape),
                    "datatype": work.datatype,
                    "data": a.reshape(-1).tolist(),
                }
                for name, a in work.inputs
            ]
        }
    ).encode()
    want = ",".join(str(v) for v in work.expected.reshape(-1).tolist()).encode()
    return body, None, b"[" + want + b"]"


def grpc_message(work: Workload, start: bool = False, end: bool = False, sequence: bool = False) -> bytes:
    """A ModelInferRequest."""
    from tritonclient.grpc import service_pb2

    message = service_pb2.ModelInferRequest(model_name=work.model)
    for name, a in work.inputs:
        message.inputs.add(name=name, datatype=work.datatype, shape=list(a.shape))
        message.raw_input_contents.append(a.tobytes())
    if sequence:
        message.parameters["sequence_id"].int64_param = SEQUENCE_MARK
        message.parameters["sequence_start"].bool_param = start
        message.parameters["sequence_end"].bool_param = end
    data: bytes = message.SerializeToString()
    return data


def write_bodies(work: Workload, form: str, folder: Path) -> list[str]:
    """Writes what the generator needs for `form` and returns its options."""
    folder.mkdir(parents=True, exist_ok=True)
    options: list[str] = []

    def put(option: str, content: bytes) -> None:
        path = folder / f"{work.model}{option}"
        path.write_bytes(content)
        options.extend([option, str(path)])

    if form in ("json", "binary"):
        body, length, expect = http_json(work) if form == "json" else http_binary(work)
        put("--body", body)
        put("--expect", expect)
        options += ["--mode", "http", "--path", f"/v2/models/{work.model}/infer"]
        if length is not None:
            options += ["--header-length", str(length)]
        return options
    put("--expect", work.expected.tobytes())
    if form == "sequence":
        put("--body", grpc_message(work, start=True, sequence=True))
        put("--body-middle", grpc_message(work, sequence=True))
        put("--body-last", grpc_message(work, end=True, sequence=True))
        return [*options, "--mode", "stream", "--path", GRPC_PATH + "ModelStreamInfer"]
    put("--body", grpc_message(work))
    method = "ModelInfer" if form == "unary" else "ModelStreamInfer"
    return [*options, "--mode", form, "--path", GRPC_PATH + method]
