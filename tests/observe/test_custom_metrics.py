"""The registry behind pb_utils.MetricFamily."""

from __future__ import annotations

import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from neptrio.errors import InvalidArgument, Unsupported
from neptrio.observe.custom_metrics import COUNTER, GAUGE, HISTOGRAM, CustomMetrics


def samples(registry: CustomMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = b"".join(part for family in registry.collect() for part in family.render()).decode()
    return {
        (s.name, tuple(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_counter_gauge_histogram() -> None:
    registry = CustomMetrics()
    counter = registry.family("requests_total", "all of them", COUNTER).Metric(
        labels={"b": "2", "a": 'x"\\\n'}
    )
    counter.increment(2.5)
    counter.increment(0)
    gauge = registry.family("depth", "how deep", GAUGE).Metric()
    gauge.set(3)
    gauge.increment(-4)
    histogram = registry.family("sizes", "sizes", HISTOGRAM).Metric(buckets=[0.1, 1, 10])
    for value in (0.1, 0.5, 100):
        histogram.observe(value)
    assert counter.value() == 2.5 and gauge.value() == -1
    assert samples(registry) == {
        ("requests_total", (("a", 'x"\\\n'), ("b", "2"))): 2.5,
        ("depth", ()): -1,
        ("sizes_count", ()): 3,
        ("sizes_sum", ()): 100.6,
        ("sizes_bucket", (("le", "0.1"),)): 1,
        ("sizes_bucket", (("le", "1"),)): 2,
        ("sizes_bucket", (("le", "10"),)): 2,
        ("sizes_bucket", (("le", "+Inf"),)): 3,
    }


def test_holders_share_and_release() -> None:
    registry = CustomMetrics()
    first = registry.family("shared", "", GAUGE)
    second = registry.family("shared", "", GAUGE)
    one, two = first.Metric({"k": "v"}), second.Metric({"k": "v"})
    one.increment(1)
    two.increment(2)
    assert one.value() == two.value() == 3
    del first, second
    assert registry.statistics().families == 1, "metrics keep their family"
    del one
    assert samples(registry) == {("shared", (("k", "v"),)): 3}
    two.close()
    two.close()
    assert registry.statistics().families == registry.statistics().metrics == 0
    assert samples(registry) == {}


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        (COUNTER, "set"),
        (COUNTER, "observe"),
        (GAUGE, "observe"),
        (HISTOGRAM, "set"),
        (HISTOGRAM, "increment"),
    ],
)
def test_operations_a_kind_does_not_have(kind: int, operation: str) -> None:
    family = CustomMetrics().family("m", "", kind)
    metric = family.Metric(buckets=[1] if kind == HISTOGRAM else None)
    with pytest.raises(Unsupported, match=rf"has no {operation}\(\)"):
        getattr(metric, operation)(1)
    if kind == HISTOGRAM:
        with pytest.raises(Unsupported, match="value"):
            metric.value()


def test_bad_definitions_are_refused() -> None:
    registry = CustomMetrics()
    for name in ("", "1a", "a b", "nv_inference_count", "neptrio_x"):
        with pytest.raises(InvalidArgument, match="name"):
            registry.family(name, "", COUNTER)
    with pytest.raises(InvalidArgument, match="kind"):
        registry.family("x", "", 7)
    counter = registry.family("c", "", COUNTER)
    with pytest.raises(InvalidArgument, match="exists as a counter"):
        registry.family("c", "", GAUGE)
    with pytest.raises(InvalidArgument, match="label name"):
        counter.Metric({"a-b": "1"})
    with pytest.raises(InvalidArgument, match="only histograms"):
        counter.Metric(buckets=[1])
    with pytest.raises(InvalidArgument, match="0 or more"):
        counter.Metric().increment(-1)
    histogram = registry.family("h", "", HISTOGRAM)
    for buckets in (None, [2, 1], [1, 1], [float("nan")]):
        with pytest.raises(InvalidArgument, match="buckets"):
            histogram.Metric(buckets=buckets)
    kept = histogram.Metric(buckets=[1])
    with pytest.raises(InvalidArgument, match="exists with buckets"):
        histogram.Metric(buckets=[2])
    kept.observe(1)


def test_many_threads_lose_nothing() -> None:
    registry = CustomMetrics()

    def work() -> None:
        metric = registry.family("n", "", COUNTER).Metric({"a": "b"})
        for _ in range(1000):
            metric.increment(1)
        done.wait(60)

    done = threading.Barrier(5)
    threads = [threading.Thread(target=work) for _ in range(4)]
    keeper = registry.family("n", "", COUNTER).Metric({"a": "b"})
    for thread in threads:
        thread.start()
    done.wait(60)
    for thread in threads:
        thread.join()
    assert keeper.value() == 4000
