"""Our tools and our metrics beside the real tritonserver: `neptrio top`, trace files, /metrics."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from benchmarks.tritonserver import home
from neptrio import commands
from tests.support import summary_rules
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.tritonserver import Tritonserver

pytestmark = pytest.mark.skipif(
    home() is None,
    reason="tritonserver is not installed: `make bench-peers`, or NEPTRIO_TRITONSERVER=ENVIRONMENT",
)
IDENTITY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", r.inputs()[0].as_numpy())]) for r in requests]
"""
ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 16 ] } ]
ensemble_scheduling { step [
  { model_name: "single" model_version: -1
    input_map { key: "INPUT0" value: "IN" } output_map { key: "OUTPUT0" value: "middle" } },
  { model_name: "single" model_version: -1
    input_map { key: "INPUT0" value: "middle" } output_map { key: "OUTPUT0" value: "OUT" } } ] }
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    write_model(
        folder, "single", identity_config(pairs=1).replace('"identity"', '"python"'), {"1/model.py": IDENTITY}
    )
    write_model(folder, "ensemble", ENSEMBLE)
    cached = identity_config(pairs=1, extra="response_cache { enable: true }").replace(
        '"identity"', '"python"'
    )
    write_model(folder, "cached", cached, {"1/model.py": IDENTITY})
    return folder


MEASURE = (
    "--cache-config=local,size=1048576",
    "--metrics-config=summary_latencies=true",
    "--metrics-config=counter_latencies=true",
)


@pytest.fixture(scope="module")
def theirs(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tritonserver]:
    folder = tmp_path_factory.mktemp("theirs")
    flags = (f"--trace-config=triton,file={folder}/trace", "--trace-config=level=TIMESTAMPS",
             "--trace-config=level=TENSORS", "--trace-config=rate=1", "--trace-config=triton,log-frequency=1")  # fmt: skip
    with Tritonserver(repository, folder, *MEASURE, *flags) as server:
        server.folder = folder  # type: ignore[attr-defined]
        yield server


def tensor(module: Any, name: str) -> list[Any]:
    made = module.InferInput(name, [1, 16], "INT32")
    made.set_data_from_numpy(np.arange(16, dtype=np.int32).reshape(1, 16))
    return [made]


def drive(server: Any) -> None:
    """Three requests of each model over HTTP, two over gRPC."""
    with httpclient.InferenceServerClient(server.http) as client:
        for _ in range(3):
            client.infer("single", tensor(httpclient, "INPUT0"), request_id="r")
            client.infer("ensemble", tensor(httpclient, "IN"))
            client.infer("cached", tensor(httpclient, "INPUT0"))
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for _ in range(2):
            client.infer("single", tensor(grpcclient, "INPUT0"))
            client.infer("ensemble", tensor(grpcclient, "IN"))


def scrape(server: Any) -> str:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as answer:
        return str(answer.read().decode())


def test_top(theirs: Tritonserver, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run("top", [theirs.http, "--once", "--interval=0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:5] == ["MODEL", "VER", "REQ/S", "INF/S", "BATCH"] and "AVG REQUEST" in lines[2]
    assert [line.split()[:2] for line in lines[3:6]] == [
        ["cached", "1"], ["ensemble", "1"], ["single", "1"]
    ]  # fmt: skip
    assert commands.run("top", [theirs.http, "--once", "--interval=0.1", "--model=nope"]) == 1
    assert "nope" in capsys.readouterr().err


def test_metrics_are_called_and_labelled_the_same(theirs: Tritonserver, repository: Path) -> None:
    drive(theirs)
    with ServerProcess(repository, *MEASURE) as ours:
        drive(ours)
        mine = scrape(ours)
    text = scrape(theirs)
    described = {line for line in text.splitlines() if line.startswith("#")}
    assert described and described - set(mine.splitlines()) == set()  # names, types and help texts

    def series(scraped: str) -> dict[str, float]:
        rows = (line.rsplit(" ", 1) for line in scraped.splitlines() if line.startswith("nv_"))
        return {name: float(number) for name, number in rows}

    they, we = series(text), series(mine)
    assert they.keys() - we.keys() == set()
    assert {re.split("[{ ]", name)[0] for name in we.keys() - they.keys()} == {
        "nv_model_load_duration_secs"
    }  # of newer ones
    counted = re.compile(
        r"nv_inference_(request_success|request_failure|count|exec_count|pending_request_count)\b"
    )
    same = {name for name in they if counted.match(name)}
    same |= {"nv_pinned_memory_pool_total_bytes", "nv_pinned_memory_pool_used_bytes"}
    assert len(same) > 12 and {name: we[name] for name in same} == {name: they[name] for name in same}


def test_their_trace_files(theirs: Tritonserver, repository: Path, tmp_path: Path,
                           capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    drive(theirs)
    with httpclient.InferenceServerClient(theirs.http) as client:
        client.update_trace_settings(None, {"trace_level": ["OFF"]})
    files = sorted(str(file) for file in theirs.folder.glob("trace.*"))  # type: ignore[attr-defined]
    assert len(files) >= 9  # of ten requests and those of other tests; the last may not be there yet
    single = [name for name in files if len(summary_rules.load(Path(name))) == 1]
    capsys.readouterr()
    assert commands.run("trace", ["summary", *files]) == 0
    captured = capsys.readouterr()
    assert not captured.err and captured.out.count("Data Flow:") == len(files)
    assert captured.out.count("Summary for ensemble (1): trace count = 1") == len(files) - len(single) > 3
    assert (
        "HTTP requests with steps (avg handler time):" in captured.out
        and "GRPC infer request" in captured.out
    )
    page = tmp_path / "page.html"
    assert commands.run("trace", ["view", "-o", str(page), *files]) == 0
    assert f"{len(files)} of {len(files)} requests" in capsys.readouterr().out
    for name in files:
        out = tmp_path / "events"
        assert commands.run("trace", ["export", "-o", str(out), name]) == 0
        events = json.loads(out.read_text())["traceEvents"]
        assert sum(event.get("cat") == "request" for event in events) == (1 if name in single else 3)
    capsys.readouterr()
    with ServerProcess(repository) as ours:
        for target in (theirs, ours):
            for protocol, url in (("http", target.http), ("grpc", target.grpc)):
                assert commands.run("trace", ["replay", "-i", protocol, "-u", url, *files]) == 0
                n = len(files)
                assert f"{n} requests replayed: {n} as recorded, 0 different" in capsys.readouterr().out
