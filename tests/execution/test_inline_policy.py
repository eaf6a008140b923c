"""Which executions run on the loop: what one that was preempted costs, and when a slow model leaves."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest

from neptrio.execution.batch import Batch
from neptrio.execution.inline_policy import LIMIT, mean
from neptrio.execution.instance_core import InstanceCore, PoolCore
from neptrio.loop.mailbox import CompletionQueue
from neptrio.request.infer_request import ModelCore

US = 1000
PREEMPTED = 40_000 * US


def on_thread(usual: int, *took: int) -> int:
    """Executions that do not run on the loop once those that `took` so long came after many usual ones."""
    now = float(usual)
    for one in took:
        now = mean(now, one)
    count = 0
    while now >= LIMIT:
        now = mean(now, usual)
        count += 1
    return count


@pytest.mark.parametrize(
    ("usual", "after_one", "after_two"),
    [(2, 0, 1), (5, 0, 2), (10, 0, 6), (11, 0, 6), (12, 1, 7), (15, 6, 12), (18, 14, 20)],
)
def test_a_preempted_execution_costs_little(usual: int, after_one: int, after_two: int) -> None:
    """Microseconds. Each execution on a thread costs 40 us more."""
    assert on_thread(usual * US, PREEMPTED) == after_one
    assert on_thread(usual * US, PREEMPTED, PREEMPTED) == after_two


@pytest.mark.parametrize(("usual", "stalls"), [(0, 3), (1, 3), (5, 2), (10, 2), (12, 1), (19, 1)])
def test_a_model_that_has_become_slow_leaves_the_loop(usual: int, stalls: int) -> None:
    means = accumulate([PREEMPTED] * 10, mean, initial=float(usual * US))
    assert [now < LIMIT for now in means].count(True) == stalls


def test_a_model_that_is_often_slow_leaves_the_loop() -> None:
    now, off = 0.0, 0
    for number in range(1000):
        off += now >= LIMIT
        now = mean(now, PREEMPTED if number % 5 == 0 else 2 * US)
    assert off > 500


class _Backend:
    native = True
    in_advance = 1
    expected_ns = 0.0
    batch_type = Batch

    def prepare(self, batch: Batch) -> Batch:
        return batch


def test_what_is_known_to_be_slow_says_nothing_of_the_rest() -> None:
    """Large shapes of a model are kept off the loop by themselves; the small ones stay there."""
    model = ModelCore("m", "1")
    backend: Any = _Backend()
    instance = InstanceCore("m_0", model, backend, CompletionQueue(), PoolCore())

    def finish(took: int, off_loop: bool) -> None:
        batch = Batch(model, [])
        batch.compute_start, batch.compute_end, batch.off_loop = 7, 7 + took, off_loop
        instance.under_way.append(batch)
        instance.finished(batch)

    for _ in range(100):
        finish(5000 * US, True)
        finish(5 * US, False)
    assert 4.9 * US < instance.mean_ns < 5.1 * US
    for _ in range(3):
        finish(5000 * US, False)
    assert instance.mean_ns > LIMIT
