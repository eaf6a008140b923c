"""The cancellation contract (docs/cancellation.md), place by place, with real clients.

A gated model holds its instance until the test lets it go on, so nothing here depends on time.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.support.bench import Bench, tensor
from tests.support.http import Http1
from tests.support.infer_messages import binary_head, request
from tests.support.raw_http2 import RawClient
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.statistics import stats
from tests.support.waiting import until


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("shared"))
    yield made
    made.close()


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The shared server with fresh counts, or one of its own for the parameters of Bench."""
    if hasattr(request, "param"):
        made = Bench(tmp_path, *request.param)
        yield made
        made.close()
        return
    made = request.getfixturevalue("shared")
    made.fresh()
    yield made
    assert made.live("accepted") == 0, "the test has left requests behind"


EIGHT = [f"m{i}" for i in range(8)]


def test_one_of_eight_mates_cancels_before_execution(bench: Bench) -> None:
    bench.send("first")
    assert bench.gate.started() == ["first"]
    bench.send(*EIGHT[:7])
    bench.cancel("m3")
    bench.send("m7")
    bench.gate.go("kk")
    mates = [id for id in EIGHT if id != "m3"]
    assert bench.gate.started() == mates
    bench.assert_answered("first", *mates)
    bench.assert_nothing_left(8, 1)


def test_one_of_eight_mates_cancels_in_a_prepared_batch(bench: Bench) -> None:
    bench.send("first")
    assert bench.gate.started() == ["first"]
    bench.send(*EIGHT)
    assert bench.live("prepared") == 8, "a full batch is prepared beside the running one"
    bench.cancel("m0")
    assert bench.live("prepared") == 7
    bench.gate.go("kk")
    assert bench.gate.started() == EIGHT[1:]
    bench.assert_answered("first", *EIGHT[1:])
    bench.assert_nothing_left(8, 1)


def test_one_of_eight_mates_cancels_during_execution(bench: Bench) -> None:
    bench.send("first")
    assert bench.gate.started() == ["first"]
    bench.send(*EIGHT)
    bench.gate.go()
    assert bench.gate.reported() == []
    assert bench.gate.started() == EIGHT
    bench.calls["m5"].cancel()
    bench.gate.go("c")
    assert bench.gate.reported() == ["m5"], "the model is told"
    bench.assert_answered("first", *(id for id in EIGHT if id != "m5"))
    bench.assert_nothing_left(8, 1)


def test_one_of_eight_mates_cancels_after_execution(bench: Bench) -> None:
    bench.send("first")
    assert bench.gate.started() == ["first"]
    bench.send(*EIGHT)
    bench.gate.go("kk")
    bench.assert_answered("first", *EIGHT)
    bench.calls["m2"].cancel()
    bench.client.get_inference_statistics("gate")
    bench.assert_nothing_left(9, 0)


@pytest.mark.parametrize("bench", [(1, "")], indirect=True, ids=["no batching"])
def test_without_a_batcher_queued_and_prepared_requests_leave_as_well(bench: Bench) -> None:
    bench.send("r0")
    assert bench.gate.started() == ["r0"]
    bench.send("r1", "r2", "r3", "r4")
    bench.cancel("r1")  # prepared
    bench.cancel("r3")  # queued
    bench.gate.go("kkk")
    assert [bench.gate.started(), bench.gate.started()] == [["r2"], ["r4"]]
    bench.assert_answered("r0", "r2", "r4")
    bench.assert_nothing_left(3, 2)


def test_a_grpc_timeout_cancels_a_queued_request_and_no_other(bench: Bench) -> None:
    bench.send("r0")
    assert bench.gate.started() == ["r0"]
    bench.send("r1")
    with RawClient(bench.server.grpc) as late:  # whose deadline is the server's, from when it has the request
        late.start(1, request("gate", np.zeros((1, 2), np.int32)), extra=[("grpc-timeout", "500m")])
        late.sync()
        bench.send("r2")
        assert late.finish(1).status == 4, "DEADLINE_EXCEEDED"
    until(lambda: bench.count("fail") == 1, "the server has cancelled it")
    bench.gate.go("kk")
    assert bench.gate.started() == ["r1", "r2"]
    bench.assert_answered("r0", "r1", "r2")
    bench.assert_nothing_left(3, 1)


def post(server: ServerProcess, id: str) -> Http1:
    """An HTTP request on a connection of its own, not yet answered."""
    body = {"id": id, "inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]}]}
    made = Http1(server.http)
    made.start("POST", "/v2/models/gate/infer", json.dumps(body).encode())
    return made


def test_an_http_disconnect_cancels_a_queued_request(bench: Bench) -> None:
    bench.send("r0")
    assert bench.gate.started() == ["r0"]
    with post(bench.server, "gone"):
        until(lambda: bench.live("queued") == 1, "the HTTP request waits")
        bench.send("r1")
    until(lambda: bench.count("fail") == 1, "the disconnect is seen")
    bench.gate.go("kk")
    assert bench.gate.started() == ["r1"]
    bench.assert_answered("r0", "r1")
    bench.assert_nothing_left(2, 1)


def test_an_http_disconnect_is_reported_to_the_executing_model(bench: Bench) -> None:
    with post(bench.server, "gone"):
        assert bench.gate.started() == ["gone"]
    bench.gate.go("c")
    assert bench.gate.reported() == ["gone"]
    bench.assert_nothing_left(0, 1)


def test_the_end_of_a_stream_cancels_what_it_asked_for_and_nothing_else(bench: Bench) -> None:
    bench.send("r0")
    assert bench.gate.started() == ["r0"]
    with grpcclient.InferenceServerClient(bench.server.grpc) as other:
        other.start_stream(lambda result, error: None)
        for i in range(5):
            other.async_stream_infer("gate", tensor(), request_id=f"s{i}")
        until(lambda: bench.live("queued") == 5, "the stream's requests wait")
        bench.send("r1")
        other.stop_stream(cancel_requests=True)
        until(lambda: bench.count("fail") == 5, "the stream's requests are cancelled")
    bench.gate.go("kk")
    assert bench.gate.started() == ["r1"]
    bench.assert_answered("r0", "r1")
    bench.assert_nothing_left(2, 5)


@pytest.mark.slow
def test_a_client_that_is_going_away_does_not_hurt_a_large_answer(tmp_path: Path) -> None:
    """Responding: the model has answered, the client reads a little and vanishes."""
    write_model(tmp_path, "large", identity_config("TYPE_UINT8", "-1", 1, 1))
    with ServerProcess(tmp_path) as server:
        size = 32 << 20
        head = binary_head([1, size], "UINT8", size, parameters={"binary_data_output": True})
        lengths = {"Inference-Header-Content-Length": str(len(head))}
        with Http1(server.http) as client:
            client.start("POST", "/v2/models/large/infer", head + bytes(size), lengths)
            assert client.sock.recv(1024).startswith(b"HTTP/1.1 200 OK")
        found = stats(server, "large")
        assert found["inference_stats"]["success"]["count"] == 1
        assert found["live"]["accepted"] == found["live"]["inflight_bytes"] == 0


def test_a_model_fails_one_request_of_a_batch(bench: Bench) -> None:
    bench.send("first")
    assert bench.gate.started() == ["first"]
    bench.send(*EIGHT)
    bench.gate.go("k1")
    assert bench.gate.started() == EIGHT
    error = bench.result("m0")
    assert isinstance(error, InferenceServerException) and error.message() == "this one fails"
    bench.assert_answered("first", *EIGHT[1:])
    until(lambda: bench.live("accepted") == 0, "every request is answered")


def test_a_model_fails_a_whole_batch_and_serves_the_next(bench: Bench) -> None:
    bench.send("first")
    assert bench.gate.started() == ["first"]
    bench.send(*EIGHT)
    bench.gate.go("kf")
    assert bench.gate.started() == EIGHT
    for id in EIGHT:
        error = bench.result(id)
        assert isinstance(error, InferenceServerException)
        assert "ValueError: the whole batch fails" in str(error.message())
    bench.send("after")
    assert bench.gate.started() == ["after"]
    bench.gate.go()
    bench.assert_answered("first", "after")


VANISHING = """
import sys, time
import numpy as np
import tritonclient.grpc as grpcclient

client = grpcclient.InferenceServerClient(sys.argv[1])
client.start_stream(lambda result, error: None)
tensor = grpcclient.InferInput("INPUT0", [1, 2], "INT32")
tensor.set_data_from_numpy(np.zeros((1, 2), np.int32))
for i in range(1000):
    client.async_stream_infer("gate", [tensor], request_id=f"v{i}")
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_client_vanishes_with_a_thousand_queued_requests(bench: Bench) -> None:
    bench.send("r0")
    assert bench.gate.started() == ["r0"]
    client = subprocess.Popen([sys.executable, "-c", VANISHING, bench.server.grpc], stdin=subprocess.PIPE)
    until(lambda: bench.live("accepted") == 1001, "a thousand requests wait")
    bench.send("r1")
    client.send_signal(signal.SIGKILL)
    client.communicate()
    until(lambda: bench.live("accepted") == 2, "the vanished client's requests are cancelled")
    bench.gate.go()
    # at most the batch that was prepared for the vanished client may have begun: it had not
    assert bench.gate.started() == ["r1"]
    bench.gate.go()
    bench.assert_answered("r0", "r1")
    bench.assert_nothing_left(2, 1000)


@pytest.mark.parametrize(
    "bench",
    [(2, "dynamic_batching { default_queue_policy { max_queue_size: 5 } }")],
    indirect=True,
    ids=["full"],
)
def test_the_server_drains_with_a_full_queue(bench: Bench) -> None:
    bench.send("r0")
    assert bench.gate.started() == ["r0"]
    bench.send("r1", "r2", "r3", "r4", "r5")
    with pytest.raises(InferenceServerException, match="Exceeds maximum queue size"):
        bench.client.infer("gate", tensor())
    bench.server.process.send_signal(signal.SIGTERM)
    bench.gate.go("kkkk")
    bench.assert_answered("r0", "r1", "r2", "r3", "r4", "r5")
    assert bench.server.ended() == 0
