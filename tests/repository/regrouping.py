"""Models that say who answered, other instance groups for them, and calls that go on meanwhile."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.support.control import load
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")
CPU = "KIND_CPU"
# says which instance of which process answered, and writes down what becomes of it
WITNESS = """
import json, os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.name = args["model_instance_name"]
        self.version = int(args["model_version"])
        self.log = config["parameters"]["log"]["string_value"]
        asked = sum(group["count"] for group in config["instance_group"])
        self.write(f"start {self.name} of {asked}")
        if asked == 3 and self.name.endswith("_2"):
            raise ValueError("no third one today")

    def write(self, line):
        with open(self.log, "a") as file:
            file.write(f"{self.version} {line}\\n")

    def execute(self, requests):
        answer = np.array([[os.getpid(), id(self) % 2**31, self.version]], dtype=np.int64)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("WHO", answer)]) for _ in requests]

    def finalize(self):
        self.write(f"stop {self.name}")
"""
WITNESS_CONFIG = """
backend: "python" max_batch_size: 4
input [ { name: "X" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "WHO" data_type: TYPE_INT64 dims: [ 3 ] } ]
parameters { key: "log" value { string_value: "LOG" } }
"""


def witness(repository: Path, name: str, extra: str = "", versions: tuple[int, ...] = (1,)) -> Path:
    log = repository.parent / f"{name}.log"
    log.touch()
    text = WITNESS_CONFIG.replace("LOG", str(log)) + extra
    write_model(repository, name, text, {f"{v}/model.py": WITNESS for v in versions}, versions)
    return log


def groups(*counts: int, **more: Any) -> list[dict[str, Any]]:
    return [{"count": count, "kind": CPU, "name": f"g{i}", **more} for i, count in enumerate(counts)]


def regroup(server: ServerProcess, name: str, instance_group: Any = None, **fields: Any) -> None:
    """Loads a model with its own configuration and other instance groups (or other fields)."""
    with httpclient.InferenceServerClient(server.http) as client:
        config = client.get_model_config(name)
        if instance_group is not None:
            config["instance_group"] = instance_group
        reply = load(server, name, config=json.dumps({**given(config), **fields}))
        assert reply.status == 200, reply.body


def given(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as a client may send it back."""
    return {key: value for key, value in config.items() if value not in ([], {}, "", None)}


def stats(server: ServerProcess, name: str, version: str = "") -> dict[str, Any]:
    with httpclient.InferenceServerClient(server.http) as client:
        found: dict[str, Any] = client.get_inference_statistics(name, version)["model_stats"][-1]
        return found


class Load:
    """Threads that call a model until they are stopped; every failure is kept."""

    def __init__(self, server: ServerProcess, job: Callable[[Any, Any], None], threads: int = 4) -> None:
        self.failures: list[str] = []
        self.answers = itertools.count()
        self.done = 0
        self._stop = threading.Event()
        modules = itertools.cycle([httpclient, grpcclient])
        self._threads = [
            threading.Thread(target=self._run, args=(server, next(modules), job)) for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, server: ServerProcess, module: Any, job: Callable[[Any, Any], None]) -> None:
        address = server.http if module is httpclient else server.grpc
        with module.InferenceServerClient(address) as client:
            while not self._stop.is_set():
                try:
                    job(module, client)
                    self.done = next(self.answers) + 1
                except (InferenceServerException, AssertionError) as error:
                    self.failures.append(str(error))

    def more(self, count: int = 20) -> None:
        """Waits for `count` further answers."""
        before = self.done
        until(lambda: self.done >= before + count or bool(self.failures), lambda: self.done)
        assert self.failures == []

    def stop(self) -> int:
        self._stop.set()
        for thread in self._threads:
            thread.join(300)
        assert self.failures == []
        return next(self.answers)


def threads_of(server: ServerProcess) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/task"))


def job(name: str, tensor: str, datatype: str, width: int, output: str = "") -> Callable[[Any, Any], None]:
    array = np.arange(width).astype({"FP32": np.float32, "INT32": np.int32}[datatype]).reshape(1, width)

    def call(module: Any, client: Any) -> None:
        given = module.InferInput(tensor, [1, width], datatype)
        given.set_data_from_numpy(array)
        result = client.infer(name, [given])
        if output:
            assert np.array_equal(result.as_numpy(output), array)

    return call


def lines(log: Path, since: int = 0) -> list[str]:
    """What the model wrote after its first `since` lines, in alphabetical order."""
    return sorted(log.read_text().splitlines()[since:])
