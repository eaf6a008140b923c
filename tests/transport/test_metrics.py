"""The metrics port of a real server, read with prometheus_client's parser."""

from __future__ import annotations

import http.client
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.support.metrics import families, request, scrape, value
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

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
    for path in ("/", "/metrics/", "/v2/health/live"):
        status, _, body = request(server, "GET", path)
        assert (status, body) == (200, b"")
    for method in ("POST", "HEAD", "PUT"):
        assert request(server, method, "/metrics")[0] == 405


def test_a_connection_serves_many_scrapes_and_garbage_ends_it(server: ServerProcess) -> None:
    connection = http.client.HTTPConnection(server.metrics, timeout=60)
    for _ in range(3):
        connection.request("GET", "/metrics")
        assert connection.getresponse().read().startswith(b"# HELP nv_inference_request_success")
    connection.close()
    host, port = server.metrics.split(":")
    for garbage in (b"nonsense\r\n\r\n", b"GET /metrics HTTP/1.1\r\nA: " + b"x" * 100_000):
        with socket.create_connection((host, int(port)), timeout=60) as sock:
            try:
                sock.sendall(garbage)
                assert sock.recv(10) == b""
            except ConnectionError:
                pass
    assert scrape(server)


def test_counters_follow_requests(server: ServerProcess) -> None:
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
    for model, bounds in (("m", "-1 0 1 2.5 +Inf"), ("default", "100 500 2000 5000 +Inf")):
        lines = [f'{name}_bucket{{model="{model}",version="1",le="{le}"}} 0' for le in bounds.split()]
        assert [
            line for line in text.splitlines() if f'_bucket{{model="{model}"' in line and name in line
        ] == lines
    assert f'{name}_count{{model="plain"' not in text, "decoupled models only"


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
