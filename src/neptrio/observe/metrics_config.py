"""--metrics-config: which latency metrics exist, and the quantiles of summaries.

Source: docs/protocol/features.md A7.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from neptrio.errors import InvalidArgument

FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
FIRST_RESPONSE_BUCKETS = (100.0, 500.0, 2000.0, 5000.0)
QUANTILES = ((0.5, 0.05), (0.9, 0.01), (0.95, 0.001), (0.99, 0.001), (0.999, 0.001))
SWITCHES = ("counter_latencies", "summary_latencies", "histogram_latencies")


@dataclass(frozen=True)
class MetricsConfig:
    """The values of --metrics-config. `summary_quantiles` are (quantile, allowed rank error)."""

    counter_latencies: bool = True
    summary_latencies: bool = False
    histogram_latencies: bool = False
    summary_quantiles: tuple[tuple[float, float], ...] = QUANTILES

    @staticmethod
    def parse(settings: Iterable[str]) -> MetricsConfig:
        """Reads `key=value` texts; of equal keys the last wins. Raises InvalidArgument naming what is wrong."""
        found: dict[str, Any] = {}
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not equals:
                raise InvalidArgument(f"--metrics-config must be <key>=<value>, got '{setting}'")
            if key in SWITCHES:
                if value.lower() not in ("true", "false"):
                    raise InvalidArgument(f"--metrics-config {key} must be true or false, got '{value}'")
                found[key] = value.lower() == "true"
            elif key == "summary_quantiles":
                found[key] = _quantiles(value)
            else:
                known = ", ".join((*SWITCHES, "summary_quantiles"))
                raise InvalidArgument(f"unknown --metrics-config setting '{key}', known are: {known}")
        return MetricsConfig(**found)

    def apply(self, counters: Any, config: Any) -> None:
        """Makes a model's counters collect what the metrics need. `config` is a checked ModelConfig."""
        if self.summary_latencies:
            counters.enable_summaries(config.response_cache.enable)
        if self.histogram_latencies:
            counters.enable_first_response(first_response_buckets(config))


def first_response_buckets(config: Any) -> tuple[float, ...]:
    """The bounds that a model's `model_metrics` sets, in milliseconds, or the default ones."""
    chosen = FIRST_RESPONSE_BUCKETS
    for control in config.model_metrics.metric_control:
        chosen = tuple(control.histogram_options.buckets) or chosen
    return chosen


def _quantiles(text: str) -> tuple[tuple[float, float], ...]:
    found = []
    for pair in text.split(","):
        quantile, _, error = pair.partition(":")
        try:
            entry = float(quantile), float(error)
        except ValueError:
            entry = -1.0, -1.0
        if not (0 <= entry[0] <= 1 and 0 <= entry[1] <= 1):
            raise InvalidArgument(
                "--metrics-config summary_quantiles must be <quantile>:<error>[,...] with numbers between 0 "
                f"and 1, got '{pair}'"
            )
        found.append(entry)
    return tuple(found)
