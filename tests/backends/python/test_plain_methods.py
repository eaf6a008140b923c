"""Models with `async def execute` whose initialize() and finalize() are plain: they are called where no event loop runs, as on a
Triton server. Those that are coroutines run on the loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.backends.python.models import isolated
from tests.support.server import ServerProcess

PLAIN = """
import asyncio
import numpy as np

class TritonPythonModel:
    async def made(self, value):
        await asyncio.sleep(0)
        return value

    def initialize(self, args):
        {initialize}

    async def execute(self, requests):
        self.loop = asyncio.get_running_loop()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([self.value], np.float32))]) for r in requests]

    def finalize(self):
        seen = asyncio.run_coroutine_threadsafe(self.made(6), self.loop).result()
        pb_utils.Logger.log_info(f"finalized with {{seen}} and {{asyncio.run(self.made(7))}}")
"""
RUNS = PLAIN.format(initialize="self.value = asyncio.run(self.made(5))")
# takes the loop of its thread for its own
CLOSES = PLAIN.format(
    initialize="loop = asyncio.get_event_loop(); self.value = loop.run_until_complete(self.made(5)); loop.close()"
)
FAILS = """
class TritonPythonModel:
    async def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]

    def finalize(self):
        raise StopIteration("said at the end")
"""
COROUTINES = """
import asyncio
import numpy as np

class TritonPythonModel:
    async def initialize(self, args):
        self.loop = asyncio.get_running_loop()

    async def execute(self, requests):
        same = 5 if asyncio.get_running_loop() is self.loop else 0
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([same], np.float32))]) for r in requests]

    async def finalize(self):
        same = asyncio.get_running_loop() is self.loop
        pb_utils.Logger.log_info(f"finalized on the same loop: {same}")
"""
WAYS = ("none", "process")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    for way in WAYS:
        isolated(repository, f"runs_{way}", RUNS, way=way)
        isolated(repository, f"fails_{way}", FAILS, way=way)
        isolated(repository, f"coroutines_{way}", COROUTINES, way=way)
    isolated(repository, "closes_process", CLOSES, way="process")
    isolated(repository, "first", FAILS, way="process")  # the first process takes longer
    flags = ("--model-control-mode=explicit", "--load-model=first")
    with ServerProcess(repository, *flags, failures="said at the end") as process:
        yield process


@pytest.mark.parametrize(
    ("model", "text"),
    [
        *((f"runs_{way}", "finalized with 6 and 7") for way in WAYS),
        ("closes_process", "finalized with 6 and 7"),
        *((f"coroutines_{way}", "finalized on the same loop: True") for way in WAYS),
        *((f"fails_{way}", "said at the end") for way in WAYS),
    ],
)
def test_where_they_are_called(server: ServerProcess, model: str, text: str) -> None:
    tensor = httpclient.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.full(1, 5, np.float32))
    with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
        client.load_model(model)
        assert client.infer(model, [tensor]).as_numpy("OUT").tolist() == [5]
        logged = server.log().count(text)
        client.unload_model(model)
        server.until_logged(f"successfully unloaded '{model}'")
    server.until_logged(text, logged + 1)
