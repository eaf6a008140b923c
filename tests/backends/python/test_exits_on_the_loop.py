"""An asynchronous model in the server's process of which a coroutine raises SystemExit, which asyncio lets through its loop: nobody
who waits for that loop waits for ever."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.python.models import isolated
from tests.support.server import ServerProcess

EXITS = """
import asyncio
import sys

async def leave():
    sys.exit(3)

class TritonPythonModel:
    async def initialize(self, args):
        if args["model_name"] == "initialize":
            sys.exit(3)

    async def execute(self, requests):
        if self.name == "execute":
            left = asyncio.ensure_future(leave())
            await asyncio.wait({left})
            left.exception()  # or asyncio logs that nobody has looked
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]

    async def finalize(self):
        if self.name == "finalize":
            sys.exit(3)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("repository")
    for name in ("initialize", "execute", "finalize"):
        code = EXITS.replace("self.name", f'"{name}"')
        isolated(repository, name, code, way="none")
    flags = ("--model-control-mode=explicit", "--load-model=execute", "--load-model=finalize")
    with ServerProcess(repository, *flags) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpclient.InferenceServerClient]:
    with httpclient.InferenceServerClient(server.http, network_timeout=60) as made:
        yield made


def test_the_load_fails(client: httpclient.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="SystemExit: 3"):
        client.load_model("initialize")


def test_requests_are_answered(client: httpclient.InferenceServerClient) -> None:
    tensor = httpclient.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.ones(1, np.float32))
    for _ in range(2):
        assert client.infer("execute", [tensor]).as_numpy("OUT").tolist() == [1]
    assert client.is_model_ready("execute")


def test_the_model_is_unloaded(server: ServerProcess, client: httpclient.InferenceServerClient) -> None:
    client.unload_model("finalize")
    server.until_logged("successfully unloaded 'finalize'")
