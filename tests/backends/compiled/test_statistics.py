"""The statistics of a model are what its backend reports of requests, executions and responses, to the nanosecond."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from tests.backends.compiled.asking import asked, numbers, text_of
from tests.support.metrics import scrape, value
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.slow

# what statistics.c reports of a request and of an execution: inputs, computation, outputs
REQUEST = (1000, 2001, 4002)
EXECUTION = (10, 21, 42)
STAGES = ("compute_input", "compute_infer", "compute_output")


class Counted:
    """The statistics of a model since this was made."""

    def __init__(self, client: Any, model: str) -> None:
        self._client, self._model = client, model
        self._before = self._read()

    def _read(self) -> Any:
        return self._client.get_inference_statistics(self._model)["model_stats"][0]

    def requests(self) -> dict[str, tuple[int, int]]:
        """stage -> (count, nanoseconds) of what has changed."""
        before, after = self._before.get("inference_stats", {}), self._read()["inference_stats"]
        found = {}
        for name, row in after.items():
            was = before.get(name, {"count": 0, "ns": 0})
            if row != was:
                found[name] = (row["count"] - was["count"], row["ns"] - was["ns"])
        return found

    def executions(self) -> dict[int, list[tuple[int, int]]]:
        """batch size -> (count, nanoseconds) of each stage of what has changed."""
        before = {row["batch_size"]: row for row in self._before.get("batch_stats", [])}
        found = {}
        for row in self._read()["batch_stats"]:
            was = before.get(row["batch_size"], {name: {"count": 0, "ns": 0} for name in STAGES})
            if row != was:
                found[row["batch_size"]] = [
                    (row[name]["count"] - was[name]["count"], row[name]["ns"] - was[name]["ns"])
                    for name in STAGES
                ]
        return found

    def count(self, name: str) -> int:
        return int(self._read().get(name, 0)) - int(self._before.get(name, 0))


def reported(counted: Counted) -> bool:
    """Whether one request has succeeded, with the times of statistics.c."""
    found = counted.requests()
    assert found["success"][0] == 1 and "fail" not in found
    return [found[name] for name in STAGES] == [(1, ns) for ns in REQUEST]


def test_a_request_and_its_execution_are_counted_as_they_are_reported(client: Any) -> None:
    counted = Counted(client, "probe")
    assert text_of(client, "stated success") == "done"
    assert reported(counted)
    assert counted.executions() == {1: [(1, ns) for ns in EXECUTION]}
    assert (counted.count("inference_count"), counted.count("execution_count")) == (1, 1)


def test_requests_of_a_batch_have_times_of_their_own(client: Any) -> None:
    counted = Counted(client, "batched")
    what = ("stated success", "stated failure of an answer", "stated success")
    waiting = [client.async_infer("batched", [numbers(5)], parameters={"do": each}) for each in what]
    for one in waiting:
        assert one.get_result().as_numpy("TEXT") is not None
    found = counted.requests()
    assert (found["success"][0], found["fail"][0]) == (2, 1)
    assert [found[name] for name in STAGES] == [(2, 2 * ns) for ns in REQUEST]


def test_whether_a_request_has_succeeded_is_what_the_backend_says(client: Any, server: ServerProcess) -> None:
    def failures() -> float:
        name = "nv_inference_request_failure"
        return value(scrape(server), name, model="probe", version="1", reason="BACKEND")

    counted, before = Counted(client, "probe"), failures()
    assert text_of(client, "stated failure of an answer") == "done"
    found = counted.requests()
    assert set(found) == {"fail"} and found["fail"][0] == 1
    assert counted.count("inference_count") == 0 and counted.count("execution_count") == 1
    assert failures() - before == 1

    counted = Counted(client, "probe")
    with pytest.raises(InferenceServerException, match="an error, and a success"):
        asked(client, "stated success of an error")
    assert reported(counted)


def test_a_request_is_reported_once(client: Any) -> None:
    counted = Counted(client, "probe")
    text = "3 TRITONBACKEND_ModelInstanceReportStatistics: the request was reported before"
    assert text_of(client, "stated twice") == text
    assert reported(counted)


def test_executions_count_as_often_as_they_are_reported(client: Any) -> None:
    counted = Counted(client, "probe")
    text_of(client, "stated in two executions")
    assert counted.executions() == {size: [(1, ns) for ns in EXECUTION] for size in (2, 3)}
    assert counted.count("execution_count") == 2


def test_times_that_cannot_be_harm_nobody(client: Any, server: ServerProcess) -> None:
    text_of(client, "stated endless")
    assert asked(client, "").as_numpy("OUT").tolist() == [[5]]
    assert "exited" not in server.log()


def test_what_is_reported_after_the_answer_counts_too(client: Any) -> None:
    for _ in range(20):
        counted = Counted(client, "probe")
        assert text_of(client, "stated late") == "held"
        until(lambda counted=counted: counted.requests())
        assert reported(counted)
        until(lambda counted=counted: counted.executions()[1] == [(1, ns) for ns in EXECUTION])
        assert counted.count("execution_count") == 1, "not as it was measured besides"


def test_what_is_answered_late_and_never_reported_counts_as_it_was_measured(client: Any) -> None:
    counted = Counted(client, "probe")
    assert text_of(client, "stated never, and answered late") == "held"
    until(lambda: counted.requests())
    assert counted.requests()["success"][0] == counted.requests()["compute_infer"][0] == 1
    assert counted.count("execution_count") == 1


def test_a_request_that_is_held_counts_when_it_is_released(client: Any) -> None:
    counted = Counted(client, "probe")
    asked(client, "keep")
    assert counted.requests() == {}
    asked(client, "look at kept")
    until(lambda: counted.requests()["success"][0] == 2)


def test_requests_of_a_decoupled_model_are_counted_as_they_are_reported(
    client: Any, server: ServerProcess
) -> None:
    made = grpc.InferInput("IN", [1, 1], "INT32")
    made.set_data_from_numpy(np.array([[1]], np.int32))
    for what in ("stated success", "stated late"):
        counted = Counted(client, "stream")
        with grpc.InferenceServerClient(server.grpc) as other:
            found: list[Any] = []
            other.start_stream(lambda result, error, found=found: found.append(error))
            other.async_stream_infer("stream", [made], parameters={"do": what})
            other.stop_stream()
        assert found == [None]
        until(lambda counted=counted: counted.requests())
        assert reported(counted), what
        until(lambda counted=counted: counted.executions() == {1: [(1, ns) for ns in EXECUTION]})
        assert counted.count("execution_count") == 1


def test_statistics_of_responses_are_those_that_the_backend_reports(client: Any) -> None:
    assert client.get_inference_statistics("batched")["model_stats"][0]["response_stats"] == {}
    texts = [text_of(client, "measured", model="batched") for _ in range(2)]
    order = "3 TRITONBACKEND_ModelInstanceReportResponseStatistics: response start, compute output start and response end"
    for text in texts:
        assert [part.startswith(order) for part in text.split("|")] == [True, True, False]
        assert "a model instance or a response factory" in text.split("|")[2]
    found = client.get_inference_statistics("batched")["model_stats"][0]["response_stats"]
    reported: list[dict[str, int]] = [
        {"compute_infer": 1000, "compute_output": 2000, "success": 3000},
        {"compute_infer": 500, "empty_response": 500},
        {"compute_infer": 700, "fail": 700},
        {"compute_infer": 10, "compute_output": 20, "fail": 30},
        {"cancel": 50},
    ]
    none = {"count": 0, "ns": 0}
    assert found == {
        str(i): {
            name: {"count": 2, "ns": 2 * row[name]} if name in row else none
            for name in ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
        }
        for i, row in enumerate(reported)
    }
