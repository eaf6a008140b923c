"""Custom metrics of models: families and metrics that Python models create at run time.

`pb_utils.MetricFamily` and `pb_utils.Metric` are these classes, bound to the server's registry.
The problem: several instances of a model (and several models) create the same family and the same metric, each
on its own thread, and expect one number in the metrics document. The choice: one registry, whose entries are
shared and count their holders.

Rules:
 1. A family is known by its name. Creating it again with the same kind shares it; with another kind, or under the
    name of one of the server's own metrics, it raises.
 2. A metric is known by its labels within its family; creating it again shares its value.
 3. Every Metric and MetricFamily object is a holder. An entry disappears when its last holder is gone or
    closed, and not before. Metrics hold their family.
 4. Any thread may use them. Values are read and written under one lock, which is never held during anything
    that can block.
Source: the Python backend's custom metrics interface (names and semantics).
"""

from __future__ import annotations

import math
import re
import threading
import weakref
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from neptrio.errors import InvalidArgument, Unsupported
from neptrio.observe.exposition import Family, pairs

COUNTER = 0
GAUGE = 1
HISTOGRAM = 2
KINDS = {COUNTER: "counter", GAUGE: "gauge", HISTOGRAM: "histogram"}
NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\Z")
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")
# prefixes of the names of the server's own metrics
RESERVED = (
    "neptrio_",
    "nv_inference_",
    "nv_cache_",
    "nv_model_",
    "nv_pinned_",
    "nv_cpu_",
    "nv_gpu_",
    "nv_energy_",
)


@dataclass(frozen=True)
class RegistryStatistics:
    """The number of families and metrics in the registry."""

    families: int
    metrics: int


class _Value:
    """The number (or histogram) shared by all Metric objects with these labels."""

    def __init__(self, labels: tuple[tuple[str, str], ...], buckets: tuple[float, ...]) -> None:
        self.labels = labels
        self.buckets = buckets
        self.value = 0.0
        self.counts = [0] * (len(buckets) + 1)
        self.holders = 0


class _FamilyEntry:
    """The entry shared by all MetricFamily objects with this name."""

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name = name
        self.description = description
        self.kind = kind
        self.values: dict[tuple[tuple[str, str], ...], _Value] = {}
        self.holders = 0


class CustomMetrics:
    """The registry of one server."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._families: dict[str, _FamilyEntry] = {}

    def family(self, name: str, description: str, kind: int) -> MetricFamily:
        """The family of that name, created if there is none. Raises InvalidArgument."""
        return MetricFamily(self, name, description, kind)

    def collect(self) -> list[Family]:
        """Every family with the current values of its metrics, sorted by name."""
        with self._lock:
            found = []
            for _, entry in sorted(self._families.items()):
                family = Family(entry.name, entry.description, KINDS[entry.kind])
                for _, value in sorted(entry.values.items()):
                    if entry.kind == HISTOGRAM:
                        below, cumulative = 0, []
                        for n in value.counts[:-1]:
                            below += n
                            cumulative.append(below)
                        family.histogram(
                            pairs(value.labels), value.buckets, cumulative, sum(value.counts), value.value
                        )
                    else:
                        family.sample(pairs(value.labels), value.value)
                found.append(family)
            return found

    def statistics(self) -> RegistryStatistics:
        """The current numbers."""
        with self._lock:
            return RegistryStatistics(
                len(self._families), sum(len(f.values) for f in self._families.values())
            )

    # ------------------------------------------------------------ for MetricFamily and Metric

    def _hold_family(self, name: str, description: str, kind: int) -> _FamilyEntry:
        with self._lock:
            entry = self._families.get(name)
            if entry is None:
                entry = self._families[name] = _FamilyEntry(name, description, kind)
            elif entry.kind != kind:
                raise InvalidArgument(
                    f"metric family '{name}' exists as a {KINDS[entry.kind]}, it cannot be created as a "
                    f"{KINDS[kind]}"
                )
            entry.holders += 1
            return entry

    def _release_family(self, entry: _FamilyEntry) -> None:
        with self._lock:
            entry.holders -= 1
            if entry.holders == 0:
                self._families.pop(entry.name, None)

    def _hold_value(
        self, entry: _FamilyEntry, labels: tuple[tuple[str, str], ...], buckets: tuple[float, ...]
    ) -> _Value:
        with self._lock:
            value = entry.values.get(labels)
            if value is None:
                value = entry.values[labels] = _Value(labels, buckets)
            elif value.buckets != buckets:
                raise InvalidArgument(
                    f"a metric of family '{entry.name}' with these labels exists with buckets "
                    f"{list(value.buckets)}, got {list(buckets)}"
                )
            value.holders += 1
            entry.holders += 1
            return value

    def _release_value(self, entry: _FamilyEntry, value: _Value) -> None:
        with self._lock:
            value.holders -= 1
            if value.holders == 0:
                entry.values.pop(value.labels, None)
            self._release_family(entry)


class MetricFamily:
    """A family of metrics with a name, a description and a kind; makes metrics with labels.

    Raises InvalidArgument for a bad or reserved name, or when the name exists with another kind.
    """

    COUNTER = COUNTER
    GAUGE = GAUGE
    HISTOGRAM = HISTOGRAM

    def __init__(self, registry: CustomMetrics, name: str, description: str, kind: int) -> None:
        if not isinstance(name, str) or not NAME.match(name):
            raise InvalidArgument(
                f"a metric name consists of letters, digits, '_' and ':' and does not start with a digit, "
                f"got {name!r}"
            )
        if name.startswith(RESERVED):
            raise InvalidArgument(
                f"the metric name '{name}' is reserved: names of the server's own metrics start with "
                f"{' or '.join(RESERVED)}"
            )
        if kind not in KINDS:
            raise InvalidArgument(f"the kind of metric family '{name}' must be COUNTER, GAUGE or HISTOGRAM")
        self.name = name
        self.kind = kind
        self._registry = registry
        self._entry = registry._hold_family(name, str(description), kind)
        self.close = weakref.finalize(self, registry._release_family, self._entry)

    def Metric(
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """The metric with these labels; `buckets` are a histogram's ascending upper bounds, where none leave it the one
        that counts all.

        Raises InvalidArgument for bad labels or buckets.
        """
        if not self.close.alive:
            raise InvalidArgument(f"metric family '{self.name}' is closed")
        pairs = tuple(sorted((str(k), str(v)) for k, v in dict(labels or {}).items()))
        for key, _ in pairs:
            if not LABEL.match(key) or key.startswith("__"):
                raise InvalidArgument(f"'{key}' is not a label name (metric family '{self.name}')")
            if self.kind == HISTOGRAM and key == "le":
                raise InvalidArgument("the label 'le' belongs to the histogram's buckets")
        bounds = tuple(float(b) for b in buckets or ())
        if self.kind == HISTOGRAM:
            if buckets is None:
                raise InvalidArgument(f"a metric of histogram family '{self.name}' needs buckets")
            if any(math.isnan(b) for b in bounds) or any(a >= b for a, b in pairwise(bounds)):
                raise InvalidArgument(f"buckets must be ascending, got {list(bounds)}")
            if bounds and bounds[-1] == math.inf:
                bounds = bounds[:-1]
        elif buckets is not None:
            raise InvalidArgument(f"only histograms have buckets; '{self.name}' is a {KINDS[self.kind]}")
        return Metric(self._registry, self._entry, pairs, bounds)


class Metric:
    """One metric. The kind of its family decides which operations it has; the others raise Unsupported."""

    def __init__(
        self,
        registry: CustomMetrics,
        entry: _FamilyEntry,
        labels: tuple[tuple[str, str], ...],
        buckets: tuple[float, ...],
    ) -> None:
        self._lock = registry._lock
        self._entry = entry
        self._value = registry._hold_value(entry, labels, buckets)
        self.close = weakref.finalize(self, registry._release_value, entry, self._value)

    def _refuse(self, operation: str) -> Unsupported:
        return Unsupported(
            f"a {KINDS[self._entry.kind]} has no {operation}() (metric family '{self._entry.name}')"
        )

    def increment(self, value: float) -> None:
        """Adds `value` to a gauge or a counter. Raises InvalidArgument for less than 0 on a counter."""
        number = float(value)
        if self._entry.kind == HISTOGRAM:
            raise self._refuse("increment")
        if self._entry.kind == COUNTER and not number >= 0:
            raise InvalidArgument(f"a counter can only be incremented by 0 or more, got {value}")
        with self._lock:
            self._value.value += number

    def set(self, value: float) -> None:
        """Sets a gauge."""
        if self._entry.kind != GAUGE:
            raise self._refuse("set")
        with self._lock:
            self._value.value = float(value)

    def observe(self, value: float) -> None:
        """Counts a value in a histogram."""
        if self._entry.kind != HISTOGRAM:
            raise self._refuse("observe")
        number = float(value)
        if math.isnan(number):
            raise InvalidArgument("a histogram cannot observe NaN")
        with self._lock:
            self._value.counts[bisect_left(self._value.buckets, number)] += 1
            self._value.value += number

    def value(self) -> float:
        """The current value of a counter or gauge."""
        if self._entry.kind == HISTOGRAM:
            raise self._refuse("value")
        with self._lock:
            return self._value.value
