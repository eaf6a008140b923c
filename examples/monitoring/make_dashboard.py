"""Writes dashboard.json, the Grafana dashboard, next to this file.

Panels are rows of (title, unit, [(query, legend)]). `$model` is the dashboard's variable, `$__rate_interval`
Grafana's own. Import the file in Grafana and choose a Prometheus data source.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODEL = 'model=~"$model"'
RATE = "$__rate_interval"


def rate(metric: str, by: str = "model", labels: str = MODEL) -> str:
    """The per-second growth of a counter."""
    return f"sum by ({by}) (rate({metric}{{{labels}}}[{RATE}]))"


def quantile(q: float, stage: str) -> str:
    """A quantile of a stage over all servers: exact merging of the buckets."""
    labels = f'{MODEL},stage="{stage}"'
    return f"histogram_quantile({q}, sum by (le, model) (rate(neptrio_stage_seconds_bucket{{{labels}}}[{RATE}])))"


PANELS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("Requests", "reqps", [(rate("nv_inference_request_success"), "{{model}}")]),
    (
        "Failures by reason",
        "reqps",
        [(rate("nv_inference_request_failure", "model, reason"), "{{model}} {{reason}}")],
    ),
    ("Inferences", "ops", [(rate("nv_inference_count"), "{{model}}")]),
    (
        "Request latency",
        "s",
        [(quantile(q, "request"), f"{{{{model}}}} p{100 * q:g}") for q in (0.5, 0.9, 0.99)],
    ),
    ("Queue time", "s", [(quantile(q, "queue"), f"{{{{model}}}} p{100 * q:g}") for q in (0.5, 0.99)]),
    (
        "Compute time, p99 by stage",
        "s",
        [
            (quantile(0.99, stage), f"{{{{model}}}} {stage.removeprefix('compute_')}")
            for stage in ("compute_input", "compute_infer", "compute_output")
        ],
    ),
    (
        "Mean time by stage",
        "µs",
        [
            (
                f"{rate(f'nv_inference_{stage}_duration_us')} / {rate('nv_inference_request_success')}",
                f"{{{{model}}}} {stage}",
            )
            for stage in ("request", "queue", "compute_input", "compute_infer", "compute_output")
        ],
    ),
    (
        "Requests held now",
        "short",
        [(f"sum by (model, state) (neptrio_requests{{{MODEL}}})", "{{model}} {{state}}")],
    ),
    (
        "Pending requests",
        "short",
        [(f"sum by (model) (nv_inference_pending_request_count{{{MODEL}}})", "{{model}}")],
    ),
    ("Bytes in flight", "bytes", [(f"sum by (model) (neptrio_inflight_bytes{{{MODEL}}})", "{{model}}")]),
    ("Open sequences", "short", [(f"sum by (model) (neptrio_live_sequences{{{MODEL}}})", "{{model}}")]),
    (
        "Mean batch size",
        "short",
        [(f"{rate('nv_inference_count')} / {rate('nv_inference_exec_count')}", "{{model}}")],
    ),
    (
        "Batches by why they were closed",
        "ops",
        [(rate("neptrio_batch_size_count", "model, close_reason"), "{{model}} {{close_reason}}")],
    ),
    (
        "Oldest request's wait, mean by close reason",
        "s",
        [
            (
                f"{rate('neptrio_batch_oldest_wait_seconds_total', 'model, close_reason')} / "
                f"{rate('neptrio_batch_size_count', 'model, close_reason')}",
                "{{model}} {{close_reason}}",
            )
        ],
    ),
    (
        "Response cache, hit rate",
        "percentunit",
        [
            (
                f"{rate('nv_cache_num_hits_per_model')} / "
                f"({rate('nv_cache_num_hits_per_model')} + {rate('nv_cache_num_misses_per_model')})",
                "{{model}}",
            )
        ],
    ),
    (
        "Response cache, use",
        "percentunit",
        [("nv_cache_util", "{{instance}}")],
    ),
    (
        "Response cache, mean time of a hit and of a miss",
        "µs",
        [
            (
                f"{rate(f'nv_cache_{kind}_duration_per_model')} / {rate(f'nv_cache_num_{many}_per_model')}",
                f"{{{{model}}}} {kind}",
            )
            for kind, many in (("hit", "hits"), ("miss", "misses"))
        ],
    ),
    (
        "Traces",
        "ops",
        [(rate("neptrio_traces_total", "outcome", ""), "{{outcome}}")],
    ),
    (
        "Memory of models",
        "bytes",
        [(f"sum by (model, type) (neptrio_model_memory_bytes{{{MODEL}}})", "{{model}} {{type}}")],
    ),
    ("Load time", "s", [(f"max by (model) (nv_model_load_duration_secs{{{MODEL}}})", "{{model}}")]),
    ("CPU", "percentunit", [("nv_cpu_utilization", "{{instance}}")]),
    (
        "Memory of the machine",
        "bytes",
        [
            ("nv_cpu_memory_used_bytes", "{{instance}} used"),
            ("nv_cpu_memory_total_bytes", "{{instance}} total"),
        ],
    ),
    ("GPU", "percentunit", [("nv_gpu_utilization", "{{gpu_uuid}}")]),
    (
        "GPU memory",
        "bytes",
        [
            ("nv_gpu_memory_used_bytes", "{{gpu_uuid}} used"),
            ("nv_gpu_memory_total_bytes", "{{gpu_uuid}} total"),
        ],
    ),
    ("GPU power", "watt", [("nv_gpu_power_usage", "{{gpu_uuid}}")]),
    (
        "Pinned memory pool",
        "bytes",
        [("nv_pinned_memory_pool_used_bytes", "used"), ("nv_pinned_memory_pool_total_bytes", "total")],
    ),
]


def panel(index: int, title: str, unit: str, queries: list[tuple[str, str]]) -> dict[str, Any]:
    """A graph; three in a row."""
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"h": 8, "w": 8, "x": index % 3 * 8, "y": index // 3 * 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": query, "legendFormat": legend}
            for i, (query, legend) in enumerate(queries)
        ],
    }


def dashboard() -> dict[str, Any]:
    """The whole document."""
    return {
        "title": "neptrio",
        "uid": "neptrio",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                {
                    "name": "model",
                    "type": "query",
                    "label": "Model",
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "query": "label_values(nv_inference_request_success, model)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                },
            ]
        },
        "panels": [panel(i, *row) for i, row in enumerate(PANELS)],
    }


def text() -> str:
    """dashboard.json's content."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("dashboard.json").write_text(text())
