"""What `neptrio top` makes of two samples."""

from __future__ import annotations

from typing import Any

from neptrio.observe.top_view import Sample, duration, render, rows

STAGES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")


def stat(count: int, ns: int, fail: int = 0, **more: Any) -> dict[str, Any]:
    inference = {stage: {"count": count, "ns": ns} for stage in STAGES}
    inference["fail"] = {"count": fail, "ns": 0}
    return {
        "name": "m", "version": "1", "inference_count": 4 * count, "execution_count": count,
        "inference_stats": inference, **more,
    }  # fmt: skip


def sample(seconds: float, model: dict[str, Any]) -> Sample:
    return Sample(seconds, {("m", "1"): model})


def test_rates_and_averages_of_any_server() -> None:
    (row,) = rows(sample(10, stat(100, 1000)), sample(12, stat(300, 401_000, fail=6)))
    assert (row.requests_per_s, row.inferences_per_s, row.failures_per_s) == (100, 400, 3)
    assert row.batch_size == 4 and row.failures == 6 and row.live is None
    assert row.latencies["request"] == (2000,)
    text = "\n".join(render("host:8000", sample(10, stat(100, 1000)), sample(12, stat(300, 401_000))))
    assert "AVG QUEUE" in text and "QUEUED" not in text and "2.0us" in text


def test_percentiles_are_those_of_the_interval() -> None:
    stages = ("request", *STAGES[2:])
    old = {stage: [[1_000_000, 1000]] for stage in stages}
    new = {stage: [[1000, 98], [1_000_000, 1000], [2_000_000, 2]] for stage in stages}
    held = {"queued": 7, "prepared": 1, "executing": 2, "sequences": 0}
    after = stat(1100, 0, histograms=new, live=held, batches={"full": {"count": 5}, "delay": {"count": 2}})
    before = stat(1000, 0, histograms=old, batches={"full": {"count": 1}, "delay": {"count": 2}})
    (row,) = rows(sample(0, before), sample(1, after))
    assert row.latencies["queue"] == (1000, 2_000_000)
    assert row.closings == {"full": 4}
    text = "\n".join(render("x", sample(0, before), sample(1, after)))
    assert "1.0us/2.0ms" in text and "m 1: full 4" in text


def test_new_reloaded_and_idle_models() -> None:
    (row,) = rows(Sample(0, {}), sample(1, stat(5, 10)))
    assert row.requests_per_s == 5
    (row,) = rows(sample(0, stat(500, 10)), sample(1, stat(5, 10)))
    assert row.requests_per_s == 5, "its counters were reset: counted from zero"
    (row,) = rows(sample(0, stat(5, 10)), sample(1, stat(5, 10)))
    assert row.latencies == {} and row.batch_size is None
    assert rows(sample(0, stat(5, 10)), Sample(1, {})) == []


def test_durations() -> None:
    assert [duration(ns) for ns in (870, 8_700, 87_000, 1_200_000, 35e6, 2.1e9)] == [
        "0.9us", "8.7us", "87us", "1.2ms", "35ms", "2.1s",
    ]  # fmt: skip


def test_models_on_demand() -> None:
    def told(state: str, hits: int, budget: int = 0, **more: Any) -> dict[str, Any]:
        counts = {"waiting": 0, "misses": 1, "loads": 1, "load_failures": 0, "put_away": 0}
        models = [
            {"name": "m", "state": state, "hits": hits, **counts, **more},
            {"name": "slow", "state": "loading", "hits": 0, **counts, "waiting": 3},
        ]
        states = {state: 1, "loading": 1, "on demand": 98}
        return {"states": states, "held_bytes": 1_500_000_000, "budget_bytes": budget, "models": models}

    def screen(before: dict[str, Any] | None, now: dict[str, Any]) -> list[str]:
        first = Sample(0, {("m", "1"): stat(5, 10)}, on_demand=before)
        return render("x", first, Sample(2, {("m", "1"): stat(5, 10)}, on_demand=now))

    lines = screen(told("loaded", 10), told("loaded", 30, 2_000_000_000))
    assert lines[1] == (
        "on demand: 1 loaded, 1 loading, 98 on demand, 1.5 GB of 2.0 GB; 10.0 hits/s, 0.0 misses/s, 0.0 loads/s, "
        "0.0 failed loads/s, 0.0 put away/s"
    )
    assert lines[2] == "  slow: loading, 3 waiting"
    assert lines[4].split()[:5] == ["MODEL", "VER", "REQ/S", "ON", "DEMAND"]
    assert lines[5].split()[:4] == ["m", "1", "0.0", "loaded"]
    lines = screen(None, told("failed", 7, reason="no\n weights"))
    grown = screen(None, {**told("loaded", 1, 2_000_000_000), "server_bytes": 20_000_000})
    assert "98 on demand, 1.5 GB and the server's 20 MB of 2.0 GB;" in grown[1]
    assert "98 on demand; 0.0 hits/s" in lines[1], "what came before the first look is no rate"
    assert lines[2] == "  m: failed, 0 waiting: no weights"
    assert not any(
        "ON DEMAND" in line for line in render("x", sample(0, stat(5, 10)), sample(1, stat(5, 10)))
    )
