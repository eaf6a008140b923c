"""Requests that a backend gives back, to be executed again: iterative sequences."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from tests.backends.compiled.asking import asked, text_of
from tests.sequences.models import listing
from tests.support.server import ServerProcess
from tests.support.streams import Answers
from tests.support.waiting import until

pytestmark = pytest.mark.slow

WAYS = ("", ", made before the release", ", and keep a factory")


def number(value: int) -> list[Any]:
    made = grpc.InferInput("IN", [1, 1], "INT32")
    made.set_data_from_numpy(np.array([[value]], np.int32))
    return [made]


def test_a_request_is_executed_until_it_is_answered(client: Any) -> None:
    def executions() -> int:
        return int(client.get_inference_statistics("again")["model_stats"][0]["execution_count"])

    before = executions()
    assert text_of(client, "again", model="again") == "at the third time"
    assert executions() - before == 3


@pytest.mark.parametrize("how", WAYS)
def test_each_execution_of_a_decoupled_request_sends_a_response(
    client: Any, server: ServerProcess, how: str
) -> None:
    def counts(model: str) -> dict[str, int]:
        (row,) = client.get_inference_statistics(model)["model_stats"]
        return {
            name: int(row["inference_stats"].get(name, {}).get("count", 0)) for name in ("success", "fail")
        }

    begun, before = [5, 0, 30, 1], counts("countdown")
    found: dict[str, list[int]] = {}
    with grpc.InferenceServerClient(server.grpc) as other, Answers(other) as answers:
        for at, value in enumerate(begun):
            other.async_stream_infer(
                "countdown", number(value), request_id=str(at), parameters={"do": f"count down{how}"}
            )
        ended = 0
        while ended < len(begun):
            answer = answers.result()
            response = answer.get_response()
            found.setdefault(response.id, []).append(int(answer.as_numpy("OUT")[0, 0]))
            ended += response.parameters["triton_final_response"].bool_param
    assert found == {str(at): list(range(value, -1, -1)) for at, value in enumerate(begun)}
    until(lambda: listing(server, "countdown")["slots_used"] == 0)
    until(lambda: counts("countdown")["success"] - before["success"] == len(begun))
    assert counts("countdown")["fail"] == before["fail"]


def test_a_request_whose_client_has_left_is_not_executed_again(server: ServerProcess) -> None:
    with grpc.InferenceServerClient(server.grpc) as other:
        found: queue.Queue[Any] = queue.Queue()
        other.start_stream(lambda result, error: found.put(error or result))
        endless = number(2_000_000_000)
        other.async_stream_infer("countdown", endless, parameters={"do": "count down"})
        assert found.get(timeout=60).as_numpy("OUT").tolist() == [[2_000_000_000]]
        assert len(listing(server, "countdown")["sequences"]) == 1
        other.stop_stream(cancel_requests=True)
    until(lambda: not listing(server, "countdown")["sequences"], server.log)


def test_only_a_model_with_iterative_sequences_gives_requests_back(
    client: Any, server: ServerProcess
) -> None:
    text = "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE"
    with pytest.raises(InferenceServerException, match=text):
        asked(client, "again")
    with grpc.InferenceServerClient(server.grpc) as other, Answers(other) as answers:
        other.async_stream_infer("stream", number(1), parameters={"do": "again"})
        assert text in str(answers.error())
