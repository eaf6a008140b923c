"""The metric families with samples of each model version.

The problem: a server may have thousands of versions, most of them idle, and every family has lines for each. The
choice: the document is made one version at a time, in all families at once, so that its maker can pause between
two versions; metrics that Triton does not have are shown only for versions that were used; and the lines that follow
from a version's counters are kept with its labels until the counters change, so that of idle versions nothing is made.

Names, labels and kinds of the nv_* families are those of a Triton server (docs/protocol/features.md A7,
docs/protocol/observed.md 15), and they exist for idle models too. Labels are sorted by name, as scripts expect.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from neptrio.observe.exposition import Family, pairs
from neptrio.observe.live import Live, live
from neptrio.observe.metrics_config import FIRST_RESPONSE, MetricsConfig
from neptrio.observe.processes import processes
from neptrio.request.infer_request import monotonic_ns

# Upper bounds of the stage histograms in nanoseconds, powers of two, which the histogram counts exactly: all of
# them from 16 us to 69 s for the detail "full", every second one up to 17 s otherwise.
ALL_STAGE_BOUNDS = tuple(1 << exponent for exponent in range(14, 37))
FEW_STAGE_BOUNDS = tuple(1 << exponent for exponent in range(14, 35, 2))
ALL_BATCH_BOUNDS = tuple(1 << exponent for exponent in range(11))
FEW_BATCH_BOUNDS = tuple(1 << exponent for exponent in range(0, 11, 2))

# of nv_inference_<name>_duration_us and nv_inference_<name>_summary_us: (name, key in the counters, what, cached)
STAGES = (
    ("request", "success", "inference request duration", True),
    ("queue", "queue", "inference queuing duration", True),
    ("compute_input", "compute_input", "compute input duration", False),
    ("compute_infer", "compute_infer", "compute inference duration", False),
    ("compute_output", "compute_output", "inference compute output duration", False),
)
CACHED = {True: "(includes cached requests)", False: "(does not include cached requests)"}


# (name, kind, what it is) of each family, in the order of the document
FAMILIES = (
    ("nv_inference_request_success", "counter", "Number of successful inference requests, all batch sizes"),
    ("nv_inference_request_failure", "counter", "Number of failed inference requests, all batch sizes"),
    ("nv_inference_count", "counter", "Number of inferences performed (does not include cached requests)"),
    (
        "nv_inference_exec_count",
        "counter",
        "Number of model executions performed (does not include cached requests)",
    ),
    (
        "nv_inference_pending_request_count",
        "gauge",
        "Instantaneous number of pending requests awaiting execution per-model.",
    ),
    *(
        row
        for name, _, what, cached in STAGES
        for text in (f"{what} in microseconds {CACHED[cached]}",)
        for row in (
            (f"nv_inference_{name}_duration_us", "counter", f"Cumulative {text}"),
            # as a Triton server writes it
            (
                f"nv_inference_{name}_summary_us",
                "summary",
                f"{'Summary of' if cached else 'Cumulative'} {text}",
            ),
        )
    ),
    (FIRST_RESPONSE, "histogram", "Duration from request to first response in milliseconds"),
    ("nv_cache_num_hits_per_model", "counter", "Number of cache hits per model"),
    ("nv_cache_num_misses_per_model", "counter", "Number of cache misses per model"),
    ("nv_cache_hit_duration_per_model", "counter", "Total cache hit duration per model, in microseconds"),
    (
        "nv_cache_miss_duration_per_model",
        "counter",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
    ),
    (
        "nv_cache_hit_summary_per_model",
        "summary",
        "Summary of cache hit counts/durations per model, in microseconds.",
    ),
    (
        "nv_cache_miss_summary_per_model",
        "summary",
        "Summary of cache miss counts/durations per model, in microseconds.",
    ),
    ("nv_model_load_duration_secs", "gauge", "Model load time in seconds"),
    ("neptrio_model_memory_bytes", "gauge", "Memory that loading the model took, by type and id"),
    ("neptrio_requests", "gauge", "Requests in the server now: queued, prepared or executing"),
    ("neptrio_accepted_requests", "gauge", "Requests accepted and not yet answered"),
    ("neptrio_inflight_bytes", "gauge", "Bytes of the accepted requests' input tensors"),
    ("neptrio_live_sequences", "gauge", "Open sequences"),
    ("neptrio_sequence_slots", "gauge", "Sequence slots of all instances, by use"),
    ("neptrio_sequence_backlog", "gauge", "What waits for a sequence slot: sequences and their requests"),
    ("neptrio_process_id", "gauge", "Process id of an instance's process"),
    ("neptrio_process_resident_bytes", "gauge", "Resident memory of an instance's process"),
    ("neptrio_process_cpu_seconds_total", "counter", "CPU time of an instance's process"),
    ("neptrio_process_restarts_total", "counter", "Restarts of an instance's process"),
    ("neptrio_process_ring_entries", "gauge", "Batches and messages ahead of a process"),
    ("neptrio_batch_size", "histogram", "Sizes of the executed batches by why they were closed"),
    (
        "neptrio_batch_oldest_wait_seconds_total",
        "counter",
        "How long the oldest request of each executed batch had waited, by why it was closed",
    ),
    ("neptrio_stage_seconds", "histogram", "Successful requests by the time a stage took"),
)


class Detail(enum.StrEnum):
    """--metrics-detail: how many of our own metrics (those that Triton does not have) are shown."""

    TRITON = "triton"  # none of it
    USED = "used"  # for models that have had a request, histograms with few buckets
    FULL = "full"  # for every model, histograms with all buckets


class LabelTexts:
    """A model version's labels as text: model, version and its metric_tags (as `_key`), sorted by name."""

    def __init__(self, model: Any) -> None:
        tags = [("_" + key, value) for key, value in model.config.metric_tags.items()]
        self._labels = [("model", str(model.name)), ("version", str(model.version)), *tags]
        self._made: dict[tuple[tuple[str, str], ...], str] = {}
        self._reasons: dict[str, str] = {}
        self.plain = self()
        # block -> what its lines were made from, and (number of the family, lines) of each family that has some
        self.kept: dict[str, tuple[Any, list[tuple[int, str]]]] = {}

    def __call__(self, *more: tuple[str, str]) -> str:
        """The labels together with others. The text is kept, since the next document has the same lines."""
        text = self._made.get(more)
        if text is None:
            text = self._made[more] = pairs(sorted([*self._labels, *more]))
        return text

    def reason(self, reason: str) -> str:
        """The labels together with a failure's reason: the most frequent case."""
        text = self._reasons.get(reason)
        if text is None:
            text = self._reasons[reason] = self(("reason", reason))
        return text


_texts: WeakKeyDictionary[Any, LabelTexts] = WeakKeyDictionary()


def label_texts(model: Any) -> LabelTexts:
    """The LabelTexts of `model` (a Model), made once."""
    texts = _texts.get(model)
    if texts is None:
        texts = _texts[model] = LabelTexts(model)
    return texts


class ModelFamilies:
    """The families of one document: call add() for each model version, then read `families`."""

    def __init__(self, config: MetricsConfig, detail: Detail, with_cache: bool) -> None:
        self._of = {name: Family(name, text, kind) for name, kind, text in FAMILIES}
        self.families = list(self._of.values())
        self._config = config
        self._detail = detail
        self._with_cache = with_cache
        self._now = int(monotonic_ns())

    def add(self, model: Any) -> None:
        """Adds the current samples of one version (a Model). Trio thread only."""
        texts = label_texts(model)
        counters = model.counters
        pending = live(model).pending if model.inflight else 0
        memory, loaded = counters.memory_usage, model.load_duration_secs
        of = (counters.changes, memory, pending, loaded, self._config, self._detail)
        if counters.summaries is not None:  # what they show changes with time alone
            self._add_nv(model, texts, pending)
        else:
            self._keep("nv", texts, of, lambda: self._add_nv(model, texts, pending))
        if self._detail is Detail.TRITON:
            return
        shown = self._of
        for process in processes(model):
            where = texts(("instance", process.instance))
            shown["neptrio_process_id"].sample(where, process.pid)
            shown["neptrio_process_resident_bytes"].sample(where, process.resident_bytes)
            shown["neptrio_process_cpu_seconds_total"].sample(where, process.cpu_seconds)
            shown["neptrio_process_restarts_total"].sample(where, process.restarts)
            shown["neptrio_process_ring_entries"].sample(where, process.ring)
        accounts = counters.accounts()
        if self._detail is Detail.FULL or accounts["accepted"] or accounts["refused"]:
            self._add_live(model, texts, live(model))
            self._keep("histograms", texts, of, lambda: self._add_histograms(model, texts))

    def _keep(self, block: str, texts: LabelTexts, of: Any, add: Callable[[], None]) -> None:
        """Adds the lines that `add` adds, which must follow from `of` and the model alone."""
        kept = texts.kept.get(block)
        if kept is not None and kept[0] == of:
            for number, lines in kept[1]:
                self.families[number].lines.append(lines)
            return
        before = [len(family.lines) for family in self.families]
        add()
        made = [
            (number, "\n".join(family.lines[count:]))
            for number, (family, count) in enumerate(zip(self.families, before, strict=True))
            if len(family.lines) > count
        ]
        texts.kept[block] = (of, made)

    def _add_nv(self, model: Any, texts: LabelTexts, pending: int) -> None:
        counters, labels, of = model.counters, texts.plain, self._of
        us = counters.microseconds()
        of["nv_inference_request_success"].sample(labels, us["success"][0])
        for reason, failures in counters.failures.items():
            of["nv_inference_request_failure"].sample(texts.reason(reason), failures)
        of["nv_inference_count"].sample(labels, counters.inference_count)
        of["nv_inference_exec_count"].sample(labels, counters.execution_count)
        of["nv_inference_pending_request_count"].sample(labels, pending)
        for name, key, _, _ in STAGES:
            if self._config.counter_latencies:
                of[f"nv_inference_{name}_duration_us"].sample(labels, us[key][1])
            if counters.summaries is not None:
                self._summarize(of[f"nv_inference_{name}_summary_us"], counters, labels, name)
        first = counters.first_response
        if first is not None:
            below, cumulative = 0, []
            for number in first.counts[:-1]:
                below += number
                cumulative.append(below)
            of[FIRST_RESPONSE].histogram(labels, first.bounds, cumulative, sum(first.counts), first.sum)
        if self._with_cache and model.config.response_cache.enable:
            of["nv_cache_num_hits_per_model"].sample(labels, us["cache_hit"][0])
            of["nv_cache_num_misses_per_model"].sample(labels, us["cache_miss"][0])
            if self._config.counter_latencies:
                of["nv_cache_hit_duration_per_model"].sample(labels, us["cache_hit"][1])
                of["nv_cache_miss_duration_per_model"].sample(labels, us["cache_miss"][1])
            self._summarize(of["nv_cache_hit_summary_per_model"], counters, labels, "cache_hit")
            self._summarize(of["nv_cache_miss_summary_per_model"], counters, labels, "cache_miss")
        of["nv_model_load_duration_secs"].sample(labels, model.load_duration_secs)
        if self._detail is not Detail.TRITON:
            for usage in counters.memory_usage:
                where = texts(("type", usage["type"]), ("id", str(usage["id"])))
                of["neptrio_model_memory_bytes"].sample(where, usage["byte_size"])

    def _summarize(self, family: Family, counters: Any, labels: str, stage: str) -> None:
        """A summary of the last minute of a stage. The counts in that window are exact, so the rank error is 0 and a
        value is within the histogram's relative error; the errors in --metrics-config are upper limits."""
        sliding = (counters.summaries or {}).get(stage)
        if sliding is None:
            return
        window = sliding.window(self._now)
        quantiles = [
            (quantile, window.percentile(quantile * 100) / 1000 if window.count else float("nan"))
            for quantile, _error in self._config.summary_quantiles
        ]
        family.summary(labels, quantiles, sliding.count, sliding.sum // 1000)

    def _add_live(self, model: Any, texts: LabelTexts, now: Live) -> None:
        labels, of = texts.plain, self._of
        for state in ("queued", "prepared", "executing"):
            of["neptrio_requests"].sample(texts(("state", state)), getattr(now, state))
        of["neptrio_accepted_requests"].sample(labels, now.accepted)
        of["neptrio_inflight_bytes"].sample(labels, now.inflight_bytes)
        if model.config.WhichOneof("scheduling_choice") == "sequence_batching":
            of["neptrio_live_sequences"].sample(labels, now.sequences)
            table = model.scheduler.statistics().table
            of["neptrio_sequence_slots"].sample(texts(("state", "used")), table.slots_used)
            of["neptrio_sequence_slots"].sample(texts(("state", "free")), table.slots - table.slots_used)
            of["neptrio_sequence_backlog"].sample(texts(("kind", "sequences")), table.backlog_sequences)
            of["neptrio_sequence_backlog"].sample(texts(("kind", "requests")), table.backlog_requests)

    def _add_histograms(self, model: Any, texts: LabelTexts) -> None:
        full, of = self._detail is Detail.FULL, self._of
        batch_bounds = ALL_BATCH_BOUNDS if full else FEW_BATCH_BOUNDS
        for reason, closing in sorted(model.counters.closings.items()):
            where = texts(("close_reason", reason))
            cumulative = [sum(n for size, n in closing.sizes.items() if size <= b) for b in batch_bounds]
            of["neptrio_batch_size"].histogram(
                where, batch_bounds, cumulative, closing.count, closing.size_sum
            )
            of["neptrio_batch_oldest_wait_seconds_total"].sample(where, closing.oldest_wait_ns / 1e9)
        bounds = ALL_STAGE_BOUNDS if full else FEW_STAGE_BOUNDS
        seconds = tuple(bound / 1e9 for bound in bounds)
        for stage, histogram in model.counters.histograms().items():
            of["neptrio_stage_seconds"].histogram(
                texts(("stage", stage)),
                seconds,
                histogram.cumulative(bounds),
                histogram.count,
                histogram.sum / 1e9,
            )
