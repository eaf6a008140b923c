"""The metrics document: every number the server knows, in Triton's names and then in our own.

Read at the moment of the scrape on the trio thread, from the same counters as the statistics
extension; nothing is collected beside the path of a request. Names, labels and kinds of the nv_*
families are a Triton server's (docs/protocol/features.md A7, docs/protocol/observed.md 15); labels are
sorted by name, as scripts match them. What Triton does not have is called neptrio_*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import trio

from neptrio.observe.custom_metrics import CustomMetrics
from neptrio.observe.exposition import Family, Labels, render
from neptrio.observe.host import HostSample
from neptrio.observe.live import live
from neptrio.observe.memory import device_pools, pinned_pools
from neptrio.observe.metrics_config import FIRST_RESPONSE, MetricsConfig
from neptrio.observe.processes import processes
from neptrio.observe.trace_file import TraceWriterStatistics
from neptrio.request.infer_request import monotonic_ns

# upper bounds of the stage histograms: 2**14 ns (16 us) to 2**36 ns (69 s); powers of two are exact
STAGE_BOUNDS_NS = tuple(1 << exponent for exponent in range(14, 37))
STAGE_BOUNDS = tuple(bound / 1e9 for bound in STAGE_BOUNDS_NS)
BATCH_BOUNDS = tuple(1 << exponent for exponent in range(11))

# nv_inference_<name>_duration_us and nv_inference_<name>_summary_us: (name, counter's key, what, cached)
STAGES = (
    ("request", "success", "inference request duration", True),
    ("queue", "queue", "inference queuing duration", True),
    ("compute_input", "compute_input", "compute input duration", False),
    ("compute_infer", "compute_infer", "compute inference duration", False),
    ("compute_output", "compute_output", "inference compute output duration", False),
)
CACHED = {True: "(includes cached requests)", False: "(does not include cached requests)"}


Models = Sequence[tuple[Any, Labels]]


def model_labels(model: Any) -> list[tuple[str, str]]:
    """model, version and the configuration's metric_tags (label `_key`), sorted by name."""
    tags = [("_" + key, value) for key, value in model.config.metric_tags.items()]
    return sorted([("model", model.name), ("version", model.version), *tags])


def with_label(labels: Labels, name: str, value: str) -> list[tuple[str, str]]:
    """The labels and one more, sorted by name."""
    return sorted([*labels, (name, value)])


class PinnedLimit(Protocol):
    """What the document says of the settings."""

    @property
    def pinned_memory_pool_byte_size(self) -> int: ...


class Cache(Protocol):
    """The response cache (scheduling.response_cache)."""

    def statistics(self) -> Any: ...


class Traces(Protocol):
    """Whoever has traces written (service.trace)."""

    def statistics(self) -> TraceWriterStatistics: ...


class Sources(Protocol):
    """Where the document's numbers come from, beside the models; service.Services is it."""

    @property
    def settings(self) -> PinnedLimit: ...

    @property
    def cache(self) -> Cache | None: ...

    @property
    def trace(self) -> Traces | None: ...

    @property
    def custom_metrics(self) -> CustomMetrics: ...


class Metrics:
    """Makes the document. `models` lists the ready model versions; `host` is the last sample."""

    def __init__(self, models: Callable[[], Iterable[Any]], services: Sources, config: MetricsConfig) -> None:
        self._models = models
        self._services = services
        self._config = config
        self.host = HostSample()

    async def document(self) -> bytes:
        """The exposition, UTF-8.

        Lets requests through between groups of families, and between models where a model has many
        lines: with hundreds of models a document takes tens of milliseconds. A sample is of its
        moment; a histogram's samples are of one.
        """
        models = [(model, model_labels(model)) for model in self._models()]
        families: list[Family] = []
        for group in (self._requests, self._latencies, self._cache, self._loads, self._live):
            families += group(models)
            await trio.lowlevel.checkpoint()
        families += self._machine()
        families += self._traces()
        families += await self._batches(models)
        families.append(await self._stages(models))
        families += self._services.custom_metrics.collect()
        return render(families)

    def _requests(self, models: Models) -> list[Family]:
        success = Family(
            "nv_inference_request_success",
            "Number of successful inference requests, all batch sizes",
            "counter",
        )
        failure = Family(
            "nv_inference_request_failure", "Number of failed inference requests, all batch sizes", "counter"
        )
        count = Family(
            "nv_inference_count",
            "Number of inferences performed (does not include cached requests)",
            "counter",
        )
        executions = Family(
            "nv_inference_exec_count",
            "Number of model executions performed (does not include cached requests)",
            "counter",
        )
        pending = Family(
            "nv_inference_pending_request_count",
            "Instantaneous number of pending requests awaiting execution per-model.",
            "gauge",
        )
        for model, labels in models:
            counters = model.counters
            success.sample(labels, counters.microseconds()["success"][0])
            for reason, failures in counters.failures.items():
                failure.sample(with_label(labels, "reason", reason), failures)
            count.sample(labels, counters.inference_count)
            executions.sample(labels, counters.execution_count)
            pending.sample(labels, live(model).pending)
        return [success, failure, count, executions, pending]

    def _latencies(self, models: Models) -> list[Family]:
        families = []
        now = monotonic_ns()
        for name, key, what, cached in STAGES:
            text = f"{what} in microseconds {CACHED[cached]}"
            counter = Family(f"nv_inference_{name}_duration_us", f"Cumulative {text}", "counter")
            word = "Summary of" if cached else "Cumulative"  # a Triton server's words
            summary = Family(f"nv_inference_{name}_summary_us", f"{word} {text}", "summary")
            for model, labels in models:
                if self._config.counter_latencies:
                    counter.sample(labels, model.counters.microseconds()[key][1])
                self._summarize(summary, model, labels, name, now)
            families += [counter, summary]
        first = Family(FIRST_RESPONSE, "Duration from request to first response in milliseconds", "histogram")
        for model, labels in models:
            histogram = model.counters.first_response
            if histogram is not None:
                below, cumulative = 0, []
                for number in histogram.counts[:-1]:
                    below += number
                    cumulative.append(below)
                first.histogram(labels, histogram.bounds, cumulative, sum(histogram.counts), histogram.sum)
        return [*families, first]

    def _summarize(self, family: Family, model: Any, labels: Labels, stage: str, now: int) -> None:
        """A sliding minute of a stage. The window's counts are exact, so the rank error is 0 and the
        value is within the histogram's relative error; the configured errors are upper limits."""
        sliding = (model.counters.summaries or {}).get(stage)
        if sliding is None:
            return
        window = sliding.window(now)
        quantiles = [
            (quantile, window.percentile(quantile * 100) / 1000 if window.count else float("nan"))
            for quantile, _error in self._config.summary_quantiles
        ]
        family.summary(labels, quantiles, sliding.count, sliding.sum // 1000)

    def _cache(self, models: Models) -> list[Family]:
        hits = Family("nv_cache_num_hits_per_model", "Number of cache hits per model", "counter")
        misses = Family("nv_cache_num_misses_per_model", "Number of cache misses per model", "counter")
        hit = Family(
            "nv_cache_hit_duration_per_model",
            "Total cache hit duration per model, in microseconds",
            "counter",
        )
        miss = Family(
            "nv_cache_miss_duration_per_model",
            "Total cache miss (insert+lookup) duration per model, in microseconds",
            "counter",
        )
        hit_summary = Family(
            "nv_cache_hit_summary_per_model",
            "Summary of cache hit counts/durations per model, in microseconds.",
            "summary",
        )
        miss_summary = Family(
            "nv_cache_miss_summary_per_model",
            "Summary of cache miss counts/durations per model, in microseconds.",
            "summary",
        )
        now = monotonic_ns()
        for model, labels in models:
            if not (self._services.cache is not None and model.config.response_cache.enable):
                continue
            durations = model.counters.microseconds()
            hits.sample(labels, durations["cache_hit"][0])
            misses.sample(labels, durations["cache_miss"][0])
            if self._config.counter_latencies:
                hit.sample(labels, durations["cache_hit"][1])
                miss.sample(labels, durations["cache_miss"][1])
            self._summarize(hit_summary, model, labels, "cache_hit", now)
            self._summarize(miss_summary, model, labels, "cache_miss", now)
        families = [hits, misses, hit, miss, hit_summary, miss_summary]
        if self._services.cache is not None:
            s = self._services.cache.statistics()
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
                gauge.sample([], value)
                families.append(gauge)
        return families

    def _loads(self, models: Models) -> list[Family]:
        load = Family("nv_model_load_duration_secs", "Model load time in seconds", "gauge")
        memory = Family(
            "neptrio_model_memory_bytes", "Memory that loading the model took, by type and id", "gauge"
        )
        for model, labels in models:
            load.sample(labels, model.load_duration_secs)
            for usage in model.counters.memory_usage:
                kind = with_label(labels, "type", usage["type"])
                memory.sample(with_label(kind, "id", str(usage["id"])), usage["byte_size"])
        return [load, memory]

    def _traces(self) -> list[Family]:
        service = self._services.trace
        if service is None:
            return []
        state = service.statistics()
        traces = Family(
            "neptrio_traces_total", "Sampled requests whose traces are on disk or lost", "counter"
        )
        traces.sample([("outcome", "written")], state.written)
        traces.sample([("outcome", "dropped")], state.dropped)
        disabled = Family(
            "neptrio_trace_disabled", "1 while tracing is off because files cannot be written", "gauge"
        )
        disabled.sample([], int(state.failed))
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
                family.sample([], value)
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
                    family.sample([("gpu_uuid", gpu.uuid)], value)
            families.append(family)
        reserved = Family(
            "neptrio_gpu_pool_reserved_bytes", "Memory pool of kernel models, taken from the GPU", "gauge"
        )
        used = Family("neptrio_gpu_pool_used_bytes", "Memory pool of kernel models, in use", "gauge")
        for uuid, *values in device_pools():
            for family, value in zip((reserved, used), values, strict=True):
                family.sample([("gpu_uuid", uuid)], value)
        return [*families, reserved, used]

    def _live(self, models: Models) -> list[Family]:
        requests = Family(
            "neptrio_requests", "Requests in the server now: queued, prepared or executing", "gauge"
        )
        accepted = Family("neptrio_accepted_requests", "Requests accepted and not yet answered", "gauge")
        inflight = Family("neptrio_inflight_bytes", "Bytes of the accepted requests' input tensors", "gauge")
        sequences = Family("neptrio_live_sequences", "Open sequences", "gauge")
        slots = Family("neptrio_sequence_slots", "Sequence slots of all instances, by use", "gauge")
        backlog = Family(
            "neptrio_sequence_backlog",
            "What waits for a sequence slot: sequences and their requests",
            "gauge",
        )
        for model, labels in models:
            now = live(model)
            for state in ("queued", "prepared", "executing"):
                requests.sample(with_label(labels, "state", state), getattr(now, state))
            accepted.sample(labels, now.accepted)
            inflight.sample(labels, now.inflight_bytes)
            if model.config.WhichOneof("scheduling_choice") == "sequence_batching":
                sequences.sample(labels, now.sequences)
                table = model.scheduler.statistics().table
                slots.sample(with_label(labels, "state", "used"), table.slots_used)
                slots.sample(with_label(labels, "state", "free"), table.slots - table.slots_used)
                backlog.sample(with_label(labels, "kind", "sequences"), table.backlog_sequences)
                backlog.sample(with_label(labels, "kind", "requests"), table.backlog_requests)
        return [requests, accepted, inflight, sequences, slots, backlog, *self._processes(models)]

    def _processes(self, models: Models) -> list[Family]:
        resident = Family(
            "neptrio_process_resident_bytes", "Resident memory of an instance's process", "gauge"
        )
        cpu = Family("neptrio_process_cpu_seconds_total", "CPU time of an instance's process", "counter")
        restarts = Family("neptrio_process_restarts_total", "Restarts of an instance's process", "counter")
        ring = Family("neptrio_process_ring_entries", "Batches and messages ahead of a process", "gauge")
        for model, labels in models:
            for process in processes(model):
                own = with_label(labels, "instance", process.instance)
                resident.sample(own, process.resident_bytes)
                cpu.sample(own, process.cpu_seconds)
                restarts.sample(own, process.restarts)
                ring.sample(own, process.ring)
        return [resident, cpu, restarts, ring]

    async def _batches(self, models: Models) -> list[Family]:
        sizes = Family(
            "neptrio_batch_size", "Sizes of the executed batches by why they were closed", "histogram"
        )
        waits = Family(
            "neptrio_batch_oldest_wait_seconds_total",
            "How long the oldest request of each executed batch had waited, by why it was closed",
            "counter",
        )
        for model, labels in models:
            for reason, closing in sorted(model.counters.closings.items()):
                own = with_label(labels, "close_reason", reason)
                cumulative = [sum(n for size, n in closing.sizes.items() if size <= b) for b in BATCH_BOUNDS]
                sizes.histogram(own, BATCH_BOUNDS, cumulative, closing.count, closing.size_sum)
                waits.sample(own, closing.oldest_wait_ns / 1e9)
            await trio.lowlevel.checkpoint()
        return [sizes, waits]

    async def _stages(self, models: Models) -> Family:
        family = Family("neptrio_stage_seconds", "Successful requests by the time a stage took", "histogram")
        for model, labels in models:
            for stage, histogram in model.counters.histograms().items():
                family.histogram(
                    with_label(labels, "stage", stage),
                    STAGE_BOUNDS,
                    histogram.cumulative(STAGE_BOUNDS_NS),
                    histogram.count,
                    histogram.sum / 1e9,
                )
            await trio.lowlevel.checkpoint()
        return family
