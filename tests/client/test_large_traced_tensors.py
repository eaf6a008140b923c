"""Traces of large tensors: copied by a thread, and still what they were when the request came."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio.observe import tensor_copier
from tests.support.embedded import EmbeddedServer
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

ELEMENTS = 300_000  # FP32: more than a MiB, so that the text is of a part of them
SHOWN = (1 << 20) // 4
NAMES = ("A", "B", "C")

WRITES = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            tensors = []
            for name in "ABC":
                array = pb_utils.get_input_tensor_by_name(request, name).as_numpy()
                array *= 2
                tensors.append(pb_utils.Tensor("OUT" + name, array))
                del array
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""


def config(isolation: str, batching: str = "") -> str:
    size = 4 if batching else 0
    inputs = ",".join(f'{{ name: "{name}" data_type: TYPE_FP32 dims: [ -1 ] }}' for name in NAMES)
    outputs = ",".join(f'{{ name: "OUT{name}" data_type: TYPE_FP32 dims: [ -1 ] }}' for name in NAMES)
    return (
        f'backend: "python" max_batch_size: {size} input [ {inputs} ] output [ {outputs} ] {batching} '
        f'parameters {{ key: "isolation" value {{ string_value: "{isolation}" }} }}'
    )


def arrays(shape: tuple[int, ...] = (ELEMENTS,)) -> dict[str, np.ndarray]:
    return {name: np.full(shape, index + 1, np.float32) for index, name in enumerate(NAMES)}


def inputs(module: Any, values: dict[str, np.ndarray]) -> list[Any]:
    made = []
    for name, array in values.items():
        tensor = module.InferInput(name, list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def identity_inputs(array: np.ndarray) -> list[Any]:
    tensor = httpclient.InferInput("INPUT0", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    return [tensor]


def check(trace: Path, shape: str) -> None:
    """The trace of one request: its inputs as they came, its outputs twice that, both cut off at a MiB."""
    found = {
        (item["activity"], item["tensor"]["name"]): item["tensor"]
        for item in json.loads(trace.read_bytes())
        if "activity" in item
    }
    assert len(found) == 9
    for (activity, name), tensor in found.items():
        value = NAMES.index(name.removeprefix("OUT")) + 1.0
        if activity == "TENSOR_BACKEND_OUTPUT":
            assert name.startswith("OUT")
            value *= 2
        assert (tensor["shape"], tensor["truncated_from"]) == (str(SHOWN), shape)
        assert tensor["data"] == ",".join([str(value)] * SHOWN), (activity, name)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("repository")
    for isolation in ("none", "process"):
        write_model(repository, f"writes_{isolation}", config(isolation), {"1/model.py": WRITES})
        write_model(
            repository,
            f"batched_{isolation}",
            config(isolation, "dynamic_batching { }"),
            {"1/model.py": WRITES},
        )
    folder = tmp_path_factory.mktemp("traces")
    with ServerProcess(repository, f"--trace-dir={folder}") as process:
        process.folder = folder  # type: ignore[attr-defined]
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("kind", ["writes", "batched"])
@pytest.mark.parametrize("isolation", ["none", "process"])
def test_a_model_that_writes_to_its_inputs(
    server: ServerProcess, isolation: str, kind: str, protocol: str
) -> None:
    module: Any = httpclient if protocol == "http" else grpcclient
    name = f"{kind}_{isolation}"
    values = arrays((1, ELEMENTS) if kind == "batched" else (ELEMENTS,))
    path = server.folder / f"{name}-{protocol}"  # type: ignore[attr-defined]
    with module.InferenceServerClient(getattr(server, protocol)) as client:
        client.update_trace_settings(
            name, {"trace_level": ["TENSORS"], "trace_rate": "1", "trace_file": str(path)}
        )
        result = client.infer(name, inputs(module, values))
        for key, array in values.items():
            np.testing.assert_array_equal(result.as_numpy(f"OUT{key}"), 2 * array)
        client.update_trace_settings(name, {"trace_level": ["OFF"]})
    check(path, ",".join(map(str, next(iter(values.values())).shape)))


class Held:
    """A server in this process whose copier waits at the gate."""

    def __init__(self, folder: Path) -> None:
        repository = folder / "repository"
        write_model(repository, "writes", config("none"), {"1/model.py": WRITES})
        write_model(repository, "identity", identity_config("TYPE_FP32", "-1", 0, 1))
        self.path = folder / "trace"
        self.server = EmbeddedServer(
            repository, trace_level=("TENSORS",), trace_rate="1", trace_file=str(self.path)
        )
        self.gate = threading.Event()
        self.copier = self.server.server.tracer.copier
        self.server.ask(partial(self.copier.behind, self.wait))

    def wait(self) -> None:
        assert self.gate.wait(60)

    def in_line(self) -> int:
        """Batches of the Python model that wait, -1 when none does: the first of them is not in the line."""
        model = next(m for m in self.server.server.repository.ready_models() if m.name == "writes")
        line = model.pool.instances[0].line
        return -1 if line is None else len(line)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    made = Held(tmp_path)
    try:
        yield made
    finally:
        made.gate.set()
        made.server.stop()


def test_batches_wait_until_their_inputs_are_copied(held: Held) -> None:
    values = arrays()
    got: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(held.server.grpc) as client:
        for _ in range(2):
            client.async_infer(
                "writes", inputs(grpcclient, values), callback=lambda result, error: got.put((result, error))
            )
        held.server.until(lambda: held.server.inflight() == 2, "both are there")
        assert held.server.ask(held.in_line) == 1
        # the loop serves others meanwhile, traced or not
        with httpclient.InferenceServerClient(held.server.http) as other:
            result = other.infer("identity", identity_inputs(values["C"]))
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), values["C"])
        assert held.server.ask(held.in_line) == 1 and held.copier.done == 0
        held.gate.set()
        for _ in range(2):
            result, error = got.get(timeout=60)
            assert error is None
            np.testing.assert_array_equal(result.as_numpy("OUTA"), 2 * values["A"])
        assert held.server.ask(held.in_line) == -1


def test_small_inputs_wait_for_nobody(held: Held) -> None:
    values = arrays((1000,))
    with httpclient.InferenceServerClient(held.server.http) as client:
        result = client.infer("writes", inputs(httpclient, values))
    np.testing.assert_array_equal(result.as_numpy("OUTB"), 2 * values["B"])
    assert held.copier.done == 0


@pytest.mark.slow
def test_a_cancelled_request_that_waits_is_answered(held: Held) -> None:
    values = arrays()
    with grpcclient.InferenceServerClient(held.server.grpc) as client:
        with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
            client.infer("writes", inputs(grpcclient, values), client_timeout=0.3)
        held.gate.set()
        held.server.until_idle()
        result = client.infer("writes", inputs(grpcclient, values))
    np.testing.assert_array_equal(result.as_numpy("OUTC"), 2 * values["C"])


@pytest.mark.slow
def test_tensors_are_left_out_when_too_many_wait(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    values = arrays()
    monkeypatch.setattr(tensor_copier, "MOST_BYTES", 4 * ELEMENTS)
    with httpclient.InferenceServerClient(held.server.http) as client:
        client.infer("identity", identity_inputs(values["A"]))
        held.gate.set()
        client.update_trace_settings(None, {"trace_level": ["OFF"]})
    found = {
        item["activity"]: item["tensor"] for item in json.loads(held.path.read_bytes()) if "activity" in item
    }
    assert found["TENSOR_QUEUE_INPUT"]["data"] == ",".join(["1.0"] * SHOWN)
    assert found["TENSOR_BACKEND_INPUT"] == found["TENSOR_QUEUE_INPUT"]
    left_out = found["TENSOR_BACKEND_OUTPUT"]
    assert (left_out["data"], left_out["shape"]) == ("", str(ELEMENTS))
    assert left_out["omitted"] == f"{4 * ELEMENTS} bytes of other tensors waited to be copied"
