"""Trace mode opentelemetry: what a collector gets, what goes in and out with requests, what models see."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tritonclient.utils import InferenceServerException

from neptrio.observe.propagation import traceparent
from tests.support.collector import Collector, attributes, events
from tests.support.infer_messages import request as message
from tests.support.metrics import scrape, value
from tests.support.raw_http2 import RawClient
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.streams import Answers
from tests.support.traced import CALLER, FAILING, ONE, ensemble, sixteen
from tests.support.waiting import until

SEND = ["INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END"]
MODEL = ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
COMPUTE = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
# answers with what it sees: the current span, and the context of each request's trace
SPY = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils
from opentelemetry import trace

class TritonPythonModel:
    EXECUTE
        span = trace.get_current_span()
        seen = span.get_span_context()
        span.set_attribute("seen.by", "the model")
        span.add_event("looked", {"requests": len(requests)})
        with trace.get_tracer("spy").start_as_current_span("inner") as inner:
            inner.set_attribute("works", True)
        answers = []
        for request in requests:
            told = request.trace()
            text = json.dumps({
                "trace_id": seen.trace_id, "span_id": seen.span_id, "recording": span.is_recording(),
                "context": told.get_context() if told else None})
            tensor = pb_utils.Tensor("OUT", np.array([text.encode()], np.object_))
            answers.append(pb_utils.InferenceResponse([tensor]))
        return answers
"""
SPY_CONFIG = """
backend: "python" max_batch_size: 0
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
ISOLATED = 'parameters { key: "isolation" value { string_value: "process" } }'
INSIDE = 'parameters { key: "isolation" value { string_value: "none" } }'

numbers = itertools.count(1)


def parent(sampled: bool = True) -> tuple[int, int, str]:
    """A new trace: its id, the id of the span outside, and the header."""
    trace_id, span_id = 0xABC0000000000000000000000000000 + next(numbers), 0x1234567890ABCDE0 + next(numbers)
    header = traceparent(trace_id, span_id)
    return trace_id, span_id, header if sampled else header[:-2] + "00"


def opentelemetry(url: str, *more: str) -> list[str]:
    return ["--trace-config=mode=opentelemetry", f"--trace-config=opentelemetry,url={url}",
            "--trace-config=level=TIMESTAMPS", "--trace-config=opentelemetry,bsp_schedule_delay=50", *more]  # fmt: skip


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


@pytest.fixture(scope="module")
def server(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    write_model(repository, "single", identity_config(pairs=1))
    write_model(repository, "ensemble", ensemble("single", "caller"))
    write_model(repository, "caller", ONE, {"1/model.py": CALLER})
    write_model(repository, "failing", ONE, {"1/model.py": FAILING})
    spy = SPY.replace("EXECUTE", "def execute(self, requests):")
    awaiting = SPY.replace("EXECUTE", "async def execute(self, requests):")
    write_model(repository, "spy", SPY_CONFIG + INSIDE, {"1/model.py": spy})
    write_model(repository, "awaiting", SPY_CONFIG + INSIDE, {"1/model.py": awaiting})
    write_model(repository, "isolated", SPY_CONFIG + ISOLATED, {"1/model.py": spy})
    write_model(repository, "isolated_awaiting", SPY_CONFIG + ISOLATED, {"1/model.py": awaiting})
    batched = (
        SPY_CONFIG.replace("size: 0", "size: 8")
        + "dynamic_batching { preferred_batch_size: 2 max_queue_delay_microseconds: 30000000 }"
    )
    write_model(repository, "batched", batched + INSIDE, {"1/model.py": spy})
    flags = opentelemetry(collector.url, "--trace-config=rate=0",
                          "--trace-config=opentelemetry,resource=service.name=inference",
                          "--trace-config=opentelemetry,resource=region=here")  # fmt: skip
    with ServerProcess(repository, *flags) as process:
        yield process


def number(module: Any, shape: list[int] | None = None) -> list[Any]:
    tensor = module.InferInput("IN", shape or [1], "INT32")
    tensor.set_data_from_numpy(np.zeros(shape or [1], np.int32))
    return [tensor]


def span_id(span: Span) -> int:
    return int.from_bytes(span.span_id)


def under(child: Span, above: Span) -> bool:
    return bool(child.parent_span_id == above.span_id and child.trace_id == above.trace_id)


# ------------------------------------------------------------ what the collector gets


def test_http(server: ServerProcess, collector: Collector) -> None:
    trace_id, outside, header = parent()
    before = time.time_ns()
    with httpclient.InferenceServerClient(server.http) as client:
        client.infer("single", sixteen(httpclient), request_id="r1", headers={"traceparent": header})
    spans = collector.trace(trace_id, 3)
    root, model, compute = spans["InferRequest"], spans["single"], spans["compute"]
    assert int.from_bytes(root.parent_span_id) == outside
    assert under(model, root) and under(compute, model)
    assert {span.kind for span in spans.values()} == {Span.SPAN_KIND_SERVER}
    assert events(root) == ["HTTP_RECV_START", "HTTP_RECV_END", *SEND]
    assert events(model) == MODEL and events(compute) == COMPUTE
    assert root.start_time_unix_nano <= model.start_time_unix_nano <= compute.start_time_unix_nano
    assert compute.end_time_unix_nano <= model.end_time_unix_nano <= root.end_time_unix_nano
    assert before - 10**9 < root.start_time_unix_nano and root.end_time_unix_nano < time.time_ns() + 10**9
    found = attributes(model)
    assert found.pop("triton.trace_id") > 0
    assert found == {"triton.model_name": "single", "triton.model_version": 1, "triton.trace_parent_id": 0,
                     "triton.request_id": "r1"}  # fmt: skip
    resource = collector.resources[-1]
    assert (resource["service.name"], resource["region"]) == ("inference", "here")


@pytest.fixture
def setting(server: ServerProcess) -> Iterator[Any]:
    """Changes the trace settings of models; they follow the global ones again behind the test."""
    with httpclient.InferenceServerClient(server.http) as client:
        changed: dict[str, list[str]] = {}

        def change(model: str, **settings: Any) -> Any:
            changed.setdefault(model, []).extend(settings)
            return client.update_trace_settings(model, settings)

        yield change
        for model, keys in changed.items():
            client.update_trace_settings(model, dict.fromkeys(keys))


@pytest.mark.slow
def test_level_tensors_makes_one_span(server: ServerProcess, collector: Collector, setting: Any) -> None:
    """As on a Triton server: it is taken, its requests are sampled and counted, their span says nothing."""
    told = server.log().count("Tensor level tracing is not supported by the mode: opentelemetry")
    settings = setting("ensemble", trace_level=["TENSORS"], trace_rate="1", trace_count="1")
    assert settings["trace_level"] == ["TENSORS"]
    server.until_logged("Tensor level tracing is not supported", told + 1)
    with httpclient.InferenceServerClient(server.http) as client:
        trace_id, outside, header = parent()
        client.infer("ensemble", sixteen(httpclient, "IN"), headers={"traceparent": header})
        assert client.get_trace_settings("ensemble")["trace_count"] == "1", "the parent asked for it"
        (root,) = collector.trace(trace_id, 1).values()
        before = len(collector.spans)
        answer = client.infer("ensemble", sixteen(httpclient, "IN"))
        assert answer.as_numpy("OUT").shape == (1, 16)
        assert client.get_trace_settings("ensemble")["trace_count"] == "0"
    assert (root.name, events(root), attributes(root)) == ("InferRequest", [], {})
    assert int.from_bytes(root.parent_span_id) == outside
    assert root.end_time_unix_nano > root.start_time_unix_nano > 0
    (sampled,) = collector.wait(lambda spans: len(spans) > before)[before:]
    assert (sampled.name, events(sampled)) == ("InferRequest", [])


def test_level_tensors_beside_timestamps(server: ServerProcess, collector: Collector, setting: Any) -> None:
    setting("single", trace_level=["TIMESTAMPS", "TENSORS"])
    trace_id, _, header = parent()
    with httpclient.InferenceServerClient(server.http) as client:
        client.infer("single", sixteen(httpclient), headers={"traceparent": header})
    spans = collector.trace(trace_id, 3)
    assert events(spans["compute"]) == COMPUTE and events(spans["single"]) == MODEL


def test_what_a_model_makes_lies_under_the_one_span(
    server: ServerProcess, collector: Collector, setting: Any
) -> None:
    setting("spy", trace_level=["TENSORS"])
    trace_id, _, header = parent()
    with httpclient.InferenceServerClient(server.http) as client:
        client.infer("spy", number(httpclient), headers={"traceparent": header})
    spans = collector.trace(trace_id, 2)
    assert under(spans["inner"], spans["InferRequest"])


@pytest.mark.slow
def test_the_server_may_start_with_level_tensors(tmp_path: Path, collector: Collector) -> None:
    write_model(tmp_path, "single", identity_config(pairs=1))
    flags = opentelemetry(collector.url, "--trace-config=level=TENSORS", "--trace-config=rate=1")
    with ServerProcess(tmp_path, *(flag for flag in flags if "TIMESTAMPS" not in flag)) as server:
        server.until_logged("Tensor level tracing is not supported by the mode: opentelemetry")
        before = len(collector.spans)
        with httpclient.InferenceServerClient(server.http) as client:
            assert client.get_trace_settings()["trace_level"] == ["TENSORS"]
            client.infer("single", sixteen(httpclient))
        (span,) = collector.wait(lambda spans: len(spans) > before)[before:]
    assert (span.name, events(span)) == ("InferRequest", [])


def test_ensemble_with_a_call(server: ServerProcess, collector: Collector) -> None:
    trace_id, _, header = parent()
    with httpclient.InferenceServerClient(server.http) as client:
        client.infer("ensemble", sixteen(httpclient, "IN"), headers={"traceparent": header})
    spans = collector.trace(trace_id, 8)  # InferRequest, ensemble, single, caller, single, three computes
    ensemble, caller = spans["ensemble"], spans["caller"]
    assert under(ensemble, spans["InferRequest"]) and under(caller, ensemble)
    steps = {"step": spans["single"], "call": spans["single+"]}
    if under(steps["call"], ensemble):
        steps = {"step": steps["call"], "call": steps["step"]}
    assert under(steps["step"], ensemble) and under(steps["call"], caller)
    computes = [spans["compute"], spans["compute+"], spans["compute++"]]
    assert {s.parent_span_id for s in computes} == {s.span_id for s in (caller, *steps.values())}
    ids = {name: attributes(span)["triton.trace_id"] for name, span in (("e", ensemble), ("c", caller))}
    assert attributes(caller)["triton.trace_parent_id"] == ids["e"] < ids["c"]
    assert attributes(steps["call"])["triton.trace_parent_id"] == ids["c"]


def test_a_failure_is_an_error(server: ServerProcess, collector: Collector) -> None:
    trace_id, _, header = parent()
    with httpclient.InferenceServerClient(server.http) as client:
        with pytest.raises(InferenceServerException, match="no luck"):
            client.infer("failing", sixteen(httpclient, "IN"), headers={"traceparent": header})
    spans = collector.trace(trace_id, 3)
    assert {span.status.code for span in spans.values()} == {2}  # ERROR
    assert "no luck" in spans["failing"].status.message


# ------------------------------------------------------------ in and out


def test_grpc_unary(server: ServerProcess, collector: Collector) -> None:
    trace_id, outside, header = parent()
    state = "vendor=x,other=y"
    with RawClient(server.grpc) as raw:
        body = message("single", np.zeros((1, 16), np.int32))
        reply = raw.call(1, body, extra=[("traceparent", header), ("tracestate", state)])
    spans = collector.trace(trace_id, 3)
    root = spans["InferRequest"]
    assert int.from_bytes(root.parent_span_id) == outside and root.trace_state == state
    assert events(root) == [
        "GRPC_WAITREAD_START",
        "GRPC_WAITREAD_END",
        *(e.replace("HTTP", "GRPC") for e in SEND),
    ]
    headers = reply.headers[0]
    assert headers["traceparent"] == traceparent(trace_id, span_id(root)) and headers["tracestate"] == state


def test_every_request_of_a_stream(server: ServerProcess, collector: Collector) -> None:
    trace_id, outside, header = parent()
    with (
        grpcclient.InferenceServerClient(server.grpc) as client,
        Answers(client, headers={"traceparent": header}) as got,
    ):
        for _ in range(2):
            client.async_stream_infer("single", sixteen(grpcclient))
        got.results(2)
    spans = collector.trace(trace_id, 6)
    roots = [spans["InferRequest"], spans["InferRequest+"]]
    assert [int.from_bytes(root.parent_span_id) for root in roots] == [outside, outside]


@pytest.mark.parametrize("model", ["single", "failing"])
def test_the_answer_names_its_span(server: ServerProcess, collector: Collector, model: str) -> None:
    trace_id, _, header = parent()
    name = "INPUT0" if model == "single" else "IN"
    body = {"inputs": [{"name": name, "shape": [1, 16], "datatype": "INT32", "data": [0] * 16}]}
    asked = urllib.request.Request(f"http://{server.http}/v2/models/{model}/infer", json.dumps(body).encode(),
                                   {"traceparent": header, "tracestate": "a=b"})  # fmt: skip
    try:
        with urllib.request.urlopen(asked) as response:
            headers = response.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
        error.close()
    root = collector.trace(trace_id, 3)["InferRequest"]
    assert headers["traceparent"] == traceparent(trace_id, span_id(root)) and headers["tracestate"] == "a=b"


def test_a_parent_that_is_not_sampled_forces_nothing(server: ServerProcess, collector: Collector) -> None:
    unsampled, _, quiet = parent(sampled=False)
    trace_id, _, loud = parent()
    with httpclient.InferenceServerClient(server.http) as client:
        for headers in ({}, {"traceparent": quiet}, {"traceparent": "00-zz"}, {"traceparent": loud}):
            client.infer("single", sixteen(httpclient), headers=headers)
    collector.trace(trace_id, 3)
    assert not any(int.from_bytes(span.trace_id) == unsampled for span in collector.spans)


def test_forced_traces_count_nowhere(server: ServerProcess, collector: Collector) -> None:
    trace_id, _, header = parent()
    with httpclient.InferenceServerClient(server.http) as client:
        client.update_trace_settings(None, {"trace_rate": "2", "trace_count": "1"})
        client.infer("single", sixteen(httpclient))
        for _ in range(3):
            client.infer("single", sixteen(httpclient), headers={"traceparent": header})
        collector.trace(trace_id, 9)
        assert client.get_trace_settings()["trace_count"] == "1"
        before = len(collector.spans)
        client.infer("single", sixteen(httpclient))  # the second that counts
        assert client.get_trace_settings()["trace_count"] == "0"
        own = collector.wait(lambda spans: len(spans) >= before + 3)[before:]
        assert [s.parent_span_id for s in own if s.name == "InferRequest"] == [b""]
        client.update_trace_settings(None, {"trace_level": ["OFF"]})
        silent, _, header = parent()
        client.infer("single", sixteen(httpclient), headers={"traceparent": header})
        settings = client.update_trace_settings(
            None, dict.fromkeys(("trace_rate", "trace_count", "trace_level"))
        )
    assert settings == {
        "trace_level": ["TIMESTAMPS"], "trace_rate": "0", "trace_count": "-1", "trace_mode": "opentelemetry",
        "url": collector.url, "resource": "service.name=inference,region=here", "bsp_schedule_delay": "50",
        "bsp_max_export_batch_size": "512", "bsp_max_queue_size": "2048",
    }  # fmt: skip
    trace_id, _, header = parent()
    with httpclient.InferenceServerClient(server.http) as client:
        client.infer("single", sixteen(httpclient), headers={"traceparent": header})
    collector.trace(trace_id, 3)
    assert not any(int.from_bytes(span.trace_id) == silent for span in collector.spans)


@pytest.mark.slow
def test_generate_and_hypercorn(tmp_path: Path, collector: Collector) -> None:
    write_model(tmp_path, "number", identity_config(dims="1", max_batch_size=0, pairs=1))
    first, _, header = parent()
    second, _, other = parent()
    with ServerProcess(
        tmp_path, *opentelemetry(collector.url, "--trace-config=rate=0", "--http-lean=false")
    ) as server:
        for verb, body, sent in (
            ("generate", b'{"INPUT0": 5}', header),
            ("infer", b'{"inputs":[{"name":"INPUT0","shape":[1],"datatype":"INT32","data":[5]}]}', other),
        ):
            url = f"http://{server.http}/v2/models/number/{verb}"
            with urllib.request.urlopen(urllib.request.Request(url, body, {"traceparent": sent})) as response:
                assert response.status == 200
        collector.trace(first, 3)
        collector.trace(second, 3)


# ------------------------------------------------------------ what models see


@pytest.mark.parametrize("model", ["spy", "awaiting", "isolated", "isolated_awaiting"])
def test_a_model_sees_its_span(server: ServerProcess, collector: Collector, model: str) -> None:
    trace_id, _, header = parent()
    with httpclient.InferenceServerClient(server.http) as client:
        answer = client.infer(model, number(httpclient), headers={"traceparent": header, "tracestate": "k=v"})
    seen = json.loads(answer.as_numpy("OUT")[0])
    spans = collector.trace(trace_id, 4)
    own = spans[model]
    assert (seen["trace_id"], seen["span_id"]) == (trace_id, span_id(own))
    assert json.loads(seen["context"]) == {
        "traceparent": traceparent(trace_id, span_id(own)),
        "tracestate": "k=v",
    }
    assert under(spans["inner"], own) and attributes(spans["inner"]) == {"works": True}
    if not model.startswith("isolated"):  # the span itself is this process's
        assert seen["recording"] and attributes(own)["seen.by"] == "the model"
        assert events(own) == ["REQUEST_START", "QUEUE_START", "looked", "REQUEST_END"]


@pytest.mark.parametrize("model", ["spy", "awaiting", "isolated"])
def test_a_model_sees_none_without_a_trace(server: ServerProcess, collector: Collector, model: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        answer = client.infer(model, number(httpclient))
    seen = json.loads(answer.as_numpy("OUT")[0])
    assert (seen["trace_id"], seen["recording"], seen["context"]) == (0, False, None)


def test_the_requests_of_a_batch(server: ServerProcess, collector: Collector) -> None:
    parents = [parent(), parent()]
    with httpclient.InferenceServerClient(server.http, concurrency=2) as client:
        calls = [client.async_infer("batched", number(httpclient, [1, 1]), headers={"traceparent": header})
                 for _, _, header in parents]  # fmt: skip
        seen = [json.loads(call.get_result().as_numpy("OUT").flat[0]) for call in calls]
    first = next(i for i in (0, 1) if parents[i][0] == seen[0]["trace_id"])
    assert seen[0]["span_id"] == seen[1]["span_id"]
    ahead, behind = collector.trace(parents[first][0], 4), collector.trace(parents[1 - first][0], 3)
    assert under(ahead["inner"], ahead["batched"])
    assert [link.span_id for link in ahead["batched"].links] == [behind["batched"].span_id]
    contexts = [json.loads(s["context"])["traceparent"] for s in seen]
    assert contexts[1 - first] == traceparent(parents[1 - first][0], span_id(behind["batched"]))


# ------------------------------------------------------------ collectors that are not there


def quiet_server(tmp_path: Path, url: str, *more: str, patience: str = "60") -> ServerProcess:
    write_model(tmp_path / "models", "single", identity_config(pairs=1))
    env = {**os.environ, "OTEL_EXPORTER_OTLP_TIMEOUT": patience}  # seconds that the exporter tries again for
    return ServerProcess(tmp_path / "models", *opentelemetry(url, "--trace-config=rate=1", *more), env=env)


@pytest.mark.slow
def test_shutdown_sends_what_waits(tmp_path: Path) -> None:
    with Collector() as own:
        with quiet_server(
            tmp_path, own.url, "--trace-config=opentelemetry,bsp_schedule_delay=600000"
        ) as server:
            with httpclient.InferenceServerClient(server.http) as client:
                for _ in range(5):
                    client.infer("single", sixteen(httpclient))
            assert server.stop() == 0
        assert sum(span.name == "InferRequest" for span in own.spans) == 5 and len(own.spans) == 15


@pytest.mark.slow
def test_a_dead_collector_disturbs_nobody(tmp_path: Path) -> None:
    more = (
        "--trace-config=opentelemetry,bsp_max_queue_size=8",
        "--trace-config=opentelemetry,bsp_max_export_batch_size=4",
    )
    with socket.socket() as nobody:  # who has the port, and does not listen
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1/traces"
        with quiet_server(tmp_path, url, *more, patience="1") as server:
            with httpclient.InferenceServerClient(server.http) as client:
                for i in range(300):
                    answer = client.infer("single", sixteen(httpclient), request_id=str(i))
                    assert answer.get_response()["id"] == str(i)
            server.until_logged("spans do not reach")
            assert server.stop() == 0
            assert server.log().count("spans do not reach") == 1


@pytest.mark.slow
def test_a_collector_that_refuses_is_told_once_and_again_when_it_is_back(tmp_path: Path) -> None:
    with Collector() as own:
        own.status = 400
        with quiet_server(tmp_path, own.url) as server:
            with httpclient.InferenceServerClient(server.http) as client:
                client.infer("single", sixteen(httpclient))
                until(
                    lambda: value(scrape(server), "neptrio_traces_total", outcome="dropped"), "it is dropped"
                )
                own.status = 200
                client.infer("single", sixteen(httpclient))
                own.wait(lambda spans: len(spans) == 3)
                until(
                    lambda: value(scrape(server), "neptrio_traces_total", outcome="written"), "it is written"
                )
            assert server.stop() == 0
            log = server.log()
            assert (
                log.count(f"spans do not reach {own.url}") == 1
                and log.count(f"spans reach {own.url} again") == 1
            )


@pytest.mark.slow
def test_missing_packages_are_named(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden" / "opentelemetry"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").touch()  # hides the installed packages
    (tmp_path / "models").mkdir()
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(hidden.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "neptrio", f"--model-repository={tmp_path / 'models'}",
               "--trace-config=mode=opentelemetry"]  # fmt: skip
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "trace mode opentelemetry needs packages that are not installed" in done.stderr
    assert "pip install 'opentelemetry-sdk" in done.stderr and "Traceback" not in done.stderr
