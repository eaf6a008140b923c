"""A model's calls of decoupled models: several at once, errors among the responses, and cancellation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.backends.python.models import config, python_model
from tests.backends.python.test_decoupled import DECOUPLED, ENSEMBLE, Stream
from tests.support.cancelled import UNTIL_CANCELLED
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

# answers when four requests have come, so that only calls which run together are answered at all
TOGETHER = """
import asyncio

class TritonPythonModel:
    def initialize(self, args):
        self.here = 0
        self.all = asyncio.Event()

    async def execute(self, requests):
        self.here += len(requests)
        if self.here == 4:
            self.here = 0
            self.all.set()
            self.all = asyncio.Event()
        else:
            await self.all.wait()
        for request in requests:
            answer = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
            request.get_response_sender().send(answer, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

# gathers its calls and, as models on a Triton server do, iterates with a plain `for`
FOUR = """
import asyncio
import numpy as np

class TritonPythonModel:
    async def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            await asyncio.gather(*(self.one(float(i), sender) for i in range(4)))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def one(self, value, sender):
        call = pb_utils.InferenceRequest(
            model_name="together", inputs=[pb_utils.Tensor("IN", np.array([value], np.float32))],
            requested_output_names=["OUT"])
        for response in await call.async_exec(decoupled=True):
            tensor = pb_utils.get_output_tensor_by_name(response, "OUT")
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor.as_numpy())]))
"""

CALLEE = """
import json, threading
import numpy as np

def response(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.float32))])

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            how = json.loads(request.parameters())["how"]
            getattr(self, how)(request, request.get_response_sender())

    def error_between(self, request, sender):
        sender.send(response(1))
        sender.send(pb_utils.InferenceResponse(
            error=pb_utils.TritonError("half way", pb_utils.TritonError.INVALID_ARG)))
        sender.send(response(2))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def last_with_data(self, request, sender):
        sender.send(response(1))
        sender.send(response(2), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def keeps(self, request, sender):
        self.kept = sender
        sender.send(response(1))

    def goes_on(self, request, sender):
        for i in range(2, 4):
            self.kept.send(response(i))
        for each in (self.kept, sender):
            each.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def raises(self, request, sender):
        sender.send(response(1))
        raise ValueError("after one")

    def ignores_cancellation(self, request, sender):
        sender.send(response(1))
        until_cancelled(request)
        for i in range(2, 6):
            sender.send(response(i))
        sender.send(response(6), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def obeys_cancellation(self, request, sender):
        sender.send(response(1))
        until_cancelled(request)
        sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("gone", pb_utils.TritonError.CANCELLED)),
                    flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def endless(self, request, sender):
        sender.send(response(1))
        until_cancelled(request)
        def run():
            try:
                while True:
                    sender.send(response(2))
            except pb_utils.TritonModelException as error:
                pb_utils.Logger.log_info(f"endless ends: {error}")
        threading.Thread(target=run).start()
"""

# tells what it has received; cancels after the first response where that is what is asked
CALLER = """
import json
import numpy as np

def told(response):
    if response.has_error():
        return [response.error().code(), response.error().message().splitlines()[0]]
    return [float(value) for tensor in response.output_tensors() for value in tensor.as_numpy()]

class TritonPythonModel:
    def execute(self, requests):
        request = requests[0]
        asked = json.loads(request.parameters())
        responses = pb_utils.InferenceRequest(
            model_name=asked.get("target", "callee"), inputs=request.inputs(), requested_output_names=["OUT"],
            parameters={"how": asked["how"]}).exec(decoupled=True)
        found = [told(next(responses))]
        if asked["cancel"]:
            responses.cancel()
        if asked["how"] == "endless":
            found.append(told(next(responses)))
            del responses
        else:
            found.extend(map(told, responses))
            responses.cancel()  # which is nothing now
        answer = pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUT", np.zeros(1, np.float32))], parameters={"found": json.dumps(found)})
        sender = request.get_response_sender()
        sender.send(answer, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# drops what its calls answer, and says of how many it knows still
DROPS = """
import gc
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        known = [len(o.decoupled_calls) for o in gc.get_objects() if type(o).__name__.endswith("RingChild")]
        if requests[0].inputs()[0].as_numpy()[0]:
            for _ in range(10):
                pb_utils.InferenceRequest(model_name="callee", inputs=requests[0].inputs(), requested_output_names=["OUT"],
                                          parameters={"how": "last_with_data"}).exec(decoupled=True)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([sum(known)], np.float32))])]
"""
# has two tasks wait for the next response of one call before there is any
SHARES = """
import asyncio
import numpy as np

class TritonPythonModel:
    async def execute(self, requests):
        def call(how):
            return pb_utils.InferenceRequest(
                model_name="callee", inputs=requests[0].inputs(), requested_output_names=["OUT"],
                parameters={"how": how}).async_exec(decoupled=True)

        responses = await call("keeps")
        await anext(responses)
        tasks = [asyncio.ensure_future(anext(responses)) for _ in range(2)]
        await asyncio.sleep(0)
        await call("goes_on")
        found = [pb_utils.get_output_tensor_by_name(r, "OUT").as_numpy()[0] for r in await asyncio.gather(*tasks)]
        requests[0].get_response_sender().send(
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.sort(np.array(found, np.float32)))]),
            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
STEP = """{{ model_name: "{}" model_version: -1 input_map {{ key: "IN" value: "IN" }}
  output_map {{ key: "OUT" value: "OUT" }} }}"""


@pytest.fixture(scope="module", params=["process", "none"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    python_model(repository, "together", TOGETHER, config(extra=DECOUPLED))
    python_model(repository, "four", FOUR, config(extra=DECOUPLED))
    python_model(repository, "callee", UNTIL_CANCELLED + CALLEE, config(extra=DECOUPLED))
    python_model(repository, "caller", CALLER, config(extra=DECOUPLED))
    python_model(repository, "shares", SHARES, config(extra=DECOUPLED))
    python_model(repository, "drops", DROPS)
    for inner in ("four", "callee"):
        write_model(repository, f"{inner}_ensemble", ENSEMBLE.format(STEP.format(inner)))
    with ServerProcess(repository, f"--backend-config=python,isolation={request.param}") as process:
        yield process


def ask(server: ServerProcess, how: str, **more: Any) -> Any:
    with Stream(server) as stream:
        stream.send("caller", how, parameters={"how": how, "cancel": False, **more})
        result, error = stream.results.get(timeout=60)
        assert error is None, error
        return json.loads(result.get_response().parameters["found"].string_param)


@pytest.mark.parametrize("model", ["four", "four_ensemble"])
def test_calls_that_are_awaited_together_run_together(server: ServerProcess, model: str) -> None:
    with Stream(server) as stream:
        stream.send(model)
        answers = [stream.next() for _ in range(5)]
    assert sorted(values[0] for values, _ in answers[:4]) == [0, 1, 2, 3]
    assert answers[4] == (None, True)


def test_tasks_that_wait_for_the_responses_of_one_call_get_one_each(server: ServerProcess) -> None:
    with Stream(server) as stream:
        stream.send("shares")
        values, _ = stream.next()
    assert list(values) == [2, 3]


def test_an_end_that_comes_alone_is_a_response_without_outputs(server: ServerProcess) -> None:
    assert ask(server, "error_between") == [[1], [3, "half way"], [2], []]
    assert ask(server, "last_with_data") == [[1], [2]]


def test_a_model_that_raises_is_an_error_response(server: ServerProcess) -> None:
    first, (code, text) = ask(server, "raises")
    assert first == [1] and code == 1 and "ValueError: after one" in text


def test_a_cancelled_call_gives_all_that_is_still_sent(server: ServerProcess) -> None:
    assert ask(server, "ignores_cancellation", cancel=True) == [[1], [2], [3], [4], [5], [6]]
    assert ask(server, "obeys_cancellation", cancel=True) == [[1], [7, "gone"]]


def test_a_call_that_nobody_reads_any_more_ends_its_model(server: ServerProcess) -> None:
    assert ask(server, "endless", cancel=True) == [[1], [2]]
    server.until_logged(
        "endless ends: Unable to send response. The request was cancelled: nobody will read it."
    )


def test_an_ensemble_as_the_callee(server: ServerProcess) -> None:
    assert ask(server, "last_with_data", target="callee_ensemble") in ([[1], [2]], [[1], [2], []])


def test_nothing_is_kept_of_calls_that_nobody_has_read(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:

        def known(value: float) -> float:
            tensor = httpclient.InferInput("IN", [1], "FP32")
            tensor.set_data_from_numpy(np.array([value], np.float32))
            return float(client.infer("drops", [tensor]).as_numpy("OUT")[0])

        known(1)
        until(lambda: known(0) == 0, "their last responses have come")
