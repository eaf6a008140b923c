"""100 reloads and many unloads under 64 clients: nothing is lost, and nobody is answered by the past."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.support.control import settled
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.slow

CLIENTS = 64
RELOADS = int(os.environ.get("NEPTRIO_RELOADS", "100"))
IO = """backend: "python" max_batch_size: 16 dynamic_batching { }
input { name: "X" data_type: TYPE_INT64 dims: [ 2 ] } output { name: "Y" data_type: TYPE_INT64 dims: [ 2 ] }
instance_group { count: 2 }
"""
CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        made = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "X").as_numpy().copy()
            array[:, 1] = {generation}
            made.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)]))
        return made
"""


class Clients:
    """Threads that infer until they are stopped, half of them over gRPC.

    The model answers with its generation; `loading` is the newest that a load was asked for, `loaded`
    the newest whose load has returned. An answer between the two is right, every other is kept.
    """

    def __init__(self, server: ServerProcess) -> None:
        self.loading = self.loaded = 0
        self.answers = 0
        self.refused: list[str] = []
        self.wrong: list[Any] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(server, i, (httpclient, grpcclient)[i % 2]))
            for i in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, server: ServerProcess, number: int, module: Any) -> None:
        with module.InferenceServerClient(server.http if module is httpclient else server.grpc) as client:
            sent = 0
            while not self._stop.is_set():
                sent += 1
                tensor = module.InferInput("X", [1, 2], "INT64")
                tensor.set_data_from_numpy(np.array([[number * 1_000_000 + sent, 0]], np.int64))
                least = self.loaded
                try:
                    own, generation = client.infer("m", [tensor]).as_numpy("Y")[0].tolist()
                except InferenceServerException as error:
                    self.refused.append(str(error))
                    continue
                if own != number * 1_000_000 + sent or not least <= generation <= self.loading:
                    self.wrong.append((own, sent, least, generation, self.loading))
                self.answers += 1

    def more(self, count: int) -> None:
        """Returns once so many more answers have come."""
        want = self.answers + count
        until(
            lambda: self.answers >= want or self.wrong or not any(t.is_alive() for t in self._threads),
            lambda: f"{want} answers: {self.answers}",
        )

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(300)
            assert not thread.is_alive()


def write(repository: Path, generation: int) -> None:
    write_model(repository, "m", IO, {"1/model.py": CODE.format(generation=generation)})


def test_reloads_under_load_lose_nothing(tmp_path: Path) -> None:
    write(tmp_path, 0)
    with ServerProcess(tmp_path, "--model-control-mode=explicit", "--load-model=m") as server:
        clients = Clients(server)
        try:
            with httpclient.InferenceServerClient(server.http, network_timeout=60) as control:
                clients.more(CLIENTS)
                for generation in range(1, RELOADS + 1):
                    write(tmp_path, generation)
                    clients.loading = generation
                    control.load_model("m")
                    clients.loaded = generation
                clients.more(CLIENTS)
                clients.stop()
                assert clients.refused == [] and clients.wrong == []
                assert settled(control, "m") == [("1", "READY", "")]
        finally:
            clients.stop()
        print(f"{clients.answers} answers during {RELOADS} reloads")


def test_unloads_under_load_refuse_in_the_right_words(tmp_path: Path) -> None:
    write(tmp_path, 0)
    said = "Request for unknown model: 'm' has no available versions"
    with ServerProcess(tmp_path, "--model-control-mode=explicit", "--load-model=m") as server:
        clients = Clients(server)
        try:
            with httpclient.InferenceServerClient(server.http, network_timeout=60) as control:
                for _ in range(10):
                    clients.more(CLIENTS)
                    control.unload_model("m")
                    assert settled(control, "m") == [("1", "UNAVAILABLE", "unloaded")]
                    told = len(clients.refused)
                    until(lambda: len(clients.refused) > told, "a client is refused meanwhile")  # noqa: B023
                    control.load_model("m")
                clients.more(CLIENTS)
                clients.stop()
                assert clients.wrong == [] and clients.refused
                assert {error for error in clients.refused if not error.endswith(said)} == set()
        finally:
            clients.stop()
