"""A package of AOTInductor through the server. It takes a C++ compiler and a minute to make one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.support.repository import write_model
from tests.support.server import ServerProcess

torch = pytest.importorskip("torch", reason="make test-backends")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler"),
]
CONFIG = """backend: "pytorch" max_batch_size: 8
input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2 ] }
instance_group { count: 2 kind: KIND_CPU }"""


def test_a_compiled_package_serves(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "compiled", CONFIG)
    module = torch.nn.Linear(4, 2).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(module, (torch.ones(2, 4),), dynamic_shapes={"input": {0: batch}})
    torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "1/model.pt2"))
    rows = np.random.default_rng(5).normal(size=(3, 4)).astype(np.float32)
    with torch.no_grad():
        expected = module(torch.from_numpy(rows)).numpy()
    tensor = httpclient.InferInput("INPUT__0", [3, 4], "FP32")
    tensor.set_data_from_numpy(rows)
    with ServerProcess(tmp_path, env=dict(os.environ, PYTHONWARNINGS="")) as server:
        with httpclient.InferenceServerClient(server.http) as client:
            found = client.infer("compiled", [tensor]).as_numpy("OUTPUT__0")
    np.testing.assert_allclose(found, expected, 1e-5, 1e-6)
