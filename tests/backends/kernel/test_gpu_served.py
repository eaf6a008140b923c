"""The benchmark of served GPU models, tried on the fake driver: that its rows are filled and every answer is checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import gpu_served
from benchmarks.requests import Workload
from tests.support.gpu import FakeGpu, needs_fake_gpu
from tests.support.gpu_models import ADD, add_config
from tests.support.repository import write_model
from tests.support.server import ServerProcess

ROWS = """
from benchmarks.gpu_served import served
print("\\n".join(served("GPU", 0.2, sizes=(1,), large=1 << 15)))
"""


@needs_fake_gpu
@pytest.mark.slow
def test_rows_are_measured_through_a_server_on_the_gpu() -> None:
    with FakeGpu() as gpu:
        done = subprocess.run(
            [sys.executable, "-c", ROWS], env=gpu.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
        assert [row[:2] for row in rows] == [
            [title, str(n)] for title in ("simple, batch 1", "y = 2 x, 128 KiB") for n in (1, 8, 64)
        ]
        assert all(float(row[2]) > 0 and float(row[3]) <= float(row[4]) for row in rows)
        assert gpu["launches"] + gpu["graph_launches"] > 0


def test_wrong_answers_and_errors_are_failures(tmp_path: Path) -> None:
    write_model(tmp_path, "add", add_config(" instance_group { kind: KIND_CPU }"), {"1/model.cu": ADD})
    x = np.arange(4, dtype=np.int32).reshape(1, 4)
    with ServerProcess(tmp_path) as server:
        port = int(server.http.rsplit(":", 1)[1])
        for model, expected, failure in (
            ("add", x + 1, None),
            ("add", x, "a wrong answer"),
            ("none", x, "HTTP/1.1 4"),
        ):
            request, wanted = gpu_served.message(Workload(model, (("X", x),), expected))
            taken: list[int] = []
            if failure is None:
                gpu_served.client(port, request, wanted, 0.1, taken)
                assert taken
            else:
                with pytest.raises(RuntimeError, match=failure):
                    gpu_served.client(port, request, wanted, 0.1, taken)
