"""Memory, descriptors, threads and shared memory come back after unloads.

`make test-all` runs a few cycles and demands that descriptors, threads and shared memory are equal to
what they were; `make soak` runs 200 and looks at the resident size too (NEPTRIO_MEMORY_CYCLES).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.support import onnx_models
from tests.support.memory import Held, held, resident
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.slow

CYCLES = int(os.environ.get("NEPTRIO_MEMORY_CYCLES", "6"))
FIRST = 2  # a first load imports what it needs for good
SETTLED = 10  # from this cycle on the size is compared
SLACK = 1.05
IO = """input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] } ] max_batch_size: 8 """
ISOLATED = 'parameters { key: "isolation" value { string_value: "process" } } '
CODE = """
import helper
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.weights = np.ones(1 << 20, np.float32)

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("Y", helper.same(pb_utils.get_input_tensor_by_name(r, "X").as_numpy()))]
            )
            for r in requests
        ]
"""
HELPER = "def same(array):\n    return array + 0\n"


def infer(client: Any, name: str) -> None:
    tensor = httpclient.InferInput("X", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
    client.infer(name, [tensor])


@pytest.mark.parametrize("name", ["onnx", "python", "isolated"])
def test_cycles_of_load_and_unload_leave_nothing(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, "onnx", 'backend: "onnxruntime" ' + IO, {"1/model.onnx": onnx_models.identity()})
    files: dict[str, str | bytes] = {"1/model.py": CODE, "1/helper.py": HELPER}
    write_model(tmp_path, "python", 'backend: "python" ' + IO, files)
    write_model(tmp_path, "isolated", 'backend: "python" ' + IO + ISOLATED, files)
    with ServerProcess(tmp_path, "--model-control-mode=explicit") as server:
        pid = server.process.pid
        with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
            sizes: list[int] = []
            seen: list[Held] = []
            settled = 0
            for cycle in range(1, CYCLES + 1):
                client.load_model(name)
                infer(client, name)
                client.unload_model(name)
                until(
                    lambda: all(r.get("state") != "UNLOADING" for r in client.get_model_repository_index()),
                    "it is unloaded",
                )
                sizes.append(resident(pid))
                if cycle == SETTLED:  # what the last model held is returned a moment after it is gone
                    until(lambda: resident(pid) <= 1.02 * min(sizes[FIRST:]), "its memory came back")
                    settled = resident(pid)
                if cycle >= FIRST:
                    until(lambda: held(pid).children == 0, "its process is gone")
                    seen.append(held(pid))
            # a thread that is just ending may be in what was seen: the least of each is what must come back
            least = Held(
                min(h.descriptors for h in seen),
                min(h.threads for h in seen),
                frozenset.intersection(*(h.shared for h in seen)),
                0,
            )
            until(
                lambda: held(pid).within(least),
                lambda: f"what is held is what was held: {held(pid)} {least}",
            )
            if CYCLES > SETTLED:
                until(lambda: resident(pid) <= settled * SLACK, f"the size is what it was: {settled} {sizes}")
            print(f"{name}: after 10 {settled >> 10} KiB, after {CYCLES} {resident(pid) >> 10} KiB, "
                  f"largest {max(sizes) >> 10} KiB, {least}")  # fmt: skip
