"""Clients of deployments, and what the tests ask Ray."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray import serve
from ray.serve.schema import ReplicaState, ServeDeploySchema

import neptrio.ray
from tests.support.waiting import until

SECONDS = 120.0  # only a failing test waits so long
SMALL = {"num_cpus": 0.1}


@dataclass(frozen=True)
class Ports:
    """Of Ray's proxies."""

    http: int
    grpc: int


@dataclass(frozen=True)
class Answer:
    """One answer over REST."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def replica(self) -> str:
        return str(self.headers["neptrio-replica"])

    def output(self) -> Any:
        """The first element of the first output; fails for errors."""
        assert self.status == 200, self.body
        return self.json["outputs"][0]["data"][0]


class Rest:
    """REST requests to one application."""

    def __init__(self, ports: Ports, prefix: str = "") -> None:
        self._base = f"http://127.0.0.1:{ports.http}{prefix}"

    def ask(self, path: str, body: Any = None, **headers: str) -> Answer:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self._base + path, data, {k.replace("_", "-"): v for k, v in headers.items()}
        )
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return Answer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers, error.read())

    def infer(self, model: str, parameters: Any = None, **inputs: Any) -> Answer:
        """`inputs`: names to (datatype, values)."""
        tensors = [
            {"name": name, "shape": [len(values)], "datatype": datatype, "data": values}
            for name, (datatype, values) in inputs.items()
        ]
        return self.ask(f"/v2/models/{model}/infer", {"inputs": tensors, "parameters": parameters or {}})

    def add(self, sequence: int | str, number: int, start: bool = False, end: bool = False) -> Answer:
        """The next request of a sequence of the model `total`."""
        parameters = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
        return self.infer("total", parameters, x=("INT64", [number]))


def tensor(module: Any, name: str, array: Any) -> Any:
    """An input of tritonclient.http or .grpc."""
    array = np.asarray(array)
    datatype = {"f": "FP32", "i": "INT64", "O": "BYTES"}[array.dtype.kind]
    made = module.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array)
    return made


@contextmanager
def running(ports: Ports, server: Any, prefix: str = "/", **options: Any) -> Iterator[Rest]:
    """An application named `t`, for as long as the context lasts."""
    name = options.pop("app_name", "t")
    serve.run(application(server, **options), name=name, route_prefix=prefix)
    try:
        yield Rest(ports, prefix.rstrip("/"))
    finally:
        serve.delete(name)


def application(server: Any, **options: Any) -> Any:
    return neptrio.ray.app(server, **{"ray_actor_options": SMALL, "num_replicas": 1, **options})


def declare(
    server: Any, name: str, prefix: str = "/", user_config: Any = None, wait: bool = True, **args: Any
) -> None:
    """Deploys an application as a configuration file does: what is as before stays, replicas included.

    With `wait` it returns when all is done; replicas that leave belong to that.
    """
    app = {
        "name": name,
        "route_prefix": prefix,
        "import_path": "neptrio.ray:build",
        "args": {"server": server, "ray_actor_options": SMALL, **args},
    }
    if user_config is not None or "num_replicas" in args:
        changed = {"name": "neptrio", "user_config": user_config, "num_replicas": args.pop("num_replicas", 1)}
        app["deployments"] = [{key: value for key, value in changed.items() if value is not None}]
        app["args"].pop("num_replicas", None)
    client = serve.context._get_global_client()
    assert client is not None
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [app]}), _blocking=wait)


def replicas(name: str = "t", state: ReplicaState = ReplicaState.RUNNING) -> set[str]:
    """The ids of an application's replicas in that state."""
    found = serve.status().applications[name].deployments["neptrio"].replica_states
    count = found.get(state, 0)
    handle = serve.get_app_handle(name)
    known = set(handle.replicas.remote().result(timeout_s=SECONDS))
    return known if count == len(known) else set()


def until_running(count: int, name: str = "t") -> set[str]:
    """Waits until that many replicas run, and returns their ids."""
    return until(lambda: len(ids := replicas(name)) == count and ids, f"{count} replicas", SECONDS) or set()
