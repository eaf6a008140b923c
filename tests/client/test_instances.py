"""Instance groups: batches of one model that run side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bench import Bench


@pytest.mark.parametrize("batching", ["", "dynamic_batching { }"])
def test_two_instances_execute_at_the_same_time(tmp_path: Path, batching: str) -> None:
    """Both executions are inside the model before either may go on; a third request has to wait."""
    bench = Bench(tmp_path, 8, f"{batching} instance_group [ {{ count: 2 kind: KIND_CPU }} ]")
    try:
        bench.send("m1")
        assert bench.gate.started() == ["m1"]
        bench.send("m2")
        assert bench.gate.started() == ["m2"], "the second instance has begun while the first executes"
        bench.send("m3")
        assert bench.live("executing") == 2 and bench.live("accepted") == 3
        assert bench.outcomes == {}
        bench.gate.go()
        assert bench.gate.started() == ["m3"]
        bench.gate.go("kk")
        bench.assert_answered("m1", "m2", "m3")
    finally:
        bench.close()
