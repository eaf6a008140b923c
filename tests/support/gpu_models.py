"""A kernel model for tests on the fake GPU, and requests to a server with it."""

from __future__ import annotations

import http.client
import json
from typing import Any

from tests.backends.kernel.family import kernel_config, parameter, tensors
from tests.support.server import ServerProcess
from tests.support.waiting import until

ADD = """
extern "C" __global__ void add(const int* x, int* y, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] + 1;
}
"""


def add_config(extra: str = "", max_batch_size: int = 8) -> str:
    """y = x + 1 over INT32[n]."""
    shape = "[batch, X.shape[1]]" if max_batch_size else "[X.shape[0]]"
    return (
        kernel_config(
            max_batch_size,
            tensors("input", ("X", "INT32", "-1")),
            tensors("output", ("Y", "INT32", "-1")),
            parameter("kernels", "add<<<ceil_div(X.size, 64), 64>>>(X, Y, X.size)"),
            parameter("shapes", f"Y = {shape}"),
        )
        + extra
    )


def post(server: ServerProcess, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(server.http, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body or {}), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text else None
    finally:
        connection.close()


def get(address: str, path: str) -> str:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def add(server: ServerProcess, model: str, *values: int) -> tuple[int, Any]:
    """Sends an inference; returns the status, and the output's data or the error."""
    tensor = {"name": "X", "datatype": "INT32", "shape": [1, len(values)], "data": list(values)}
    status, body = post(server, f"/v2/models/{model}/infer", {"inputs": [tensor]})
    return status, body["outputs"][0]["data"] if status == 200 else body["error"]


def reason(server: ServerProcess, model: str) -> tuple[str, str]:
    _, index = post(server, "/v2/repository/index")
    row = next(row for row in index if row["name"] == model)
    return row["state"], row.get("reason", "")


def unload(server: ServerProcess, model: str) -> None:
    """Unloads a model, and waits until that has ended."""
    assert post(server, f"/v2/repository/models/{model}/unload")[0] == 200
    until(lambda: reason(server, model) == ("UNAVAILABLE", "unloaded"), "the unload's end")


def held(server: ServerProcess, model: str) -> dict[tuple[str, int], int]:
    """memory_usage of a model by type and id."""
    stats = json.loads(get(server.http, f"/v2/models/{model}/stats"))["model_stats"][0]
    return {(u["type"], int(u["id"])): int(u["byte_size"]) for u in stats["memory_usage"]}
