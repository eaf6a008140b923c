"""The protocol through Ray's proxies: what a client sees is what a server of ours shows it."""

from __future__ import annotations

import gzip
import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.ray.support import SECONDS, Ports, Rest, running, tensor, until_running
from tests.support.waiting import until


@pytest.fixture(scope="module")
def rest(cluster: Ports) -> Iterator[Rest]:
    with running(cluster, "tests.ray.models:make", num_replicas=2) as found:
        until_running(2)
        yield found


@pytest.fixture
def client(cluster: Ports, rest: Rest) -> Iterator[Any]:
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{cluster.grpc}") as found:
        yield found


def test_rest_of_an_unchanged_client(cluster: Ports, rest: Rest) -> None:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{cluster.http}") as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("double")
        assert "sequence" in client.get_server_metadata()["extensions"]
        assert client.get_model_config("double")["name"] == "double"
        numbers = np.arange(100_000, dtype=np.float32)
        answer = client.infer("double", [tensor(tritonclient.http, "x", numbers)])
        assert (answer.as_numpy("OUTPUT") == 2 * numbers).all()
        packed = client.infer(
            "double",
            [tensor(tritonclient.http, "x", numbers)],
            request_compression_algorithm="gzip",
            response_compression_algorithm="deflate",
        )
        assert (packed.as_numpy("OUTPUT") == 2 * numbers).all()
        with pytest.raises(InferenceServerException, match="unknown model") as refused:
            client.infer("none", [tensor(tritonclient.http, "x", numbers)])
        assert refused.value.status() == "404"


def test_answers_name_their_replica_and_come_from_all(rest: Rest) -> None:
    seen: set[str] = set()
    until(lambda: seen.add(rest.ask("/v2").replica) or len(seen) == 2, seen)
    assert seen == until_running(2)


def test_rest_streams(rest: Rest) -> None:
    body = {"inputs": [{"name": "n", "shape": [1], "datatype": "INT64", "data": [4]}]}
    answer = rest.ask("/v2/models/count/infer_stream", body)
    events = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line]
    assert [event["outputs"][0]["data"] for event in events if event["outputs"]] == [[0], [1], [2], [3]]
    assert answer.headers["content-type"].startswith("text/event-stream")


def test_rest_errors(rest: Rest) -> None:
    assert rest.ask("/v2/models/double/infer", b"{").status == 400
    assert rest.ask("/v3").status == 404
    assert rest.ask("/v2/models/double/infer").status == 405
    refused = rest.ask("/v2/repository/models/double/unload", {})
    assert refused.status == 403 and "user_config" in refused.json["error"]


def test_grpc_of_an_unchanged_client(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("double")
    assert client.get_model_metadata("total").name == "total"
    assert client.get_inference_statistics("double").model_stats[0].name == "double"
    numbers = np.arange(2_000_000, dtype=np.float32)
    answer = client.infer("double", [tensor(tritonclient.grpc, "x", numbers)])
    assert (answer.as_numpy("OUTPUT") == 2 * numbers).all()


def test_grpc_errors(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="unknown model") as refused:
        client.infer("none", [tensor(tritonclient.grpc, "x", np.ones(1, np.float32))])
    assert refused.value.status() == "StatusCode.NOT_FOUND"
    with pytest.raises(InferenceServerException, match="user_config") as denied:
        client.unload_model("double")
    assert denied.value.status() == "StatusCode.PERMISSION_DENIED"


def test_grpc_health_and_metadata(cluster: Ports, rest: Rest) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc}") as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        answer, call = check.with_call(b"", timeout=SECONDS)
        assert answer == b"\x08\x01"  # SERVING
        assert dict(call.trailing_metadata())["neptrio-replica"] in until_running(2)
        with pytest.raises(grpc.RpcError) as refused:
            next(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=SECONDS))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def answers_of(client: Any, send: Any, count: int) -> list[tuple[Any, Any]]:
    """What a stream answers to the requests that `send(client)` makes."""
    found: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: found.put((result, error)))
    try:
        send(client)
        return [found.get(timeout=SECONDS) for _ in range(count)]
    finally:
        client.stop_stream()


def test_grpc_streams_carry_any_number_of_requests_and_responses(client: Any) -> None:
    def send(client: Any) -> None:
        for n in (3, 2):
            client.async_stream_infer(
                "count", [tensor(tritonclient.grpc, "n", [n])], enable_empty_final_response=True
            )

    answers = answers_of(client, send, 7)
    assert all(error is None for _, error in answers)
    values = [r.as_numpy("OUTPUT") for r, _ in answers]
    assert sorted(int(v[0]) for v in values if v is not None) == [0, 0, 1, 1, 2]


def test_a_stream_answers_errors_and_goes_on(client: Any) -> None:
    def send(client: Any) -> None:
        client.async_stream_infer("none", [tensor(tritonclient.grpc, "x", np.ones(1, np.float32))])
        client.async_stream_infer("double", [tensor(tritonclient.grpc, "x", np.ones(1, np.float32))])

    (_, refused), (answer, error) = answers_of(client, send, 2)
    assert "unknown model" in str(refused) and error is None
    assert answer.as_numpy("OUTPUT").tolist() == [2]


@pytest.mark.parametrize("protocol", ["rest", "grpc", "stream"])
def test_a_client_that_leaves_cancels_its_request(
    cluster: Ports, rest: Rest, client: Any, protocol: str, tmp_path: Path
) -> None:
    mark = tmp_path / "running"
    text = np.array([str(mark)], object)
    if protocol == "rest":
        body = {"inputs": [{"name": "path", "shape": [1], "datatype": "BYTES", "data": [str(mark)]}]}
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", cluster.http)
        connection.request("POST", "/v2/models/wait/infer", json.dumps(body))
        until(mark.exists, "the model runs")
        connection.close()
    elif protocol == "grpc":
        inputs = [tensor(tritonclient.grpc, "path", text)]
        call = client.async_infer("wait", inputs, lambda result, error: None)
        until(mark.exists, "the model runs")
        call.cancel()
    else:
        client.start_stream(lambda result, error: None)
        client.async_stream_infer("wait", [tensor(tritonclient.grpc, "path", text)])
        until(mark.exists, "the model runs")
        client.stop_stream(cancel_requests=True)
    until(lambda: not mark.exists(), "the model saw that it was cancelled")


def test_a_prefix(cluster: Ports, rest: Rest) -> None:
    with running(cluster, "tests.ray.models:make", prefix="/some/place", app_name="second") as other:
        assert other.infer("double", x=("FP32", [2.0])).output() == 4
        assert other.ask("/v2/models/double").json["name"] == "double"
        body = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]})
        packed = gzip.compress(body.encode())
        assert other.ask("/v2/models/double/infer", packed, content_encoding="gzip").output() == 2
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{cluster.grpc}") as client:
            assert client.is_server_ready(headers={"application": "second"})
