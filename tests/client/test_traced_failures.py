"""Traces of requests that their queue refused, that waited too long, or that were cancelled."""

from __future__ import annotations

import json
import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.support.gate import Gate
from tests.support.infer_messages import request
from tests.support.metrics import scrape, value
from tests.support.raw_http2 import RawClient
from tests.support.server import ServerProcess, without_front_ends
from tests.support.waiting import until

RECEIVED = ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "REQUEST_START"]
COMPUTE = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
SENT = ["INFER_RESPONSE_COMPLETE", "GRPC_SEND_START", "GRPC_SEND_END"]
LIMITS = "dynamic_batching { default_queue_policy { max_queue_size: 1 allow_timeout_override: true default_timeout_microseconds: 600000000 } }"


def inputs() -> list[Any]:
    tensor = grpcclient.InferInput("INPUT0", [1, 4], "INT32")
    tensor.set_data_from_numpy(np.zeros((1, 4), np.int32))
    return [tensor]


@pytest.mark.slow
@without_front_ends
def test_each_shows_the_stages_it_reached(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "models", tmp_path / "gate", "gate", LIMITS)
    path = tmp_path / "trace.json"
    flags = (f"--trace-config=triton,file={path}", "--trace-config=level=TIMESTAMPS", "--trace-config=rate=1")
    with ServerProcess(tmp_path / "models", *flags) as server:
        with grpcclient.InferenceServerClient(server.grpc) as client:
            answers: dict[str, queue.Queue[Any]] = {}

            def send(name: str, **more: Any) -> Any:
                answers[name] = queue.Queue()

                def took(result: Any, error: Any) -> None:
                    answers[name].put(error)

                return client.async_infer("gate", inputs(), took, request_id=name, **more)

            running = send("cancelled")
            assert gate.started() == ["cancelled"]
            send("late", timeout=1000)  # microseconds in the queue
            assert "imeout" in str(answers["late"].get(timeout=60))
            with RawClient(server.grpc) as raw:
                body = request("gate", np.zeros((1, 4), np.int32), request_id="deadline")
                assert raw.call(1, body, extra=[("grpc-timeout", "20m")]).status == 4
            send("waits")
            until(
                lambda: value(scrape(server), "neptrio_requests", model="gate", version="1", state="queued"),
                "it is queued",
            )
            with pytest.raises(InferenceServerException, match="maximum queue size"):
                client.infer("gate", inputs(), request_id="refused")
            running.cancel()
            assert answers["cancelled"].get(timeout=60) is not None
            gate.go("c")
            assert gate.started() == ["waits"]
            gate.go("k")
            assert answers["waits"].get(timeout=60) is None
    gate.close()
    traces = {trace["request_id"]: trace for trace in json.loads(path.read_bytes())}
    found = {name: [t["name"] for t in trace["timestamps"]] for name, trace in traces.items()}
    assert found == {
        "cancelled": [*RECEIVED, "QUEUE_START", *COMPUTE, "REQUEST_END"],
        "late": [*RECEIVED, "QUEUE_START", "REQUEST_END", *SENT],
        "waits": [*RECEIVED, "QUEUE_START", *COMPUTE, "REQUEST_END", *SENT],
        "refused": [*RECEIVED, "QUEUE_START", "REQUEST_END", *SENT[1:]],
        "deadline": [*RECEIVED, "QUEUE_START", "GRPC_SEND_START", "REQUEST_END", "GRPC_SEND_END"],
    }
    assert "cancelled" in traces["cancelled"]["error"].lower()
    assert "maximum queue size" in traces["refused"]["error"] and "error" not in traces["waits"]
