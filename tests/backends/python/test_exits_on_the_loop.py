"""An asynchronous model of which a coroutine raises SystemExit, which asyncio lets through its loop: nobody who waits for that loop
waits for ever. In the server's process the loop goes on; a process of the model's own ends."""

from __future__ import annotations

import venv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.python.models import isolated
from tests.backends.python.test_environment_template import SITE, THREADS_AT_START
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
# the thread is none that Python ends with the process
IN_A_PROCESS = """
import threading

threading.Thread(target=threading.Event().wait).start()
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


@pytest.mark.slow
@pytest.mark.parametrize("forked", [True, False])
def test_a_process_ends_whatever_threads_it_has(tmp_path: Path, forked: bool) -> None:
    environment, repository = tmp_path / "environment", tmp_path / "repository"
    venv.create(environment, with_pip=False, symlinks=True)
    paths = environment / SITE
    (paths / "numpy.pth").write_text(f"{Path(np.__file__).parent.parent}\n")
    if not forked:  # an interpreter that runs threads is started for each process
        (paths / "runs.pth").write_text("import threads_at_start\n")
        (paths / "threads_at_start.py").write_text(THREADS_AT_START)
    code = EXITS.replace("self.name", '"execute"') + IN_A_PROCESS
    isolated(repository, "execute", code, way=str(environment))
    with (
        ServerProcess(repository, failures="SystemExit: 3") as server,
        httpclient.InferenceServerClient(server.http, network_timeout=60) as client,
    ):
        tensor = httpclient.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.ones(1, np.float32))
        with pytest.raises(InferenceServerException, match="its process exited with status 1"):
            client.infer("execute", [tensor])
