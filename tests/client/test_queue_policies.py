"""Queue policies, priorities and order, from outside: real clients against a model that is held.

The model's only instance stays in its first batch until the test lets it go (tests/support/gate.py), so who
waits, who is refused and who comes next is decided by the rules alone.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.grpc._utils import _get_inference_request
from tritonclient.utils import InferenceServerException

from tests.support import infer_messages, onnx_models
from tests.support.bench import Bench, tensor
from tests.support.metrics import scrape, value
from tests.support.raw_http2 import RawClient
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess, without_front_ends
from tests.support.statistics import stats
from tests.support.waiting import until

LEVELS = """dynamic_batching {
    priority_levels: 3 default_priority_level: 2
    default_queue_policy { max_queue_size: 4 }
    priority_queue_policy { key: 1 value { max_queue_size: 1 } }
}"""
HOUR_US = 3_600_000_000


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A held model without room for a second request in a batch; its dynamic_batching is the parameter."""
    made = Bench(tmp_path, 1, request.param)
    made.send("running")
    assert made.gate.started() == ["running"]
    yield made
    made.close()


def policy(rules: str) -> Any:
    return pytest.mark.parametrize("bench", [rules], indirect=True, ids=[""])


def order_of(bench: Bench, count: int) -> list[str]:
    """Lets `count` requests go, one after the other; the order in which they execute."""
    order = []
    for _ in range(count):
        bench.gate.go()
        order += bench.gate.started()
    bench.gate.go()
    return order


def over_http(bench: Bench, id: str, **options: Any) -> threading.Thread:
    """Sends an HTTP request that will be answered; returns once it is accepted."""

    def one() -> None:
        made = httpclient.InferInput("INPUT0", [1, 2], "INT32")
        made.set_data_from_numpy(np.zeros((1, 2), np.int32))
        with httpclient.InferenceServerClient(bench.server.http) as client:
            client.infer("gate", [made], request_id=id, **options)

    before = bench.total()
    thread = threading.Thread(target=one)
    thread.start()
    until(lambda: bench.total() > before, f"'{id}' is accepted")
    return thread


@policy(LEVELS)
def test_lower_numbers_first_and_the_default_level_for_the_rest(bench: Bench) -> None:
    bench.send("three", priority=3)
    bench.send("none")
    bench.send("zero", priority=0)
    bench.send("nine", priority=9)
    thread = over_http(bench, "two", priority=2)
    bench.send("one", priority=1)
    assert order_of(bench, 6) == ["one", "none", "zero", "nine", "two", "three"]
    thread.join(300)
    bench.assert_answered("running", "three", "none", "zero", "nine", "one")


@policy(LEVELS)
def test_each_level_has_its_own_limit(bench: Bench) -> None:
    bench.send("a1", priority=1)
    bench.send("b1", "b2", "b3", "b4", priority=2)
    bench.send("c1", priority=3)
    for priority in (1, 2, 0, 9):
        with pytest.raises(InferenceServerException) as info:
            bench.client.infer("gate", tensor(), request_id="full", priority=priority)
        assert info.value.message() == "[request id: full] Exceeds maximum queue size"
        assert info.value.status() == "StatusCode.UNAVAILABLE"
    made = httpclient.InferInput("INPUT0", [1, 2], "INT32")
    made.set_data_from_numpy(np.zeros((1, 2), np.int32))
    with httpclient.InferenceServerClient(bench.server.http) as client:
        for id, text in (("", "<id_unknown>"), ("x", "x")):
            with pytest.raises(InferenceServerException) as info:
                client.infer("gate", [made], priority=1, request_id=id)
            assert (info.value.status(), info.value.message()) == (
                "503",
                f"[request id: {text}] Exceeds maximum queue size",
            )
    bench.send("c2", priority=3)
    assert order_of(bench, 7) == ["a1", "b1", "b2", "b3", "b4", "c1", "c2"]
    bench.assert_nothing_left(8, 0)


@policy("dynamic_batching { default_queue_policy { default_timeout_microseconds: 30000 max_queue_size: 1 } }")
def test_reject_fires_while_the_instance_is_still_held_and_makes_room(bench: Bench) -> None:
    bench.send("late")
    error = bench.result("late")  # nobody has let the running batch go
    assert (error.message(), error.status()) == ("Request timeout expired", "StatusCode.UNAVAILABLE")
    made = httpclient.InferInput("INPUT0", [1, 2], "INT32")
    made.set_data_from_numpy(np.zeros((1, 2), np.int32))
    with httpclient.InferenceServerClient(bench.server.http) as client:
        with pytest.raises(InferenceServerException) as info:
            client.infer("gate", [made])
        assert (info.value.status(), info.value.message()) == ("503", "Request timeout expired")
    bench.gate.go()
    bench.assert_answered("running")
    assert (bench.count("success"), bench.count("fail")) == (1, 2)
    found, labels = bench.stats(), {"model": "gate", "version": "1"}
    assert (found["execution_count"], found["inference_count"]) == (1, 1), "a failure and nothing else"
    assert value(scrape(bench.server), "nv_inference_request_failure", reason="REJECTED", **labels) == 2


@policy(
    f"dynamic_batching {{ default_queue_policy {{ default_timeout_microseconds: {HOUR_US} "
    "allow_timeout_override: true timeout_action: DELAY } }"
)
def test_delayed_requests_execute_behind_those_in_time(bench: Bench) -> None:
    bench.send("late0", "late1", timeout=1000)
    with pytest.raises(InferenceServerException, match=r"(?i)deadline.exceeded"):
        bench.client.infer("gate", tensor(), request_id="clock", client_timeout=0.1)
    until(lambda: bench.live("queued") == 2, "a tenth of a second later they still wait")
    bench.send("fresh")
    assert order_of(bench, 3) == ["fresh", "late0", "late1"]
    bench.assert_answered("running", "late0", "late1", "fresh")


@policy(
    f"dynamic_batching {{ default_queue_policy {{ default_timeout_microseconds: {HOUR_US} "
    "allow_timeout_override: true } }"
)
def test_a_request_may_shorten_its_timeout(bench: Bench) -> None:
    bench.send("stays", timeout=2 * HOUR_US)
    bench.send("hurries", timeout=1000)
    assert bench.result("hurries").message() == "Request timeout expired"
    assert bench.live("queued") == 1
    assert order_of(bench, 1) == ["stays"]
    bench.assert_answered("running", "stays")


@policy(f"dynamic_batching {{ default_queue_policy {{ default_timeout_microseconds: {HOUR_US} }} }}")
def test_a_timeout_that_may_not_be_overridden_stands(bench: Bench) -> None:
    bench.send("patient", timeout=1)
    with pytest.raises(InferenceServerException, match=r"(?i)deadline.exceeded"):
        bench.client.infer("gate", tensor(), client_timeout=0.1)  # much later than a microsecond
    until(lambda: bench.live("queued") == 1, "only it waits")
    assert order_of(bench, 1) == ["patient"]
    bench.assert_answered("running", "patient")


@pytest.mark.parametrize("bench", ["", "dynamic_batching { }"], indirect=True, ids=["default", "dynamic"])
def test_without_levels_and_policies_priority_and_timeout_mean_nothing(bench: Bench) -> None:
    bench.send("first", priority=3, timeout=1)
    bench.send("second", priority=1, timeout=1)
    labels = {"model": "gate", "version": "1"}
    assert value(scrape(bench.server), "nv_inference_pending_request_count", **labels) == 2
    assert order_of(bench, 2) == ["first", "second"]
    bench.assert_answered("running", "first", "second")
    bench.assert_nothing_left(3, 0)
    assert value(scrape(bench.server), "nv_inference_pending_request_count", **labels) == 0


@pytest.mark.slow
@policy("dynamic_batching { default_queue_policy { max_queue_size: 100 } }")
def test_a_burst_of_ten_thousand_leaves_exactly_the_limit(bench: Bench) -> None:
    made = httpclient.InferInput("INPUT0", [1, 2], "INT32")
    made.set_data_from_numpy(np.zeros((1, 2), np.int32))
    body = _get_inference_request(
        model_name="gate", inputs=tensor(), model_version="", request_id="", outputs=None, sequence_id=0,
        sequence_start=False, sequence_end=False, priority=0, timeout=None, parameters=None,
    ).SerializeToString()  # fmt: skip
    refused = threading.Semaphore(0)
    texts: set[str] = set()

    def done(future: Any) -> None:
        if future.exception() is not None:
            texts.add(future.exception().details())
            refused.release()

    channels = [
        grpc.insecure_channel(bench.server.grpc, options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(4)
    ]
    calls = [channel.unary_unary("/inference.GRPCInferenceService/ModelInfer") for channel in channels]
    futures = []
    for i in range(10_000):
        futures.append(calls[i % 4].future(body))
        futures[-1].add_done_callback(done)
    for _ in range(9_900):
        assert refused.acquire(timeout=60)
    assert texts == {"[request id: <id_unknown>] Exceeds maximum queue size"}
    found = bench.stats()
    assert (found["live"]["queued"], found["live"]["executing"]) == (100, 1)
    assert found["accounts"] == {
        "accepted": 101, "refused": 9_900, "answered": 0, "failed": 0, "cancelled": 0,
    }  # fmt: skip
    bench.gate.go("k" * 101)
    assert sum(future.exception() is None for future in futures) == 100
    for channel in channels:
        channel.close()


@without_front_ends
@policy("dynamic_batching { default_queue_policy { max_queue_size: 1 } }")
def test_a_large_request_is_refused_before_it_is_decoded(bench: Bench) -> None:
    """A body that would be refused for what is in it, too, shows which was looked at first."""
    bench.send("waits")
    large = json.dumps(
        {"inputs": [{"name": "NOPE", "datatype": "INT32", "shape": [1, 9], "data": [0] * 9000}]}
    )
    small = large.replace(", 0" * 8999, "")
    with httpclient.InferenceServerClient(bench.server.http) as client:
        answers = [client._post("v2/models/gate/infer", text, {}, None) for text in (large, small)]
    assert [answer.status_code for answer in answers] == [503, 400]
    bench.gate.go("kk")
    bench.assert_answered("running", "waits")


# ------------------------------------------------------------------ what makes a batch


HELD = dict(os.environ, TRITONSERVER_DELAY_SCHEDULER="2")
KINDS = {
    "BATCH_ELEMENT_COUNT": ([2, 6], 2),
    "BATCH_ACCUMULATED_ELEMENT_COUNT": ([2, 8], 2),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": ([0, 2, 8], 3),
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": ([0] * 6, 6),
    "BATCH_ITEM_SHAPE": ([[2], [3], [3]], 3),
    "BATCH_ITEM_SHAPE_FLATTEN": ([2, 3, 3], 3),
}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Models whose batches start when two requests wait."""
    from onnx import helper

    repository: Path = tmp_path_factory.mktemp("shapes")
    nodes = [
        helper.make_node("Cast", ["E"], ["F"], to=1),
        helper.make_node("ReduceSum", ["F"], ["TOTAL"], keepdims=0),
        helper.make_node("Size", ["E"], ["S"]),
        helper.make_node("Cast", ["S"], ["COUNT"], to=1),
        helper.make_node("ReduceSum", ["X"], ["ALL"], keepdims=0),
        helper.make_node("Add", ["Z", "TOTAL"], ["Y0"]),
        helper.make_node("Add", ["Z", "COUNT"], ["Y1"]),
        helper.make_node("Add", ["Z", "ALL"], ["Y2"]),
    ]
    for kind in KINDS:
        rank: list[int | str | None] = ["A", "B"] if kind == "BATCH_ITEM_SHAPE" else ["A"]
        content = onnx_models.model(
            nodes,
            [
                onnx_models.tensor("X", "FP32", ["N"]),
                onnx_models.tensor("Z", "FP32", ["N2", 1]),
                onnx_models.tensor("E", "INT32", rank),
            ],
            [onnx_models.tensor(f"Y{i}", "FP32", ["N2", 1]) for i in range(3)],
        )
        outputs = ", ".join(f'{{ name: "Y{i}" data_type: TYPE_FP32 dims: [ 1 ] }}' for i in range(3))
        write_model(
            repository,
            kind.lower(),
            f"""backend: "onnxruntime" max_batch_size: 8 dynamic_batching {{ }}
            input [ {{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }},
                    {{ name: "Z" data_type: TYPE_FP32 dims: [ 1 ] }} ] output [ {outputs} ]
            batch_input [ {{ kind: {kind} target_name: "E" data_type: TYPE_INT32 source_input: "X" }} ]""",
            {"1/model.onnx": content},
        )
    optional = identity_config(dims="-1", extra="dynamic_batching { }").replace(
        'name: "INPUT1"', 'optional: true name: "INPUT1"'
    )
    write_model(repository, "optional", optional)
    write_model(repository, "fixed", identity_config(dims="-1", extra="dynamic_batching { }"))
    for name, size, batching in (
        ("full", 2, ""),
        ("preferred", 8, "preferred_batch_size: [ 2 ]"),
        ("delay", 8, "max_queue_delay_microseconds: 1000"),
        ("shape", 8, ""),
        ("idle", 8, ""),
    ):
        write_model(
            repository,
            name,
            identity_config(
                dims="-1", pairs=1, max_batch_size=size, extra=f"dynamic_batching {{ {batching} }}"
            ),
        )
    with ServerProcess(repository, env=HELD) as server:
        yield server


def pair(server: ServerProcess, model: str, inputs: list[dict[str, np.ndarray]]) -> tuple[list[Any], Any]:
    """Two requests, the second sent when the first waits; their results and the sizes of the batches."""
    outcomes: dict[int, Any] = {}
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for i, arrays in enumerate(inputs):
            made = []
            for name, array in arrays.items():
                made.append(
                    grpcclient.InferInput(name, array.shape, "FP32" if array.dtype.kind == "f" else "INT32")
                )
                made[-1].set_data_from_numpy(array)

            def called(result: Any, error: Any, i: int = i) -> None:
                outcomes[i] = error or result

            client.async_infer(model, made, called)
            if not i:
                client.get_inference_statistics(model)  # behind it on the same connection
        until(lambda: len(outcomes) == 2, "both answers")
        rows = client.get_inference_statistics(model).model_stats[0].batch_stats
    return [outcomes[i] for i in range(2)], {row.batch_size: row.compute_infer.count for row in rows}


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_requests_share_a_batch_that_says_where_each_begins(shapes: ServerProcess, kind: str) -> None:
    inputs = [
        {"X": np.array([[1, 2]], np.float32), "Z": np.array([[100]], np.float32)},
        {"X": np.array([[1, 1, 1], [2, 2, 2]], np.float32), "Z": np.array([[200], [300]], np.float32)},
    ]
    results, sizes = pair(shapes, kind.lower(), inputs)
    assert sizes == {3: 1}, "one batch of both"
    extra, length = KINDS[kind]
    total = float(np.sum(np.array(extra)))
    count = float(np.size(np.array(extra)))
    assert len(extra) == length
    for name, add in (("Y0", total), ("Y1", count), ("Y2", 12.0)):
        got = [result.as_numpy(name).ravel().tolist() for result in results]
        assert got == [[100 + add], [200 + add, 300 + add]], name


@pytest.mark.parametrize(("model", "both", "sizes"), [("optional", False, {1: 2}), ("fixed", True, {2: 1})])
def test_another_set_of_optional_inputs_makes_another_batch(
    shapes: ServerProcess, model: str, both: bool, sizes: dict[int, int]
) -> None:
    first = {"INPUT0": np.zeros((1, 2), np.int32), "INPUT1": np.ones((1, 2), np.int32)}
    second = first if both else {"INPUT0": np.zeros((1, 2), np.int32)}
    results, found = pair(shapes, model, [first, second])
    assert found == sizes
    assert results[0].as_numpy("OUTPUT1").tolist() == [[1, 1]]
    assert results[1].as_numpy("OUTPUT1").tolist() == ([[1, 1]] if both else [[0]])


@pytest.mark.parametrize(
    ("reason", "widths", "closed"),
    [
        ("full", (2, 2), {"full": {"2": 1}}),
        ("preferred", (2, 2), {"preferred": {"2": 1}}),
        ("delay", (2, 2), {"delay": {"2": 1}}),
        ("shape", (2, 3), {"shape": {"1": 1}, "idle": {"1": 1}}),
        ("idle", (2, 2), {"idle": {"2": 1}}),
    ],
)
def test_every_batch_records_why_it_closed_and_how_long_its_oldest_waited(
    shapes: ServerProcess, reason: str, widths: tuple[int, int], closed: dict[str, dict[str, int]]
) -> None:
    pair(shapes, reason, [{"INPUT0": np.zeros((1, width), np.int32)} for width in widths])
    batches = stats(shapes, reason)["batches"]
    assert {why: row["sizes"] for why, row in batches.items()} == closed
    text = scrape(shapes)
    for why, sizes in closed.items():
        labels = {"model": reason, "version": "1", "close_reason": why}
        count = sum(sizes.values())
        requests = sum(int(size) * n for size, n in sizes.items())
        assert (batches[why]["count"], batches[why]["size_sum"]) == (count, requests)
        assert value(text, "neptrio_batch_size_count", **labels) == count
        assert value(text, "neptrio_batch_size_sum", **labels) == requests
        waited = value(text, "neptrio_batch_oldest_wait_seconds_total", **labels)
        assert waited == pytest.approx(batches[why]["oldest_wait_ns"] / 1e9)
        assert waited >= 0.001 or why != "delay", "no sooner than the delay"


# ------------------------------------------------------------------ preserve_ordering

BY_VALUE = """
import json
import os

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.folder = json.loads(args["model_config"])["parameters"]["folder"]["string_value"]

    def execute(self, requests):
        (request,) = requests
        array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        with open(os.path.join(self.folder, f"go{array.flat[0]}"), "rb") as pipe:
            pipe.read(1)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)])]
"""


@pytest.mark.slow
def test_answers_keep_the_order_of_arrival_though_instances_finish_in_another(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    io = "data_type: TYPE_INT32 dims: [ -1 ]"
    write_model(
        repository,
        "ordered",
        f'backend: "python" max_batch_size: 1 input [ {{ name: "INPUT0" {io} }} ] '
        f'output [ {{ name: "OUTPUT0" {io} }} ] instance_group [ {{ count: 3 }} ] '
        f'parameters {{ key: "folder" value {{ string_value: "{tmp_path}" }} }} '
        "dynamic_batching { preserve_ordering: true }",
        {"1/model.py": BY_VALUE},
    )
    for i in range(3):
        os.mkfifo(tmp_path / f"go{i}")
    pipes = [os.open(tmp_path / f"go{i}", os.O_RDWR) for i in range(3)]
    with (
        ServerProcess(repository) as server,
        httpclient.InferenceServerClient(server.http) as http,
        RawClient(server.grpc) as client,
    ):

        def executions() -> int:
            return int(http.get_inference_statistics("ordered")["model_stats"][0]["execution_count"])

        streams = [1, 3, 5]
        for i, stream in enumerate(streams):
            client.start(stream, infer_messages.request("ordered", np.full((1, 2), i, np.int32)))
            client.sync()
        for done, i in enumerate((2, 1)):
            os.write(pipes[i], b"k")
            until(lambda done=done: executions() == done + 1, f"{i} has been executed")  # type: ignore[misc]
        client.sync()
        assert client.ends == [], "their answers wait for the first"
        os.write(pipes[0], b"k")
        client.until(lambda: len(client.ends) == 3, "all answers")
        assert client.ends == streams
    for pipe in pipes:
        os.close(pipe)
