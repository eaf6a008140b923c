"""A server that traces every request, and one request of every kind."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.sequences.models import sequence_config
from tests.support.gate import Gate
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.statistics import stats
from tests.support.waiting import until

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \u2028 & 'x\""


def ensemble(*steps: str) -> str:
    """The configuration of a pipeline of models of this module: IN to OUT, INT32 [16]."""
    callers = ("pipeline", "caller")  # their tensors are IN and OUT
    names = ["IN", *(f"between{i}" for i in range(1, len(steps))), "OUT"]
    made = ",".join(
        f'{{ model_name: "{model}" model_version: -1 '
        f'input_map {{ key: "{"IN" if model in callers else "INPUT0"}" value: "{names[i]}" }} '
        f'output_map {{ key: "{"OUT" if model in callers else "OUTPUT0"}" value: "{names[i + 1]}" }} }}'
        for i, model in enumerate(steps)
    )
    return (
        'platform: "ensemble" max_batch_size: 8 '
        'input [ { name: "IN" data_type: TYPE_INT32 dims: [ 16 ] } ] '
        'output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 16 ] } ] '
        f"ensemble_scheduling {{ step [ {made} ] }}"
    )


REPEAT = """
import ml_dtypes
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            sender = request.get_response_sender()
            for i in range(count):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([i], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
REPEAT_CONFIG = """
backend: "python" max_batch_size: 0 model_transaction_policy { decoupled: true }
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            tensor = pb_utils.Tensor("INPUT0", request.inputs()[0].as_numpy())
            call = pb_utils.InferenceRequest(
                model_name="single", requested_output_names=["OUTPUT0"], inputs=[tensor], trace=request.trace())
            out = call.exec().output_tensors()[0].as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]))
        return answers
"""
FAILING = """
class TritonPythonModel:
    def execute(self, requests):
        raise ValueError("no luck")
"""
ONE = """
backend: "python" max_batch_size: 8
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 16 ] } ]
"""
# datatype -> elements whose text form is difficult
HARD = {
    "BOOL": np.array([True, False, True, False]),
    "UINT8": np.array([0, 255, 10, 44], np.uint8),
    "UINT16": np.array([0, 65535, 1, 2], np.uint16),
    "UINT32": np.array([0, 2**32 - 1, 1, 2], np.uint32),
    "UINT64": np.array([0, 2**64 - 1, 2**63, 2], np.uint64),
    "INT8": np.array([-128, 127, 34, 92], np.int8),
    "INT16": np.array([-32768, 32767, 0, 1], np.int16),
    "INT32": np.array([-(2**31), 2**31 - 1, 0, 1], np.int32),
    "INT64": np.array([-(2**63), 2**63 - 1, 0, 1], np.int64),
    "FP16": np.array([1 / 3, np.nan, -np.inf, -0.0], np.float16),
    "FP32": np.array([1 / 3, np.nan, 1e-45, -0.0], np.float32),
    "FP64": np.array([1 / 3, 5e-324, np.inf, -0.0], np.float64),
    "BF16": np.array([1 / 3, 3e38, -1.5, -0.0], ml_dtypes.bfloat16),
    "BYTES": np.array([b'say "hi"', b"a,b\\", b"\xff\x00\n", "ü</script>".encode()], np.object_),
}


def write_models(repository: Path) -> None:
    """Writes the models of this module into a repository."""
    write_model(repository, "single", identity_config(pairs=1))
    write_model(repository, "cached", identity_config(pairs=1, extra="response_cache { enable: true }"))
    write_model(repository, "pipeline", ensemble("single", "single"))
    write_model(repository, "nested", ensemble("pipeline", "single"))
    write_model(repository, "repeat", REPEAT_CONFIG, {"1/model.py": REPEAT})
    write_model(repository, "caller", ONE, {"1/model.py": CALLER})
    write_model(repository, "failing", ONE, {"1/model.py": FAILING})
    write_model(repository, "sums", sequence_config("direct { }", 4))
    for name in HARD:
        dtype = "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}"
        write_model(repository, f"type_{name}", identity_config(dtype, "4", 0, 1))


def sixteen(module: Any, name: str = "INPUT0", start: int = 0) -> list[Any]:
    """An input INT32 [1,16] that counts up from `start`."""
    tensor = module.InferInput(name, [1, 16], "INT32")
    tensor.set_data_from_numpy(np.arange(start, start + 16, dtype=np.int32).reshape(1, 16))
    return [tensor]


def read(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a trace file."""
    found: list[dict[str, Any]] = json.loads(Path(path).read_bytes())
    return found


def switch_on(client: Any, path: str | Path, *level: str, **more: str) -> None:
    """Traces every request into `path`, with timestamps or with the given levels."""
    wanted = {"trace_level": list(level or ("TIMESTAMPS",)), "trace_rate": "1", "trace_file": str(path)}
    client.update_trace_settings(None, {**wanted, **more})


def switch_off(client: Any) -> None:
    """Ends tracing; the file is written when this returns."""
    client.update_trace_settings(None, {"trace_level": ["OFF"]})


def hard(module: Any, name: str) -> list[Any]:
    """The hard elements of a datatype."""
    tensor = module.InferInput("INPUT0", [4], name)
    tensor.set_data_from_numpy(HARD[name])
    return [tensor]


class Traced:
    """The server, and calls that leave traces."""

    def __init__(self, server: ServerProcess, gate: Gate, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.gate = gate

    def on(self, path: Path, *level: str, **more: str) -> None:
        """Traces every request into `path`, with timestamps or with the given levels."""
        with httpclient.InferenceServerClient(self.server.http) as client:
            switch_on(client, path, *level, **more)

    def off(self) -> None:
        """Ends tracing; the file is written when this returns."""
        with httpclient.InferenceServerClient(self.server.http) as client:
            switch_off(client)

    @contextmanager
    def tracing(self, path: Path, *level: str, **more: str) -> Iterator[Path]:
        """Traces the requests made inside the block into `path`."""
        self.on(path, *level, **more)
        try:
            yield path
        finally:
            self.off()

    def everything(self) -> None:
        """Makes one request of every kind; the request ids name them."""
        with httpclient.InferenceServerClient(self.server.http) as client:
            client.infer("single", sixteen(httpclient), request_id="http")
            for name in ("pipeline", "nested", "caller"):
                client.infer(name, sixteen(httpclient, "IN"), request_id=f"http {name}")
            for name in ("miss", "hit"):
                client.infer("cached", sixteen(httpclient), request_id=f"cache {name}")
            with pytest.raises(InferenceServerException, match="no luck"):
                client.infer("failing", sixteen(httpclient, "IN"), request_id="fails")
            client.infer("single", sixteen(httpclient), request_id=HOSTILE)
        with grpcclient.InferenceServerClient(self.server.grpc) as client:
            client.infer("single", sixteen(grpcclient), request_id="grpc")
            client.infer("pipeline", sixteen(grpcclient, "IN"), request_id="grpc pipeline")
            self.stream(client, "single", [(sixteen(grpcclient), {"request_id": "stream"})], 1)
            self.decoupled(client, 3)
            self.cancelled(client)

    def stream(self, client: Any, model: str, sent: list[tuple[Any, dict[str, Any]]], answers: int) -> None:
        """Sends requests over one stream and waits for `answers` responses."""
        got: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: got.put(error))
        for inputs, more in sent:
            client.async_stream_infer(model, inputs, **more)
        assert [got.get(timeout=60) for _ in range(answers)] == [None] * answers
        client.stop_stream()

    def decoupled(self, client: Any, count: int, request_id: str = "decoupled") -> None:
        """A request with `count` responses."""
        tensor = grpcclient.InferInput("IN", [1], "INT32")
        tensor.set_data_from_numpy(np.array([count], np.int32))
        self.stream(
            client, "repeat", [([tensor], {"request_id": request_id, "enable_empty_final_response": True})],
            count + 1,
        )  # fmt: skip

    def cancelled(self, client: Any) -> None:
        """A request that is cancelled while it executes."""
        tensor = grpcclient.InferInput("INPUT0", [1, 4], "INT32")
        tensor.set_data_from_numpy(np.zeros((1, 4), np.int32))
        answer: queue.Queue[Any] = queue.Queue()
        call = client.async_infer(
            "gate", [tensor], lambda result, error: answer.put(error), request_id="cancelled"
        )
        assert self.gate.started() == ["cancelled"]
        call.cancel()
        assert answer.get(timeout=60) is not None
        self.gate.go("c")
        self.gate.reported()
        # the request's end, and with it the trace's
        until(lambda: not stats(self.server, "gate")["live"]["accepted"], "its end")


@contextmanager
def traced_server(folder: Path) -> Iterator[Traced]:
    """A server with the models of this page; trace files may lie in `folder`."""
    repository = folder / "models"
    write_models(repository)
    gate = Gate(repository, folder / "gate", "gate", "")
    try:
        with ServerProcess(
            repository, f"--trace-dir={folder}", "--cache-config=local,size=1000000"
        ) as server:
            yield Traced(server, gate, folder)
    finally:
        gate.close()
