"""`neptrio trace replay`: recorded by a real server, sent to the same one and to one with changed models."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient

from neptrio import commands
from neptrio.traces.replay import in_order
from tests.sequences import models as sequences
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.traced import HARD, REPEAT_CONFIG, Traced, hard, sixteen

CHANGED = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().copy()
            if array.dtype == object:
                array[1] = b"changed"
            else:
                array.reshape(-1)[3] += array.dtype.type(0.25 if array.dtype.kind == "f" else 4)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]))
        return answers
"""
FEWER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
FAILING = """
class TritonPythonModel:
    def execute(self, requests):
        raise ValueError("it fails now")
"""


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server on which models of the same names answer otherwise."""
    repository = tmp_path_factory.mktemp("changed")
    python = identity_config(pairs=1).replace('"identity"', '"python"')
    write_model(repository, "single", python, {"1/model.py": CHANGED})
    write_model(repository, "cached", python, {"1/model.py": FAILING})
    write_model(
        repository,
        "failing",
        python.replace("INPUT0", "IN").replace("OUTPUT0", "OUT").replace("python", "identity"),
    )
    write_model(repository, "repeat", REPEAT_CONFIG, {"1/model.py": FEWER})
    for name in ("FP32", "BYTES", "INT64"):
        kind = "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}"
        config = identity_config(kind, "4", 0, 1).replace('"identity"', '"python"')
        write_model(repository, f"type_{name}", config, {"1/model.py": CHANGED})
    write_model(repository, "type_INT8", identity_config("TYPE_INT8", "2,2", 0, 1))
    with ServerProcess(repository) as server:
        yield server


Replay = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Replay:
    def run(path: Path, server: ServerProcess, protocol: str, *more: str) -> tuple[int, list[str], str]:
        capsys.readouterr()
        url = server.http if protocol == "http" else server.grpc
        status = commands.run("trace", ["replay", str(path), "-u", url, "-i", protocol, *more])
        captured = capsys.readouterr()
        return status, captured.out.splitlines(), captured.err

    return run


@pytest.fixture(scope="module")
def datatypes(traced: Traced) -> Path:
    """A request of every datatype."""
    with traced.tracing(traced.folder / "datatypes.json", "TENSORS") as path:
        with httpclient.InferenceServerClient(traced.server.http) as client:
            for name in HARD:
                client.infer(f"type_{name}", hard(httpclient, name), request_id=name)
    return path


BOTH = pytest.mark.parametrize("protocol", ["http", "grpc"])


@BOTH
def test_every_datatype_is_as_recorded(
    datatypes: Path, traced: Traced, replay: Replay, protocol: str
) -> None:
    status, lines, warnings = replay(datatypes, traced.server, protocol, "--concurrency=4")
    n = len(HARD)
    assert lines == [
        f"{n} requests replayed: {n} as recorded, 0 different, 0 failed; 0 left out; {n} outputs compared"
    ]
    assert (status, warnings) == (0, "")


@BOTH
def test_every_kind_is_as_recorded(every_kind: Path, traced: Traced, replay: Replay, protocol: str) -> None:
    status, lines, warnings = replay(every_kind, traced.server, protocol)
    assert status == 0 and "was not answered when it was recorded (cancelled)" in warnings
    if protocol == "http":
        assert "its model is decoupled, which HTTP cannot ask: use -i grpc" in warnings
        assert lines[-1].startswith("11 requests replayed: 11 as recorded, 0 different, 0 failed; 2 left out")
    else:
        assert lines[-1].startswith("12 requests replayed: 12 as recorded, 0 different, 0 failed; 1 left out")


@pytest.mark.slow
@BOTH
def test_a_changed_model_is_found_out(
    every_kind: Path, changed: ServerProcess, replay: Replay, protocol: str
) -> None:
    flags = [f"--model={name}" for name in ("single", "cached", "failing", "repeat")]
    status, lines, _ = replay(every_kind, changed, protocol, *flags)
    assert status == 1
    by_id = {line.split("'")[1]: line.split(") ", 1)[-1] for line in lines if "(id " in line}
    different = "output 'OUTPUT0' [0, 3]: expected 3, got 7; 1 of 16 elements differ, the most by 4 at [0, 3]"
    assert all(lines[i].endswith(different) for i in (0, -3) if "single" in lines[i])
    singles = [line for line in lines if " of single " in line]
    assert len(singles) == 4 and all(line.endswith(different) for line in singles)
    assert "it fails now" in by_id["cache miss"] and by_id["cache miss"].startswith("failed: ")
    assert by_id["fails"].startswith("failed: it was answered; when it was recorded it failed: ")
    if protocol == "grpc":
        assert lines[-2].endswith("responses expected 3 responses, got 0")
        assert lines[-1].startswith("8 requests replayed: 0 as recorded, 5 different, 3 failed; 0 left out")
    else:
        assert lines[-1].startswith("7 requests replayed: 0 as recorded, 4 different, 3 failed; 1 left out")


@BOTH
def test_differences_by_datatype_and_tolerance(
    datatypes: Path, changed: ServerProcess, replay: Replay, protocol: str
) -> None:
    status, lines, warnings = replay(datatypes, changed, protocol, "--json", "--atol=0.25", "--rtol=1e-6")
    assert not warnings
    found = {row["request_id"]: row for row in map(json.loads, lines[:-1])}
    assert status == 1
    kinds = {name: row["result"] for name, row in found.items()}
    missing = {name: "failed" for name in HARD if name not in ("FP32", "BYTES", "INT64", "INT8")}
    assert kinds == {"BYTES": "different", "INT64": "different", "INT8": "failed", **missing}
    assert "unknown model" in found["FP64"]["failed"] and "shape" in found["INT8"]["failed"]
    (text,), (number,) = found["BYTES"]["differences"], found["INT64"]["differences"]
    assert (text["index"], text["expected"], text["got"]) == (
        [1],
        "b'a,b\\\\\\\\'".replace("\\\\\\\\", "\\\\"),
        "b'changed'",
    )
    assert (number["index"], number["expected"], number["got"], number["largest"]) == ([3], "1", "5", 4.0)
    summary = json.loads(lines[-1])
    assert (summary["same"], summary["different"]) == (1, 2)  # FP32 is within 0.25
    status, lines, _ = replay(datatypes, changed, protocol, "--model=type_FP32")
    assert (
        status == 1
        and "[3]: expected -0.0, got 0.25; 1 of 4 elements differ, the most by 0.25 at [3]" in lines[0]
    )


@pytest.fixture(scope="module")
def three_sequences(traced: Traced) -> Path:
    """Three interleaved sequences of four requests each: running sums."""
    with traced.tracing(traced.folder / "sequences.json", "TENSORS") as path:
        with httpclient.InferenceServerClient(traced.server.http) as client:
            for step in range(4):
                for number in (11, 12, 2**64 - 13):
                    client.infer(
                        "sums", sequences.tensors(httpclient, [number % 100 + step]), request_id=f"{number}.{step}",
                        sequence_id=number, sequence_start=step == 0, sequence_end=step == 3,
                    )  # fmt: skip
    return path


@BOTH
@pytest.mark.parametrize("concurrency", [1, 8])
def test_sequences_keep_their_order(
    three_sequences: Path, traced: Traced, replay: Replay, protocol: str, concurrency: int
) -> None:
    status, lines, warnings = replay(three_sequences, traced.server, protocol, f"--concurrency={concurrency}")
    assert lines[-1].startswith("12 requests replayed: "), lines
    # START, END and CORRID come back as they went; slots may be others
    assert [line for line in lines[:-1] if "'BATCH_SIZE'" not in line and "'POSITION'" not in line] == []
    assert not warnings and status in (0, 1)


def test_a_sequence_without_its_start_is_left_out(
    three_sequences: Path, traced: Traced, replay: Replay, tmp_path: Path
) -> None:
    items = json.loads(three_sequences.read_text())
    first = next(item["id"] for item in items if item.get("request_id") == "11.0")
    cut = tmp_path / "cut.json"
    cut.write_text(json.dumps([item for item in items if item["id"] != first]))
    _, lines, warnings = replay(cut, traced.server, "http", "--report=2")
    assert "8 requests replayed" in lines[-1] and "3 left out" in lines[-1]
    assert warnings.count("its sequence was not recorded from the start") == 1
    assert warnings.count("of its sequence was left out") == 1
    assert "... and 1 more skipped" in lines
    for item in items:  # a request in the middle that cannot be sent takes the rest with it
        if item.get("request_id") == "12.1":
            broken = item["id"]
    for item in items:
        if item["id"] == broken and item.get("activity") == "TENSOR_QUEUE_INPUT":
            item["tensor"]["truncated_from"] = "5,5"
    cut.write_text(json.dumps(items))
    _, lines, warnings = replay(cut, traced.server, "grpc")
    assert "9 requests replayed" in lines[-1] and "3 left out" in lines[-1]
    assert "were recorded (--trace-tensor-bytes)" in warnings
    assert warnings.count(f"request {broken} of its sequence was left out") == 2


@pytest.mark.slow
def test_what_was_cut_off(traced: Traced, replay: Replay, tmp_path: Path) -> None:
    """A server that records 16 bytes of a tensor: inputs above it are left out, outputs compared in part."""
    write_model(tmp_path / "models", "single", identity_config(pairs=1))
    write_model(tmp_path / "models", "mean", 'backend: "python" input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 2 ] } ] '
                'output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 3, 3 ] } ]',
                {"1/model.py": "import numpy as np\nimport triton_python_backend_utils as pb_utils\n"
                 "class TritonPythonModel:\n    def execute(self, requests):\n"
                 "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUTPUT0', np.arange(9, dtype=np.int32).reshape(3, 3))]) for r in requests]\n"})  # fmt: skip
    path = tmp_path / "t.json"
    flags = (f"--trace-config=triton,file={path}", "--trace-config=level=TENSORS", "--trace-config=rate=1",
             "--trace-tensor-bytes=16")  # fmt: skip
    with ServerProcess(tmp_path / "models", *flags) as server:
        with httpclient.InferenceServerClient(server.http) as client:
            client.infer("single", sixteen(httpclient))
            pair = httpclient.InferInput("INPUT0", [2], "INT32")
            pair.set_data_from_numpy(np.array([1, 2], np.int32))
            client.infer("mean", [pair])
            client.update_trace_settings(None, {"trace_level": ["OFF"]})
        status, lines, warnings = replay(path, server, "grpc")
        assert status == 0 and lines == [
            "1 requests replayed: 1 as recorded, 0 different, 0 failed; 1 left out; 1 outputs compared, 1 of them in part"
        ]
        assert (
            "input 'INPUT0': only its first 4 elements of [1,16] were recorded (--trace-tensor-bytes)"
            in warnings
        )
        status, lines, warnings = replay(path, server, "http", "--model=single")
        assert status == 2 and "no request of the trace could be replayed" in warnings
        items = json.loads(path.read_text())
        items[-1]["tensor"]["data"] = "0,1,2,4"
        path.write_text(json.dumps(items))
        status, lines, _ = replay(path, server, "http")
        assert status == 1 and "[1, 0]: expected 4, got 3; 1 of 4 elements differ" in lines[0]


def test_versions(every_kind: Path, traced: Traced, replay: Replay) -> None:
    assert replay(every_kind, traced.server, "http", "--model=single", "--model-version=recorded")[0] == 0
    status, lines, _ = replay(every_kind, traced.server, "grpc", "--model=single", "--model-version=7")
    assert status == 1 and all("failed: " in line for line in lines[:-1]) and len(lines) == 5


def test_what_cannot_be_done(every_kind: Path, traced: Traced, replay: Replay, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # so that nobody else listens there
        port = free.getsockname()[1]
        for protocol in ("http", "grpc"):
            arguments = ["replay", str(every_kind), "-i", protocol, "-u", f"127.0.0.1:{port}"]
            assert commands.run("trace", arguments) == 2
    assert commands.run("trace", ["replay", str(tmp_path / "none"), "-u", traced.server.http]) == 2
    assert replay(every_kind, traced.server, "http", "--model=nobody")[0] == 2
    stamps = tmp_path / "stamps.json"
    items = json.loads(every_kind.read_text())
    stamps.write_text(json.dumps([item for item in items if "activity" not in item]))
    status, _, warnings = replay(stamps, traced.server, "http", "--model=single")
    assert status == 2 and "its tensors were not recorded (trace level TENSORS)" in warnings
    with pytest.raises(SystemExit):
        replay(every_kind, traced.server, "http", "--rtol=-1")


@BOTH
def test_a_server_that_goes_away(every_kind: Path, capsys: pytest.CaptureFixture[str], protocol: str) -> None:
    """A listener that takes the first call and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            connection.recv(100)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"127.0.0.1:{listener.getsockname()[1]}"
        assert commands.run("trace", ["replay", str(every_kind), "-i", protocol, "-u", url]) == 2
        thread.join()
    assert f"cannot replay to {url}" in capsys.readouterr().err


def test_requests_are_put_in_order() -> None:
    rng = random.Random(3)
    items: list[dict[str, Any]] = [
        {"id": number, "model_name": "a" if number % 3 else "b"}
        for number in sorted(range(1, 2001), key=lambda number: number + rng.randrange(200))
    ]
    items += [{"id": 9999, "parent_id": 2, "model_name": "a"}]
    source = StringIO(json.dumps(items))
    assert [t.id for t in in_order(source, pytest.fail, frozenset())] == list(range(1, 2001))
    source.seek(0)
    assert [t.id for t in in_order(source, pytest.fail, frozenset({"b"}))] == list(range(3, 2001, 3))


def test_outputs_that_were_written_twice(
    every_kind: Path, traced: Traced, replay: Replay, tmp_path: Path
) -> None:
    """As a Triton server does of a cache miss; a decoupled model's are that many responses."""
    doubled = tmp_path / "doubled.json"
    items = []
    for item in json.loads(every_kind.read_text()):
        item.pop("response", None)
        items += [item] * (
            1 + (item.get("activity") == "TENSOR_BACKEND_OUTPUT" and item["model_name"] != "repeat")
        )
    doubled.write_text(json.dumps(items))
    status, lines, _ = replay(doubled, traced.server, "grpc", "--model=single", "--model=repeat")
    assert status == 0 and lines[-1].startswith("5 requests replayed: 5 as recorded")
