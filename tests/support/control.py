"""Load, unload and index of a real server, over REST or with a client."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.support.http import Http1, Reply
from tests.support.server import ServerProcess
from tests.support.waiting import until

CONFIG = {
    "backend": "identity",
    "max_batch_size": 8,
    "input": [{"name": f"INPUT{i}", "data_type": "TYPE_INT32", "dims": [16]} for i in range(2)],
    "output": [{"name": f"OUTPUT{i}", "data_type": "TYPE_INT32", "dims": [16]} for i in range(2)],
}


def post(server: ServerProcess, path: str, body: Any = b"") -> Reply:
    """POST to /v2/repository/`path`."""
    with Http1(server.http) as http:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return http.request("POST", f"/v2/repository/{path}", raw)


def load(server: ServerProcess, name: str, **parameters: Any) -> Reply:
    """Sends a load call."""
    return post(server, f"models/{name}/load", {"parameters": parameters})


def refused(reply: Reply, status: int) -> str:
    """Checks the reply's status and returns its error text."""
    assert reply.status == status, reply.body
    text: str = json.loads(reply.body)["error"]
    return text


def rows(client: Any, name: str) -> list[tuple[str, str, str]]:
    """(version, state, reason) of every version of a model in the index."""
    return [
        (row.get("version", ""), row.get("state", ""), row.get("reason", ""))
        for row in client.get_model_repository_index()
        if row["name"] == name
    ]


def settled(client: Any, name: str) -> list[tuple[str, str, str]]:
    """rows(), once no version is UNLOADING any more."""
    until(
        lambda: all(state != "UNLOADING" for _, state, _ in rows(client, name)),
        lambda: rows(client, name),
    )
    return rows(client, name)


def progress(server: ServerProcess, name: str) -> Any:
    """The server's report on a model's load (our extension)."""
    with Http1(server.http) as http:
        reply = http.request("GET", f"/v2/repository/models/{name}")
    assert reply.status == 200, reply.body
    return json.loads(reply.body)


def infer(
    client: Any, name: str = "m", names: tuple[str, str] = ("INPUT0", "INPUT1"), version: str = ""
) -> Any:
    """An inference with an INT32 [1,16] tensor of ones for every input."""
    module = httpclient if isinstance(client, httpclient.InferenceServerClient) else grpcclient
    tensors = []
    for tensor_name in names:
        tensor = module.InferInput(tensor_name, [1, 16], "INT32")
        tensor.set_data_from_numpy(np.ones((1, 16), dtype=np.int32))
        tensors.append(tensor)
    return client.infer(name, tensors, model_version=version)
