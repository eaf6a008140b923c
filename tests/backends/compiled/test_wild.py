"""What no backend should do costs an error, not the process with the requests that others have in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from tests.backends.compiled.asking import asked, text_of
from tests.support.memory import resident
from tests.support.sanitizer import no_memory_figures
from tests.support.server import ServerProcess
from tests.support.streams import Answers
from tests.support.waiting import until

pytestmark = pytest.mark.slow


def test_memory_that_there_cannot_be(client: Any) -> None:
    def reported() -> list[tuple[str, str, int]]:
        rows = client.get_inference_statistics("probe")["model_stats"][0].get("memory_usage", [])
        return [(row["type"], row["id"], row["byte_size"]) for row in rows if row["type"] != "CPU"]

    assert text_of(client, "wild memory").split("|") == [
        "3 TRITONBACKEND_ModelReportMemoryUsage: there is no GPU -1",
        "3 TRITONBACKEND_ModelReportMemoryUsage: there is no such kind of memory",
    ]
    # the CPU's is measured, and what is page-locked is no device's
    until(lambda: sorted(reported()) == [("CPU_PINNED", 0, (1 << 62) - 1), ("GPU", 1, 77)])
    text_of(client, "wild no memory")
    until(lambda: reported() == [])


def test_sizes_that_are_no_array_s(client: Any) -> None:
    assert text_of(client, "wild sizes").split("|") == [
        "3 TRITONBACKEND_ResponseOutput: there are no tensors of 4294967295 dimensions",
        "3 TRITONBACKEND_StateNew: there are no tensors of 4294967295 dimensions",
        "3 TRITONSERVER_InferenceRequestAddInput: there are no tensors of 18446744073709551615 dimensions",
        "3 TRITONSERVER_InferenceRequestAppendInputData: there are no 18446744073709551615 bytes",
        "3 TRITONSERVER_MessageNewFromSerializedJson: there are no 18446744073709551615 bytes",
        "3 TRITONSERVER_MetricArgsSetHistogram: more than 10000 buckets",
    ]


@pytest.mark.parametrize(
    ("what", "status", "message"),
    [
        ("empty", "500", "the backend's output 'OUT' cannot be used: a dimension is negative or too large"),
        ("code", "400", "it has failed"),
    ],
)
def test_an_answer_that_cannot_be(client: Any, what: str, status: str, message: str) -> None:
    with pytest.raises(InferenceServerException) as failed:
        asked(client, f"wild {what}")
    assert (failed.value.status(), failed.value.message()) == (status, message)


@no_memory_figures
def test_an_answer_to_a_request_that_is_then_refused_takes_no_memory(client: Any) -> None:
    def refused(times: int) -> int:
        for _ in range(times):
            with pytest.raises(InferenceServerException, match="not today"):
                asked(client, "refuse the answered")
        return resident(process)

    process = int(text_of(client, "wild process"))
    before = refused(20)
    assert refused(100) - before < 50 << 20  # a MiB each


def test_the_rest_of_a_batch_is_refused_when_one_is_answered(server: ServerProcess) -> None:
    made = grpc.InferInput("IN", [1, 1], "INT32")
    made.set_data_from_numpy(np.array([[5]], np.int32))
    with grpc.InferenceServerClient(server.grpc) as client, Answers(client) as answers:
        for id in "ab":
            client.async_stream_infer("streams", [made], request_id=id, parameters={"do": "refuse the rest"})
        first, second = answers.next(), answers.next()
    assert first.as_numpy("TEXT")[0, 0] == b"the first"
    assert second.message().endswith("not today")
