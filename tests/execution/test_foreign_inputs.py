"""What one model hands to another is copied beside the loop where it is large: the loop serves, order and cancellation hold."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
import tritonclient.grpc as grpcclient

import triton_python_backend_utils as utils
from neptrio.errors import Cancelled, Overloaded
from neptrio.execution.foreign_inputs import ON_LOOP, ForeignInputs
from neptrio.request import foreign_memory
from neptrio.request.infer_request import InferRequest
from neptrio.request.numpy_tensor import from_numpy, to_numpy
from neptrio.request.own_copy import OwnCopy
from neptrio.service.held_bytes import HeldBytes
from tests.backends.python.models import config, isolated
from tests.support.embedded import EmbeddedServer
from tests.support.gated_workers import WorkersGate, gate_workers
from tests.support.http import Http1
from tests.support.repository import write_model
from tests.support.rings import Pair
from tests.support.waiting import until_trio

LARGE = ON_LOOP + 1
WHOLE = 2 << 20  # bytes that the server's models hand on


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> WorkersGate:
    return gate_workers(monkeypatch)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(area=8 << 20)
    yield made
    made.close()


def output(pair: Pair, size: int) -> Any:
    (tensor,) = pair.outputs(
        lambda requests: [utils.InferenceResponse([utils.Tensor("OUT", np.full(size, 5, np.uint8))])],
        IN=np.zeros(1, np.float32),
    )
    assert foreign_memory.is_foreign(tensor)
    return tensor


class Line:
    """A way to the models, and what came out of it."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.held = HeldBytes(limit)
        self.inputs = ForeignInputs(held=self.held)
        self.events: list[Any] = []
        self.admission: Any = SimpleNamespace(
            lookup=lambda name, version: SimpleNamespace(pool=None), submit=self.submitted
        )

    def submitted(self, request: InferRequest) -> None:
        assert not foreign_memory.among(request.inputs), "copied, then checked"
        self.events.append(request.id)

    def send(self, id: str, tensor: Any, model: str = "one") -> InferRequest:
        request = InferRequest()
        request.id, request.model_name, request.inputs = id, model, [tensor]
        self.inputs.submit(self.admission, request, lambda error: self.events.append((id, type(error))))
        return request


async def until_done(line: Line) -> None:
    await until_trio(lambda: not line.inputs._lines, "all is handed over")


def small() -> Any:
    return from_numpy("IN", np.zeros(4, np.int32))


def test_what_comes_behind_a_large_copy_waits_for_it(pair: Pair, gate: WorkersGate) -> None:
    async def main() -> None:
        line, tensor = Line(), output(pair, LARGE)
        first = line.send("first", tensor)
        line.send("second", small())
        line.send("third", tensor)
        line.send("other", small(), "two")
        assert line.events == ["other"], "another model's requests do not wait"
        assert line.held.look() == LARGE
        gate.open.set()
        await until_done(line)
        assert line.events == ["other", "first", "second", "third"]
        assert to_numpy(first.inputs[0]).tobytes() == b"\x05" * LARGE
        assert line.held.look() == LARGE
        first.inputs = []
        assert line.held.look() == 0

    trio.run(main)


def test_a_small_copy_is_made_at_once_and_counted(pair: Pair, gate: WorkersGate) -> None:
    line = Line()
    request = line.send("small", output(pair, ON_LOOP))
    assert line.events == ["small"] and gate.asked == 0
    assert line.held.look() == ON_LOOP
    request.inputs = []
    assert line.held.look() == 0


def test_who_is_cancelled_meanwhile_is_not_submitted(pair: Pair, gate: WorkersGate) -> None:
    async def main() -> None:
        line, tensor = Line(), output(pair, LARGE)
        copied, waiting = line.send("copied", tensor), line.send("waiting", tensor)
        line.send("stays", small())
        await trio.testing.wait_all_tasks_blocked()
        assert gate.asked == 1
        copied.cancelled = waiting.cancelled = True
        gate.open.set()
        await until_done(line)
        assert line.events == [("copied", Cancelled), ("waiting", Cancelled), "stays"]
        assert gate.asked == 1, "nothing is copied for nobody"
        assert line.held.look() == 0

    trio.run(main)


def test_a_copy_needs_room(pair: Pair, gate: WorkersGate) -> None:
    async def main() -> None:
        line, tensor = Line(LARGE + 10), output(pair, LARGE)
        first = line.send("first", tensor)
        with pytest.raises(Overloaded, match="no room for another"):
            line.send("second", tensor, "two")
        line.send("behind", tensor)
        gate.open.set()
        await until_done(line)
        assert line.events == ["first", ("behind", Overloaded)]
        first.inputs = []
        assert line.held.look() == 0

    trio.run(main)


def test_who_is_refused_after_the_copy_hears_it_and_the_line_goes_on(pair: Pair) -> None:
    async def main() -> None:
        line, tensor = Line(), output(pair, LARGE)

        def refuse(request: InferRequest) -> None:
            if request.id == "bad":
                raise ValueError("no")
            line.submitted(request)

        line.admission.submit = refuse
        line.send("bad", tensor)
        line.send("good", tensor)
        await until_done(line)
        assert line.events == [("bad", ValueError), "good"]

    trio.run(main)


def test_a_copy_is_made_in_steps() -> None:
    content = np.arange((8 << 20) + 9, dtype=np.uint8)
    copy = OwnCopy(from_numpy("IN", content))
    assert not copy.step()
    with pytest.raises(RuntimeError, match="not copied yet"):
        copy.tensor()
    assert copy.step() and copy.step()
    made = copy.tensor()
    assert (made.name, made.dtype, made.shape) == ("IN", 2, content.shape)
    assert to_numpy(made).tobytes() == content.tobytes()
    empty = OwnCopy(from_numpy("IN", np.zeros(0, np.float32)))
    assert empty.step() and empty.tensor().nbytes == 0


MAKES = f"""
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("ALL", np.ones({WHOLE}, np.uint8))]) for _ in requests]
"""
SUMS = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("SUM", np.array([r.inputs()[0].as_numpy().sum(dtype=np.int64)]))]
            )
            for r in requests
        ]
"""
CALLS = f"""
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        made = []
        for _ in requests:
            request = pb_utils.InferenceRequest(
                model_name="sums",
                requested_output_names=["SUM"],
                inputs=[pb_utils.Tensor("ALL", np.ones({WHOLE}, np.uint8))],
            )
            answer = request.exec()
            if answer.has_error():
                made.append(pb_utils.InferenceResponse(error=answer.error()))
            else:
                made.append(pb_utils.InferenceResponse(answer.output_tensors()))
        return made
"""
STEPS = """
platform: "ensemble"
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "SUM" data_type: TYPE_INT64 dims: [ 1 ] }
ensemble_scheduling { step [
  { model_name: "makes" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "ALL" value: "all" } },
  { model_name: "sums" model_version: -1 input_map { key: "ALL" value: "all" } output_map { key: "SUM" value: "SUM" } }
] }
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    isolated(folder, "makes", MAKES, config(outputs="ALL:TYPE_UINT8:-1"))
    isolated(folder, "sums", SUMS, config("ALL:TYPE_UINT8:-1", "SUM:TYPE_INT64:1"), way="none")
    isolated(folder, "calls", CALLS, config(outputs="SUM:TYPE_INT64:1"))
    write_model(folder, "ensemble", STEPS, {"1/keep": b""})
    return folder


def one() -> list[Any]:
    given = grpcclient.InferInput("IN", [1], "FP32")
    given.set_data_from_numpy(np.zeros(1, np.float32))
    return [given]


def ask(address: str, model: str) -> int:
    with grpcclient.InferenceServerClient(address) as client:
        return int(client.infer(model, one()).as_numpy("SUM")[0])


@pytest.mark.parametrize("model", ["ensemble", "calls"])
def test_others_are_served_while_a_large_tensor_is_copied(
    repository: Path, gate: WorkersGate, model: str
) -> None:
    with EmbeddedServer(repository) as server, ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, server.grpc, model)
        server.until(lambda: gate.asked == 1, "it is with the workers")
        body = {"inputs": [{"name": "ALL", "datatype": "UINT8", "shape": [2], "data": [3, 4]}]}
        with Http1(server.http) as http:
            reply = http.request("POST", "/v2/models/sums/infer", json.dumps(body).encode())
        assert json.loads(reply.body)["outputs"][0]["data"] == [7]
        held = server.server.services.held
        assert server.ask(held.look) >= WHOLE
        assert not asked.done()
        server.ask(gate.open.set)
        assert asked.result(60) == WHOLE
        server.until(lambda: held.look() < WHOLE, "the copy is not held any more")


@pytest.mark.parametrize("model", ["ensemble", "calls"])
def test_who_goes_while_it_is_copied_is_executed_no_further(
    repository: Path, gate: WorkersGate, model: str
) -> None:
    with (
        EmbeddedServer(repository) as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
    ):
        models = {m.name: m for m in server.server.repository.ready_models()}
        ended: queue.Queue[Any] = queue.Queue()
        call = client.async_infer(model, one(), lambda result, error: ended.put(error))
        server.until(lambda: gate.asked == 1, "it is with the workers")
        (walk,) = server.server._foreign_inputs._lines.values()
        call.cancel()
        assert "Locally cancelled" in str(ended.get(timeout=60))
        server.until(lambda: walk[0].request.cancelled, "the server knows that it is gone")
        server.ask(gate.open.set)
        server.until(lambda: models[model].inflight == 0, "it is over")
        assert models["sums"].counters.snapshot()["inference_stats"]["success"]["count"] == 0
        assert models["sums"].inflight == 0
