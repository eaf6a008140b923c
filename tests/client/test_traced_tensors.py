"""Level TENSORS: every datatype over both protocols, and the tensors that a sequence batcher adds."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from neptrio.datatypes import NUMBER
from tests.sequences.models import sequence_config
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

VALUES: dict[str, Any] = {
    "BOOL": (np.array([True, False, True], np.bool_), "1,0,1"),
    "UINT8": (np.array([0, 65, 255], np.uint8), "0,65,255"),
    "UINT16": (np.array([0, 1, 65535], np.uint16), "0,1,65535"),
    "UINT32": (np.array([0, 1, 4294967295], np.uint32), "0,1,4294967295"),
    "UINT64": (np.array([0, 1, 18446744073709551615], np.uint64), "0,1,18446744073709551615"),
    "INT8": (np.array([-128, 65, 127], np.int8), "-128,65,127"),
    "INT16": (np.array([-32768, 0, 32767], np.int16), "-32768,0,32767"),
    "INT32": (np.array([-2147483648, 0, 7], np.int32), "-2147483648,0,7"),
    "INT64": (np.array([-9223372036854775808, 0, 7], np.int64), "-9223372036854775808,0,7"),
    "FP16": (np.array([0.5, -2, 65504], np.float16), "0.5,-2.0,65500.0"),
    "FP32": (np.array([0.1, -2.5, 16777217], np.float32), "0.1,-2.5,16777216.0"),
    "FP64": (np.array([1e-9, -2.5, 1e300], np.float64), "1e-09,-2.5,1e+300"),
    "BYTES": (np.array([b"a,b", b'"', "ü".encode()], np.object_), '"a,b","\\"","ü"'),
    "BF16": (np.array([1.5, -3, 0], ml_dtypes.bfloat16), "1.5,-3.0,0.0"),
}
FIELDS = ("trace_level", "trace_rate", "trace_file")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    for name in VALUES:
        dtype = "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}"
        write_model(repository, name.lower(), identity_config(dtype, "3", 0, 1))
    write_model(repository, "direct", sequence_config("direct { }", 0))
    write_model(repository, "oldest", sequence_config("oldest { max_candidate_sequences: 4 }", 4))
    folder = tmp_path_factory.mktemp("traces")
    with ServerProcess(repository, f"--trace-dir={folder}") as process:
        process.folder = folder  # type: ignore[attr-defined]
        yield process


def on(client: Any, server: ServerProcess, name: str) -> Path:
    folder: Path = server.folder  # type: ignore[attr-defined]
    client.update_trace_settings(
        None, {"trace_level": ["TENSORS"], "trace_rate": "1", "trace_file": str(folder / name)}
    )
    return folder / name


def off(client: Any, path: Path) -> list[dict[str, Any]]:
    client.update_trace_settings(None, dict.fromkeys(FIELDS))
    found: list[dict[str, Any]] = json.loads(path.read_bytes())
    return found


def test_every_datatype_is_here() -> None:
    assert set(VALUES) == set(NUMBER)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_every_datatype(server: ServerProcess, protocol: str) -> None:
    module: Any = httpclient if protocol == "http" else grpcclient
    with module.InferenceServerClient(getattr(server, protocol)) as client:
        path = on(client, server, protocol)
        for name, (array, _) in VALUES.items():
            tensor = module.InferInput("INPUT0", [3], name)
            tensor.set_data_from_numpy(array)
            client.infer(name.lower(), [tensor])
        objects = off(client, path)
    found = {}
    for item in objects:
        if "activity" in item:
            found[(item["model_name"].upper(), item["activity"])] = item["tensor"]
    assert len(found) == 3 * len(VALUES)
    for name, (_, data) in VALUES.items():
        shown = {"dtype": "FP32", "source_dtype": "BF16"} if name == "BF16" else {"dtype": name}
        for activity, tensor in (
            ("TENSOR_QUEUE_INPUT", "INPUT0"),
            ("TENSOR_BACKEND_INPUT", "INPUT0"),
            ("TENSOR_BACKEND_OUTPUT", "OUTPUT0"),
        ):
            assert found[(name, activity)] == {"name": tensor, "data": data, "shape": "3", **shown}


@pytest.mark.parametrize("model", ["direct", "oldest"])
@pytest.mark.parametrize("protocol", ["http", "stream"])
def test_sequences(server: ServerProcess, model: str, protocol: str) -> None:
    module: Any = httpclient if protocol == "http" else grpcclient
    shape = [1] if model == "direct" else [1, 1]
    with module.InferenceServerClient(server.http if protocol == "http" else server.grpc) as client:
        path = on(client, server, f"{model}-{protocol}")
        if protocol == "stream":
            got: queue.Queue[Any] = queue.Queue()
            client.start_stream(lambda result, error: got.put(error))
        for i in range(3):
            tensor = module.InferInput("INPUT", shape, "INT32")
            tensor.set_data_from_numpy(np.full(shape, 10 + i, np.int32))
            of = {"sequence_id": 77, "sequence_start": i == 0, "sequence_end": i == 2, "request_id": str(i)}
            if protocol == "http":
                client.infer(model, [tensor], **of)
            else:
                client.async_stream_infer(model, [tensor], **of)
                assert got.get(timeout=60) is None
        if protocol == "stream":
            client.stop_stream()
        objects = off(client, path)
    heads = [item for item in objects if "activity" not in item]
    assert [head["request_id"] for head in heads] == ["0", "1", "2"]
    for i, head in enumerate(heads):
        own = [item for item in objects if item["id"] == head["id"] and "activity" in item]
        queued, given, answered = (
            {o["tensor"]["name"]: o["tensor"]["data"] for o in own if o["activity"] == f"TENSOR_{activity}"}
            for activity in ("QUEUE_INPUT", "BACKEND_INPUT", "BACKEND_OUTPUT")
        )
        assert queued == {"INPUT": str(10 + i)}  # what the client sent
        controls = {"START": str(int(i == 0)), "END": str(int(i == 2)), "READY": "1", "CORRID": "77"}
        assert given == {"INPUT": str(10 + i), **controls}  # and what the batcher added
        assert answered["OUTPUT"] == str(sum(range(10, 11 + i)))
