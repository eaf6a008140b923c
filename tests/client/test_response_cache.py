"""The response cache before Python and ONNX models: real server, real clients."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from neptrio.scheduling.response_cache import ENTRY_OVERHEAD_BYTES, TENSOR_OVERHEAD_BYTES
from tests.support import infer_messages, onnx_models
from tests.support.gate import Gate
from tests.support.metrics import scrape, value
from tests.support.raw_http2 import RawClient, message
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.statistics import stats
from tests.support.waiting import until

CACHED = "response_cache { enable: true }"
ENTRY = ENTRY_OVERHEAD_BYTES + TENSOR_OVERHEAD_BYTES + 16  # one FP32[1,4] or INT32[1,4]


def tensor(module: Any, number: int, name: str = "INPUT0", datatype: str = "INT32") -> list[Any]:
    made = module.InferInput(name, [1, 4], datatype)
    made.set_data_from_numpy(np.full((1, 4), number, np.int32 if datatype == "INT32" else np.float32))
    return [made]


def ask(client: Any, answers: queue.Queue[Any], id: str) -> None:
    """Sends a request, the same each time, whose answer or error goes to `answers`."""
    client.async_infer(
        "gate", tensor(grpcclient, 7), lambda result, error: answers.put(error or result), request_id=id
    )


def accepted(server: ServerProcess, model: str) -> int:
    return int(stats(server, model)["live"]["accepted"])


@pytest.fixture(scope="module", params=["alone", "coalesce"])
def gated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, Gate, bool]]:
    """A cached Python model that answers when the test says so."""
    folder = tmp_path_factory.mktemp("gated")
    gate = Gate(folder / "repository", folder / "gate", extra=CACHED)
    coalesce = request.param == "coalesce"
    with ServerProcess(
        folder / "repository", f"--cache-config=local,size=100000,coalesce={str(coalesce).lower()}"
    ) as server:
        yield server, gate, coalesce
    gate.close()


def test_identical_requests_in_flight(gated: tuple[ServerProcess, Gate, bool]) -> None:
    """With coalesce=true they share one execution; by default each runs on its own."""
    server, gate, coalesce = gated
    answers: queue.Queue[Any] = queue.Queue()
    count = 5
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for i in range(count):
            ask(client, answers, f"r{i}")
        until(lambda: accepted(server, "gate") == count, "all are under way")
        runs = 1 if coalesce else count
        for _ in range(runs):
            assert len(gate.started()) == 1
            gate.go()
        got = [answers.get(timeout=60) for _ in range(count)]
        assert {result.get_response().id for result in got} == {f"r{i}" for i in range(count)}
        for result in got:
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), np.full((1, 4), 7))
        before = stats(server, "gate")
        # the answer is kept: the model hears of no other
        kept = client.infer("gate", tensor(grpcclient, 7), request_id="later")
        np.testing.assert_array_equal(kept.as_numpy("OUTPUT0"), np.full((1, 4), 7))
    after = stats(server, "gate")
    assert before["execution_count"] == after["execution_count"] == runs
    durations = after["inference_stats"]
    assert (durations["success"]["count"], durations["fail"]["count"]) == (count + 1, 0)
    assert durations["compute_infer"]["count"] == runs
    assert durations["cache_hit"]["count"] == count + 1 - runs
    assert durations["cache_miss"]["count"] == runs, "of those that were executed, whoever's answer was kept"


@pytest.mark.slow
def test_a_default_level_without_levels_keeps_nobody_from_following(tmp_path: Path) -> None:
    """As a Triton server, this one takes such a configuration."""
    extra = f"{CACHED} dynamic_batching {{ default_priority_level: 2 }}"
    gate = Gate(tmp_path / "repository", tmp_path / "gate", extra=extra)
    answers: queue.Queue[Any] = queue.Queue()
    with (
        ServerProcess(tmp_path / "repository", "--cache-config=local,size=100000,coalesce=true") as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
    ):
        for i in range(2):
            ask(client, answers, f"r{i}")
            client.get_inference_statistics("gate")  # behind it on the same connection
        gate.started()
        gate.go()
        for _ in range(2):
            np.testing.assert_array_equal(answers.get(timeout=60).as_numpy("OUTPUT0"), np.full((1, 4), 7))
        assert stats(server, "gate")["execution_count"] == 1
    gate.close()


def test_a_failed_leader_leaves_the_others_their_own_execution(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "repository", tmp_path / "gate", extra=CACHED)
    answers: queue.Queue[Any] = queue.Queue()
    with (
        ServerProcess(tmp_path / "repository", "--cache-config=local,size=100000,coalesce=true") as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
    ):
        for i in range(2):
            ask(client, answers, f"r{i}")
        until(lambda: accepted(server, "gate") == 2, "both are under way")
        (leader,) = gate.started()
        gate.go("f")
        failed = answers.get(timeout=60)
        assert "the whole batch fails" in failed.message()
        (follower,) = gate.started()
        assert {leader, follower} == {"r0", "r1"}
        gate.go()
        np.testing.assert_array_equal(answers.get(timeout=60).as_numpy("OUTPUT0"), np.full((1, 4), 7))
    gate.close()


def test_a_request_that_is_about_to_be_executed_takes_no_place_of_its_followers(tmp_path: Path) -> None:
    """Three equal requests in one loop pass and a queue for one: the first is executed, the second waits for it."""
    queue = " dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    gate = Gate(tmp_path / "repository", tmp_path / "gate", extra=CACHED + queue, size=1)
    with (
        ServerProcess(tmp_path / "repository", "--cache-config=local,size=100000,coalesce=true") as server,
        RawClient(server.grpc) as client,
    ):
        body = message(infer_messages.request("gate", np.full((1, 4), 7, np.int32)))
        client.send(b"".join(client.headers(stream) + client.data(stream, body) for stream in (1, 3, 5)))
        client.until(lambda: client.ends, "one too many is refused")
        assert client.ends == [5]
        assert client.replies[5].text == "[request id: <id_unknown>] Exceeds maximum queue size"
        gate.started()
        gate.go()
        client.until(lambda: sorted(client.ends) == [1, 3, 5], "the others are answered")
        assert [client.replies[stream].status for stream in (1, 3)] == [0, 0]
        assert stats(server, "gate")["execution_count"] == 1
    gate.close()


def test_a_follower_is_refused_at_its_own_deadline(tmp_path: Path) -> None:
    """The one that it equals, and another that follows, go on."""
    policy = "default_timeout_microseconds: 100000000 allow_timeout_override: true"
    gate = Gate(
        tmp_path / "repository",
        tmp_path / "gate",
        extra=f"{CACHED} dynamic_batching {{ default_queue_policy {{ {policy} }} }}",
    )
    answers: dict[str, Any] = {}
    with (
        ServerProcess(tmp_path / "repository", "--cache-config=local,size=100000,coalesce=true") as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
    ):

        def send(id: str, timeout_us: int | None = None) -> None:
            def keep(result: Any, error: Any) -> None:
                answers[id] = error or result

            client.async_infer("gate", tensor(grpcclient, 7), keep, request_id=id, timeout=timeout_us)

        send("first")
        assert gate.started() == ["first"]
        send("patient")
        send("hasty", 1000)
        until(lambda: "hasty" in answers, "it is refused while the first one runs")
        assert answers["hasty"].status() == "StatusCode.UNAVAILABLE"
        assert "Request timeout expired" in answers["hasty"].message()
        assert list(answers) == ["hasty"]
        gate.go()
        until(lambda: len(answers) == 3, "the others are answered")
        for id in ("first", "patient"):
            np.testing.assert_array_equal(answers[id].as_numpy("OUTPUT0"), np.full((1, 4), 7))
        found = stats(server, "gate")
        assert found["execution_count"] == 1
        counts = {name: row["count"] for name, row in found["inference_stats"].items()}
        assert [counts[name] for name in ("success", "fail", "cache_hit", "cache_miss")] == [2, 1, 1, 1]
    gate.close()


@pytest.mark.parametrize("coalesce", ["false", "true"])
def test_hits_and_followers_keep_the_order_of_arrival(tmp_path: Path, coalesce: str) -> None:
    ordered = CACHED + " dynamic_batching { preserve_ordering: true }"
    gate = Gate(tmp_path / "repository", tmp_path / "gate", extra=ordered, size=1)
    with (
        ServerProcess(
            tmp_path / "repository", f"--cache-config=local,size=100000,coalesce={coalesce}"
        ) as server,
        RawClient(server.grpc) as client,
    ):
        streams: dict[int, str] = {}

        def send(id: str, number: int) -> int:
            stream = 2 * len(streams) + 1
            streams[stream] = id
            numbers = np.full((1, 4), number, np.int32)
            client.start(stream, infer_messages.request("gate", numbers, request_id=id))
            client.sync()
            return stream

        gate.go()
        client.finish(send("known", 5))
        gate.started()
        send("slow", 7)
        assert gate.started() == ["slow"]
        send("hit", 5)
        until(lambda: stats(server, "gate")["inference_stats"]["cache_hit"]["count"] == 1, "the hit")
        send("same", 7)
        send("hit again", 5)
        until(lambda: stats(server, "gate")["inference_stats"]["cache_hit"]["count"] == 2, "the other hit")
        client.sync()
        assert client.ends == [1], "they wait for the one that came first"
        gate.go("k" if coalesce == "true" else "kk")
        client.until(lambda: len(client.ends) == 5, "all answers")
        assert [streams[stream] for stream in client.ends] == ["known", "slow", "hit", "same", "hit again"]
    gate.close()


@pytest.mark.slow
def test_a_small_cache_evicts_the_least_recently_used(tmp_path: Path) -> None:
    """An ONNX model and room for three answers, seen through statistics and metrics."""
    write_model(
        tmp_path,
        "onnx",
        'backend: "onnxruntime" max_batch_size: 8 input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ] '
        f'output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }} ] {CACHED}',
        {"1/model.onnx": onnx_models.identity()},
    )
    with ServerProcess(tmp_path, f"--cache-config=local,size={3 * ENTRY}") as server:
        with httpclient.InferenceServerClient(server.http) as client:

            def ask(number: int) -> bool:
                """Whether the answer came out of the cache."""
                before = stats(server, "onnx")["inference_stats"]["cache_hit"]["count"]
                result = client.infer("onnx", tensor(httpclient, number, "X", "FP32"))
                np.testing.assert_array_equal(result.as_numpy("Y"), np.full((1, 4), number))
                return bool(stats(server, "onnx")["inference_stats"]["cache_hit"]["count"] > before)

            assert [ask(n) for n in (0, 1, 2)] == [False, False, False]
            assert ask(0), "all three fit"
            assert not ask(3), "new: 1, the least recently used, goes"
            assert [ask(n) for n in (0, 2, 3)] == [True, True, True]
            assert not ask(1)
        durations = stats(server, "onnx")["inference_stats"]
        names = (
            "success",
            "cache_hit",
            "cache_miss",
            "compute_infer",
            "compute_input",
            "compute_output",
            "queue",
        )
        assert [durations[n]["count"] for n in names] == [9, 4, 5, 5, 5, 5, 9]
        assert durations["cache_hit"]["ns"] > 0 and durations["cache_miss"]["ns"] > 0
        text = scrape(server)
        labels = {"model": "onnx", "version": "1"}
        assert value(text, "nv_cache_num_hits_per_model", **labels) == 4
        assert value(text, "nv_cache_num_misses_per_model", **labels) == 5
        assert value(text, "nv_cache_hit_duration_per_model", **labels) >= 0
        assert value(text, "nv_cache_miss_duration_per_model", **labels) > 0


@pytest.mark.slow
def test_a_miss_counts_whatever_becomes_of_the_answer(tmp_path: Path) -> None:
    """The cache has no room for this model's answers."""
    rows = '{{ name: "{}" data_type: TYPE_INT32 dims: [ 4 ] }}'
    config = f'backend: "identity" max_batch_size: 8 input [ {rows.format("INPUT0")} ] output [ {rows.format("OUTPUT0")} ]'
    write_model(tmp_path, "large", f"{config} {CACHED}")
    with ServerProcess(tmp_path, f"--cache-config=local,size={ENTRY - 1}") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            for _ in range(3):
                client.infer("large", tensor(httpclient, 1))
        durations = stats(server, "large")["inference_stats"]
        names = ("success", "cache_hit", "cache_miss", "compute_infer")
        assert [durations[name]["count"] for name in names] == [3, 0, 3, 3]
        assert durations["cache_miss"]["ns"] > 0
        with grpcclient.InferenceServerClient(server.grpc) as client:
            told = client.get_inference_statistics("large").model_stats[0].inference_stats.cache_miss
        assert (told.count, told.ns) == tuple(durations["cache_miss"].values())
        text = scrape(server)
        assert value(text, "nv_cache_num_misses_per_model", model="large", version="1") == 3
        assert (value(text, "nv_cache_num_misses"), value(text, "nv_cache_num_entries")) == (3, 0)


@pytest.mark.slow
def test_requests_that_wait_for_an_equal_one_count_in_the_queue(tmp_path: Path) -> None:
    queue = " dynamic_batching { default_queue_policy { max_queue_size: 2 } }"
    gate = Gate(tmp_path / "repository", tmp_path / "gate", extra=CACHED + queue, size=1)
    answers: list[str] = []
    with (
        ServerProcess(tmp_path / "repository", "--cache-config=local,size=100000,coalesce=true") as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
    ):
        for _ in range(4):
            client.async_infer(
                "gate",
                tensor(grpcclient, 7),
                lambda result, error: answers.append("ok" if error is None else str(error)),
            )
            client.get_inference_statistics("gate")  # behind it on the same connection
        gate.started()
        until(lambda: len(answers) == 1, "one too many is refused")
        assert "Exceeds maximum queue size" in answers[0]
        gate.go()
        until(lambda: len(answers) == 4, "the others are answered")
        assert answers[1:] == ["ok"] * 3
    gate.close()
