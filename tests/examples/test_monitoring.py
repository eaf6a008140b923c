"""The dashboard, the scrape configuration, the rules and the autoscaler's metric name what the server has."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import yaml
from prometheus_client.parser import text_string_to_metric_families

from neptrio.loop.loop_lag import LoopLag
from neptrio.observe.custom_metrics import CustomMetrics
from neptrio.observe.machine import GpuSample, HostSample
from neptrio.observe.metrics import Metrics
from neptrio.observe.metrics_config import MetricsConfig
from neptrio.settings import Settings
from tests.support.infer_messages import identity_inputs
from tests.support.metrics import scrape
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
PROMETHEUS = Path(__file__).parents[2] / "deploy" / "prometheus"
WORDS = {
    "sum",
    "by",
    "rate",
    "max",
    "histogram_quantile",
    "label_values",
    "le",
    "clamp_min",
    "increase",
    "and",
}
OF_TARGETS = {"instance", "job", "namespace", "pod"}  # labels that Prometheus gives to all series of a server


def load_dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
    return found


def queries() -> list[str]:
    dashboard = load_dashboard()
    variables = [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]] + variables


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def adapter_queries() -> list[str]:
    """Of the autoscaler's metric, with a pod's labels where the adapter puts them."""
    filled = {"<<.GroupBy>>": "namespace, pod", ",<<.LabelMatchers>>": ',pod="a"'}
    found = []
    for rule in yaml.safe_load((PROMETHEUS / "adapter.yaml").read_text()):
        for query in (rule["seriesQuery"], rule["metricsQuery"]):
            for place, text in filled.items():
                query = query.replace(place, text)
            found.append(query)
    return found


def names(query: str) -> set[str]:
    """The metrics of a PromQL query: identifiers that are no label, function or keyword."""
    bare = re.sub(r'\{[^}]*\}|\[[^\]]*\]|\bby \([^)]*\)|"[^"]*"', " ", query)
    bare = bare.replace("label_values(nv_inference_request_success, model)", "nv_inference_request_success")
    return {name for name in re.findall(r"[a-zA-Z_:][\w:]*", bare) if name not in WORDS}


def all_metrics(tmp_path: Path) -> tuple[set[str], dict[str, set[str]]]:
    """Sample names and their labels: a real server's, and (from the same code) a GPU machine's."""
    extra = "sequence_batching {}" if _has_sequences() else ""
    write_model(tmp_path, "m", identity_config(extra="dynamic_batching {}"))
    if extra:
        write_model(tmp_path, "s", identity_config(extra=extra))
    write_model(tmp_path, "c", identity_config(extra="response_cache { enable: true }"))
    process = 'parameters { key: "isolation" value { string_value: "process" } }'
    code = "class TritonPythonModel:\n    def execute(self, requests):\n        return [None for _ in requests]\n"
    python = identity_config(extra=process).replace('"identity"', '"python"')
    write_model(tmp_path, "p", python, {"1/model.py": code})
    with ServerProcess(tmp_path, "--cache-config=local,size=1000000", "--metrics-detail=full") as server:
        import tritonclient.http as httpclient

        with httpclient.InferenceServerClient(server.http) as client:
            client.infer("m", identity_inputs(httpclient))
        text = scrape(server)
    gpu = GpuSample("GPU-1", 0.5, 2, 1, 100.0, 300.0, 5.0)
    services = SimpleNamespace(settings=Settings(), loop=SimpleNamespace(lag=LoopLag()))
    verbs = SimpleNamespace(cache=None, trace=None, custom_metrics=CustomMetrics())
    metrics = Metrics(lambda: [], services, verbs, MetricsConfig())
    metrics.host = HostSample(gpus=(gpu,))
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text + b"".join(trio.run(metrics.document)).decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    # the parser appends _total to the names of counters
    for name in list(labels):
        labels.setdefault(name.removesuffix("_total"), labels[name])
    return set(labels), labels


def _has_sequences() -> bool:
    return (Path(__file__).parents[2] / "src/neptrio/scheduling/sequence.py").exists()


@pytest.mark.slow
def test_every_query_names_an_existing_metric_and_label(tmp_path: Path) -> None:
    known, labels = all_metrics(tmp_path)
    if not _has_sequences():
        known.add("neptrio_live_sequences")
        labels["neptrio_live_sequences"] = {"model", "version"}
    assert len(queries()) > 20
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for query in [*queries(), *(rule["expr"] for rule in rules()), *adapter_queries()]:
        if query.startswith(("up{", *(name + " " for name in recorded))):
            continue  # Prometheus' own, and what other rules make
        found = names(query)
        assert found, query
        assert found <= known, f"{found - known} of {query}"
        for name, selector in re.findall(r"([a-z_]+)\{([^}]*)\}", query):
            for label in re.findall(r"(\w+)!?=", selector):
                assert label in labels[name] | OF_TARGETS, f"label {label} of {query}"
        for group in re.findall(r"by \(([^)]*)\)", query):
            for label in group.split(", "):
                assert any(label in labels[name] | OF_TARGETS for name in found), f"label {label} of {query}"


def test_the_dashboard_is_what_its_script_makes() -> None:
    spec = importlib.util.spec_from_file_location("make_dashboard", FOLDER / "make_dashboard.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (FOLDER / "dashboard.json").read_text() == module.text(), (
        "run examples/monitoring/make_dashboard.py"
    )
    panels = load_dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_scrape_example_asks_the_metrics_port() -> None:
    text = (FOLDER / "prometheus.yml").read_text()
    assert f'targets: ["localhost:{Settings().metrics_port}"]' in text
    assert "metrics_path: /metrics" in text
