"""The benchmark of GPUs (benchmarks/gpu.py) runs on the fake driver, so that it is not a real GPU that finds its mistakes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.gpu import FakeGpu, needs_fake_gpu

pytestmark = needs_fake_gpu


@pytest.mark.slow
def test_bare_launches_of_a_batch_that_became_a_graph() -> None:
    """They need addresses of their own: the graph has those of its recording."""
    code = "from benchmarks.gpu import overhead; print('\\n'.join(overhead('GPU', 5)))"
    with FakeGpu(main_thread=1) as gpu:
        done = subprocess.run([sys.executable, "-c", code], env=gpu.env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        rows = re.findall(r"^\| (\d+) \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \|$", done.stdout, re.M)
        assert rows == ["1", "8", "64"]
        assert gpu["graph_launches"] > 0
