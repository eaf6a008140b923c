"""Tracing as a user sees it: switched on over both protocols, read from the files."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio import commands
from tests.support.metrics import scrape, value
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.streams import Answers
from tests.support.traced import (
    CALLER,
    FAILING,
    ONE,
    REPEAT,
    REPEAT_CONFIG,
    ensemble,
    read,
    sixteen,
    switch_off,
    switch_on,
)
from tests.support.waiting import until

HTTP = ["HTTP_RECV_START", "HTTP_RECV_END"]
GRPC = ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END"]
REQUEST = ["REQUEST_START", "QUEUE_START"]
COMPUTE = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    write_model(repository, "identity", identity_config())
    write_model(repository, "single", identity_config(pairs=1))
    write_model(repository, "text", identity_config("TYPE_STRING", "2", 0, 1))
    write_model(repository, "cached", identity_config(pairs=1, extra="response_cache { enable: true }"))
    write_model(repository, "number", identity_config(dims="1", max_batch_size=0, pairs=1))
    write_model(repository, "ensemble", ensemble("single", "single"))
    write_model(repository, "repeat", REPEAT_CONFIG, {"1/model.py": REPEAT})
    write_model(repository, "caller", ONE, {"1/model.py": CALLER})
    write_model(repository, "failing", ONE, {"1/model.py": FAILING})
    folder = tmp_path_factory.mktemp("traces")
    with ServerProcess(repository, f"--trace-dir={folder}", "--cache-config=local,size=1000000") as process:
        process.folder = folder  # type: ignore[attr-defined]
        yield process


@pytest.fixture
def trace_file(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[str]:
    """A path for the test's traces; every setting is cleared afterwards."""
    folder: Path = server.folder  # type: ignore[attr-defined]
    yield str(folder / request.node.name.replace("[", "-").rstrip("]"))
    with httpclient.InferenceServerClient(server.http) as client:
        cleared = dict.fromkeys(("trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file"))
        client.update_trace_settings(None, cleared)
        for model in ("single", "identity"):
            client.update_trace_settings(model, cleared)


def names(trace: dict[str, Any]) -> list[str]:
    times = [t["ns"] for t in trace["timestamps"]]
    assert times == sorted(times) and times[0] > 0
    return [t["name"] for t in trace["timestamps"]]


def sent(front: str) -> list[str]:
    return ["INFER_RESPONSE_COMPLETE", f"{front}_SEND_START", f"{front}_SEND_END"]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_settings_of_both_protocols(server: ServerProcess, trace_file: str, protocol: str) -> None:
    module: Any = httpclient if protocol == "http" else grpcclient
    plain = {} if protocol == "http" else {"as_json": True}

    def values(settings: Any) -> dict[str, Any]:
        if protocol == "http":
            return dict(settings)
        got = {key: item["value"] for key, item in settings["settings"].items()}
        return {key: value if key == "trace_level" else value[0] for key, value in got.items()}

    start = {"trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0",
             "trace_file": trace_file, "trace_mode": "triton"}  # fmt: skip
    with module.InferenceServerClient(getattr(server, protocol)) as client:
        assert values(client.update_trace_settings(None, {"trace_file": trace_file}, **plain)) == start
        client.update_trace_settings("single", {"trace_rate": "7"})
        client.update_trace_settings(None, {"trace_rate": "9", "trace_count": "4"})
        assert values(client.get_trace_settings("single", **plain)) == {
            **start,
            "trace_rate": "7",
            "trace_count": "4",
        }
        client.update_trace_settings("single", {"trace_rate": None})
        assert values(client.get_trace_settings("single", **plain))["trace_rate"] == "9"
        for model, settings, message in (
            ("", {"trace_rate": "x"}, "Unable to parse 'trace_rate', got: x"),
            ("nope", {"trace_rate": "1"}, "Request for unknown model : nope"),
            ("", {"trace_file": "/etc/trace"}, "outside the trace directory"),
            ("", {"log_frequency": "5", "trace_level": ["TENSORS"], "trace_rate": "0"},
             "Attempting to set invalid trace setting :sample rate must be non-zero"),
        ):  # fmt: skip
            with pytest.raises(InferenceServerException, match=message) as info:
                client.update_trace_settings(model, settings)
            assert info.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
        assert values(client.get_trace_settings(**plain))["log_frequency"] == "0"  # all or nothing


def test_http_request(server: ServerProcess, trace_file: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        switch_on(client, trace_file)
        client.infer("single", sixteen(httpclient), request_id='my "id"')
        switch_off(client)
    (trace,) = read(trace_file)
    assert (
        trace["model_name"] == "single" and trace["model_version"] == 1 and trace["request_id"] == 'my "id"'
    )
    assert "parent_id" not in trace and "error" not in trace
    assert names(trace) == [*HTTP, *REQUEST, *COMPUTE, "REQUEST_END", *sent("HTTP")]


@pytest.mark.parametrize("stream", [False, True])
def test_grpc_request(server: ServerProcess, trace_file: str, stream: bool) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        switch_on(client, trace_file)
        if stream:
            with Answers(client) as answers:
                for _ in range(2):
                    client.async_stream_infer("single", sixteen(grpcclient))
                answers.results(2)
        else:
            client.infer("single", sixteen(grpcclient))
        switch_off(client)
    traces = read(trace_file)
    assert len(traces) == (2 if stream else 1)
    for trace in traces:
        assert names(trace) == [*GRPC, *REQUEST, *COMPUTE, "REQUEST_END", *sent("GRPC")]


def test_ensemble_is_one_trace_of_three_parts(server: ServerProcess, trace_file: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        switch_on(client, trace_file, trace_count="2")
        for _ in range(3):
            client.infer("ensemble", sixteen(httpclient, "IN"))
        assert client.get_trace_settings()["trace_count"] == "0"
        switch_off(client)
    traces = read(trace_file + ".0")  # the count was used up
    roots = [t for t in traces if "parent_id" not in t]
    assert [t["model_name"] for t in roots] == ["ensemble", "ensemble"] and len(traces) == 6
    for root in roots:
        assert names(root) == [*HTTP, *REQUEST, "REQUEST_END", *sent("HTTP")]
        steps = [t for t in traces if t.get("parent_id") == root["id"]]
        assert [names(t) for t in steps] == [[*REQUEST, *COMPUTE, "REQUEST_END"]] * 2
        assert all(t["id"] > root["id"] and t["model_name"] == "single" for t in steps)


def test_bls_call_is_a_child(server: ServerProcess, trace_file: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        switch_on(client, trace_file)
        client.infer("caller", sixteen(httpclient, "IN"))
        switch_off(client)
    root, child = read(trace_file)
    assert (root["model_name"], child["model_name"]) == ("caller", "single")
    assert child["parent_id"] == root["id"] < child["id"]
    assert names(child) == [*REQUEST, *COMPUTE, "REQUEST_END"]


def test_decoupled_responses_one_by_one(server: ServerProcess, trace_file: str) -> None:
    tensor = grpcclient.InferInput("IN", [1], "INT32")
    tensor.set_data_from_numpy(np.array([3], np.int32))
    with grpcclient.InferenceServerClient(server.grpc) as client:
        switch_on(client, trace_file)
        with Answers(client) as answers:
            client.async_stream_infer("repeat", [tensor], enable_empty_final_response=True)
            answers.results(4)
        switch_off(client)
    (trace,) = read(trace_file)
    found = names(trace)
    assert [found.count(name) for name in (*sent("GRPC"), "REQUEST_END")] == [3, 3, 3, 1]


def test_failed_and_cached_requests(server: ServerProcess, trace_file: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        switch_on(client, trace_file)
        with pytest.raises(InferenceServerException, match="no luck"):
            client.infer("failing", sixteen(httpclient, "IN"))
        client.infer("cached", sixteen(httpclient))
        client.infer("cached", sixteen(httpclient))
        with pytest.raises(InferenceServerException):
            client.infer("nope", sixteen(httpclient))  # never accepted: no trace
        switch_off(client)
    failed, missed, hit = read(trace_file)
    assert "no luck" in failed["error"]
    assert names(failed) == [*HTTP, *REQUEST, *COMPUTE, "REQUEST_END", *sent("HTTP")]
    assert names(missed) == names(failed)
    assert names(hit) == [*HTTP, *REQUEST, "REQUEST_END", *sent("HTTP")]


def test_tensors(server: ServerProcess, trace_file: str) -> None:
    text = httpclient.InferInput("INPUT0", [2], "BYTES")
    text.set_data_from_numpy(np.array([b'say "hi"', b"a,b"], dtype=np.object_))
    with httpclient.InferenceServerClient(server.http) as client:
        switch_on(client, trace_file, "TENSORS")
        client.infer("single", sixteen(httpclient))
        client.infer("text", [text])
        switch_off(client)
    objects = read(trace_file)
    assert [o.get("activity") for o in objects] == [
        None,
        "TENSOR_QUEUE_INPUT",
        "TENSOR_BACKEND_INPUT",
        "TENSOR_BACKEND_OUTPUT",
    ] * 2
    assert all("timestamps" not in o for o in objects)
    assert objects[3]["tensor"] == {
        "name": "OUTPUT0",
        "data": ",".join(map(str, range(16))),
        "shape": "1,16",
        "dtype": "INT32",
    }
    assert objects[5]["tensor"]["data"] == '"say \\"hi\\"","a,b"' and objects[5]["tensor"]["shape"] == "2"


def test_rate_and_files_by_log_frequency(server: ServerProcess, trace_file: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        switch_on(client, trace_file, trace_rate="2", log_frequency="2")
        for i in range(10):
            client.infer(
                "identity", [*sixteen(httpclient), *sixteen(httpclient, "INPUT1")], request_id=str(i + 1)
            )
        switch_off(client)
    found = [[t["request_id"] for t in read(f"{trace_file}.{i}")] for i in range(3)]
    assert found == [["2", "4"], ["6", "8"], ["10"]]  # the last at the change of settings
    assert not Path(trace_file).exists()


def test_model_without_tracing_stays_out(server: ServerProcess, trace_file: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        switch_on(client, trace_file)
        client.update_trace_settings("single", {"trace_level": ["OFF"]})
        client.infer("single", sixteen(httpclient))
        client.infer("cached", sixteen(httpclient))
        switch_off(client)
    assert [t["model_name"] for t in read(trace_file)] == ["cached"]


def test_count_is_exact_under_concurrency(server: ServerProcess, trace_file: str) -> None:
    with httpclient.InferenceServerClient(server.http, concurrency=8) as client:
        switch_on(client, trace_file, trace_count="17")
        for call in [client.async_infer("single", sixteen(httpclient)) for _ in range(60)]:
            call.get_result()
        assert client.get_trace_settings()["trace_count"] == "0"
        switch_off(client)
    assert len(read(trace_file + ".0")) == 17


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_generate_is_sent_after_its_response_is_there(
    server: ServerProcess, trace_file: str, verb: str
) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        switch_on(client, trace_file)
        with urllib.request.urlopen(
            f"http://{server.http}/v2/models/number/{verb}", b'{"INPUT0": 5}'
        ) as reply:
            assert json.loads(reply.read().removeprefix(b"data: "))["OUTPUT0"] == 5
        switch_off(client)
    (trace,) = read(trace_file)
    assert names(trace)[:2] == HTTP and names(trace)[-3:] == sent("HTTP")
    there, start, end = [t["ns"] for t in trace["timestamps"][-3:]]
    assert there < start < end  # made by one task, sent by another


def test_hypercorn(tmp_path: Path) -> None:
    flags = (f"--trace-config=triton,file={tmp_path}/t", "--trace-config=level=TIMESTAMPS",
             "--trace-config=rate=1", "--http-lean=false")  # fmt: skip
    with run_server(tmp_path, *flags) as server, httpclient.InferenceServerClient(server.http) as client:
        client.infer("single", sixteen(httpclient))
        switch_off(client)
        (trace,) = read(f"{tmp_path}/t")
    assert names(trace) == [*HTTP, *REQUEST, *COMPUTE, "REQUEST_END", *sent("HTTP")]


def test_recent_traces_and_the_summary(
    server: ServerProcess, trace_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        switch_on(client, trace_file, "TIMESTAMPS", "TENSORS")
        client.infer("ensemble", sixteen(httpclient, "IN"), request_id="last")
        switch_off(client)
    with urllib.request.urlopen(f"http://{server.http}/v2/trace/recent") as response:
        recent = json.loads(response.read())
    assert recent[-3:] == [t for t in read(trace_file) if "activity" not in t]
    assert commands.run("trace", ["summary", "-t", trace_file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Summary for ensemble (1): trace count = 1" in lines
    assert "Summary for single (1): trace count = 2" in lines
    assert lines.count("single (1):") == 2 and "  Name: ensemble" in lines and "    Name: single" in lines


def run_server(tmp_path: Path, *flags: str) -> ServerProcess:
    write_model(tmp_path / "models", "single", identity_config(pairs=1))
    return ServerProcess(tmp_path / "models", *flags)


def test_killed_server_leaves_valid_files(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    server = run_server(tmp_path, f"--trace-config=triton,file={path}", "--trace-config=level=TIMESTAMPS",
                        "--trace-config=rate=1", "--trace-config=triton,log-frequency=3")  # fmt: skip
    with server, httpclient.InferenceServerClient(server.http) as client:
        for _ in range(100):
            client.infer("single", sixteen(httpclient))
        until((tmp_path / "trace.json.9").exists, "files are written while the server runs")
        server.stop(signal.SIGKILL)
    files = sorted(tmp_path.glob("trace.json.?"), key=str) + sorted(tmp_path.glob("trace.json.??"), key=str)
    assert len(files) >= 10 and all(len(read(str(file))) == 3 for file in files)


def test_shutdown_writes_what_is_left(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    older = (f"--trace-file={path}", "--trace-level=TIMESTAMPS", "--trace-rate=1")
    with run_server(tmp_path, *older) as server:
        with httpclient.InferenceServerClient(server.http) as client:
            for _ in range(5):
                client.infer("single", sixteen(httpclient))
        assert server.stop() == 0
    assert len(read(str(path))) == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["models", "trace.json"]


@pytest.mark.slow
def test_a_killed_server_has_written_what_is_not_new(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    flags = (f"--trace-config=triton,file={path}", "--trace-config=level=TIMESTAMPS", "--trace-config=rate=1")
    with run_server(tmp_path, *flags) as server, httpclient.InferenceServerClient(server.http) as client:
        for _ in range(3):
            before = len(read(str(path))) if path.exists() else 0
            client.infer("single", sixteen(httpclient))
            # nobody asks for it
            until(lambda before=before: path.exists() and len(read(str(path))) > before, "it is written")
        for _ in range(200):
            client.infer("single", sixteen(httpclient))
            if path.exists():
                read(str(path))
        server.stop(signal.SIGKILL)
    assert len(read(str(path))) >= 3


@pytest.mark.slow
def test_disk_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    flags = (f"--trace-config=triton,file={folder}/t", "--trace-config=level=TIMESTAMPS",
             "--trace-config=rate=1", "--trace-config=triton,log-frequency=1")  # fmt: skip
    with run_server(tmp_path, *flags) as server, httpclient.InferenceServerClient(server.http) as client:
        folder.rmdir()
        for _ in range(20):
            client.infer("single", sixteen(httpclient))
        until(lambda: value(scrape(server), "neptrio_trace_disabled"), "tracing is disabled")
        assert value(scrape(server), "neptrio_traces_total", outcome="dropped") > 0
        server.stop()
        assert server.log().count("tracing is disabled: cannot write trace file") == 1


def test_file_update_can_be_forbidden(tmp_path: Path) -> None:
    with run_server(tmp_path, "--allow-trace-file-update=false") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            with pytest.raises(InferenceServerException, match="can not be updated through network") as info:
                client.update_trace_settings(None, {"trace_file": None})
            assert info.value.status() == "501"


def test_the_extension_is_reported(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        assert "trace" in client.get_server_metadata()["extensions"]
    with grpcclient.InferenceServerClient(server.grpc) as client:
        assert "trace" in client.get_server_metadata().extensions


def test_setting_the_file_begins_at_index_0_again(server: ServerProcess, trace_file: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        switch_on(client, trace_file, log_frequency="1")
        for name in ("a", "b"):
            client.infer("single", sixteen(httpclient), request_id=name)
        client.update_trace_settings(None, {"trace_rate": "1"})  # the index goes on
        client.infer("single", sixteen(httpclient), request_id="c")
        client.update_trace_settings(None, {"trace_file": trace_file})
        client.infer("single", sixteen(httpclient), request_id="d")
        switch_off(client)
    found = [[t["request_id"] for t in read(f"{trace_file}.{i}")] for i in range(3)]
    assert found == [["d"], ["b"], ["c"]]


@pytest.mark.parametrize("model", ["", "/models/single"])
def test_errors_are_an_object_with_a_message(server: ServerProcess, model: str) -> None:
    asked = urllib.request.Request(f"http://{server.http}/v2{model}/trace/setting", b'{"trace_rate": "x"}')
    with pytest.raises(urllib.error.HTTPError) as info:
        urllib.request.urlopen(asked)
    assert info.value.code == 400
    assert json.loads(info.value.read()) == {"error": "Unable to parse 'trace_rate', got: x"}
    info.value.close()


@pytest.mark.parametrize("body", [b"5", b'"x"', b"[1]", b'[{"trace_rate": "5"}]', b"false"])
def test_a_body_that_is_no_object_is_refused(server: ServerProcess, body: bytes) -> None:
    asked = urllib.request.Request(f"http://{server.http}/v2/trace/setting", body)
    with pytest.raises(urllib.error.HTTPError) as info:
        urllib.request.urlopen(asked)
    assert info.value.code == 400
    text = json.loads(info.value.read())["error"]
    assert text.startswith("attempt to get members for non-object, got: ")
    info.value.close()
