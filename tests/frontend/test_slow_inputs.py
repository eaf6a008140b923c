"""Inputs that take long to take up, behind front ends: a worker does it, others are served meanwhile, and sequences keep their order."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.frontend.test_front_ends import pids
from tests.support.http import Http1
from tests.support.large_region import COUNT, LARGE, REGION, VALUES, large_region
from tests.support.repository import identity_config, write_model
from tests.support.run_first import with_site
from tests.support.server import ServerProcess
from tests.support.statistics import stats
from tests.support.streams import Answers
from tests.support.waiting import until

pytestmark = pytest.mark.slow
# how many numbers each request of the sequence has had so far
HISTORY = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.seen = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            seen = self.seen.setdefault(request.correlation_id(), [])
            seen.append(request.inputs()[0].as_numpy().size)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([seen], np.int32))]))
        return responses
"""
HISTORY_CONFIG = (
    'backend: "python" max_batch_size: 1 sequence_batching { } '
    'input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ] '
    'output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ] '
    'parameters { key: "isolation" value { string_value: "none" } }'
)
# the engine's workers say that they were asked, and wait until something lies in `go`
GATED = """
import os
import trio
from neptrio.loop.workers import Workers

run = Workers.run
asked, go = (os.open(os.path.join({folder!r}, name), os.O_RDWR) for name in ("asked", "go"))

async def gated(self, step, whose=None):
    with open("/proc/self/comm") as comm:
        if comm.read().startswith("neptrio:front"):
            return await run(self, step, whose)
    os.write(asked, b".")
    await trio.lowlevel.wait_readable(go)
    return await run(self, step, whose)

Workers.run = gated
"""


class Gate:
    """Before the workers of a server's engine."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._pipes = {}
        for name in ("asked", "go"):
            os.mkfifo(folder / name)
            self._pipes[name] = os.open(folder / name, os.O_RDWR | os.O_NONBLOCK)
        self.env = with_site(folder, GATED.format(folder=str(folder)))
        self._asked = 0

    def asked(self) -> int:
        """How often a worker was asked."""
        try:
            self._asked += len(os.read(self._pipes["asked"], 4096))
        except BlockingIOError:
            pass
        return self._asked

    def open(self) -> None:
        os.write(self._pipes["go"], b".")

    def close(self) -> None:
        for pipe in self._pipes.values():
            os.close(pipe)


@pytest.fixture
def region() -> Iterator[None]:
    with large_region():
        yield


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "gate")
    yield made
    made.close()


@pytest.fixture
def server(tmp_path: Path, gate: Gate, region: None) -> Iterator[ServerProcess]:
    write_model(tmp_path / "models", "numbers", identity_config(dims="-1", max_batch_size=0, pairs=1))
    text = identity_config(datatype="TYPE_STRING", dims="-1", max_batch_size=0, pairs=1)
    write_model(tmp_path / "models", "text", text)
    write_model(tmp_path / "models", "history", HISTORY_CONFIG, {"1/model.py": HISTORY})
    flags = ("--frontends=1", "--allow-client-shm=1")
    with ServerProcess(tmp_path / "models", *flags, env=gate.env, failures="is killed") as made:
        with httpclient.InferenceServerClient(made.http) as client:
            client.register_system_shared_memory("all", REGION, 2 * LARGE)
        yield made
        gate.open()


def asked(module: Any, count: int, *shape: int) -> list[Any]:
    """So many of VALUES, where the region has them."""
    made = module.InferInput("INPUT0", [*shape, count], "INT32")
    made.set_shared_memory("all", 4 * count)
    return [made]


def connect(module: Any, server: ServerProcess) -> Any:
    address = server.http if module is httpclient else server.grpc
    return module.InferenceServerClient(address)


@pytest.mark.parametrize("module", [httpclient, grpcclient])
@pytest.mark.parametrize("model", ["numbers", "text"])
def test_others_are_served_meanwhile(server: ServerProcess, gate: Gate, module: Any, model: str) -> None:
    strings = np.array([b"a" * 100] * (LARGE // 100), object)

    def infer(count: int) -> Any:
        if model == "numbers":
            inputs = asked(module, count)
        else:
            inputs = [module.InferInput("INPUT0", [min(count, len(strings))], "BYTES")]
            inputs[0].set_data_from_numpy(strings[:count])
        with connect(module, server) as client:
            return client.infer(model, inputs).as_numpy("OUTPUT0")

    with ThreadPoolExecutor() as pool:
        large = pool.submit(infer, COUNT)
        until(lambda: gate.asked() == 1, "a worker was asked to read")
        assert len(infer(16)) == 16
        assert gate.asked() == 1, "the loop has read what is small itself"
        gate.open()
        np.testing.assert_array_equal(large.result(60), VALUES if model == "numbers" else strings)


@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_small_parts_that_are_large_together(server: ServerProcess, gate: Gate, module: Any) -> None:
    gate.open()
    with connect(module, server) as client:
        for count, steps in ((1500, 1), (8, 1)):  # of these the first are large together, the others not
            made = [module.InferInput(f"INPUT{i}", [COUNT // 32], "INT32") for i in range(count)]
            for tensor in made:
                tensor.set_shared_memory("all", LARGE // 32)
            with pytest.raises(InferenceServerException, match=f"expected 1 inputs but got {count}"):
                client.infer("numbers", made)
            assert gate.asked() == steps


@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_what_cannot_be_read_is_the_requests_error(server: ServerProcess, gate: Gate, module: Any) -> None:
    gate.open()
    os.truncate(f"/dev/shm{REGION}", LARGE - 1)
    with connect(module, server) as client:
        with pytest.raises(InferenceServerException, match="has become shorter"):
            client.infer("numbers", asked(module, COUNT))
        with pytest.raises(InferenceServerException, match="Invalid offset"):
            client.infer("numbers", asked(module, 2 * COUNT + 1))
        np.testing.assert_array_equal(
            client.infer("numbers", asked(module, 16)).as_numpy("OUTPUT0"), VALUES[:16]
        )


def test_a_sequence_keeps_its_order(server: ServerProcess, gate: Gate) -> None:
    with connect(grpcclient, server) as client, Answers(client) as answers:

        def send(count: int, sequence: int, **flags: bool) -> None:
            client.async_stream_infer("history", asked(grpcclient, count, 1), sequence_id=sequence, **flags)

        with connect(grpcclient, server) as other, Answers(other) as others:
            send(COUNT, 7, sequence_start=True)
            until(lambda: gate.asked() == 1, "a worker was asked to read")
            send(1, 7)
            send(COUNT, 7)
            send(2, 7, sequence_end=True)
            other.async_stream_infer(
                "history", asked(grpcclient, 3, 1), sequence_id=8, sequence_start=True, sequence_end=True
            )
            assert others.result().as_numpy("OUTPUT0").tolist() == [[3]], "another sequence does not wait"
        assert answers.empty()
        gate.open()
        found = [answer.as_numpy("OUTPUT0").tolist() for answer in answers.results(4)]
        history = [COUNT, 1, COUNT, 2]
        assert found == [[history[: n + 1]] for n in range(4)]


@pytest.mark.parametrize("who", ["client", "front end"])
def test_whoever_leaves_meanwhile_is_forgotten(server: ServerProcess, gate: Gate, who: str) -> None:
    """Its sequence has not begun, and what waited for it executes no more."""
    document = {"sequence_id": 7, "sequence_start": True}
    part = {"shared_memory_region": "all", "shared_memory_byte_size": LARGE}
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, COUNT], "parameters": part}
    body = json.dumps({"parameters": document, "inputs": [tensor]}).encode()
    (front,) = pids(server)
    client = Http1(server.http)
    client.start("POST", "/v2/models/history/infer", body)
    client.start("POST", "/v2/models/history/infer", body)
    until(lambda: gate.asked() == 1, "a worker was asked to read")
    if who == "client":
        client.close()
    else:
        os.kill(front, signal.SIGKILL)
        until(lambda: pids(server) not in ([], [front]), "another has started")
    with connect(httpclient, server) as other:
        np.testing.assert_array_equal(
            other.infer("numbers", asked(httpclient, 16)).as_numpy("OUTPUT0"), VALUES[:16]
        )
        gate.open()
        flags: dict[str, Any] = {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
        answer = other.infer("history", asked(httpclient, COUNT, 1), **flags)
        assert answer.as_numpy("OUTPUT0").tolist() == [[COUNT]]
    assert stats(server, "history")["inference_count"] == 1
    client.close()
