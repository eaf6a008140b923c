"""Custom metrics: families of counters, gauges and histograms, shown by the metrics endpoint.

Families with the same name are one family, and metrics of a family with the same labels share one value, also between
instances and models. A metric exists as long as some model holds its object. Without a server the values are kept here,
so that models can be debugged.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from . import _checks, _host
from ._errors import TritonModelException
from ._foreign import text_of, valid

_KINDS = ("counter", "gauge", "histogram")


class MetricKind(IntEnum):
    """The kind of a family."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class MetricFamily:
    """A named family of metrics of one kind. Raises TritonModelException for a name it cannot have."""

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        name = valid(_checks.text(name, "name of MetricFamily"))
        description = valid(_checks.text(description, "description of MetricFamily"))
        _checks.member(kind, MetricKind, "kind of MetricFamily", "MetricFamily")
        host = _host.require("MetricFamily") if _host.forked() else _host.find()
        make = _LocalFamily if host is None else host.metric_family
        self._family: Any = _call(make, name, description, int(kind))

    def Metric(self, labels: dict[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        """The metric with these labels; `buckets` are a histogram's ascending upper bounds."""
        bounds = None
        if buckets is not None:
            given = _checks.sequence(buckets, "buckets of Metric()", "a list of numbers")
            bounds = [_checks.real(bound, "a bucket of Metric()") for bound in given]
        if labels is not None and not isinstance(labels, dict):
            raise _checks.wrong("labels of Metric()", "a dict", labels)
        return Metric(
            _call(self._family.Metric, {_label(k): _label(v) for k, v in (labels or {}).items()}, bounds)
        )


class Metric:
    """One metric, made by MetricFamily.Metric(). A method that its kind lacks raises TritonModelException."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric

    def increment(self, value: float) -> None:
        """Adds to a counter or gauge."""
        _call(self._metric.increment, _checks.real(value, "value of increment()"))

    def set(self, value: float) -> None:
        """Sets a gauge."""
        _call(self._metric.set, _checks.real(value, "value of set()"))

    def observe(self, value: float) -> None:
        """Adds a value to a histogram."""
        _call(self._metric.observe, _checks.real(value, "value of observe()"))

    def value(self) -> float:
        """The value of a counter or gauge."""
        return float(_call(self._metric.value))


def _label(value: Any) -> str:
    return (
        valid(_checks.text(value, "a label of Metric()"))
        if isinstance(value, (bytes, bytearray))
        else text_of(value)
    )


def _call(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except TritonModelException:
        raise
    except Exception as error:
        raise TritonModelException(text_of(error)) from error


class _LocalFamily:
    """A family outside a server."""

    def __init__(self, name: str, description: str, kind: int) -> None:
        self._kind = kind
        self._metrics: dict[tuple[tuple[str, str], ...], _LocalMetric] = {}

    def Metric(self, labels: dict[str, str], buckets: list[float] | None) -> _LocalMetric:
        if (buckets is not None) != (self._kind == MetricFamily.HISTOGRAM):
            raise TritonModelException("buckets belong to histograms, and only to them")
        return self._metrics.setdefault(tuple(sorted(labels.items())), _LocalMetric(self._kind))


class _LocalMetric:
    def __init__(self, kind: int) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._value = 0.0

    def _change(self, operation: str, kinds: tuple[int, ...], value: float, add: bool) -> None:
        if self._kind not in kinds:
            raise TritonModelException(f"a {_KINDS[self._kind]} has no {operation}()")
        if operation == "increment" and self._kind == 0 and value < 0:
            raise TritonModelException(f"a counter can only be incremented by 0 or more, got {value}")
        with self._lock:
            self._value = self._value + value if add else value

    def increment(self, value: float) -> None:
        self._change("increment", (0, 1), value, True)

    def set(self, value: float) -> None:
        self._change("set", (1,), value, False)

    def observe(self, value: float) -> None:
        self._change("observe", (2,), value, True)

    def value(self) -> float:
        if self._kind == MetricFamily.HISTOGRAM:
            raise TritonModelException("a histogram has no value()")
        return self._value
