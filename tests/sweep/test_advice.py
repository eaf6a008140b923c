"""What is recommended for made-up measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neptrio.sweep.advice import Advice, Point, Tuned, advise, batch_advice, best_size, costs

SIZES = (1, 2, 4, 8)


def sweep(cost: Callable[[int], float], busy: float = 1.0, cpu: float | None = 0.5) -> list[Point]:
    """A model without dynamic batching, one instance: executions of the requests' sizes, `cost` in seconds."""
    made = []
    for size in SIZES:
        for clients in (1, 4, 16):
            worked = busy if clients > 1 else 0.5 * busy
            count = round(worked / cost(size))
            made.append(
                Point(
                    batch=size,
                    concurrency=clients,
                    seconds=1.0,
                    requests=count,
                    p99_ms=2e3 * cost(size) * clients,
                    inferences=count * size,
                    executions=count,
                    queue_us=1e6 * cost(size) * (clients - 1),
                    compute_us=1e6 * cost(size),
                    host_cpu=cpu,
                    sizes={size: (count, worked)},
                )
            )
    return made


def constant(size: int) -> float:
    return 0.004


def linear(size: int) -> float:
    return 0.001 * size


def by_setting(model: Tuned, points: list[Point]) -> dict[str, Advice]:
    return {advice.setting: advice for advice in advise(model, points)}


PLAIN = Tuned("m", 8, scheduler="none")


def test_a_model_of_linear_cost_gains_nothing_by_batches() -> None:
    found = by_setting(PLAIN, sweep(linear))
    assert found["max_batch_size"].config == "max_batch_size: 1"
    assert "would be refused" in found["max_batch_size"].evidence[-1]
    assert found["max_queue_delay_microseconds"].config == ""
    waiting = by_setting(replace(PLAIN, scheduler="dynamic", delay_us=500), sweep(linear))
    assert (
        waiting["max_queue_delay_microseconds"].config
        == "dynamic_batching { max_queue_delay_microseconds: 0 }  # beside what else stands there"
    )


def test_a_model_that_hardly_gains_from_its_largest_batch_is_not_called_rising() -> None:
    """From 4 rows to 8 a row becomes 7 % cheaper: enough to keep 8, too little to ask for 16."""
    by_size = {1: 0.001, 2: 0.0015, 4: 0.0020, 8: 0.0020 * 2 / 1.07}
    found = by_setting(PLAIN, sweep(lambda size: by_size[size]))["max_batch_size"]
    assert found.config == "" and found.text == "Change nothing: 8 rows are the cheapest per row."


def test_a_model_of_constant_cost_wants_all_the_batches_it_can_get() -> None:
    found = by_setting(PLAIN, sweep(constant))
    assert found["max_batch_size"].config == "" and "still rising" in found["max_batch_size"].text
    assert found["max_queue_delay_microseconds"].config == "dynamic_batching { }"
    assert "8.00 times as cheap per row" in found["max_queue_delay_microseconds"].evidence[0]


def test_the_smallest_size_with_95_percent_of_the_best_is_enough() -> None:
    assert best_size({1: 0.001, 2: 0.001, 4: 0.002, 8: 0.00385}) == 2  # 1000, 2000, 2000, 2078 a second
    assert best_size({1: 0.001, 2: 0.001, 4: 0.002, 8: 0.0037}) == 8  # 2162
    assert best_size({}) == 0


def test_a_latency_budget_bounds_the_size_of_an_execution() -> None:
    curve = {1: 0.004, 2: 0.005, 4: 0.007, 8: 0.011}
    assert best_size(curve) == 8
    assert best_size(curve, 7.0) == 4
    assert best_size(curve, 3.0) == 0
    found = batch_advice(replace(PLAIN, budget_ms=7.5), sweep(lambda size: curve[size]))
    assert found.config == "max_batch_size: 4"
    assert "Larger executions alone take longer than the budget of 7.5 ms." in found.evidence
    assert "Change nothing" in batch_advice(replace(PLAIN, budget_ms=1), sweep(constant)).text


def test_a_saturated_instance_gets_help_only_while_there_is_cpu() -> None:
    found = by_setting(PLAIN, sweep(constant, cpu=0.4))["instance_group"]
    assert found.config == "instance_group [ { count: 2 kind: KIND_CPU } ]  # beside what else stands there"
    assert "busy 100 % of the time" in found.evidence[0] and "CPU of the machine: 40 %" in found.evidence[0]
    assert "CPU is what is short" in by_setting(PLAIN, sweep(constant, cpu=0.97))["instance_group"].text
    unknown = by_setting(PLAIN, sweep(constant, cpu=None))["instance_group"]
    assert unknown.config == "" and "not measured" in unknown.text
    idle = by_setting(PLAIN, sweep(constant, busy=0.5))["instance_group"]
    assert idle.config == "" and "not saturated" in idle.text


def test_instances_that_slow_each_other_are_too_many() -> None:
    slow = [
        replace(p, sizes={p.batch: (n, seconds * (1 if p.concurrency == 1 else 3.8))})
        for p in sweep(constant)
        for n, seconds in [p.sizes[p.batch]]
    ]
    model = replace(PLAIN, instances=4)
    assert (
        by_setting(model, slow)["instance_group"].config
        == "instance_group [ { count: 1 kind: KIND_CPU } ]  # beside what else stands there"
    )
    assert "count: 1 " not in by_setting(model, sweep(constant))["instance_group"].config


def batched(executed: float, rows: float, p99: float) -> list[Point]:
    """Single requests of 16 clients that batch to `executed` rows, beside the costs of a constant model."""
    known = [p for p in sweep(constant) if p.concurrency == 1]
    one = replace(
        known[0],
        concurrency=16,
        requests=round(rows),
        inferences=round(rows),
        executions=round(rows / executed),
        p99_ms=p99,
        sizes={round(executed): (round(rows / executed), 1.0)},
    )
    return [*known, one]


def test_a_delay_is_for_saturated_instances_with_small_batches() -> None:
    model = replace(PLAIN, scheduler="dynamic")
    setting = "max_queue_delay_microseconds"
    # 6 of 8 rows are missing, 2000 arrive a second: 3 ms, less than an execution's 4
    small = by_setting(model, batched(2, 2000, 10.0))[setting]
    assert (
        small.config
        == "dynamic_batching { max_queue_delay_microseconds: 3000 }  # beside what else stands there"
    )
    tight = by_setting(replace(model, budget_ms=14.0), batched(2, 2000, 10.0))[setting]
    assert (
        tight.config
        == "dynamic_batching { max_queue_delay_microseconds: 2000 }  # beside what else stands there"
    )
    assert (
        "no time to wait" in by_setting(replace(model, budget_ms=9.0), batched(2, 2000, 10.0))[setting].text
    )
    assert "fill by themselves" in by_setting(model, batched(6, 2000, 10.0))[setting].text
    idle = [
        replace(p, sizes={k: (n, s / 4) for k, (n, s) in p.sizes.items()}) for p in batched(2, 2000, 10.0)
    ]
    assert "no instance was saturated" in by_setting(model, idle)[setting].text


def test_a_delay_that_passes_the_budget_of_a_lone_client_is_shortened() -> None:
    points = [replace(p, p99_ms=7.0) for p in sweep(constant)]
    model = replace(PLAIN, scheduler="dynamic", delay_us=4000, budget_ms=5.0)
    found = by_setting(model, points)["max_queue_delay_microseconds"]
    assert (
        found.config
        == "dynamic_batching { max_queue_delay_microseconds: 2000 }  # beside what else stands there"
    )
    kept = by_setting(replace(model, budget_ms=None), points)["max_queue_delay_microseconds"]
    assert kept.config == "" and "cannot tell" in kept.text


def test_points_that_say_nothing_about_the_model_are_not_used() -> None:
    good = sweep(constant)
    for wrong in ({"failures": 5000}, {"cache_hits": 1}, {"others": 5000}):
        bad = [replace(p, **wrong) for p in good]  # type: ignore[arg-type]
        assert costs(bad) == {}
        (only,) = advise(PLAIN, bad)
        assert only.config == "" and "no point can be used" in only.text
    assert "not judged" in advise(replace(PLAIN, decoupled=True), good)[0].text
    assert "its steps" in advise(replace(PLAIN, scheduler="ensemble"), good)[0].text
    assert all(
        advice.config == "" for advice in advise(replace(PLAIN, max_batch_size=0), sweep(constant, 0.3))
    )


def test_a_model_that_hardly_executes_is_left_alone() -> None:
    (only,) = advise(PLAIN, sweep(constant, busy=0.05))
    assert only.config == "" and "not what requests wait for" in only.text
