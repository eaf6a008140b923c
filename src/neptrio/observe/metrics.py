"""The metrics document: every number of the server, first those with Triton's names, then our own.

It is made when it is requested, on the trio thread, from the counters that the statistics extension also shows;
nothing is collected for it while requests pass. Metrics that Triton does not have are named neptrio_*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from neptrio.loop.loop_lag import BOUNDS_NS as LAG_BOUNDS_NS
from neptrio.loop.loop_lag import LoopLag
from neptrio.loop.slices import Slices
from neptrio.observe import front_ends
from neptrio.observe.custom_metrics import CustomMetrics
from neptrio.observe.demand_families import DemandFamilies, DemandRow
from neptrio.observe.exposition import Family, pairs
from neptrio.observe.front_ends import FrontEndRow
from neptrio.observe.machine import HostSample
from neptrio.observe.memory import device_pools, pinned_pools
from neptrio.observe.metrics_config import MetricsConfig
from neptrio.observe.model_families import Detail, ModelFamilies
from neptrio.observe.trace_file import TraceWriterStatistics


class PinnedLimit(Protocol):
    """The setting that the document shows."""

    @property
    def pinned_memory_pool_byte_size(self) -> int: ...


class Cache(Protocol):
    """The response cache (scheduling.response_cache)."""

    def statistics(self) -> Any: ...


class Traces(Protocol):
    """The owner of the trace writer (service.trace)."""

    def statistics(self) -> TraceWriterStatistics: ...


class Loop(Protocol):
    """The loop's measurements (scheduling.base.LoopServices)."""

    @property
    def lag(self) -> LoopLag: ...


class Sources(Protocol):
    """The sources of the numbers that are not a model's (service.Services)."""

    @property
    def settings(self) -> PinnedLimit: ...

    @property
    def loop(self) -> Loop: ...


class Counted(Protocol):
    """The same of verbs (service.Verbs)."""

    @property
    def cache(self) -> Cache | None: ...

    @property
    def trace(self) -> Traces | None: ...

    @property
    def custom_metrics(self) -> CustomMetrics: ...


class Demand(Protocol):
    """Models that are loaded on demand (repository.demand_view)."""

    def rows(self) -> Iterator[DemandRow]: ...

    def states(self) -> Mapping[str, int]: ...

    def memory(self) -> Iterable[tuple[int, int, int]]: ...

    def server_bytes(self) -> int: ...


class Metrics:
    """Makes the document. `models` returns the ready model versions, which may come and go while they are iterated over;
    `host` is the last sample of the machine."""

    def __init__(
        self,
        models: Callable[[], Iterable[Any]],
        services: Sources,
        verbs: Counted,
        config: MetricsConfig,
        detail: Detail = Detail.USED,
    ) -> None:
        self._models = models
        self._services = services
        self._verbs = verbs
        self._config = config
        self._detail = detail
        self.host = HostSample()
        self.front_ends: Callable[[], list[FrontEndRow]] = list  # the rows of --frontends
        self.demand: Demand | None = None  # models that are loaded on demand, where there may be any

    async def document(self) -> list[bytes]:
        """The document in parts, UTF-8.

        It is made in slices, between which requests are served: with thousands of models it takes tens
        of milliseconds. All samples of one version are of the same moment.
        """
        of_models = ModelFamilies(self._config, self._detail, self._verbs.cache is not None)
        slices = Slices()
        await _fill(of_models, self._models(), slices)
        families = [*of_models.families, *self._cache(), *self._machine()]
        if self._detail is not Detail.TRITON:
            families += await self._on_demand(slices)
            families += [*self._pools(), *self._traces(), self._loop_lag()]
            families += front_ends.families(self.front_ends(), self._detail is Detail.FULL)
        families += self._verbs.custom_metrics.collect()
        parts: list[bytes] = []
        for family in families:
            parts += family.render()
            await slices.rest()
        return parts

    async def _on_demand(self, slices: Slices) -> list[Family]:
        if self.demand is None:
            return []
        of_demand = DemandFamilies()
        await _fill(of_demand, self.demand.rows(), slices)
        of_demand.count(self.demand.states(), self.demand.memory(), self.demand.server_bytes())
        return of_demand.families

    def _loop_lag(self) -> Family:
        family = Family(
            "neptrio_loop_lag_seconds",
            "Passes of the event loop by how long nothing else was looked at",
            "histogram",
        )
        lag = self._services.loop.lag
        bounds = LAG_BOUNDS_NS if self._detail is Detail.FULL else LAG_BOUNDS_NS[::2]
        family.histogram(
            "", tuple(bound / 1e9 for bound in bounds), lag.cumulative(bounds), lag.count, lag.sum_ns / 1e9
        )
        return family

    def _cache(self) -> list[Family]:
        families: list[Family] = []
        if self._verbs.cache is not None:
            s = self._verbs.cache.statistics()
            for name, text, value in (
                ("num_entries", "Number of responses stored in response cache", s.entries),
                ("num_lookups", "Number of cache lookups in response cache", s.lookups),
                ("num_hits", "Number of cache hits in response cache", s.hits),
                ("num_misses", "Number of cache misses in response cache", s.misses),
                ("num_evictions", "Number of cache evictions in response cache", s.evictions),
                (
                    "lookup_duration",
                    "Total cache lookup duration (hit and miss), in microseconds",
                    s.lookup_ns // 1000,
                ),
                (
                    "insertion_duration",
                    "Total cache insertion duration, in microseconds",
                    s.insertion_ns // 1000,
                ),
                (
                    "util",
                    "Cache utilization [0.0 - 1.0]",
                    s.used_bytes / s.total_bytes if s.total_bytes else 0,
                ),
            ):
                gauge = Family(f"nv_cache_{name}", text, "gauge")
                gauge.sample("", value)
                families.append(gauge)
        return families

    def _traces(self) -> list[Family]:
        service = self._verbs.trace
        if service is None:
            return []
        state = service.statistics()
        traces = Family(
            "neptrio_traces_total", "Sampled requests whose traces are on disk or lost", "counter"
        )
        traces.sample(pairs([("outcome", "written")]), state.written)
        traces.sample(pairs([("outcome", "dropped")]), state.dropped)
        disabled = Family(
            "neptrio_trace_disabled", "1 while tracing is off because files cannot be written", "gauge"
        )
        disabled.sample("", int(state.failed))
        return [traces, disabled]

    def _machine(self) -> list[Family]:
        host = self.host
        limit = self._services.settings.pinned_memory_pool_byte_size
        pinned_total, pinned_used = pinned_pools(limit)
        rows: list[tuple[str, str, float | None]] = [
            (
                "nv_pinned_memory_pool_total_bytes",
                "Pinned memory pool total memory size, in bytes",
                pinned_total,
            ),
            (
                "nv_pinned_memory_pool_used_bytes",
                "Pinned memory pool used memory size, in bytes",
                pinned_used,
            ),
            ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", host.cpu_utilization),
            ("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", host.memory_total_bytes),
            ("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", host.memory_used_bytes),
        ]
        families = []
        for name, text, value in rows:
            family = Family(name, text, "gauge")
            if value is not None:
                family.sample("", value)
            families.append(family)
        for name, text, kind, field in (
            ("nv_gpu_utilization", "GPU utilization rate [0.0 - 1.0)", "gauge", "utilization"),
            ("nv_gpu_memory_total_bytes", "GPU total memory, in bytes", "gauge", "memory_total_bytes"),
            ("nv_gpu_memory_used_bytes", "GPU used memory, in bytes", "gauge", "memory_used_bytes"),
            ("nv_gpu_power_usage", "GPU power usage in watts", "gauge", "power_watts"),
            ("nv_gpu_power_limit", "GPU power management limit in watts", "gauge", "power_limit_watts"),
            (
                "nv_energy_consumption",
                "GPU energy consumption in joules since the Triton Server started",
                "counter",
                "energy_joules",
            ),
        ):
            family = Family(name, text, kind)
            for gpu in host.gpus:
                value = getattr(gpu, field)
                if value is not None:
                    family.sample(pairs([("gpu_uuid", gpu.uuid)]), value)
            families.append(family)
        return families

    def _pools(self) -> list[Family]:
        """The memory pools of kernel models."""
        reserved = Family(
            "neptrio_gpu_pool_reserved_bytes", "Memory pool of kernel models, taken from the GPU", "gauge"
        )
        used = Family("neptrio_gpu_pool_used_bytes", "Memory pool of kernel models, in use", "gauge")
        for uuid, *values in device_pools():
            for family, value in zip((reserved, used), values, strict=True):
                family.sample(pairs([("gpu_uuid", uuid)]), value)
        return [reserved, used]


async def _fill(made: ModelFamilies | DemandFamilies, rows: Iterable[Any], slices: Slices) -> None:
    """Adds the rows one by one, with rests in between."""
    for row in rows:
        made.add(row)
        if slices.used_up:
            for family in made.families:
                family.pack()
            await slices.pause()
