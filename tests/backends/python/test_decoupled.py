"""Decoupled models: responses from any thread, flow control, finals, cancellation."""

from __future__ import annotations

import json
import os
import queue
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.python.models import config, isolated, python_model
from tests.support.cancelled import UNTIL_CANCELLED
from tests.support.http import Http1
from tests.support.latch import Latch
from tests.support.memory import resident
from tests.support.metrics import families, scrape, value
from tests.support.repository import write_model
from tests.support.sanitizer import no_memory_figures
from tests.support.server import ServerProcess
from tests.support.statistics import stats
from tests.support.waiting import until

DECOUPLED = "model_transaction_policy { decoupled: true }"
IN_ORDER = DECOUPLED + " dynamic_batching { preserve_ordering: true }"
# the responses of `repeat`, passed on as they are or through a second step
ENSEMBLE = """
platform: "ensemble" max_batch_size: 0
input {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }}
ensemble_scheduling {{ step [ {} ] }}
"""
REPEAT_STEP = """{{ model_name: "repeat" model_version: -1 input_map {{ key: "IN" value: "IN" }}
  output_map {{ key: "OUT" value: "{}" }} }}"""
SECOND_STEP = """{ model_name: "second" model_version: -1 input_map { key: "IN" value: "MID" }
  output_map { key: "OUT" value: "OUT" } }"""
REPEAT = """
import json, threading
import numpy as np

def response(values, **more):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(values, np.float32))], **more)

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            how = json.loads(request.parameters())["how"]
            getattr(self, how)(request, request.get_response_sender())

    def inline(self, request, sender):
        for value in request.inputs()[0].as_numpy():
            sender.send(response([value]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def thread(self, request, sender):
        threading.Thread(target=self.inline, args=(request, sender)).start()

    def with_data(self, request, sender):
        sender.send(response([7], parameters={"part": 1}), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def nothing(self, request, sender):
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def error_between(self, request, sender):
        sender.send(response([1]))
        sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("half way")))
        sender.send(response([2]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def raises(self, request, sender):
        sender.send(response([1]))
        raise RuntimeError("after one")

    def forgets(self, request, sender):
        sender.send(response([1]))

    def too_late(self, request, sender):
        sender.send(response([1]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        for attempt in (lambda: sender.send(response([2])), lambda: sender.send(flags=1), lambda: sender.send(flags=5),
                        lambda: sender.send()):
            try:
                attempt()
            except pb_utils.TritonModelException as error:
                pb_utils.Logger.log_info(f"refused: {error}")

    def endless(self, request, sender):
        def run():
            pb_utils.Logger.log_info("endless runs")
            try:
                while True:
                    sender.send(response([0] * 1000))
            except pb_utils.TritonModelException as error:
                pb_utils.Logger.log_info(f"endless ends: {error} {request.is_cancelled()}")
        threading.Thread(target=run).start()

    def raises_when_told(self, request, sender):
        pb_utils.Logger.log_info("sending until told")
        while True:
            sender.send(response([0] * 1000))

    def waits_until_told(self, request, sender, last=None):
        def run():
            pb_utils.Logger.log_info("sending until told")
            until_cancelled(request)
            sender.send(last, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        threading.Thread(target=run).start()

    def answers_when_told(self, request, sender):
        self.waits_until_told(request, sender, response([1]))

    def fails_when_told(self, request, sender):
        self.waits_until_told(request, sender, pb_utils.InferenceResponse(error=pb_utils.TritonError("told")))

    def large(self, request, sender):
        def run():
            block = np.random.default_rng(1).random(1 << 18, np.float32)  # 1 MiB that hardly compresses
            for i in range(10000):
                block[0] = i
                try:
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", block)]))
                except pb_utils.TritonModelException:
                    pb_utils.Logger.log_info(f"large was told at {i}")
                    return
                if i == 3:
                    pb_utils.Logger.log_info("large has begun")
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        threading.Thread(target=run).start()
"""

ASYNC = """
import asyncio, numpy as np

class TritonPythonModel:
    async def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for value in request.inputs()[0].as_numpy():
                await asyncio.sleep(0)
                await sender.async_send(
                    pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.float32))]))
            await sender.async_send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

RETURNS = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""

# answers while its batch is not over: until somebody writes to the named pipe
HELD = """
import json

class TritonPythonModel:
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        answer = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", requests[0].inputs()[0].as_numpy())])
        sender.send(answer, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        with open(json.loads(requests[0].parameters())["how"]) as pipe:
            pipe.read()
"""

COLLECT = """
import json, asyncio
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        request = requests[0]
        how = json.loads(request.parameters())["how"]
        inner = pb_utils.InferenceRequest(model_name="repeat", inputs=[pb_utils.Tensor("IN", request.inputs()[0].as_numpy())],
            requested_output_names=["OUT"], parameters={"how": "thread" if how != "endless" else how})
        values = []
        if how == "single":
            return [inner.exec()]
        if how == "endless":
            iterator = inner.exec(decoupled=True)
            for _ in range(3):
                values.extend(next(iterator).output_tensors()[0].as_numpy()[:1])
            iterator.cancel()
            values.append(99)
        elif how == "exec":
            for response in inner.exec(decoupled=True):
                for tensor in response.output_tensors():  # the last response has none
                    values.extend(tensor.as_numpy())
        else:
            async def collect():
                async for response in await inner.async_exec(decoupled=True):
                    for tensor in response.output_tensors():
                        values.extend(tensor.as_numpy())
            asyncio.run(collect())
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(values, np.float32))])]
"""

# more than may be on its way through later steps
SIX = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender, first = request.get_response_sender(), request.inputs()[0].as_numpy()[0]
            for i in range(6):
                array = np.full(1 << 18, first * 10 + i, np.float32)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

# the same once the test says so
SIX_HELD = SIX.replace(
    "            for i",
    """            open(os.path.join(self.folder, "begun"), "w").close()
            with open(os.path.join(self.folder, "latch")) as latch:
                latch.read()
            for i""",
).replace(
    "import numpy as np\n\nclass TritonPythonModel:\n",
    """import os
import numpy as np

class TritonPythonModel:
    def initialize(self, args):
        self.folder = args["model_repository"]

""",
)

# answers one after the other, once the client of one is gone
TOGETHER = (
    UNTIL_CANCELLED
    + """
class TritonPythonModel:
    def execute(self, requests):
        until_cancelled(*requests)
        for request in requests:
            sender = request.get_response_sender()
            answer = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
            sender.send(answer)
            sender.send(answer, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
)
TOGETHER_ASYNC = TOGETHER.replace("def execute", "async def execute").replace(
    "sender.send", "await sender.async_send"
)

SINGLE = """
import threading, json
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        request = requests[0]
        how = json.loads(request.parameters())["how"]
        sender = request.get_response_sender()
        answer = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.ones(1, np.float32))])
        if how == "later":
            threading.Timer(0.05, lambda: sender.send(answer, flags=1)).start()
            return None
        if how == "twice":
            sender.send(answer)
            try:
                sender.send(answer)
            except pb_utils.TritonModelException as error:
                pb_utils.Logger.log_info(f"second: {error}")
            return [None]
        if how == "dropped":
            return [None]
        return [answer]
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository: Path = tmp_path_factory.mktemp("repository")
    python_model(repository, "repeat", UNTIL_CANCELLED + REPEAT, config(extra=DECOUPLED))
    python_model(repository, "in_order", UNTIL_CANCELLED + REPEAT, config(extra=IN_ORDER))
    python_model(repository, "async_repeat", ASYNC, config(extra=DECOUPLED))
    python_model(repository, "held", HELD, config(extra=DECOUPLED))
    isolated(repository, "held_inside", HELD, config(extra=DECOUPLED), "none")
    python_model(repository, "returns", RETURNS, config(extra=DECOUPLED))
    python_model(repository, "collect", COLLECT)
    python_model(repository, "single", SINGLE)
    for name in ("six", "six_more"):
        python_model(repository, name, SIX, config(extra=DECOUPLED))
    chain = f"{REPEAT_STEP.format('MID')}, {SECOND_STEP}".replace('"repeat"', '"six"')
    write_model(repository, "six_times_six", ENSEMBLE.format(chain.replace('"second"', '"six_more"')))
    for first, then in (("six_held", "six_held_too"), ("six_held_too", "six_held")):
        python_model(repository, first, SIX_HELD, config(extra=DECOUPLED))
        crossing = chain.replace('"six"', f'"{first}"').replace('"second"', f'"{then}"')
        write_model(repository, f"{first}_first", ENSEMBLE.format(crossing))
    two = "dynamic_batching { preferred_batch_size: 2 max_queue_delay_microseconds: 3600000000 }"
    for name, code, way in (
        ("together", TOGETHER, "process"),
        ("together_inside", TOGETHER, "none"),
        ("together_async", TOGETHER_ASYNC, "process"),
        ("together_async_inside", TOGETHER_ASYNC, "none"),
    ):
        isolated(repository, name, code, config(max_batch_size=2, extra=f"{DECOUPLED} {two}"), way)
    write_model(repository, "second", config().replace('"python"', '"identity"'))
    write_model(repository, "one_step", ENSEMBLE.format(REPEAT_STEP.format("OUT")))
    write_model(repository, "two_steps", ENSEMBLE.format(f"{REPEAT_STEP.format('MID')}, {SECOND_STEP}"))
    again = SECOND_STEP.replace('"second"', '"repeat"')
    write_model(repository, "repeat_twice", ENSEMBLE.format(f"{REPEAT_STEP.format('MID')}, {again}"))
    return repository


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    with ServerProcess(repository) as process:
        yield process


class Stream:
    """A stream of a real client and what it has received."""

    def __init__(self, server: ServerProcess) -> None:
        self.client = grpcclient.InferenceServerClient(server.grpc)
        self.results: queue.Queue[Any] = queue.Queue()
        self.client.start_stream(lambda result, error: self.results.put((result, error)))

    def send(self, model: str, how: str = "", values: tuple[Any, ...] = (1, 2, 3), **more: Any) -> None:
        array = np.array(values, np.float32)
        tensor = grpcclient.InferInput("IN", list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        more.setdefault("enable_empty_final_response", True)
        more.setdefault("parameters", {"how": how})
        self.client.async_stream_infer(model, [tensor], **more)

    def next(self) -> tuple[Any, bool]:
        """The next answer: its values or its error text, and whether it is final."""
        result, error = self.results.get(timeout=60)
        if error is not None:
            return error.message(), None  # type: ignore[return-value]
        final = result.get_response().parameters["triton_final_response"].bool_param
        array = result.as_numpy("OUT")
        return None if array is None else array.tolist(), final

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


@pytest.mark.parametrize(("model", "how"), [("repeat", "inline"), ("repeat", "thread"), ("async_repeat", "")])
def test_many_responses(server: ServerProcess, model: str, how: str) -> None:
    with Stream(server) as stream:
        stream.send(model, how)
        assert [stream.next() for _ in range(4)] == [([1], False), ([2], False), ([3], False), (None, True)]


@pytest.mark.parametrize("model", ["held", "held_inside"])
def test_a_request_that_ends_before_its_batch_was_executed(
    server: ServerProcess, model: str, tmp_path: Path
) -> None:
    """It counts with the time that the model has had until then, and not as an answer without a model."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with Stream(server) as stream:
        stream.send(model, str(pipe))
        assert stream.next() == ([1, 2, 3], True)
        pipe.write_text("go on")
    with httpclient.InferenceServerClient(server.http) as client:
        numbers = client.get_inference_statistics(model)["model_stats"][0]["inference_stats"]
    assert numbers["success"]["count"] == 1 and numbers["compute_infer"]["ns"] > 0


def test_final_with_data_and_without(server: ServerProcess) -> None:
    with Stream(server) as stream:
        stream.send("repeat", "with_data")
        assert stream.next() == ([7], True)
        stream.send("repeat", "nothing")
        assert stream.next() == (None, True)
        stream.send("repeat", "nothing", enable_empty_final_response=False)
        stream.send("repeat", "inline", (5,), enable_empty_final_response=False)
        assert stream.next() == ([5], False)


def test_an_error_in_between(server: ServerProcess) -> None:
    with Stream(server) as stream:
        stream.send("repeat", "error_between")
        assert [stream.next() for _ in range(4)] == [
            ([1], False),
            ("half way", None),
            ([2], False),
            (None, True),
        ]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "RuntimeError: after one"),
        ("forgets", "dropped the response sender of a request without sending"),
    ],
)
def test_requests_that_the_model_leaves_open_fail(server: ServerProcess, how: str, message: str) -> None:
    with Stream(server) as stream:
        stream.send("repeat", how)
        assert stream.next() == ([1], False)
        assert re.search(message, stream.next()[0])
        stream.send("repeat", "nothing")
        assert stream.next() == (None, True)


def test_sending_after_the_final_response_is_refused(server: ServerProcess) -> None:
    with Stream(server) as stream:
        stream.send("repeat", "too_late")
        assert stream.next() == ([1], True)
    server.until_logged("refused: Inference Response object must be provided")
    assert server.log().count("refused: Unable to send response. Response sender has been closed") == 2
    server.until_logged("refused: Unable to send response. Unsupported flag value: 5")


def test_a_decoupled_model_must_return_none(server: ServerProcess) -> None:
    with Stream(server) as stream:
        stream.send("returns")
        assert "the execute function must return None" in stream.next()[0]


def test_a_cancelled_stream_stops_its_sender(server: ServerProcess) -> None:
    with Stream(server) as stream:
        stream.send("repeat", "endless")
        server.until_logged("endless runs")
        assert stream.next()[1] is False
    server.until_logged("endless ends: Unable to send response. The request was cancelled")
    wait_for_idle(server, "repeat")


@pytest.mark.parametrize(
    "how", ["raises_when_told", "waits_until_told", "answers_when_told", "fails_when_told"]
)
def test_a_cancelled_request_counts_as_cancelled_whatever_the_model_does(
    server: ServerProcess, how: str
) -> None:
    before, begun = failures(server, "repeat"), server.log().count("sending until told")
    with Stream(server) as stream:
        stream.send("repeat", how)
        server.until_logged("sending until told", begun + 1)
    wait_for_idle(server, "repeat")
    assert failures(server, "repeat") == {**before, "CANCELED": before["CANCELED"] + 1}


@pytest.mark.parametrize("model", ["together", "together_inside", "together_async", "together_async_inside"])
def test_a_cancelled_request_takes_none_of_its_batch_with_it(server: ServerProcess, model: str) -> None:
    """The model does not look whether it is cancelled, as few do."""
    with Stream(server) as stays:
        with Stream(server) as goes:
            goes.send(model, values=((1.0,),))
            until(lambda: stats(server, model)["live"]["accepted"] == 1, "it waits for another")
            stays.send(model, values=((2.0,),))
            until(lambda: stats(server, model)["live"]["executing"] == 2, "both are executed")
        assert [stays.next() for _ in range(2)] == [([[2.0]], False), ([[2.0]], True)]
    wait_for_idle(server, model)


def test_collecting_from_a_decoupled_model(server: ServerProcess) -> None:
    for how in ("exec", "async"):
        assert infer(server, "collect", how=how, values=range(2000)) == list(range(2000))
    assert infer(server, "collect", how="endless") == [0, 0, 0, 99]
    with pytest.raises(InferenceServerException, match="is decoupled; call exec"):
        infer(server, "collect", how="single")
    wait_for_idle(server, "repeat")


def test_a_sender_of_a_model_that_is_not_decoupled(server: ServerProcess) -> None:
    for how in ("later", "twice", "returned"):
        assert infer(server, "single", how=how) == [1]
    server.until_logged("second: Unable to send response. A model that is not decoupled sends exactly one")
    with pytest.raises(InferenceServerException, match="dropped the response sender"):
        infer(server, "single", how="dropped")


def at_rest(server: ServerProcess) -> int:
    """The resident memory once a sender rests: it stays while the server answers others 50 times.

    A sender that does not wait makes some 50 MiB in that time.
    """
    base, still = resident(server.process.pid), 0

    def rests() -> bool:
        nonlocal base, still
        infer(server, "single", how="returned")
        now = resident(server.process.pid)
        if abs(now - base) < 4 << 20:
            still += 1
        else:
            base, still = now, 0
        return still == 50

    until(rests, "the sender comes to rest")
    return base


@no_memory_figures
@pytest.mark.parametrize("model", ["repeat", "in_order", "one_step", "two_steps"])
def test_a_client_that_reads_nothing_costs_little(server: ServerProcess, model: str) -> None:
    """10,000 responses of 1 MiB wait for a client whose callback never returns; then it is gone."""
    before = resident(server.process.pid)
    begun, told = server.log().count("large has begun"), server.log().count("large was told")
    held: queue.Queue[None] = queue.Queue()
    # a window of its own measuring would grow to tens of MiB when the machine stands still
    client = grpcclient.InferenceServerClient(server.grpc, channel_args=[("grpc.http2.bdp_probe", 0)])
    client.start_stream(lambda result, error: held.get())
    tensor = grpcclient.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.zeros(1, np.float32))
    client.async_stream_infer(model, [tensor], parameters={"how": "large"})
    server.until_logged("large has begun", begun + 1)
    assert at_rest(server) - before < 64 << 20
    client._stream._response_iterator.cancel()  # first, for it must take nothing more
    server.until_logged("large was told", told + 1)
    for _ in range(20000):
        held.put(None)
    client.stop_stream(cancel_requests=True)
    client.close()
    assert int(re.findall(r"large was told at (\d+)", server.log())[-1]) < 64  # of 1 MiB each
    for name in {model, "repeat"}:
        wait_for_idle(server, name)


def six_times_six(stream: Stream) -> None:
    """Reads the answers of two steps that answer six times."""
    got = [stream.results.get(timeout=60)[0] for _ in range(37)]
    values = [result.as_numpy("OUT")[0] for result in got[:-1]]
    assert values == [10 * (10 + i) + j for i in range(6) for j in range(6)]
    assert got[-1].get_response().parameters["triton_final_response"].bool_param


@pytest.mark.slow
def test_a_step_does_not_wait_for_what_an_earlier_one_has_sent(server: ServerProcess) -> None:
    """That goes away only when it has ended."""
    with Stream(server) as stream:
        stream.send("six_times_six", values=(1,))
        six_times_six(stream)


@pytest.mark.slow
def test_steps_of_two_ensembles_do_not_wait_for_one_another(repository: Path, server: ServerProcess) -> None:
    """Each keeps the only instance of the model that the other one's next step has."""
    folders = [repository / name for name in ("six_held", "six_held_too")]
    with Stream(server) as one, Stream(server) as other, ExitStack() as latches:
        held = [latches.enter_context(Latch(folder / "latch")) for folder in folders]
        for stream, folder in zip((one, other), folders, strict=True):
            stream.send(f"{folder.name}_first", values=(1,))
        until(lambda: all((folder / "begun").exists() for folder in folders))
        for latch in held:
            latch.open()
        for stream in (one, other):
            six_times_six(stream)


@pytest.mark.slow
def test_a_step_does_not_wait_for_a_later_one_of_its_own_model(server: ServerProcess) -> None:
    """The only instance sends more than may be on its way before it can execute what follows."""
    count = 6000
    with Stream(server) as stream:
        stream.send("repeat_twice", "inline", tuple(range(count)))
        got = [stream.next() for _ in range(count + 1)]
    assert got == [([i], False) for i in range(count)] + [(None, True)]


@pytest.mark.slow
@no_memory_figures
def test_so_does_one_that_takes_compressed_answers(repository: Path) -> None:
    """They wait for the compression before they wait for the client."""
    with ServerProcess(repository, "--grpc-infer-response-compression-level=high") as server:
        test_a_client_that_reads_nothing_costs_little(server, "repeat")


@no_memory_figures
def test_a_generate_stream_that_is_not_read_holds_its_sender(server: ServerProcess) -> None:
    before, ended = resident(server.process.pid), server.log().count("endless ends")
    body = json.dumps({"IN": [1], "how": "endless"}).encode()
    with Http1(server.http) as client:
        client.start("POST", "/v2/models/repeat/generate_stream", body)
        assert client.head().status == 200
        assert at_rest(server) - before < 64 << 20
        assert server.log().count("endless ends") == ended
    server.until_logged("endless ends", ended + 1)
    wait_for_idle(server, "repeat")


def infer(server: ServerProcess, model: str, how: str, values: Any = (1, 2)) -> Any:
    array = np.array(list(values), np.float32)
    with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
        tensor = httpclient.InferInput("IN", list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        return client.infer(model, [tensor], parameters={"how": how}).as_numpy("OUT").tolist()


def failures(server: ServerProcess, model: str) -> dict[str, int]:
    """The model's failed requests by reason."""
    samples = families(scrape(server))["nv_inference_request_failure"].samples
    found = {s.labels["reason"]: int(s.value) for s in samples if s.labels["model"] == model}
    assert len(found) == 4
    return found


def wait_for_idle(server: ServerProcess, model: str) -> None:
    """Until the model has no request under way."""
    accepted = "neptrio_accepted_requests"
    until(lambda: value(scrape(server), accepted, model=model, version="1") == 0, f"'{model}' is idle")
