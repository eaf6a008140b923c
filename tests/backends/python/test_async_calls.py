"""What async_exec() gives is a future, as on a Triton server: its request is sent at once, whoever waits for it when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.backends.python.models import isolated
from tests.support.server import ServerProcess

# answers when two requests are there
BOTH = """
import asyncio

class TritonPythonModel:
    async def initialize(self, args):
        self.there, self.all = 0, asyncio.Event()

    async def execute(self, requests):
        self.there += len(requests)
        if self.there >= 2:
            self.all.set()
        await self.all.wait()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
# makes a file when it has begun
WAITS = """
import asyncio
import json
import pathlib

class TritonPythonModel:
    async def execute(self, requests):
        pathlib.Path(json.loads(requests[0].parameters())["file"]).touch()
        while not requests[0].is_cancelled():
            await asyncio.sleep(0)
        pb_utils.Logger.log_info("it is cancelled")
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("cancelled")) for r in requests]
"""
CALLER = """
import asyncio
import json
import pathlib
import numpy as np

def call(tensor, model="both", **more):
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=["OUT"], inputs=[tensor], **more
    ).async_exec()

def value(response):
    return float(response.output_tensors()[0].as_numpy()[0])

class TritonPythonModel:
    async def one_after_the_other(self, tensor):
        first, second = call(tensor), call(tensor)
        return value(await asyncio.wait_for(first, 60)) + value(await second)

    async def wait(self, tensor):
        done, left = await asyncio.wait([call(tensor), call(tensor)])
        return sum(value(future.result()) for future in done)

    async def awaited_twice(self, tensor):
        future, _ = call(tensor), call(tensor)
        return value(await future) + value(await future)

    async def callback(self, tensor):
        found = asyncio.get_running_loop().create_future()
        call(tensor).add_done_callback(lambda future: found.set_result(value(future.result())))
        return value(await call(tensor)) + await found

    async def refused(self, tensor):
        future = call(tensor, model="")
        try:
            await future
        except pb_utils.TritonModelException:
            return 2.0

    async def cancelled(self, tensor, file):
        future = call(tensor, model="waits", parameters={"file": file})
        while not pathlib.Path(file).exists():
            await asyncio.sleep(0)
        future.cancel()
        try:
            await future
        except asyncio.CancelledError:
            return 2.0

    async def execute(self, requests):
        given = json.loads(requests[0].parameters())
        found = await getattr(self, given.pop("way"))(requests[0].inputs()[0], **given)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([found], np.float32))])]
"""
HOMES = ("none", "process")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    isolated(repository, "both", BOTH)
    isolated(repository, "waits", WAITS)
    for home in HOMES:
        isolated(repository, f"caller_{home}", CALLER, way=home)
    with ServerProcess(repository) as process:
        yield process


def calls(server: ServerProcess, home: str, way: str, **more: str) -> float:
    """What a call of the model in that way gives."""
    tensor = httpclient.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.ones(1, np.float32))
    with httpclient.InferenceServerClient(server.http, network_timeout=90) as client:
        found = client.infer(f"caller_{home}", [tensor], parameters={"way": way, **more})
    return float(found.as_numpy("OUT")[0])


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("way", ["one_after_the_other", "wait", "awaited_twice", "callback", "refused"])
def test_it_is_a_future(server: ServerProcess, home: str, way: str) -> None:
    assert calls(server, home, way) == 2


@pytest.mark.parametrize("home", HOMES)
def test_cancelling_it_cancels_the_call(server: ServerProcess, home: str, tmp_path: Path) -> None:
    seen = server.log().count("it is cancelled")
    assert calls(server, home, "cancelled", file=str(tmp_path / "begun")) == 2
    server.until_logged("it is cancelled", seen + 1)
