"""Programs in the manner of the in-process interface's public examples, on neptrio.compat.tritonserver."""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest

import neptrio.compat.tritonserver as tritonserver
from tests.compat.models import write_models
from tests.support.gate import Gate
from tests.support.waiting import until

ALL = ["echo", "count", "sequences", "identity", "bfloat", "gate"]
QUEUE = "dynamic_batching { default_queue_policy { default_timeout_microseconds: 600000000 allow_timeout_override: true } }"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def gate(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    made = Gate(repository, tmp_path_factory.mktemp("gate"), extra=QUEUE, size=1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(repository: Path, gate: Gate) -> Iterator[tritonserver.Server]:
    made = tritonserver.Server(
        server_id="in-process",
        model_repository=str(repository),
        model_control_mode=tritonserver.ModelControlMode.EXPLICIT,
        startup_models=ALL,
        strict_readiness=True,
    ).start(wait_until_ready=True)
    yield made
    made.stop()


def test_a_server_tells_of_itself_and_its_models(server: tritonserver.Server) -> None:
    assert server.live()
    assert server.ready()
    assert server.metadata()["name"] == "in-process"
    models = server.models()
    assert ("echo", 1) in models
    assert models["echo"].version == -1
    assert str(models["echo", 1]) == "{'name': 'echo', 'version': 1, 'state': 'READY'}"
    with pytest.raises(KeyError, match="Unknown Model"):
        models["nobody"]
    model = server.model("identity")
    assert model.ready()
    assert model.metadata()["inputs"][0]["name"] == "INPUT0"
    assert model.config()["max_batch_size"] == 8
    assert model.batch_properties() == tritonserver.ModelBatchFlag.FIRST_DIM
    assert server.model("echo").batch_properties() == tritonserver.ModelBatchFlag.UNKNOWN
    assert model.transaction_properties() == tritonserver.ModelTxnPropertyFlag.ONE_TO_ONE
    assert server.model("count").transaction_properties() == tritonserver.ModelTxnPropertyFlag.DECOUPLED
    assert model.statistics()["model_stats"][0]["name"] == "identity"
    assert "nv_inference_request_success" in server.metrics()


def test_a_request_from_keywords(server: tritonserver.Server) -> None:
    half = numpy.random.rand(1, 100).astype(numpy.float16)
    responses = list(
        server.model("echo").infer(
            inputs={"half_input": half, "text_input": [["hello", "wörld"]], "flag_input": [[True, False]]},
            request_id="seven",
            parameters={"int": 1, "float": 0.5, "bool": False, "str": "x"},
            output_memory_type="cpu",
        )
    )
    assert len(responses) == 1
    [response] = responses
    assert response.final
    assert response.error is None
    assert (response.model.name, response.model.version, response.request_id) == ("echo", 1, "seven")
    numpy.testing.assert_array_equal(numpy.from_dlpack(response.outputs["half_output"]), half)
    assert numpy.from_dlpack(response.outputs["flag_output"]).tolist() == [[True, False]]
    text = response.outputs["text_output"]
    assert text.to_bytes_array().tolist() == [[b"hello", "wörld".encode()]]
    assert text.to_string_array().tolist() == [["hello", "wörld"]]
    assert text.data_type == tritonserver.DataType.BYTES
    said = json.loads(response.outputs["parameters"].to_string_array()[0])
    assert said == {"request": "seven", "int": 1, "float": 0.5, "bool": False, "str": "x"}


def test_a_request_made_first(server: tritonserver.Server) -> None:
    model = server.model("identity", 1)
    request = model.create_request(request_id="a")
    request.inputs["INPUT0"] = numpy.ones((2, 3), numpy.float32)
    request.inputs["INPUT1"] = tritonserver.Tensor.from_dlpack(numpy.zeros((2, 1), numpy.float32))
    other = tritonserver.InferenceRequest(model, inputs=request.inputs)
    for response in [*model.infer(request), *model.infer(other)]:
        tensor = response.outputs["OUTPUT0"]
        assert (tensor.memory_type, tensor.memory_type_id) == (tritonserver.MemoryType.CPU, 0)
        assert (tensor.size, list(tensor.shape)) == (24, [2, 3])
        assert tensor.to_host() is tensor.to_device("cpu:0") is tensor
        assert numpy.from_dlpack(tensor).tolist() == [[1] * 3] * 2


def test_bfloat16_passes_by_dlpack(server: tritonserver.Server) -> None:
    array = numpy.array([[1.5, -2]], ml_dtypes.bfloat16)
    tensor = tritonserver.Tensor.from_dlpack(array)
    again = tritonserver.Tensor.from_dlpack(tensor)
    assert again.data_type == tritonserver.DataType.BF16
    [response] = server.model("bfloat").infer(inputs={"INPUT0": again})
    output = tritonserver.Tensor.from_dlpack(response.outputs["OUTPUT0"])
    assert output._array().tolist() == [[1.5, -2]]


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        pytest.param({"inputs": {}}, "InvalidArgumentError", "expected 2 inputs", id="inputs"),
        pytest.param({"inputs": {"INPUT0": object()}}, "InvalidArgumentError", "cannot be object", id="object"),
        pytest.param({"inputs": {"INPUT0": [[1], [1, 2]]}}, "InvalidArgumentError", "cannot become", id="ragged"),
        pytest.param({"parameters": {"a": None}}, "InvalidArgumentError", "parameter 'a'", id="parameter"),
        pytest.param({"parameters": {"a": {"b": 1}}}, "InvalidArgumentError", "parameter 'a'", id="nested"),
        pytest.param({"output_memory_type": "moon"}, "InvalidArgumentError", "'moon' is no memory", id="memory"),
        pytest.param({"output_memory_type": "gpu:0"}, "UnsupportedError", "GPU memory", id="gpu"),
        pytest.param({"output_memory_allocator": object()}, "InvalidArgumentError", "allocator", id="allocator"),
        pytest.param({"flags": 4}, "InvalidArgumentError", "flags must be", id="flags"),
        pytest.param({"priority": -1}, "InvalidArgumentError", "request cannot be made", id="priority"),
        pytest.param({"response_queue": asyncio.Queue()}, "InvalidArgumentError", "queue.SimpleQueue", id="queue"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_at_once(
    server: tritonserver.Server, fields: dict[str, Any], error: str, text: str
) -> None:
    with pytest.raises(getattr(tritonserver, error), match=text):
        server.model("identity").infer(**fields)


class Arena(tritonserver.MemoryAllocator):
    """Memory of one array; `short`: so many bytes too few, `full`: none at all."""

    def __init__(self, short: int = 0, full: bool = False) -> None:
        self.array = numpy.zeros(64, numpy.uint8)
        self.short = short
        self.full = full
        self.asked: list[tuple[int, tritonserver.MemoryType, int, str]] = []

    def allocate(
        self, size: int, memory_type: tritonserver.MemoryType, memory_type_id: int, tensor_name: str
    ) -> tritonserver.MemoryBuffer:
        self.asked.append((size, memory_type, memory_type_id, tensor_name))
        if self.full:
            raise MemoryError("no page left")
        return tritonserver.MemoryBuffer.from_dlpack(self.array[: size - self.short])


def test_outputs_in_memory_of_the_program(server: tritonserver.Server) -> None:
    array = numpy.arange(16, dtype=numpy.float32).reshape(1, 16)

    def ask(arena: Arena) -> tritonserver.InferenceResponse:
        [response] = server.model("identity").infer(
            inputs={"INPUT0": array, "INPUT1": array}, output_memory_allocator=arena, raise_on_error=False
        )
        return response

    arena = Arena()
    outputs = ask(arena).outputs
    assert [one[:3] for one in arena.asked] == [(64, tritonserver.MemoryType.CPU, 0)] * len(outputs)
    assert sorted(one[3] for one in arena.asked) == sorted(outputs)
    assert arena.array.view(numpy.float32).tolist() == list(range(16))
    assert outputs["OUTPUT0"].data_ptr == arena.array.ctypes.data
    refused = ask(Arena(short=4)).error
    assert isinstance(refused, tritonserver.InvalidArgumentError) and "of 64 bytes" in str(refused)
    failed = ask(Arena(full=True)).error
    assert isinstance(failed, tritonserver.InternalError) and "no page left" in str(failed)


def test_a_model_that_is_not_there(server: tritonserver.Server) -> None:
    nobody = server.model("nobody")
    assert not nobody.ready()
    with pytest.raises(tritonserver.NotFoundError, match="'nobody' is not found"):
        nobody.infer(inputs={})
    with pytest.raises(tritonserver.NotFoundError):
        nobody.metadata()


def test_load_with_another_configuration_and_unload(server: tritonserver.Server) -> None:
    config = {"backend": "python", "parameters": {"refuses": {"string_value": "yes"}}}
    model = server.load("echo", {"config": json.dumps(config)})
    with pytest.raises(tritonserver.UnavailableError, match="nothing today") as caught:
        next(model.infer(inputs={"flag_input": [[True]]}))
    assert caught.value.args[1].error is caught.value
    [response] = model.infer(inputs={"flag_input": [[True]]}, raise_on_error=False, request_id="b")
    assert isinstance(response.error, tritonserver.UnavailableError)
    assert (response.request_id, response.final, response.outputs) == ("b", True, {})
    server.unload(model, wait_until_unloaded=True, polling_interval=0)
    assert not model.ready()
    assert server.models()["echo", 1].state == "UNAVAILABLE"
    with pytest.raises(tritonserver.InvalidArgumentError, match="no parameter 'other'"):
        server.load("echo", {"other": 1})
    assert server.load("echo").ready()


def test_responses_of_a_decoupled_model_end_with_an_empty_one(server: tritonserver.Server) -> None:
    """The model waits for its reader: the blocks are more than may lie about."""
    responses = list(server.model("count").infer(inputs={"n": numpy.array([8], numpy.int32)}))
    assert [r.final for r in responses] == [False] * 8 + [True]
    assert responses[-1].outputs == {}
    assert [int(numpy.from_dlpack(r.outputs["block"])[0]) for r in responses[:-1]] == list(range(8))


def live(server: tritonserver.Server, model: str) -> Any:
    return server._running().ask(_live_of, model)


async def _live_of(core: Any, model: str) -> Any:
    from neptrio.embedded import control

    return (await control.statistics(core, model, "", True))["model_stats"][0]["live"]


def idle(server: tritonserver.Server, model: str) -> bool:
    found = live(server, model)
    return not found["executing"] and not found["queued"]


def test_cancelling_ends_the_responses_and_the_request(server: tritonserver.Server) -> None:
    responses = server.model("count").infer(inputs={"n": numpy.array([1 << 30], numpy.int32)})
    assert not next(responses).final
    responses.cancel()
    assert list(responses) == []
    until(lambda: idle(server, "count"), "the model ends")


def test_a_forgotten_iterator_lets_the_model_go_on(server: tritonserver.Server) -> None:
    responses = server.model("count").infer(inputs={"n": numpy.array([20], numpy.int32)})
    next(responses)
    del responses
    until(lambda: idle(server, "count"), "the model ends")
    counts = server.model("count").statistics()["model_stats"][0]["inference_stats"]
    assert counts["success"]["count"] >= 1


@pytest.mark.slow
def test_responses_in_a_queue_and_in_the_iterators(server: tritonserver.Server) -> None:
    found: queue.SimpleQueue[tritonserver.InferenceResponse] = queue.SimpleQueue()
    inputs = {"flag_input": numpy.array([[True]])}
    iterators = [server.model("echo").infer(inputs=inputs, response_queue=found) for _ in range(2)]
    queued = [found.get(timeout=60) for _ in iterators]
    iterated = [response for iterator in iterators for response in iterator]
    assert {id(r) for r in queued} == {id(r) for r in iterated}
    assert found.empty()
    blocks: queue.SimpleQueue[tritonserver.InferenceResponse] = queue.SimpleQueue()
    server.model("count").infer(inputs={"n": numpy.array([20], numpy.int32)}, response_queue=blocks)
    assert [blocks.get(timeout=60).final for _ in range(21)] == [False] * 20 + [True]


def test_coroutines(server: tritonserver.Server) -> None:
    async def main() -> None:
        model = server.model("echo")
        found: asyncio.Queue[tritonserver.InferenceResponse] = asyncio.Queue()
        iterators = [
            model.async_infer(inputs={"text_input": [[str(i)]]}, response_queue=found) for i in range(3)
        ]
        texts = [(await found.get()).outputs["text_output"].to_string_array()[0, 0] for _ in iterators]
        assert sorted(texts) == ["0", "1", "2"]
        for i, iterator in enumerate(iterators):
            async for response in iterator:
                assert response.outputs["text_output"].to_string_array().tolist() == [[str(i)]]
        ends = [r.final async for r in server.model("count").async_infer(inputs={"n": numpy.int32([3])})]
        assert ends == [False, False, False, True]
        with pytest.raises(tritonserver.InvalidArgumentError, match=r"asyncio\.\S*Queue"):
            model.async_infer(inputs={}, response_queue=queue.SimpleQueue())

    asyncio.run(main())


@pytest.mark.parametrize("sequence", [7, "seven"])
def test_sequences(server: tritonserver.Server, sequence: int | str) -> None:
    model = server.model("sequences")
    totals = []
    for value, flags in ((1, 1), (2, 0), (3, 2)):
        [response] = model.infer(
            inputs={"x": numpy.array([value])}, correlation_id=sequence, flags=flags, priority=1
        )
        assert response.parameters == {"of": str(sequence)}
        totals.append(int(numpy.from_dlpack(response.outputs["total"])[0]))
    assert totals == [1, 3, 6]
    with pytest.raises(tritonserver.TritonError, match="sequence"):
        next(model.infer(inputs={"x": numpy.array([1])}, correlation_id=sequence))


def test_the_timeout_is_the_time_in_the_queue(server: tritonserver.Server, gate: Gate) -> None:
    inputs = {"INPUT0": numpy.zeros((1, 4), numpy.int32)}
    model = server.model("gate")
    others = [model.infer(inputs=inputs) for _ in range(6)]  # one executes, some are prepared, some wait
    gate.started()
    try:
        with pytest.raises(tritonserver.UnavailableError, match="timeout expired"):
            next(model.infer(inputs=inputs, timeout=1000))
    finally:
        gate.go("k" * len(others))
    assert [response.final for other in others for response in other] == [True] * 6


def test_custom_metrics(server: tritonserver.Server) -> None:
    family = tritonserver.MetricFamily(tritonserver.MetricKind.COUNTER, "cups", "Cups of tea")
    metric = tritonserver.Metric(family, {"kind": "green"})
    metric.increment(2)
    assert (metric.value, metric.kind) == (2, tritonserver.MetricKind.COUNTER)
    assert 'cups{kind="green"} 2' in server.metrics()
    gauge = tritonserver.Metric(tritonserver.MetricFamily(tritonserver.MetricKind.GAUGE, "heat", "Degrees"))
    gauge.set_value(80)
    assert gauge.value == 80
    with pytest.raises(tritonserver.UnsupportedError):
        metric.set_value(1)


def test_what_is_not_supported_says_so(server: tritonserver.Server) -> None:
    with pytest.raises(tritonserver.UnsupportedError, match="name them all in Options"):
        server.register_model_repository("/tmp")
    with pytest.raises(tritonserver.UnsupportedError, match="unload the models"):
        server.unregister_model_repository("/tmp")
    with pytest.raises(tritonserver.UnavailableError, match="polling needs"):
        server.poll_model_repository()
    with pytest.raises(tritonserver.InvalidArgumentError, match="already started"):
        server.start()
