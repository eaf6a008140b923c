"""Traces that requests ask for themselves, traces of what was slow or failed, and the recent ones."""

from __future__ import annotations

import json
import queue
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

from neptrio.settings import Settings
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.streams import Answers
from tests.support.traced import read

# a negative input fails
FAILS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            array = request.inputs()[0].as_numpy()
            if array[0] < 0:
                answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("negative")))
                continue
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]))
        return answers
"""
FAILS_CONFIG = """
backend: "python" max_batch_size: 0
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
FIELDS = ("trace_level", "trace_rate", "trace_count", "trace_file", "trace_tail", "log_frequency")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    write_model(repository, "number", identity_config(dims="1", max_batch_size=0, pairs=1))
    write_model(repository, "fails", FAILS_CONFIG, {"1/model.py": FAILS})
    folder = tmp_path_factory.mktemp("traces")
    with ServerProcess(repository, "--allow-forced-trace=true", f"--trace-dir={folder}") as process:
        process.folder = folder  # type: ignore[attr-defined]
        yield process


@pytest.fixture
def path(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[str]:
    """A path for the test's traces; every setting is cleared afterwards."""
    folder: Path = server.folder  # type: ignore[attr-defined]
    yield str(folder / request.node.name.replace("[", "-").rstrip("]"))
    with httpclient.InferenceServerClient(server.http) as client:
        client.update_trace_settings(None, dict.fromkeys(FIELDS))
        client.update_trace_settings("fails", dict.fromkeys(FIELDS))


def tensor(module: Any, value: int = 1, name: str = "INPUT0") -> list[Any]:
    made = module.InferInput(name, [1], "INT32")
    made.set_data_from_numpy(np.array([value], np.int32))
    return [made]


def recent(server: ServerProcess, query: str = "") -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"http://{server.http}/v2/trace/recent{query}") as response:
        found: list[dict[str, Any]] = json.loads(response.read())
    return found


def ids(traces: list[dict[str, Any]]) -> list[str]:
    return [trace["request_id"] for trace in traces if "activity" not in trace]


def names(trace: dict[str, Any]) -> list[str]:
    return [t["name"] for t in trace["timestamps"]]


# ------------------------------------------------------------ forced


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("how", ["parameter", "header"])
def test_a_request_forces_its_trace(server: ServerProcess, path: str, protocol: str, how: str) -> None:
    module: Any = httpclient if protocol == "http" else grpcclient
    asked: dict[str, Any] = (
        {"parameters": {"neptrio_trace": True}} if how == "parameter" else {"headers": {"neptrio-trace": "1"}}
    )
    with module.InferenceServerClient(getattr(server, protocol)) as client:
        client.update_trace_settings(None, {"trace_file": path, "trace_count": "5"})  # the level is OFF
        client.infer("number", tensor(module), request_id="plain")
        client.infer("number", tensor(module), request_id=f"{protocol} {how}", **asked)
        client.update_trace_settings(None, {"trace_level": ["TIMESTAMPS"], "trace_rate": "1000"})
        client.infer("number", tensor(module), request_id="again", **asked)
        settings = client.get_trace_settings()
        count = settings["trace_count"] if protocol == "http" else settings.settings["trace_count"].value[0]
        assert count == "5"
        client.update_trace_settings(None, {"trace_level": ["OFF"]})
    traces = read(path)
    assert ids(traces) == [f"{protocol} {how}", "again"]
    start = "HTTP_RECV_START" if protocol == "http" else "GRPC_WAITREAD_START"
    assert names(traces[0])[0] == start and names(traces[0])[-1].endswith("SEND_END")
    assert ids(recent(server, "?count=2")) == ids(traces)


def test_in_a_stream_each_request_for_itself(server: ServerProcess, path: str) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.update_trace_settings(None, {"trace_file": path})
        with Answers(client) as answers:
            for i, asks in enumerate((False, True, False)):
                more = {"parameters": {"neptrio_trace": True}} if asks else {}
                client.async_stream_infer("number", tensor(grpcclient), request_id=str(i), **more)
            answers.results(3)
        client.update_trace_settings(None, {"trace_file": None})
    assert ids(read(path)) == ["1"]


def test_the_level_may_be_named(server: ServerProcess, path: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        client.update_trace_settings(None, {"trace_file": path})
        client.infer("number", tensor(httpclient, 7), request_id="a", headers={"Neptrio-Trace": "TENSORS"})
        client.infer("number", tensor(httpclient, 8), request_id="b",
                     parameters={"neptrio_trace": "TENSORS,TIMESTAMPS"})  # fmt: skip
        client.update_trace_settings(None, {"trace_file": None})
    objects = read(path)
    assert [o.get("activity") for o in objects] == [
        None, "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_INPUT", "TENSOR_BACKEND_OUTPUT",
    ] * 2  # fmt: skip
    assert "timestamps" not in objects[0] and "timestamps" in objects[4]
    assert [objects[1]["tensor"]["data"], objects[5]["tensor"]["data"]] == ["7", "8"]


@pytest.mark.parametrize("wish", ["LOUD", "TENSORS,LOUD", "2"])
def test_an_unknown_level_is_refused(server: ServerProcess, wish: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        for asked in ({"parameters": {"neptrio_trace": wish}}, {"headers": {"neptrio-trace": wish}}):
            with pytest.raises(
                InferenceServerException, match=f"expected true, false, .* got '{wish}'"
            ) as info:
                client.infer("number", tensor(httpclient), **asked)
            assert info.value.status() == "400"
        client.infer("number", tensor(httpclient))


def test_a_request_may_say_no(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        client.infer("number", tensor(httpclient), request_id="yes", headers={"neptrio-trace": "true"})
        for no in (False, "false", "0"):
            client.infer("number", tensor(httpclient), request_id="no", parameters={"neptrio_trace": no})
    assert ids(recent(server))[-1] == "yes"


def test_without_a_file_it_is_among_the_recent_ones(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        client.infer("number", tensor(httpclient), request_id="seen", headers={"neptrio-trace": "TENSORS"})
        client.infer("number", tensor(httpclient), request_id="too", headers={"neptrio-trace": "1"})
    assert ids(recent(server, "?count=2")) == ["seen", "too"]


def test_it_takes_a_permission(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "number", identity_config(dims="1", max_batch_size=0, pairs=1))
    flags = (
        f"--trace-config=triton,file={tmp_path}/t",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=rate=3",
        "--allow-forced-trace=false",
    )
    with ServerProcess(tmp_path / "models", *flags) as server:
        with httpclient.InferenceServerClient(server.http) as client:
            for i in range(3):
                client.infer("number", tensor(httpclient), request_id=str(i), headers={"neptrio-trace": "1"},
                             parameters={"neptrio_trace": "LOUD"})  # fmt: skip
    assert ids(read(f"{tmp_path}/t")) == ["2"]  # the third, as the rate says


def test_on_loopback_the_parameter_alone_needs_no_flag(tmp_path: Path) -> None:
    write_model(tmp_path, "number", identity_config(dims="1", max_batch_size=0, pairs=1))
    with ServerProcess(tmp_path) as server:
        for module, address in ((httpclient, server.http), (grpcclient, server.grpc)):
            with module.InferenceServerClient(address) as client:
                client.infer("number", tensor(module), request_id="header", headers={"neptrio-trace": "1"})
                client.infer("number", tensor(module), request_id="no")
                client.infer("number", tensor(module), request_id="yes", parameters={"neptrio_trace": True})
        assert ids(recent(server)) == ["yes", "yes"]


def test_without_the_flag_no_request_leaves_the_fast_path() -> None:
    options = Settings(http_address="127.0.0.1", grpc_address="127.0.0.1").trace_options()
    assert options.allow_forced and not options.forced_by_header
    assert Settings(allow_forced_trace=True).trace_options().forced_by_header


def test_where_it_needs_no_flag() -> None:
    assert Settings(http_address="127.0.0.1", grpc_address="::1").forced_trace
    assert Settings(http_address="127.0.0.1", allow_grpc=False).forced_trace
    assert not Settings().forced_trace, "the defaults are all addresses"
    assert not Settings(http_address="127.0.0.1").forced_trace, "gRPC is reached by others"
    assert not Settings(allow_http=False, allow_grpc=False).forced_trace, "nobody knows who embeds it"
    assert Settings(allow_forced_trace=True).forced_trace
    assert not Settings(http_address="::1", grpc_address="::1", allow_forced_trace=False).forced_trace


# ------------------------------------------------------------ slow or failed


# microseconds: no request takes ten minutes, and none less than one of them
LONG, SHORT = "600000000", "1"


@pytest.mark.parametrize("protocol", ["http", "grpc", "stream"])
@pytest.mark.parametrize(
    ("tail", "count", "sent", "kept"),
    [
        (
            LONG,
            "2",
            {"quick": 0, "failed": -1, "quick again": 0, "failed again": -1, "too late": -1},
            ["failed", "failed again"],
        ),
        (
            SHORT,
            "3",
            {"slow": 0, "failed": -1, "slow again": 0, "too late": 0},
            ["slow", "failed", "slow again"],
        ),
    ],
    ids=["quick", "slow"],
)
def test_only_slow_and_failed_requests(
    server: ServerProcess,
    path: str,
    protocol: str,
    tail: str,
    count: str,
    sent: dict[str, int],
    kept: list[str],
) -> None:
    module: Any = httpclient if protocol == "http" else grpcclient
    settings = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_file": path, "trace_count": count}
    address = server.http if protocol == "http" else server.grpc
    with module.InferenceServerClient(address) as client:
        client.update_trace_settings(None, settings)
        client.update_trace_settings("fails", {"trace_tail": tail})
        if protocol == "stream":
            got: queue.Queue[Any] = queue.Queue()
            client.start_stream(lambda result, error: got.put(error))
        for name, value in sent.items():
            inputs = tensor(module, value, "IN")
            if protocol == "stream":
                client.async_stream_infer("fails", inputs, request_id=name)
                assert (got.get(timeout=60) is None) == (value >= 0)
            elif value < 0:
                with pytest.raises(InferenceServerException, match="negative"):
                    client.infer("fails", inputs, request_id=name)
            else:
                client.infer("fails", inputs, request_id=name)
        if protocol == "stream":
            client.stop_stream()
        told = client.get_trace_settings("fails")
        if protocol == "http":
            assert (told["trace_count"], told["trace_tail"]) == ("0", tail)
        else:
            assert told.settings["trace_tail"].value == [tail]
        client.update_trace_settings("fails", dict.fromkeys(FIELDS))
        client.update_trace_settings(None, dict.fromkeys(FIELDS))
    assert ids(read(path + ".0")) == kept


def test_globally_and_forced(server: ServerProcess, path: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        on = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_file": path, "trace_tail": "60000000"}
        client.update_trace_settings(None, on)
        assert client.get_trace_settings()["trace_tail"] == "60000000"
        client.infer("number", tensor(httpclient), request_id="quick")
        client.infer("number", tensor(httpclient), request_id="asked", headers={"neptrio-trace": "1"})
        client.update_trace_settings(None, {"trace_tail": None})
        assert "trace_tail" not in client.get_trace_settings()
        client.infer("number", tensor(httpclient), request_id="quick again")
        client.update_trace_settings(None, dict.fromkeys(FIELDS))
    assert ids(read(path)) == ["asked", "quick again"]


# ------------------------------------------------------------ recent


def test_the_recent_ones_are_limited(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        for i in range(130):
            client.infer("number", tensor(httpclient), request_id=str(i), headers={"neptrio-trace": "1"})
    assert ids(recent(server)) == [str(i) for i in range(2, 130)]
    assert ids(recent(server, "?count=3")) == ["127", "128", "129"]
    assert ids(recent(server, "?count=999")) == [str(i) for i in range(2, 130)]


@pytest.mark.parametrize("query", ["?count=0", "?count=x", "?count=", "?last=3"])
def test_what_recent_does_not_understand(server: ServerProcess, query: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as info:
        recent(server, query)
    assert info.value.code == 400 and "trace/recent: " in json.loads(info.value.read())["error"]
    info.value.close()
