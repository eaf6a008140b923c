"""A server inside ordinary code: neptrio.Server(...).running()."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client

import neptrio
from neptrio.loop import threads
from neptrio.testing import FakeModel, TestServer
from tests.embedded import models
from tests.support.repository import identity_config, write_model
from tests.support.waiting import until


@pytest.fixture(scope="module")
def server() -> Iterator[neptrio.RunningServer]:
    with models.new_server(http_port=0, grpc_port=0, metrics_port=0).running() as running:
        yield running


def test_arrays_in_arrays_out(server: neptrio.RunningServer) -> None:
    x = np.arange(4, dtype=np.float32)
    response = server.model("double").infer({"x": x}, request_id="seven")
    assert (response.model_name, response.model_version, response.id) == ("double", "1", "seven")
    assert list(response) == ["OUTPUT"]
    assert response["OUTPUT"].dtype == np.float32
    assert response["OUTPUT"].tolist() == [0, 2, 4, 6]
    assert x.tolist() == [0, 1, 2, 3]


def test_outputs_are_the_functions_own_memory_to_read_only(server: neptrio.RunningServer) -> None:
    made: list[int] = []

    def twice(x: models.Floats) -> models.Floats:
        out = x * 2
        made.append(out.ctypes.data)
        return out

    output = server.add(twice).infer({"x": np.ones(100_000, np.float32)})["OUTPUT"]
    assert (output.ctypes.data, output.flags.writeable) == (made[0], False)
    server.remove("twice")


def test_lists_become_arrays_of_the_models_type(server: neptrio.RunningServer) -> None:
    assert server.model("double").infer({"x": [1, 2]})["OUTPUT"].dtype == np.float32
    assert (
        server.model("greet").infer({"name": ["you"], "times": [2]})["OUTPUT"][0] == b"hello you hello you "
    )


def test_an_output_that_there_is_not_is_told_with_those_that_there_are(server: neptrio.RunningServer) -> None:
    response = server.model("double").infer({"x": [1, 2]})
    with pytest.raises(KeyError, match=r"no output 'OUT', the response has \['OUTPUT'\]"):
        response["OUT"]
    assert "OUT" not in response and response.get("OUT") is None


def test_an_optional_input_may_be_left_out(server: neptrio.RunningServer) -> None:
    assert server.model("greet").infer({"name": ["you"]})["OUTPUT"].tolist() == [b"hello you "]


def test_a_missing_input_is_the_error_of_its_own_request_in_a_batch(server: neptrio.RunningServer) -> None:
    def both(a, b=None):  # type: ignore[no-untyped-def]
        return a if b is None else a + b

    spec = neptrio.TensorSpec("FP32", [1])
    model = server.add(both, max_batch_size=4, inputs={"a": spec, "b": spec}, outputs={"c": spec})
    one = np.ones((1, 1), np.float32)
    with pytest.raises(neptrio.InvalidArgument, match=r"missing required input\(s\) \['a'\]"):
        model.infer({"b": one})
    assert model.infer({"a": one, "b": one})["c"].tolist() == [[2]]
    server.remove("both")


@pytest.mark.parametrize(
    ("model", "inputs", "code", "text"),
    [
        pytest.param("nobody", {}, neptrio.Code.NOT_FOUND, "'nobody' is not found", id="no model"),
        pytest.param("double", {}, neptrio.Code.INVALID_ARG, "expected 1 inputs but got 0", id="no input"),
        pytest.param("greet", {"times": [2]}, neptrio.Code.INVALID_ARG, r"missing required input\(s\) \['name'\] for model 'greet'", id="a required input"),
        pytest.param("double", {"x": np.zeros(2)}, neptrio.Code.INVALID_ARG, "FP64", id="datatype"),
        pytest.param("double", {"x": ["a"]}, neptrio.Code.INVALID_ARG, "input 'x' cannot become an array of FP32", id="no array"),
        pytest.param("double", {"x": np.zeros((2, 2), np.float32)}, neptrio.Code.INVALID_ARG, r"\[2,2\]", id="shape"),
        pytest.param("greet", {"name": [""]}, neptrio.Code.INVALID_ARG, "nobody to greet", id="the function says"),
        pytest.param("greet", {"name": [b"\xff"]}, neptrio.Code.INVALID_ARG, "no UTF-8", id="no text"),
        pytest.param("count", {"n": [1]}, neptrio.Code.UNSUPPORTED, r"iterate over stream\(\)", id="decoupled"),
    ],
)  # fmt: skip
def test_errors_are_those_of_a_client(
    server: neptrio.RunningServer, model: str, inputs: dict[str, object], code: neptrio.Code, text: str
) -> None:
    with pytest.raises(neptrio.TritonError, match=text) as caught:
        server.model(model).infer(inputs)
    assert caught.value.code is code


def test_a_failing_batch_fails_its_requests_only(server: neptrio.RunningServer) -> None:
    add = server.model("add")
    with pytest.raises(neptrio.TritonError, match="ValueError: no number") as caught:
        add.infer({"A": [[np.nan]], "B": [[0]]})
    assert caught.value.code is neptrio.Code.INTERNAL
    assert add.infer({"A": [[1]], "B": [[2]]})["SUM"].tolist() == [[3]]


def test_many_requests_are_batched_and_come_back_in_order(server: neptrio.RunningServer) -> None:
    models.calls.clear()
    requests = ({"A": [[i]], "B": [[1]]} for i in range(64))
    answers = [int(r["SUM"][0, 0]) for r in server.model("add").infer_each(requests, ahead=32)]
    assert answers == list(range(1, 65))
    assert sum(models.calls) == 64
    assert max(models.calls) > 1


def test_a_stream_of_responses(server: neptrio.RunningServer) -> None:
    for name in ("count", "count_async"):
        assert [int(r["OUTPUT"][0]) for r in server.model(name).stream({"n": [5]})] == [0, 1, 2, 3, 4]
        assert list(server.model(name).stream({"n": [0]})) == []
    assert [r["OUTPUT"].tolist() for r in server.model("double").stream({"x": [3]})] == [[6]]


def test_leaving_a_stream_cancels_its_request(server: neptrio.RunningServer) -> None:
    models.calls.clear()
    responses = server.model("count").stream({"n": [1 << 40]})
    assert int(next(responses)["OUTPUT"][0]) == 0
    responses.close()  # type: ignore[attr-defined]
    until(lambda: not server.statistics("count", live=True)["model_stats"][0]["live"]["executing"], "it ends")


def test_a_deadline_ends_the_wait_and_the_request() -> None:
    held = FakeModel({"x": ("FP32", [1])}, {"y": ("FP32", [1])}).holds().answers({"y": [1]})
    with TestServer(held) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.model("fake").infer, {"x": [1]}, timeout=3600)
        held.until_asked()
        server.clock.jump(3600)
        with pytest.raises(neptrio.TritonError, match="deadline") as caught:
            asked.result(60)
        assert caught.value.code is neptrio.Code.DEADLINE
        held.release(2)
        assert server.model("fake").infer({"x": [1]}, timeout=3600)["y"].tolist() == [1]


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), "1"])
def test_a_timeout_that_is_none(server: neptrio.RunningServer, timeout: float) -> None:
    with pytest.raises(neptrio.InvalidArgument, match="timeout must be a number of seconds"):
        server.model("double").infer({"x": [1]}, timeout=timeout)


def test_arguments_that_do_not_exist(server: neptrio.RunningServer) -> None:
    with pytest.raises(TypeError, match="unexpected argument 'deadline', expected one of outputs"):
        server.model("double").infer({"x": [1]}, deadline=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="inputs must be a mapping"):
        server.model("double").infer([1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Server has no setting 'http_prot'"):
        neptrio.Server(http_prot=1)


def test_sequences(server: neptrio.RunningServer) -> None:
    model = server.model("accumulate")
    with model.sequence() as sequence:
        assert sequence.infer({"x": [1]})["total"].tolist() == [1]
        assert sequence.infer({"x": [2]})["total"].tolist() == [3]
        assert server.sequences("accumulate")["sequences"][0]["id"] == sequence.id
        assert sequence.infer({"x": [3]}, end=True)["total"].tolist() == [6]
        with pytest.raises(RuntimeError, match="has ended"):
            sequence.infer({"x": [4]})
    with model.sequence("mine") as sequence:
        assert sequence.infer({"x": [5]})["total"].tolist() == [5]
    until(lambda: not server.sequences("accumulate")["sequences"], "leaving the context ends it")


def test_threads_share_a_server(server: neptrio.RunningServer) -> None:
    model = server.model("double")
    wrong: list[object] = []

    def work(number: int) -> None:
        for i in range(50):
            got = model.infer({"x": [number, i]})["OUTPUT"].tolist()
            if got != [2 * number, 2 * i]:
                wrong.append(got)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_clients_over_the_network_see_the_same_models(server: neptrio.RunningServer) -> None:
    before = server.statistics("double")["model_stats"][0]["inference_count"]
    x = np.arange(3, dtype=np.float32)
    for module, name in ((http_client, "http"), (grpc_client, "grpc")):
        client = module.InferenceServerClient(server.addresses[name])
        given = module.InferInput("x", [3], "FP32")
        given.set_data_from_numpy(x)
        assert client.infer("double", [given]).as_numpy("OUTPUT").tolist() == [0, 2, 4]
        client.close()
    assert server.statistics("double")["model_stats"][0]["inference_count"] == before + 2


def test_what_a_server_tells_of_itself(server: neptrio.RunningServer) -> None:
    assert server.ready()
    assert server.metadata()["name"] == "triton"
    assert {row["name"]: row["state"] for row in server.index()}["greet"] == "READY"
    model = server.model("greet")
    assert model.ready()
    assert [t["name"] for t in model.metadata()["inputs"]] == ["name", "times"]
    assert model.config()["input"][1]["optional"]
    assert not server.model("nobody").ready()
    assert 'nv_inference_request_success{model="double"' in server.metrics()
    assert server.trace_settings({"trace_rate": "7"}, "double")["trace_rate"] == "7"
    assert server.log_settings({"log_verbose_level": 0})["log_verbose_level"] == 0


def test_one_more_function_while_it_runs(server: neptrio.RunningServer) -> None:
    def triple(x: models.Floats) -> models.Floats:
        return 3 * x

    model = server.add(triple)
    assert model.infer({"x": [1]})["OUTPUT"].tolist() == [3]
    with pytest.raises(ValueError, match="has a function model 'triple' already"):
        server.add(triple)
    server.unload("triple")
    with pytest.raises(neptrio.TritonError, match="triple"):
        model.infer({"x": [1]})
    server.load("triple")
    assert model.infer({"x": [1]})["OUTPUT"].tolist() == [3]


def test_a_repository_of_folders(tmp_path: Path) -> None:
    write_model(tmp_path, "same", identity_config(pairs=1))
    with neptrio.Server(tmp_path, model_control_mode="explicit").running() as server:
        with pytest.raises(neptrio.TritonError, match="same"):
            server.model("same").infer({"INPUT0": np.zeros((1, 16), np.int32)})
        model = server.load("same")
        data = np.arange(16, dtype=np.int32).reshape(1, 16)
        assert (model.infer({"INPUT0": data})["OUTPUT0"] == data).all()
        other = server.load("same", config={**model.config(), "max_batch_size": 1})
        with pytest.raises(neptrio.TritonError, match="batch-size must be <= 1"):
            other.infer({"INPUT0": np.zeros((2, 16), np.int32)})
        assert server.addresses == {}


def test_two_servers_at_once(tmp_path: Path) -> None:
    write_model(tmp_path, "same", identity_config(pairs=1, dims="1"))
    with neptrio.Server(tmp_path).running() as one, neptrio.Server(str(tmp_path)).running() as other:
        for server in (one, other, one):
            assert server.model("same").infer({"INPUT0": [[7]]})["OUTPUT0"].tolist() == [[7]]
        assert one.statistics("same")["model_stats"][0]["inference_count"] == 2
        assert other.statistics("same")["model_stats"][0]["inference_count"] == 1


def test_a_server_that_cannot_start(tmp_path: Path) -> None:
    write_model(tmp_path, "broken", 'backend: "nonsense"')
    with pytest.raises(neptrio.TritonError, match="failed to load all models"):
        with neptrio.Server(tmp_path).running():
            pytest.fail("it started")
    with neptrio.Server(tmp_path, exit_on_error=False).running() as server:
        assert server.index()[0]["state"] == "UNAVAILABLE"


def test_after_its_end_everything_is_refused() -> None:
    made = models.new_server()
    with made.running() as server:
        model = server.model("double")
        waiting: list[BaseException] = []

        def wait() -> None:
            try:
                server.model("hold").infer({"x": [1]})
            except neptrio.TritonError as error:
                waiting.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        until(
            lambda: bool(server.statistics("hold", live=True)["model_stats"][0]["live"]["executing"]),
            "it executes",
        )
        models.gate.set()
    thread.join()
    assert not waiting  # a request that was accepted is answered
    assert "closed" in models.calls
    for use in (lambda: model.infer({"x": [1]}), server.ready, lambda: made.model("double")):
        with pytest.raises(neptrio.Unavailable):
            use()
    with pytest.raises(RuntimeError, match="has been started already"):
        with made.running():
            pytest.fail("it started twice")


def test_an_asynchronous_class_is_made_and_closed_on_its_loop() -> None:
    made = neptrio.Server()
    closed: list[bool] = []

    @made.function(inputs={"x": ("INT64", [1])}, outputs={"same": ("BOOL", [1])})
    class held:
        def __init__(self) -> None:
            self.loop = asyncio.get_running_loop()

        async def __call__(self, x: np.ndarray) -> np.ndarray:
            return np.array([asyncio.get_running_loop() is self.loop])

        def close(self) -> None:
            closed.append(asyncio.get_running_loop() is self.loop)

    with made.running() as server:
        assert server.model("held").infer({"x": [1]})["same"].item()
    assert closed == [True]


def test_functions_come_are_replaced_and_go(server: neptrio.RunningServer) -> None:
    def number(x: float) -> float:
        return x + 1

    def other(x: float) -> float:
        return x + 2

    def wrong(x: float) -> float:
        return x

    def asked() -> float:
        return float(server.model("number").infer({"x": [1.0]})["OUTPUT"][0])

    server.add(number)
    with pytest.raises(ValueError, match="'number' already; replace=True"):
        server.add(other, name="number")
    assert asked() == 2
    server.add(other, name="number", replace=True)
    assert asked() == 3
    with pytest.raises(neptrio.TritonError):
        server.add(wrong, name="number", replace=True, config={"backend": "nobody"})
    assert asked() == 3, "what could not be loaded takes nobody's place"
    server.unload("number")
    server.add(number)
    assert asked() == 2
    server.remove("number")
    with pytest.raises(neptrio.NotFound):
        asked()
    assert "number" not in [row["name"] for row in server.index()]
    with pytest.raises(neptrio.NotFound, match="no function model 'number'"):
        server.remove("number")


def test_a_function_that_could_not_be_loaded_can_be_added_again(server: neptrio.RunningServer) -> None:
    def late(x: float) -> float:
        return x

    with pytest.raises(neptrio.TritonError):
        server.add(late, config={"backend": "nobody"})
    assert server.add(late).infer({"x": [4.0]})["OUTPUT"].tolist() == [4]
    server.remove("late")


def test_start_and_stop_without_a_context() -> None:
    made = models.new_server()
    running = made.start()
    try:
        with pytest.raises(RuntimeError, match="been started already"):
            made.start()
        with pytest.raises(RuntimeError, match="been started already"), made.running():
            pass
        assert running.model("double").infer({"x": np.ones(1, np.float32)})["OUTPUT"].tolist() == [2]
    finally:
        running.stop()
    made.stop()
    with pytest.raises(neptrio.Unavailable):
        running.ready()


def test_a_stop_that_comes_before_the_thread_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    server = models.new_server()
    begin = threads.begin

    def stopped(thread: threading.Thread) -> None:
        server.stop()
        begin(thread)

    monkeypatch.setattr(threads, "begin", stopped)
    with pytest.raises(neptrio.Unavailable, match="the server has stopped"):
        server.start()


def test_inputs_that_may_be_none(server: neptrio.RunningServer) -> None:
    model = server.model("maybe")
    assert model.infer({})["OUTPUT"].tolist() == [b"None None"]
    assert model.infer({"x": 1.5, "y": [1, 2]})["OUTPUT"].tolist() == [b"1.5 [1.0, 2.0]"]
    with ThreadPoolExecutor(4) as threads:
        each = [{"x": [[i, i]]} | ({"bias": [[1, 1]]} if i % 2 else {}) for i in range(8)]
        found = list(threads.map(server.model("rows").infer, each))
    assert [r["OUTPUT"].tolist() for r in found] == [[[i + i % 2] * 2] for i in range(8)]


def test_one_element_needs_no_list(server: neptrio.RunningServer) -> None:
    assert server.model("greet").infer({"name": "you", "times": 2})["OUTPUT"][0] == b"hello you hello you "
    assert server.model("maybe").infer({"x": np.float64(2)})["OUTPUT"][0] == b"2.0 None"
    with pytest.raises(neptrio.InvalidArgument, match="x"):
        server.model("double").infer({"x": 1.0})  # an array is annotated


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        ("greet", {"name": None}),
        ("greet", {"name": ["a", None]}),
        ("greet", {"name": np.array([None], object)}),
        ("double", {"x": [1.0, None]}),
        ("double", {"x": np.ma.masked_array([1.0, 2.0], [False, True]).astype(np.float32)}),
        ("nobody", {"x": [None]}),
    ],
    ids=str,
)
def test_none_is_no_element(server: neptrio.RunningServer, model: str, inputs: dict[str, object]) -> None:
    with pytest.raises(neptrio.InvalidArgument, match=r"None|masked"):
        server.model(model).infer(inputs)


def test_nan_is_an_element(server: neptrio.RunningServer) -> None:
    assert np.isnan(server.model("double").infer({"x": [float("nan")]})["OUTPUT"]).all()


def test_a_request_that_was_refused_does_not_begin_or_end_its_sequence(
    server: neptrio.RunningServer,
) -> None:
    with server.model("accumulate").sequence() as sequence:
        with pytest.raises(neptrio.InvalidArgument):
            sequence.infer({"x": ["no number"]})
        assert sequence.infer({"x": [5]})["total"].item() == 5
        with pytest.raises(neptrio.InvalidArgument):
            sequence.infer({"x": ["no number"]}, end=True)
        assert sequence.infer({"x": [2]}, end=True)["total"].item() == 7


def test_a_sequence_whose_first_request_failed_goes_on_and_is_ended(server: neptrio.RunningServer) -> None:
    model = server.model("accumulate")
    for end in (False, True):
        with model.sequence() as sequence:
            with pytest.raises(neptrio.TritonError, match="no amount"):
                sequence.infer({"x": [-1]})
            if end:
                assert sequence.infer({"x": [3]}, end=True)["total"].item() == 3
        until(lambda: server.sequences("accumulate")["sequences"] == [], "the sequence has ended")
    with model.sequence() as sequence:
        assert sequence.infer({"x": [3]})["total"].item() == 3
        with pytest.raises(neptrio.TritonError, match="no amount"):
            sequence.infer({"x": [-1]}, end=True)
        with pytest.raises(RuntimeError, match="has ended"):
            sequence.infer({"x": [1]})


def test_a_generator_runs_in_one_task(server: neptrio.RunningServer) -> None:
    """What it opens before one item is still there, and is closed, behind another."""
    got = [response["OUTPUT"][0] for response in server.model("scoped").stream({"n": 1})]
    assert got == [b"here", b"here", b"late"]


def test_a_function_is_added_once_at_a_time(server: neptrio.RunningServer) -> None:
    entered, released = threading.Event(), threading.Event()

    class slow:
        def __init__(self) -> None:
            entered.set()
            assert released.wait(60)
            raise ValueError("not today")

        def __call__(self, x: float) -> float:
            return x

    def quick(x: float) -> float:
        return 7 * x

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(server.add, slow, name="twice")
        assert entered.wait(60)
        for replace in (False, True):
            with pytest.raises(ValueError, match="'twice' is being added"):
                server.add(quick, name="twice", replace=replace)
        with pytest.raises(ValueError, match="'twice' is being added"):
            server.remove("twice")
        released.set()
        with pytest.raises(neptrio.TritonError, match="not today"):
            first.result(60)
    assert server.add(quick, name="twice").infer({"x": 1.0})["OUTPUT"].item() == 7
    server.remove("twice")


def test_an_iterator_that_is_left_early_is_no_failure(
    server: neptrio.RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    for model in ("endless", "endless_async"):
        responses = server.model(model).stream({"n": 1})
        assert next(responses)["OUTPUT"].tolist() == [0]
        responses.close()  # type: ignore[attr-defined]
        until(lambda: f"{model} closed" in models.calls, "the generator is closed")  # noqa: B023
    assert "failed" not in caplog.text


def test_the_error_of_a_function_is_the_cause(server: neptrio.RunningServer) -> None:
    with pytest.raises(neptrio.TritonError, match="no number") as failed:
        server.model("add").infer({"A": [[np.nan]], "B": [[1]]})
    assert isinstance(failed.value.__cause__, ValueError)
    assert failed.value.__cause__.__traceback__ is not None
    with pytest.raises(neptrio.InvalidArgument, match="nobody to greet") as refused:
        server.model("greet").infer({"name": ""})
    assert isinstance(refused.value.__cause__, neptrio.InvalidArgument)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sequence_id": None}, "sequence id must be"),
        ({"request_id": 7}, "request_id: expected str, got int"),
        ({"sequence_id": 1.5}, "sequence id must be"),
        ({"sequence_start": 1}, "sequence_start: expected bool, got int"),
        ({"priority": True}, "priority: expected int, got bool"),
        ({"queue_timeout_us": "5"}, "queue_timeout_us: expected int, got str"),
        ({"parameters": {"a": [1]}}, "parameter 'a': expected bool or int or float or str, got list"),
        ({"parameters": {1: 1}}, "expected a string as the name of a parameter, got 1"),
        ({"parameters": [1]}, "parameters: expected Mapping, got list"),
        ({"outputs": "OUTPUT"}, "outputs: expected list or tuple or"),
    ],
    ids=str,
)
def test_options_of_another_type(
    server: neptrio.RunningServer, options: dict[str, object], text: str
) -> None:
    with pytest.raises(neptrio.InvalidArgument, match=text):
        server.model("double").infer({"x": [1]}, **options)  # type: ignore[arg-type]


def test_a_request_that_nobody_can_make_sense_of_ends_its_call(server: neptrio.RunningServer) -> None:
    with pytest.raises(neptrio.TritonError, match="NoneType"):
        server.model("double").infer({"x": [1]}, outputs=[None], timeout=20)  # type: ignore[list-item]


def test_numpys_numbers_as_options(server: neptrio.RunningServer) -> None:
    options = {
        "sequence_id": np.int64(7),
        "sequence_start": True,
        "sequence_end": True,
        "priority": np.int8(0),
    }
    assert server.model("accumulate").infer({"x": [3]}, **options)["total"].item() == 3  # type: ignore[arg-type]
