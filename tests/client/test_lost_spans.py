"""Trace mode opentelemetry: spans that cannot be sent take no others with them, and traces that are dropped are counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.client.test_opentelemetry import INSIDE, SPY_CONFIG, number, opentelemetry, quiet_server
from tests.support.collector import Collector
from tests.support.metrics import scrape, value
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.traced import sixteen
from tests.support.waiting import until

# does to its span what its input says, where that is not 0
ODD = """
import numpy as np
import triton_python_backend_utils as pb_utils
from opentelemetry import trace

DEEDS = (
    lambda span: span.add_event("\\udc80"),
    lambda span: span.add_event("early", timestamp=-5),
    lambda span: span.add_event("late", timestamp="tomorrow"),
    lambda span: span.update_name(7),
    lambda span: span.set_status(trace.StatusCode.ERROR, "\\udc80"),
    lambda span: span.add_link(None),
    lambda span: trace.get_tracer("odd").start_span("\\udc80").end(),
    lambda span: [span.add_event(f"event {i}") for i in range(1000)],
)

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            which = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            if which:
                DEEDS[which - 1](trace.get_current_span())
        out = pb_utils.Tensor("OUT", np.array([b"done"], np.object_))
        return [pb_utils.InferenceResponse([out]) for _ in requests]
"""
DEEDS = 8


@pytest.mark.slow
def test_a_span_that_cannot_be_encoded_takes_no_others_with_it(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "odd", SPY_CONFIG + INSIDE, {"1/model.py": ODD})
    with Collector() as own:
        # one batch holds them all
        flags = opentelemetry(
            own.url, "--trace-config=rate=1", "--trace-config=opentelemetry,bsp_schedule_delay=600000"
        )
        with ServerProcess(tmp_path / "models", *flags) as server:
            with httpclient.InferenceServerClient(server.http) as client:
                for which in range(DEEDS + 1):
                    [tensor] = number(httpclient)
                    tensor.set_data_from_numpy(np.array([which], np.int32))
                    client.infer("odd", [tensor])
            assert server.stop() == 0
            server.until_logged("is left out: it cannot be sent")
            assert "spans do not reach" not in server.log()
        sent = Counter(span.name for span in own.spans)
        assert sent["InferRequest"] == sent["compute"] == DEEDS + 1
        assert (
            sent["odd"] >= 3
        )  # the ordinary one, and at least those with an event without a time and with many events
        most = max((span for span in own.spans if span.name == "odd"), key=lambda span: len(span.events))
        assert [event.name for event in most.events if event.name.startswith("event ")] == [
            f"event {i}" for i in range(1000 - 128, 1000)
        ]


@pytest.mark.slow
def test_what_a_slow_collector_takes_not_is_dropped_whole_and_counted(tmp_path: Path) -> None:
    count = 100
    with Collector() as own:
        own.answers.clear()
        with quiet_server(tmp_path, own.url, "--trace-config=opentelemetry,bsp_max_queue_size=8") as server:
            with httpclient.InferenceServerClient(server.http) as client:
                for _ in range(count):
                    client.infer("single", sixteen(httpclient))

            def outcome(name: str) -> float:
                return value(scrape(server), "neptrio_traces_total", outcome=name)

            until(lambda: outcome("dropped") >= count - 6, "what has no place is counted")
            own.answers.set()
            until(lambda: outcome("written") + outcome("dropped") == count, "every trace is counted once")
            written = outcome("written")
            assert server.stop() == 0
        sent = Counter(span.trace_id for span in own.spans)
        assert len(sent) == written and set(sent.values()) == {3}
