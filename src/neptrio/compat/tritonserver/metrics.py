"""Custom metrics, on the metrics page of the server that was started last."""

from __future__ import annotations

import weakref
from typing import Any

from neptrio.compat.tritonserver.enums import MetricKind
from neptrio.compat.tritonserver.errors import InvalidArgumentError, converting
from neptrio.observe.custom_metrics import CustomMetrics

_registries: list[weakref.ref[CustomMetrics]] = []


def serving(registry: CustomMetrics) -> None:
    """A server has started: families made from now on are its."""
    _registries.append(weakref.ref(registry))


def stopped(registry: CustomMetrics) -> None:
    """The server has stopped."""
    _registries[:] = [known for known in _registries if known() not in (registry, None)]


class MetricFamily:
    """Metrics with one name and different labels. Raises InvalidArgumentError for a bad name, or without a server."""

    def __init__(self, kind: MetricKind, name: str, description: str) -> None:
        registry = _registries[-1]() if _registries else None
        if registry is None:
            raise InvalidArgumentError("metrics belong to a server: start one first")
        self.kind = MetricKind(kind)
        with converting():
            self._family = registry.family(name, description, int(self.kind))


class Metric:
    """A counter or gauge with its labels."""

    def __init__(self, family: MetricFamily, labels: dict[str, str] | None = None, **more: Any) -> None:
        """`buckets`: the ascending upper bounds of a histogram."""
        self.kind = family.kind
        with converting():
            self._metric = family._family.Metric(labels, **more)

    @property
    def value(self) -> float:
        """What it counts now."""
        with converting():
            return self._metric.value()

    def increment(self, value: float) -> None:
        """Adds to it; a counter only grows."""
        with converting():
            self._metric.increment(value)

    def set_value(self, value: float) -> None:
        """Sets a gauge."""
        with converting():
            self._metric.set(value)

    def observe(self, value: float) -> None:
        """Counts a value in a histogram."""
        with converting():
            self._metric.observe(value)
