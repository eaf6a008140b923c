"""The metrics port of a real server, read with prometheus_client's parser."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.python.models import config, isolated, python_model
from tests.support.http import Http1
from tests.support.metrics import families, request, scrape, value
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.streams import Answers

M = {"model": "m", "version": "1"}


def infer(server: ServerProcess, model: str = "m", batch: int = 1, times: int = 1) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        tensors = []
        for i in range(2):
            tensor = httpclient.InferInput(f"INPUT{i}", [batch, 16], "INT32")
            tensor.set_data_from_numpy(np.zeros((batch, 16), np.int32))
            tensors.append(tensor)
        for _ in range(times):
            client.infer(model, tensors)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    write_model(repository, "m", identity_config())
    write_model(repository, "tagged", identity_config(extra='metric_tags { key: "team" value: "a\\"b" }'))
    with ServerProcess(repository) as process:
        yield process


def test_paths_and_methods(server: ServerProcess) -> None:
    status, headers, body = request(server, "GET", "/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert body.endswith(b"\n")
    assert request(server, "GET", "/metrics?x=1")[2].startswith(b"# HELP")
    assert request(server, "GET", "/metrics/")[2].startswith(b"# HELP nv_inference_request_success")
    for path in ("/", "/metrics//", "/v2/health/live"):
        status, _, body = request(server, "GET", path)
        assert status == 200 and body.startswith(b"# metrics are at /metrics; this is the metrics port")


@pytest.mark.parametrize("method", ["POST", "HEAD", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ["/metrics", "/metrics/", "/"])
def test_other_methods_are_answered_as_on_the_other_ports(
    server: ServerProcess, method: str, path: str
) -> None:
    with Http1(server.metrics) as scraper, Http1(server.http) as rest:
        scraped, other = scraper.request(method, path, b"x"), rest.request(method, "/v2/health/live", b"x")
        assert (scraped.status, scraped.reason) == (other.status, other.reason)
        assert scraped.body == other.body or path == "/"
        assert (scraped.status, scraped.reason) == (405, "Not Allowed")
        assert scraped.headers["allow"] == "GET"
        for name in ("content-type", *(() if path == "/" else ("content-length",))):
            assert scraped.headers[name] == other.headers[name]
        assert scraper.request("GET", "/metrics").status == 200, "the connection goes on"


def test_a_connection_serves_many_scrapes_and_garbage_ends_it(server: ServerProcess) -> None:
    connection = http.client.HTTPConnection(server.metrics, timeout=60)
    for _ in range(3):
        connection.request("GET", "/metrics")
        assert connection.getresponse().read().startswith(b"# HELP nv_inference_request_success")
    connection.close()
    garbage: tuple[tuple[bytes, int], ...] = (
        (b"nonsense\r\n\r\n", 405),
        (b"GET /metrics HTTP/1.1\r\nA: " + b"x" * 100_000 + b"\r\n\r\n", 431),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 70000\r\n\r\n", 413),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
    )
    for sent, status in garbage:
        with Http1(server.metrics) as client:
            client.send(sent)
            assert client.read().status == status, "as on the other ports"
            assert client.closed()
    with Http1(server.metrics) as client:
        client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert client.closed()
    assert scrape(server)


def test_counters_follow_requests(server: ServerProcess) -> None:
    infer(server)
    before = scrape(server)
    infer(server, batch=4, times=3)
    with pytest.raises(InferenceServerException, match="batch"):
        infer(server, batch=9)
    after = scrape(server)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **M, **labels) - value(before, name, **M, **labels)

    assert grown("nv_inference_request_success") == 3
    assert grown("nv_inference_count") == 12
    assert grown("nv_inference_exec_count") == 3
    assert grown("nv_inference_request_duration_us") > 0
    assert grown("neptrio_stage_seconds_count", stage="request") == 3
    for reason in ("OTHER", "CANCELED", "REJECTED", "BACKEND"):
        assert grown("nv_inference_request_failure", reason=reason) == 0, (
            "refused at the door: counts nowhere"
        )
    assert value(after, "nv_inference_pending_request_count", **M) == 0
    assert value(after, "neptrio_accepted_requests", **M) == value(after, "neptrio_inflight_bytes", **M) == 0
    assert value(after, "nv_model_load_duration_secs", **M) > 0


def test_names_labels_and_kinds(server: ServerProcess) -> None:
    infer(server)
    text = scrape(server)
    found = families(text)
    assert 'nv_inference_request_failure{model="m",reason="OTHER",version="1"} 0' in text.splitlines()
    assert '_team="a\\"b",model="tagged"' in text
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE))
    assert set(kinds) == set(helps)
    triton = {name: kind for name, kind in kinds.items() if name.startswith("nv_") and "gpu" not in name}
    triton.pop("nv_energy_consumption", None)
    assert triton == {
        "nv_inference_request_success": "counter",
        "nv_inference_request_failure": "counter",
        "nv_inference_count": "counter",
        "nv_inference_exec_count": "counter",
        "nv_inference_pending_request_count": "gauge",
        "nv_inference_request_duration_us": "counter",
        "nv_inference_queue_duration_us": "counter",
        "nv_inference_compute_input_duration_us": "counter",
        "nv_inference_compute_infer_duration_us": "counter",
        "nv_inference_compute_output_duration_us": "counter",
        "nv_model_load_duration_secs": "gauge",
        "nv_pinned_memory_pool_total_bytes": "gauge",
        "nv_pinned_memory_pool_used_bytes": "gauge",
        "nv_cpu_utilization": "gauge",
        "nv_cpu_memory_total_bytes": "gauge",
        "nv_cpu_memory_used_bytes": "gauge",
    }
    assert helps["nv_inference_count"] == "Number of inferences performed (does not include cached requests)"
    assert 0 <= value(text, "nv_cpu_utilization") <= 1
    assert 0 < value(text, "nv_cpu_memory_used_bytes") < value(text, "nv_cpu_memory_total_bytes")
    for family in found.values():
        for sample in family.samples:
            assert sample.value >= 0
            if (
                family.type == "histogram"
                and sample.name.endswith("_bucket")
                and sample.labels["le"] == "+Inf"
            ):
                labels = {k: v for k, v in sample.labels.items() if k != "le"}
                assert value(text, family.name + "_count", **labels) == sample.value


def test_the_metrics_port_serves_no_inference(server: ServerProcess) -> None:
    with Http1(server.metrics) as client:
        reply = client.request("POST", "/v2/models/m/infer", b"{}")
        text = b'{"error":"Method Not Allowed: this is the metrics port, REST is on another port, --http-port (8000)"}'
        assert (reply.status, reply.body) == (405, text)
        pipelined = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n"
        client.send(pipelined * 2)
        assert [client.read().body[:6] for _ in range(4)] == [b"# HELP", b"# metr"] * 2


NV_LINES = 14  # of a model without requests: 1 success, 4 failures, 3 of inferences, 5 durations, 1 load


@pytest.fixture(scope="module")
def fifty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository: Path = tmp_path_factory.mktemp("fifty")
    for i in range(50):
        write_model(repository, f"a_model_with_a_name_{i:02}", identity_config())
    return repository


def samples(text: str, prefix: str, model: str) -> set[str]:
    """Names of the families with a sample of the model."""
    return {
        family.name
        for family in families(text).values()
        for sample in family.samples
        if family.name.startswith(prefix) and sample.labels.get("model") == model
    }


@pytest.mark.slow
def test_what_nobody_uses_is_told_in_few_words(fifty: Path) -> None:
    """A page of 50 idle models is under 100 KB and has all that a Triton server has of them."""
    used, idle = "a_model_with_a_name_00", "a_model_with_a_name_01"
    with ServerProcess(fifty) as server:
        before = scrape(server)
        infer(server, used)
        after = scrape(server)
    assert len(before.encode()) < 100_000
    for text in (before, after):
        lines = [line for line in text.splitlines() if f'model="{idle}"' in line and line.startswith("nv_")]
        assert len(lines) == NV_LINES
    loaded = {"neptrio_model_memory_bytes"}  # where loading it took some
    assert samples(before, "neptrio_", used) - loaded == samples(after, "neptrio_", idle) - loaded == set()
    assert samples(after, "neptrio_", used) - loaded == {
        "neptrio_stage_seconds",
        "neptrio_batch_size",
        "neptrio_batch_oldest_wait_seconds",
        "neptrio_requests",
        "neptrio_accepted_requests",
        "neptrio_inflight_bytes",
    }
    assert samples(after, "nv_", used) == samples(after, "nv_", idle)
    bounds = re.findall(
        rf'stage_seconds_bucket{{model="{used}",stage="queue",version="1",le="([^"]+)"', after
    )
    assert len(bounds) == 12
    assert [bounds[0], bounds[-2], bounds[-1]] == [str(2**14 / 1e9), str(2**34 / 1e9), "+Inf"]


@pytest.mark.slow
@pytest.mark.parametrize(("detail", "own"), [("triton", False), ("full", True)])
def test_how_much_is_told_can_be_chosen(fifty: Path, detail: str, own: bool) -> None:
    used, idle = "a_model_with_a_name_00", "a_model_with_a_name_01"
    with ServerProcess(fifty, f"--metrics-detail={detail}") as server:
        infer(server, used)
        text = scrape(server)
    assert bool(samples(text, "neptrio_", used)) is bool(samples(text, "neptrio_", idle)) is own
    assert ("neptrio_" in text) is own
    assert samples(text, "nv_", idle) == samples(text, "nv_", used)
    bounds = re.findall(rf'stage_seconds_bucket{{model="{idle}",stage="queue",version="1",le="([^"]+)"', text)
    assert len(bounds) == (24 if own else 0)


def test_summaries_when_enabled_and_counters_when_not(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        "m",
        identity_config(extra='parameters { key: "execute_delay_ms" value { string_value: "5" } }'),
    )
    with ServerProcess(
        tmp_path,
        "--metrics-config=summary_latencies=true",
        "--metrics-config=counter_latencies=false",
        "--metrics-config=summary_quantiles=0.5:0.05,0.99:0.001",
        "--allow-cpu-metrics=false",
    ) as server:
        assert "NaN" in scrape(server), "no value within the window"
        infer(server, times=5)
        text = scrape(server)
    assert "duration_us" not in text and "nv_cpu" not in text
    found = families(text)
    for stage in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
        family = found[f"nv_inference_{stage}_summary_us"]
        assert family.type == "summary"
        assert [s.labels["quantile"] for s in family.samples if "quantile" in s.labels] == ["0.5", "0.99"]
        assert value(text, family.name + "_count", **M) == 5
    infer_us = value(text, "nv_inference_compute_infer_summary_us", quantile="0.5", **M)
    assert (
        5000 * (1 - 1 / 128)
        <= infer_us
        <= value(text, "nv_inference_request_summary_us", quantile="0.99", **M) * (1 + 1 / 64)
    )


def test_first_response_buckets(tmp_path: Path) -> None:
    override = """model_metrics { metric_control [ {
        metric_identifier { family: "nv_inference_first_response_histogram_ms" }
        histogram_options { buckets: [ -1, 0.0, 1, 2.5 ] } } ] }"""
    decoupled = "model_transaction_policy { decoupled: true }"
    write_model(tmp_path, "m", identity_config(extra=decoupled + override))
    write_model(tmp_path, "default", identity_config(extra=decoupled))
    write_model(tmp_path, "plain", identity_config())
    with ServerProcess(tmp_path, "--metrics-config=histogram_latencies=true") as server:
        text = scrape(server)
    name = "nv_inference_first_response_histogram_ms"
    usual = "100 500 2000 5000 +Inf"
    for model, bounds in (("m", "-1 0 1 2.5 +Inf"), ("default", usual), ("plain", usual)):
        lines = [f'{name}_bucket{{model="{model}",version="1",le="{le}"}} 0' for le in bounds.split()]
        assert [
            line for line in text.splitlines() if f'_bucket{{model="{model}"' in line and name in line
        ] == lines


def control(family: str | None, options: str) -> str:
    identifier = "" if family is None else f'metric_identifier {{ family: "{family}" }}'
    return f"model_metrics {{ metric_control [ {{ {identifier} {options} }} ] }}"


FIRST = "nv_inference_first_response_histogram_ms"


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        (control(FIRST, "histogram_options { }"), "histogram_options must specify buckets"),
        (
            control(FIRST, "histogram_options { buckets: [ 2, 1 ] }"),
            f"the buckets of '{FIRST}' must be finite and ascending, got [2.0, 1.0]",
        ),
        (
            control(FIRST, "histogram_options { buckets: [ 1, inf ] }"),
            f"the buckets of '{FIRST}' must be finite and ascending, got [1.0, inf]",
        ),
        (
            control("", "histogram_options { buckets: [ 1 ] }"),
            f"must name a metric family, expected '{FIRST}'",
        ),
        (
            control(None, "histogram_options { buckets: [ 1 ] }"),
            f"must name a metric family, expected '{FIRST}'",
        ),
        (
            control("nv_no_such_histogram", "histogram_options { buckets: [ 1 ] }"),
            f"unknown metric family 'nv_no_such_histogram', the one that can be configured is '{FIRST}'",
        ),
        *(
            (
                f'metric_tags {{ key: "{name}" value: "x" }}',
                f"a tag's name consists of ASCII letters, digits and '_', got '{name}'",
            )
            for name in ("a-b", "a b", "ü", "a=")
        ),
    ],
)
def test_metrics_of_a_model_that_cannot_be_configured(tmp_path: Path, metrics: str, reason: str) -> None:
    """The load fails, whatever --metrics-config says, and for models that are not decoupled too."""
    write_model(tmp_path, "m", identity_config(extra=metrics))
    with ServerProcess(tmp_path, "--exit-on-error=false") as server:
        log = server.log()
        with httpclient.InferenceServerClient(server.http) as client:
            (row,) = client.get_model_repository_index()
    where = "model_metrics.metric_control[0]" if metrics.startswith("model_metrics") else "metric_tags"
    assert f"config.pbtxt:1: {where}" in row["reason"]
    assert f"{reason} (model 'm')" in row["reason"]
    assert "load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument:" in log


SENDER = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for flags in (0, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL):
                tensor = pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())
                sender.send(pb_utils.InferenceResponse([tensor]), flags=flags)
"""
COMPLETES = """
    @staticmethod
    def auto_complete_config(c):
        c.set_model_transaction_policy({"decoupled": True})
        return c
"""
ENSEMBLE = """
platform: "ensemble"
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
ensemble_scheduling { step [
  { model_name: "async" model_version: -1
    input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "middle" } },
  { model_name: "single" model_version: -1
    input_map { key: "IN" value: "middle" } output_map { key: "OUT" value: "OUT" } } ] }
"""


@pytest.mark.slow
def test_every_decoupled_model_has_a_first_response(tmp_path: Path) -> None:
    """Written with async, told by the model itself, in its own process, and an ensemble of such models."""
    plain = config("IN:TYPE_INT32:1", "OUT:TYPE_INT32:1")
    decoupled = plain + " model_transaction_policy { decoupled: true }"
    waits = SENDER.replace("def execute", "async def execute")
    python_model(tmp_path, "sync", SENDER, decoupled)
    python_model(tmp_path, "async", waits, decoupled)
    python_model(tmp_path, "completes", waits + COMPLETES, plain)
    isolated(tmp_path, "apart", waits, decoupled)
    echo = "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', r.inputs()[0].as_numpy())]) for r in requests]"
    python_model(tmp_path, "single", SENDER.split("        for")[0] + echo, plain)
    write_model(tmp_path, "ensemble", ENSEMBLE)
    models = ("sync", "async", "completes", "apart", "ensemble")
    with ServerProcess(tmp_path, "--metrics-config=histogram_latencies=true") as server:
        with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client) as responses:
            for model in models:
                tensor = grpcclient.InferInput("IN", [1], "INT32")
                tensor.set_data_from_numpy(np.zeros(1, np.int32))
                client.async_stream_infer(model, [tensor])
                for _ in range(2):
                    assert responses.result().as_numpy("OUT").tolist() == [0]
        text = scrape(server)
    counts = {name: value(text, f"{FIRST}_count", model=name, version="1") for name in (*models, "single")}
    assert counts == {"sync": 1, "async": 2, "completes": 1, "apart": 1, "ensemble": 1, "single": 2}


def test_the_size_of_the_pinned_pool(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config())
    with ServerProcess(tmp_path, "--pinned-memory-pool-byte-size=12345678") as server:
        text = scrape(server)
    assert value(text, "nv_pinned_memory_pool_total_bytes") == 12345678
    assert value(text, "nv_pinned_memory_pool_used_bytes") == 0


def test_switched_off(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config())
    with ServerProcess(tmp_path, "--allow-metrics=false") as server:
        assert server.metrics == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("counter_latencies", "<key>=<value>"),
        ("counter_latencies=maybe", "true or false"),
        ("summary_quantiles=2:0", "between 0 and 1"),
        ("nonsense=1", "known are: counter_latencies"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, setting: str, message: str) -> None:
    command = [
        sys.executable,
        "-m",
        "neptrio",
        f"--model-repository={tmp_path}",
        f"--metrics-config={setting}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert message in done.stderr
